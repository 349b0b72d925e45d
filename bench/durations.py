"""Show where a run of the tests spent its time: the slowest tenth of the tests, all cases of each together.

make test PYTEST_ADDOPTS=--junitxml=build/tests.xml
python -m bench.durations build/tests.xml --out build/test-durations.jsonl
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.provenance import show


def records(report: Path) -> Iterator[dict[str, Any]]:
    """Yield the sums of a JUnit report, then its slowest tests, the slowest first."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name', '').partition('[')[0]}"
        seconds[name].append(float(case.get("time", 0)))
    totals = {name: sum(times) for name, times in seconds.items()}
    yield {
        "record": "tests",
        "tests": len(totals),
        "cases": sum(map(len, seconds.values())),
        "seconds": round(sum(totals.values()), 1),
    }
    slowest = sorted(totals, key=lambda name: -totals[name])[: len(totals) // 10]
    for name in slowest:
        times = seconds[name]
        yield {
            "record": "test",
            "name": name,
            "cases": len(times),
            "seconds": round(totals[name], 2),
            "longest": round(max(times), 2),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.durations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("report", type=Path, help="what pytest writes by --junitxml")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(arguments)
    show(records(args.report), args.out)


if __name__ == "__main__":
    main()

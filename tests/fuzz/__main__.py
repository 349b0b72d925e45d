"""python -m tests.fuzz [--cases N] [--seed N] [--kind KIND ...] [--case NAME] [--out FILE]: fuzz tiny models.

What users do wrong, and lives of engines.

Spoiled configs, prompts and options; loaded models that change beside an engine, settings of the process, weights that
are no plain tensors, and folders with other files in them. Every case is answered, as plain decoding by the model
would, or refused by an error of specengine that is one line on the command line. Anything else is listed, the end of
the process included, with exit status 1; `--case` runs one of them again. `--kind lives --out FILE` writes a result
file as it goes, and goes on where such a file ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.cases import KINDS
from tests.fuzz.running import Ran, Report, fuzz
from tests.fuzz.tally import Tally
from tests.fuzz.workers import worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="again for more kinds")
    parser.add_argument("--case", help="one alone, by its name: SEED/KIND/NUMBER")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="with --kind lives: the result file"
    )
    given = parser.parse_args()
    if given.out and given.kind != ["lives"]:
        parser.error("--out: accepted with --kind lives alone")
    with worker() as run:
        if given.case:
            report = Report()
            report.count(given.case.split("/")[1], given.case, run(given.case))
        elif given.out:
            report = _lives(run, given.cases, Tally.read(given.out, given.seed, sys.argv[1:]))
        else:
            report = fuzz(run, given.cases, given.seed, given.kind or tuple(KINDS))
    print("\n".join([*report.lines(), *report.findings]))
    return 1 if report.findings else 0


def _lives(run: Callable[[str], Ran], cases: int, tally: Tally) -> Report:
    """Run the lives that a result file lacks, and write it now and then."""
    report = Report()
    tally.again(run)
    tally.write()
    while tally.cases < cases:
        name = f"{tally.seed}/lives/{tally.cases}"
        made = run(name)
        report.count("lives", name, made)
        tally.add(name, made)
        if tally.cases % 20 == 0 or tally.cases == cases:
            tally.write()
    return report


if __name__ == "__main__":
    raise SystemExit(main())

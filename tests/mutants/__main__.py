"""python -m tests.mutants: make small mistakes in a copy of the sources, one at a time; do the tests notice?

Exits with 1 if a mutant is not caught.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specengine.benchmark.records import provenance
from specengine.files import atomic
from tests.mutants.copies import Copy, compiler
from tests.mutants.running import Runner
from tests.mutants.table import ROOT, Mutant, mutants, named

CAUGHT = ("caught", "slow only")
AT_ONCE = 4  # mutants between two writings of the file
Record = dict[str, Any]


def key(mutant: Mutant) -> str:
    """Return what a verdict holds for: the mutant and the file that it changes."""
    file = ROOT / mutant.file
    content = file.read_bytes() if file.is_file() else b""
    return hashlib.sha256(json.dumps(asdict(mutant)).encode() + content).hexdigest()[:16]


def verdicts(file: Path | None) -> dict[str, Record]:
    """Return the verdicts of mutants that were caught, by their keys, from a file; the others are tried again."""
    if file is None or not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    return {
        record["key"]: record for record in map(json.loads, lines) if record.get("result") in CAUGHT
    }


def write(file: Path | None, head: Record, records: list[Record]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic(file) as part:
            part.write_text(
                "".join(json.dumps(each) + "\n" for each in [head, *records]), encoding="utf-8"
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="mutants to try")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="JSON lines; what was caught before is kept, unless the mutant or its file has changed",
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "mutants", help="of the copy of the sources"
    )
    options = parser.parse_args()
    if compiler() is None:
        parser.error("needs Linux and g++ on the path (Debian: apt install g++)")
    listed = named(mutants(), options.only)
    keys = {mutant: key(mutant) for mutant in mutants()}  # of the files as they are copied
    known = verdicts(options.out)
    records = {mutant: known[keys[mutant]] for mutant in keys if keys[mutant] in known}
    waiting = [mutant for mutant in listed if mutant not in records]
    # those that compile for long come last
    waiting.sort(key=lambda mutant: mutant.file.startswith("csrc/cpu"))
    head = provenance("python -m tests.mutants", sys.argv[1:])
    if waiting:
        copy = Copy(options.folder.resolve())
        copy.build()
        runner = Runner(copy)
    for first in range(0, len(waiting), AT_ONCE):
        some = waiting[first : first + AT_ONCE]
        for mutant, verdict in zip(some, runner.verdicts(some), strict=True):
            facts = {
                "record": "mutant",
                "name": mutant.name,
                "file": mutant.file,
                **asdict(verdict),
            }
            records[mutant] = facts | {"key": keys[mutant]}
            print(
                f"{mutant.name:40} {verdict.result:12} {verdict.seconds:6.1f} s  {verdict.test}",
                flush=True,
            )
        write(options.out, head, [records[mutant] for mutant in keys if mutant in records])
    results = [records[mutant]["result"] for mutant in listed]
    print(", ".join(f"{count} {word}" for word, count in Counter(results).most_common()))
    return int(any(result not in CAUGHT for result in results))


if __name__ == "__main__":
    sys.exit(main())

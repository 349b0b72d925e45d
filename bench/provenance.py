"""Result files: a record with command, commit, device and versions, then the measured records."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specengine.benchmark import records as origin

ROWS = ".rows"  # the end of the name of a file that grows

Record = dict[str, Any]


def provenance() -> Record:
    """Return the first record of every result file."""
    return origin.provenance(f"python -m {_module()}", sys.argv[1:])


def keep(records: Iterable[Record], path: Path | None) -> Iterator[Record]:
    """Yield the records, and write each to disk before the next is measured.

    They grow in the file beside `path` that ends in .rows, where what a run that breaks off has measured stays, and
    `bench.report` reads it. After the last record it becomes `path`.
    """
    if path is None:
        yield from records
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    growing = path.with_suffix(ROWS)
    with growing.open("w") as log:
        log.write(json.dumps(provenance()) + "\n")
        for record in records:
            log.write(json.dumps(record) + "\n")
            log.flush()
            yield record
    growing.replace(path)


def show(records: Iterable[Record], path: Path | None) -> list[Record]:
    """Write the records to a result file if requested, print each, and return them all."""
    shown = []
    for record in keep(records, path):
        print(json.dumps(record), flush=True)
        shown.append(record)
    return shown


def _module() -> str:
    """Return the dotted name of the program for `python -m`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")

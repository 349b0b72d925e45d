"""Result files: what they came from, and their records."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specengine.benchmark import provenance as origin

ROWS = ".rows"  # the end of the name of a file that grows


def provenance() -> dict[str, Any]:
    """The first record of every result file."""
    return origin.provenance(f"python -m {_module()}", sys.argv[1:])


def kept(rows: Iterable[dict[str, Any]], path: Path | None) -> Iterator[dict[str, Any]]:
    """The same records, each in the file beside `path` that ends in .rows before the next one is made.

    What a run that breaks off has measured stays there, and `bench.report` reads it; `write` removes it.
    """
    if path is None:
        yield from rows
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(ROWS).open("w") as log:
        log.write(json.dumps(provenance()) + "\n")
        for row in rows:
            log.write(json.dumps(row) + "\n")
            log.flush()
            yield row


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A result file: provenance, then one record per line; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in [provenance(), *rows]))
    temporary.replace(path)
    path.with_suffix(ROWS).unlink(missing_ok=True)


def show(rows: Iterable[dict[str, Any]], path: Path | None) -> None:
    """Print each record as it comes; then the result file, where one is asked for."""
    found = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    if path:
        write(path, found)


def _module() -> str:
    """Return the dotted name of the program as `python -m` takes it; of a package, that is its `__main__`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")

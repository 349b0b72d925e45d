"""Default tables for records without a table of their own: one column per field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specengine.benchmark.tables import NOTHING, Record, Table

MAX_ROWS, MAX_COLUMNS, MAX_LETTERS = 40, 14, 40
APART = ("provenance", "settings", "resumed", "model", "way")  # records that say how something was measured


def plain_tables(records: Sequence[Record]) -> list[Table]:
    """Return a table per kind of record. Long tables are cut, which the title says."""
    kinds = [kind for kind in dict.fromkeys(map(_kind, records)) if kind not in APART]
    return [_table(kind, [record for record in records if _kind(record) == kind]) for kind in kinds]


def _kind(record: Record) -> str:
    return str(record.get("record", "record"))


def _table(kind: str, records: list[Record]) -> Table:
    rows = [dict(_cells(record)) for record in records[:MAX_ROWS]]
    header = tuple(dict.fromkeys(name for row in rows for name in row))[:MAX_COLUMNS]
    left = f", the first {MAX_ROWS} of {len(records)}" if len(records) > MAX_ROWS else ""
    return Table(
        "plain", f"Records {kind!r}{left}", header, [[row.get(name, NOTHING) for name in header] for row in rows]
    )


def _cells(record: Record, of: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields that fit into a cell by name; nested fields as `field.name`."""
    for name, value in record.items():
        if isinstance(value, dict) and not of:
            yield from _cells(value, f"{name}.")
        elif isinstance(value, str | int | float | None) and name != "record":
            yield of + name, _shown(value)


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(NOTHING if value is None else value)
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= MAX_LETTERS else f"{line[:MAX_LETTERS]}..."

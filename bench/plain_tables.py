"""Default tables for records without a table of their own: one column per field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from specengine.benchmark.records import NOTHING, Record, Table

MAX_ROWS, MAX_COLUMNS, MAX_LETTERS = 40, 14, 40  # a way is its row's name, and is never cut
MAX_ITEMS = 4  # of a list in a cell, as an interval
# records that say how something was measured
APART = "provenance", "settings", "resumed", "model", "way"


def plain_tables(
    records: Sequence[Record], rows: int = MAX_ROWS, apart: Collection[str] = ()
) -> list[Table]:
    """Return a table per kind of record but those of APART and `apart`. Cut tables say so in their title.

    rows: so many of each kind; 0 for all of them and all of their fields.
    """
    kinds = [kind for kind in dict.fromkeys(map(_kind, records)) if kind not in (*APART, *apart)]
    return [
        _table(kind, [record for record in records if _kind(record) == kind], rows)
        for kind in kinds
    ]


def _kind(record: Record) -> str:
    return str(record.get("record", "record"))


def _table(kind: str, records: list[Record], most: int) -> Table:
    rows = [dict(_cells(record)) for record in (records[:most] if most else records)]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    header = names[:MAX_COLUMNS] if most else names
    cuts = [("", len(rows), len(records)), (" fields", len(header), len(names))]
    left = "".join(
        f", the first {shown} of {there}{what}" for what, shown, there in cuts if shown < there
    )
    return Table(
        "plain",
        f"Records {kind!r}{left}",
        header,
        [[row.get(name, NOTHING) for name in header] for row in rows],
    )


def _cells(record: Record, of: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields that fit into a cell by name; nested fields as `field.name`. Long lists do not fit."""
    for name, value in record.items():
        if isinstance(value, dict) and not of:
            yield from _cells(value, f"{name}.")
        elif (
            isinstance(value, list)
            and 0 < len(value) <= MAX_ITEMS
            and all(_scalar(item) for item in value)
        ):
            yield of + name, ", ".join(map(_shown, value))
        elif _scalar(value) and name != "record":
            yield of + name, _shown(value, None if name == "way" else MAX_LETTERS)


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | None)


def _shown(value: Any, letters: int | None = MAX_LETTERS) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(NOTHING if value is None else value)
    line = " ".join(text.replace("|", "/").split())
    return line if letters is None or len(line) <= letters else f"{line[:letters]}..."

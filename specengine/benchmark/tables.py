"""A table in markdown, and the cells of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table. `kind` is what --only picks."""

    kind: str
    title: str
    header: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self) -> str:
        widths = [max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))]
        lines = [self.header, ["-" * width for width in widths], *self.rows]
        text = "\n".join(
            "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in lines
        )
        return f"**{self.title}**\n\n{text}"


def number(record: Record, name: str, digits: int) -> str:
    return f"{record[name]:.{digits}f}" if name in record else NOTHING

"""All figures of the house, and the table that holds them: budgets.json.

Of each figure the table has `survey`, the number in house.md (119dda4; of statements c032b77), `start`, as its row
began (most of them at the commit that stands in the table), `held`, above which a test fails, and `budget`, where
architecture.md sets one. Held figures only fall. `loading: files` rose, with its reason, by one when the default policy
became several files (making it enters `auto/auto.py` and `auto/costs.py`), and by one when what families declare did
(`families/blocks.py` and `families/family.py`).
"""

from __future__ import annotations

import ast
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.house import imports, journeys, members, reading, seats

TABLE = Path(__file__).with_name("budgets.json")
PACKAGE = Path(journeys.PACKAGE)
DOCS = PACKAGE.parent / "docs"


def sizes() -> dict[str, int]:
    """Return statements and files of the package's Python.

    Statements, as lines say more of how code is packed than of how much it does.
    """
    files = sorted(PACKAGE.rglob("*.py"))
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {"package statements": sum(map(reading.statements, trees)), "package files": len(files)}


def pages() -> dict[str, int]:
    """Return the words of the documents, as wc counts them: the marks of tables and the words of code included."""
    files = [*DOCS.glob("*.md"), *DOCS.glob("*/*.md")]
    return {"words of the documents": sum(len(file.read_text("utf-8").split()) for file in files)}


def touched() -> dict[str, int]:
    """Return the source files to touch of each kind that has a seat."""
    counts = {}
    for kind in seats.SEATS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts[f"files to touch: {kind}"] = len(seats.follow(kind, Path(folder)))
            except seats.NoSeatError:
                continue
    return counts


def text(content: dict[str, Any]) -> str:
    """Return the table as its file has it, a figure per line."""
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in content["figures"].items()
    )
    return f'{{\n "start": {json.dumps(content["start"])},\n "figures": {{\n{rows}\n }}\n}}\n'


def read() -> dict[str, dict[str, Any]]:
    """Return the table's figures."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["figures"]


def measure() -> dict[str, int]:
    """Return all figures that can be measured, by name."""
    static = imports.measure(PACKAGE) | members.measure() | sizes() | reading.measure(PACKAGE)
    return journeys.measure() | static | pages() | touched()


def higher(measured: dict[str, int], table: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each figure above what the table holds, and for each one that it lacks."""
    lines = [
        f"{name}: {value}, not in the table"
        for name, value in measured.items()
        if name not in table
    ]
    return lines + [
        f"{name}: {measured[name]}, held at {row['held']}"
        for name, row in table.items()
        if name in measured and measured[name] > row["held"]
    ]


def lowered(
    measured: dict[str, int], table: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the table with lower figures where they have fallen; none rises."""
    return {
        name: row | {"held": min(row["held"], measured.get(name, row["held"]))}
        for name, row in table.items()
    }

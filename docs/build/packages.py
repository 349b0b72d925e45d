"""The table of packages in CONTRIBUTING.md, from the first line of each package's docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from specengine.benchmark.records import Table

PACKAGE = Path(__file__).parents[2] / "specengine"


def packages() -> str:
    """Return a table in markdown: every folder of specengine with an `__init__.py`, and what it is for."""
    folders = sorted(file.parent for file in PACKAGE.rglob("__init__.py"))
    rows = [
        [f"`{folder.relative_to(PACKAGE.parent).as_posix()}/`", purpose(folder)]
        for folder in folders
    ]
    return Table("", "", ("package", "purpose"), rows).markdown().partition("\n\n")[2]


def purpose(folder: Path) -> str:
    """Return the first line of the package's docstring; ValueError if it has none."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    if not text:
        raise ValueError(f"{folder.name}: the package has no docstring")
    return text.splitlines()[0]

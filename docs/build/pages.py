"""Draw the blocks of the pages between `<!-- drawn: NAME ARGUMENTS -->` and `<!-- /drawn -->`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.build import (
    command_line,
    drawings,
    head_tables,
    policy_tables,
    serving_tables,
    tables,
)
from docs.build.models import models
from docs.build.packages import packages

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
MARKED = re.compile(r"(<!-- drawn: (.+?) -->\n).*?(<!-- /drawn -->)", re.DOTALL)

DRAWN: dict[str, Callable[..., str]] = {
    **tables.TABLES,
    **policy_tables.TABLES,
    **serving_tables.TABLES,
    **head_tables.TABLES,
    "options": command_line.listing,
    "packages": packages,
    "models": models,
}


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"
    yield from sorted(PAGES.rglob("*.md"))


def drawn(text: str, page: Path) -> str:
    """Return the text of `page` with its blocks drawn anew. Raise ValueError for an unknown name."""

    def fill(block: re.Match[str]) -> str:
        name, *words = shlex.split(block[2])
        if name == "plot":
            body = drawings.image(words[0], page)
        elif name in DRAWN:
            body = DRAWN[name](*words)
        else:
            raise ValueError(
                f"{page.name}: unknown block {name!r}, known are plot, {', '.join(DRAWN)}"
            )
        return f"{block[1]}\n{body}\n\n{block[3]}"

    return MARKED.sub(fill, text)


def stale() -> list[Path]:
    """Return the pages and plots that differ from what would be drawn now."""
    old = [page for page in pages() if drawn(page.read_text(), page) != page.read_text()]
    return old + [
        drawings.file_of(name) for name in drawings.DRAWINGS if not drawings.is_current(name)
    ]

"""Draw the blocks of the pages between `<!-- drawn: NAME ARGUMENTS -->` and `<!-- /drawn -->`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.build import command_line, drawings, head_tables, tables

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
MARKED = re.compile(r"(<!-- drawn: (.+?) -->\n).*?(<!-- /drawn -->)", re.DOTALL)

DRAWN: dict[str, Callable[..., str]] = {**tables.TABLES, **head_tables.TABLES, "options": command_line.listing}


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted(PAGES.rglob("*.md"))


def drawn(text: str, page: Path) -> str:
    """Return the page's text with everything between markers as it is drawn now; ValueError for an unknown name."""

    def fill(found: re.Match[str]) -> str:
        name, *words = shlex.split(found[2])
        if name == "plot":
            made = drawings.image(words[0], page)
        elif name in DRAWN:
            made = DRAWN[name](*words)
        else:
            raise ValueError(f"{page.name}: {name!r} is drawn by nothing, known are plot, {', '.join(DRAWN)}")
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return MARKED.sub(fill, text)


def stale() -> list[Path]:
    """Pages and plots that are not as they would be drawn now."""
    old = [page for page in pages() if drawn(page.read_text(), page) != page.read_text()]
    return old + [drawings.file_of(name) for name in drawings.DRAWINGS if not drawings.is_current(name)]

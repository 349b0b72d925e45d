"""What the pages hold that is drawn: tables and plots of result files, and the options of the command line.

python -m bench.pages           write it anew, between `<!-- drawn: PART ARGUMENTS -->` and `<!-- /drawn -->`
python -m bench.pages --check   exit 1, and the names, where a page or a plot differs

A part is a function of bench/parts.py, bench/head_parts.py or bench/drawings.py; its arguments are words, result files
first.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import drawings, head_parts, options, parts

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs"
MARKED = re.compile(r"(<!-- drawn: (.+?) -->\n).*?(<!-- /drawn -->)", re.DOTALL)

PARTS: dict[str, Callable[..., str]] = {**parts.PARTS, **head_parts.PARTS, "options": options.listing}


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted(PAGES.rglob("*.md"))


def drawn(text: str, page: Path) -> str:
    """The page's text with everything between markers as it is drawn now; ValueError for an unknown part."""

    def fill(found: re.Match[str]) -> str:
        part, *words = shlex.split(found[2])
        if part == "plot":
            made = drawings.image(words[0], page)
        elif part in PARTS:
            made = PARTS[part](*words)
        else:
            raise ValueError(f"{page.name}: {part!r} is drawn by nothing, known are plot, {', '.join(PARTS)}")
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return MARKED.sub(fill, text)


def stale() -> list[Path]:
    """Pages and plots that are not as they would be drawn now."""
    old = [page for page in pages() if drawn(page.read_text(), page) != page.read_text()]
    return old + [drawings.file_of(name) for name in drawings.DRAWINGS if not drawings.is_current(name)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where something differs")
    checks = parser.parse_args(argv).check
    old = stale()
    for file in old:
        print(file.relative_to(ROOT), file=sys.stderr)
    if checks:
        if old:
            print("these differ from what would be drawn: run python -m bench.pages and commit", file=sys.stderr)
        return bool(old)
    for name in drawings.DRAWINGS:
        if not drawings.is_current(name):
            drawings.draw(name)
    for page in pages():
        page.write_text(drawn(page.read_text(), page))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draw the generated blocks of the pages: tables, plots, the options of the command line, the packages.

python -m docs.build           rewrite the blocks, between `<!-- drawn: NAME ARGUMENTS -->` and `<!-- /drawn -->`
python -m docs.build --check   list the pages and plots that differ, and exit with 1

NAME is a function of a file `*tables.py`, or `plot`, `options`, `packages` or `models`. ARGUMENTS are words, result
files first.
"""

from __future__ import annotations

import argparse
import sys

from docs.build import drawings, pages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page or plot differs"
    )
    check = parser.parse_args(argv).check
    old = pages.stale()
    for file in old:
        print(file.relative_to(pages.ROOT), file=sys.stderr)
    if check:
        if old:
            print("out of date: run python -m docs.build and commit", file=sys.stderr)
        return bool(old)
    for name in drawings.DRAWINGS:
        if not drawings.is_current(name):
            drawings.draw(name)
    for page in pages.pages():
        page.write_text(pages.drawn(page.read_text(), page))
    return 0


if __name__ == "__main__":
    sys.exit(main())

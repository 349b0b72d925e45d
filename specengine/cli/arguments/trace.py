"""specengine trace: look at what `--trace` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "show the trees that `specengine generate --trace` wrote"


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.trace:run")
    parser.add_argument("file", nargs="+", type=Path, metavar="FILE", help="traces; their queries are counted through")
    parser.add_argument("--query", type=int, metavar="N", help="show a cycle of the N-th query (default 1)")
    parser.add_argument("--cycle", type=int, metavar="N", help="show the N-th cycle (default 1)")
    parser.add_argument("--pruned", action="store_true", help="give every pruned node a line of its own, or a box")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that steps through the cycles; its name ends in .html"
    )
    parser.add_argument(
        "--tree", type=Path, metavar="FILE", help="draw that cycle's tree; its name ends in .svg, .png or .pdf"
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="draw acceptance by depth and rank, its length, and drafting effort",
    )

"""A cycle's tree in the terminal, in the colours of its marks."""

from __future__ import annotations

import sys

from specengine.cli.terminal import DRAFTED, FAINT, RESET, why_no_colours
from specengine.trace.records import TracedCycle
from specengine.trace.text import MARKS, cycle_lines

COLOURS = {MARKS["accepted"]: DRAFTED, MARKS["pruned"]: FAINT}
ASCII = str.maketrans("├└│✓×·", "|`|vx.")
MARK_COLUMN = 17  # of the lines of a tree


def print_tree(cycle: TracedCycle, *, pruned: bool = False) -> None:
    """A node per line; colours where standard output shows them."""
    coloured = why_no_colours() is None
    for line in cycle_lines(cycle, pruned=pruned):
        print_line(line, coloured=coloured)


def print_line(line: str, *, coloured: bool = False) -> None:
    """A line, in ASCII where the output takes no more, and in the colour of its mark."""
    encoding = sys.stdout.encoding or "utf-8"
    colour = COLOURS.get(line[MARK_COLUMN : MARK_COLUMN + 1]) if coloured else None
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        line = line.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    print(f"{colour}{line}{RESET}" if colour else line)

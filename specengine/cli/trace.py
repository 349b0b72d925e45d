"""specengine trace: look at what `--trace` wrote."""

import argparse
import sys
from collections.abc import Sequence

from specengine.cli.terminal import DRAFTED, FAINT, RESET, why_no_colours
from specengine.errors import require, require_suffix
from specengine.files import write_whole, writing
from specengine.trace import Trace, TracedCycle, read_trace
from specengine.trace.views import MARKS, cycle_lines, page, summary


def run(arguments: argparse.Namespace) -> int:
    if arguments.html:
        require_suffix("html", arguments.html, (".html", ".htm"))
    traces = [read_trace(file) for file in arguments.file]
    if arguments.html:
        with writing(arguments.html, "html"):
            write_whole(arguments.html, page(traces))
        print(arguments.html)
    if arguments.tree:
        from specengine.trace.pictures import draw_tree

        draw_tree(_cycle(traces, arguments)[0], arguments.tree, pruned=arguments.pruned)
        print(arguments.tree)
    is_for_cycle = (
        arguments.query is not None or arguments.cycle is not None
    ) and not arguments.tree
    if is_for_cycle or not (arguments.html or arguments.tree):
        _show(traces, arguments, with_summary=not is_for_cycle)
    return 0


def _show(traces: Sequence[Trace], arguments: argparse.Namespace, *, with_summary: bool) -> None:
    if with_summary:
        for line in summary(traces):
            print_line(line)
        if not next((query.cycles for trace in traces for query in trace.queries), None):
            return
    cycle, place = _cycle(traces, arguments)
    print_line(f"\n{place}")
    print_tree(cycle, pruned=arguments.pruned)


def _cycle(traces: Sequence[Trace], arguments: argparse.Namespace) -> tuple[TracedCycle, str]:
    """Return the cycle that was asked for, and where it stands."""
    queries = [query for trace in traces for query in trace.queries]
    number, position = arguments.query or 1, arguments.cycle or 1
    require(
        "query",
        arguments.query,
        _range(len(queries)),
        arguments.query != 0 and 1 <= number <= len(queries),
    )
    cycles = queries[number - 1].cycles
    accepted = f"{_range(len(cycles))} in query {number}"
    require(
        "cycle", arguments.cycle, accepted, arguments.cycle != 0 and 1 <= position <= len(cycles)
    )
    return cycles[
        position - 1
    ], f"query {number} of {len(queries)}, cycle {position} of {len(cycles)}"


def _range(count: int) -> str:
    return f"1 to {count}" if count else "none, as there are none"


COLOURS = {MARKS["accepted"]: DRAFTED, MARKS["pruned"]: FAINT}
ASCII = str.maketrans("├└│✓×·", "|`|vx.")
MARK_COLUMN = 17  # of the lines of a tree


def print_tree(cycle: TracedCycle, *, pruned: bool = False) -> None:
    """Print a node per line, in colours where standard output shows them."""
    coloured = why_no_colours() is None
    for line in cycle_lines(cycle, pruned=pruned):
        print_line(line, coloured=coloured)


def print_line(line: str, *, coloured: bool = False) -> None:
    """Print a line in the colour of its mark, in ASCII where the output takes nothing else."""
    encoding = sys.stdout.encoding or "utf-8"
    colour = COLOURS.get(line[MARK_COLUMN : MARK_COLUMN + 1]) if coloured else None
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        line = line.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    print(f"{colour}{line}{RESET}" if colour else line)

"""Show traces: as one self-contained HTML page, and in the terminal, a table of queries and a cycle as a tree."""

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from specengine.trace.records import ACCEPTED, PRUNED, REJECTED, ROOT, Trace, TracedCycle

MARKS = {ROOT: " ", ACCEPTED: "✓", REJECTED: "×", PRUNED: "·"}
OWN = "+"  # the mark of the target's own token
LEGEND = "✓ accepted   × verified, not accepted   · pruned before verification   + the target's own token"
TITLE_WIDTH = 44


def summary(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a table with one line per query of all traces, numbered from 1."""
    numbers = itertools.count(1)
    for trace in traces:
        yield f"{trace.file}: {_plain(trace.model)}, draft {_plain(trace.draft)}, policy {_plain(trace.policy)}"
        if trace.truncated:
            yield "  the run was killed: the last line is incomplete and was skipped"
        yield (
            f"  {'query':>5}{'cycles':>8}{'tokens':>8}{'tau':>7}{'delta':>7}{'verified':>10}{'drafted':>9}"
            f"  {'end':<10}prompt"
        )
        for query in trace.queries:
            title = repr(query.title)
            shown = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 3] + "..."
            tokens = sum(len(cycle.committed) for cycle in query.cycles)
            yield (
                f"  {next(numbers):>5}{len(query.cycles):>8}{tokens:>8}{query.tau:>7.2f}{query.delta:>7.2f}"
                f"{query.verified:>10.1f}{query.drafted:>9.1f}"
                f"  {_plain(query.finish_reason or '-'):<10}{shown}"
            )


def _plain(text: str) -> str:
    """Return text without the control characters of a terminal."""
    return repr(text)[1:-1]


def cycle_lines(cycle: TracedCycle, *, pruned: bool = False) -> Iterator[str]:
    """Yield the tree of a cycle, one node per line: probability of edge and path, mark, branches, text.

    pruned: show each pruned node. Otherwise the pruned children of a node share a line, with what is below them.
    """
    yield (
        f"{len(cycle.tokens) - 1} drafted in {cycle.passes} passes, {len(cycle.kept)} verified with the root, "
        f"{len(cycle.accepted) - 1} accepted; committed {cycle.text!r}"
    )
    yield f"{'edge':>6}{'path':>9}"
    # node, its branch, prefix of its children; no recursion, because a chain can be long
    stack = [(0, "", "")]
    while stack:
        node, branch, before = stack.pop()
        if node < 0:
            yield branch
            continue
        edge, path = cycle.probabilities[node], cycle.path_probabilities[node]
        shape = "9.3f" if path >= 0.001 else "9.0e"
        probabilities = f"{edge:>6.3f}{path:>{shape}}" if node else " " * 15
        yield f"{probabilities}  {MARKS[cycle.states[node]]} {branch}{cycle.texts[node]!r} {cycle.tokens[node]}"
        stack.extend(reversed(list(_below(cycle, node, before, pruned))))
    yield LEGEND


def _below(
    cycle: TracedCycle, node: int, before: str, pruned: bool
) -> Iterator[tuple[int, str, str]]:
    """Yield the lines below `node` as entries of the stack. Lines that are not nodes have the number -1."""
    hidden = [child for child in cycle.children[node] if cycle.states[child] == PRUNED]
    folded = not pruned and (len(hidden) > 1 or any(cycle.children[child] for child in hidden))
    shown = [child for child in cycle.children[node] if not (folded and child in hidden)]
    has_own = cycle.has_own and node == cycle.accepted[-1]
    lines = len(shown) + has_own + folded
    if has_own:
        lines -= 1
        missed = any(cycle.tokens[child] == cycle.committed[-1] for child in hidden)
        text = f"{cycle.committed_texts[-1]!r} {cycle.committed[-1]}{', drafted but pruned' if missed else ''}"
        yield -1, f"{'':15}  {OWN} {before}{_branch(lines)}{text}", ""
    for child in shown:
        lines -= 1
        yield child, before + _branch(lines), before + ("│ " if lines else "  ")
    if folded:
        best = f"{cycle.texts[hidden[0]]!r} {cycle.probabilities[hidden[0]]:.3f}"
        yield -1, f"{'':15}  {MARKS[PRUNED]} {before}└ {len(hidden)} pruned, the best {best}", ""


def _branch(lines_after: int) -> str:
    return "├ " if lines_after else "└ "


PROBABILITY_DIGITS = 4
SECONDS_DIGITS = 5


def page(traces: Sequence[Trace]) -> str:
    """Return the page with all queries of these traces.

    The content of the traces is embedded as JSON that cannot end its script element, and shown as text only. The
    page's security policy allows no other script and no requests.
    """
    files = resources.files("specengine.trace")
    template, style, script = (
        files.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    data = {  # short names, and each text once
        "runs": [_run(trace) for trace in traces],
        "queries": [
            {
                "run": number,
                "title": query.title,
                "prompt": query.prompt,
                "seed": query.seed,
                "end": query.finish_reason,
                "cycles": [_cycle(cycle) for cycle in query.cycles],
            }
            for number, trace in enumerate(traces)
            for query in trace.queries
        ],
    }
    escapes = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
    texts = {
        "{{script-hash}}": _hash(script),
        "{{style-hash}}": _hash(style),
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": json.dumps(data, allow_nan=False, separators=(",", ":")).translate(escapes),
    }
    for name, text in texts.items():  # the data last, so that nothing in it is read as a name
        template = template.replace(name, text, 1)
    return template


def _hash(text: str) -> str:
    """Return the hash of a text as a source of a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _run(trace: Trace) -> dict[str, Any]:
    texts = {
        token: text
        for query in trace.queries
        for cycle in query.cycles
        for tokens, of_tokens in (
            (cycle.tokens, cycle.texts),
            (cycle.committed, cycle.committed_texts),
        )
        for token, text in zip(tokens, of_tokens, strict=True)
    }
    return {
        "file": trace.file.name,
        "model": trace.model,
        "draft": trace.draft,
        "policy": trace.policy,
        "versions": trace.versions,
        "truncated": trace.truncated,
        "texts": texts,
    }


def _cycle(cycle: TracedCycle) -> dict[str, Any]:
    return {
        "t": cycle.tokens,
        "p": cycle.parents,
        "e": [float(f"{value:.{PROBABILITY_DIGITS}g}") for value in cycle.probabilities],
        "k": cycle.kept if len(cycle.kept) < len(cycle.tokens) else None,
        "a": cycle.accepted,
        "c": cycle.committed,
        "s": cycle.text,
        "d": cycle.passes,
        "sec": {step: round(seconds, SECONDS_DIGITS) for step, seconds in cycle.seconds.items()},
    }

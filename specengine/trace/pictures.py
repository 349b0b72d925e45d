"""Plots of one trace or of several, after those of the papers, and a picture of one cycle's tree, root on the left."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specengine.errors import InputError, require_input, require_suffix
from specengine.files import atomic, writing
from specengine.trace.records import ACCEPTED, PRUNED, REJECTED, ROOT, Query, Trace, TracedCycle

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito's
MARKERS = "osD^vP"
MIN_NODES = 5  # a cell with fewer nodes has no number
MIN_RANKS, MAX_RANKS = 4, 12  # columns of a panel
LABEL_WIDTH = 42
# Metadata by suffix that would differ in the next run, and is left out.
METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}
DOT = 320.0  # area of all dots of a query, square points


def draw(traces: Sequence[Trace], folder: Path) -> list[Path]:
    """Write three plots as SVG files into `folder` and return their paths. All traces share each plot.

    Raise InputError without matplotlib, without cycles, or if the folder cannot be written.
    """
    traces = [trace for trace in traces if _with_cycles(trace)]
    runs = list(zip(_labels(traces), map(_with_cycles, traces), strict=True))
    require_input("pictures: these traces have no cycles", bool(runs))
    drawings = {
        "acceptance-by-depth-and-rank": _heat_maps,
        "acceptance-length": _lengths,
        "draft-passes-against-length": _effort,
    }
    files = [folder / f"{name}.svg" for name in drawings]
    for file, fill in zip(files, drawings.values(), strict=True):
        write_figure(
            file, "pictures", partial(fill, runs=runs), {"font.size": 11}, layout="constrained"
        )
    return files


Run = tuple[str, list[Query]]


def _with_cycles(trace: Trace) -> list[Query]:
    return [query for query in trace.queries if query.cycles]


def _labels(traces: Sequence[Trace]) -> list[str]:
    """Return distinct labels: the policy, with the draft or the file if policies are equal."""
    for names in (
        [trace.policy for trace in traces],
        [f"{trace.policy}, {trace.draft}" for trace in traces],
        [f"{trace.policy}, {trace.file.name}" for trace in traces],
        [f"{trace.policy}, {trace.file}" for trace in traces],
    ):
        if len(set(names)) == len(names):
            break
    return [literal(name) for name in names]


def literal(text: str) -> str:
    """Return text without unprintable characters and without formulas for matplotlib."""
    return "".join(letter if letter.isprintable() else "?" for letter in text).replace("$", r"\$")


def write_figure(
    file: Path, field: str, fill: Callable[[Any], None], look: dict[Any, Any], **options: Any
) -> None:
    """Write what `fill` draws onto a figure, in the format of the file's suffix, with the same bytes every time.

    look: matplotlib's settings; options: those of its Figure. Raise InputError naming `field` for another suffix,
    without matplotlib, or if the file cannot be written.
    """
    require_suffix(field, file, METADATA)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"{field}: needs matplotlib, run pip install matplotlib") from error
    suffix = file.suffix.lower()
    with matplotlib.rc_context({**look, "svg.hashsalt": "specengine"}):
        figure: Any = Figure(**options)
        fill(figure)
        with writing(file, field):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic(file) as temporary:
                figure.savefig(temporary, format=suffix[1:], metadata=METADATA[suffix])


# ---- acceptance by depth and rank (TALON, Fig. 3)


def acceptance_counts(queries: Sequence[Query]) -> tuple[np.ndarray, np.ndarray]:
    """Return accepted and verified draft nodes, int64 [depths, ranks], by depth and rank among siblings from 1."""
    counts: dict[bool, Counter[tuple[int, int]]] = {True: Counter(), False: Counter()}
    for cycle in (cycle for query in queries for cycle in query.cycles):
        for node, state in enumerate(cycle.states):
            if node and state != PRUNED:
                counts[state == ACCEPTED][cycle.depths[node], cycle.ranks[node]] += 1
    both = counts[True] + counts[False]
    shape = (
        max((depth for depth, _ in both), default=0),
        max((rank for _, rank in both), default=0),
    )
    return _grid(counts[True], shape), _grid(both, shape)


def _grid(counts: Counter[tuple[int, int]], shape: tuple[int, int]) -> np.ndarray:
    grid = np.zeros(shape, dtype=np.int64)
    for (depth, rank), count in counts.items():
        grid[depth - 1, rank - 1] = count
    return grid


def _heat_maps(figure: Any, runs: Sequence[Run]) -> None:
    grids = [acceptance_counts(queries) for _, queries in runs]
    ranks = [min(max(MIN_RANKS, verified.shape[1]), MAX_RANKS) for _, verified in grids]
    depths = max(1, *(verified.shape[0] for _, verified in grids))
    best = max(
        (float(share) for grid in grids for share in _share(*grid).flat if share > 0), default=1.0
    )
    figure.set_size_inches(1.8 + 0.62 * sum(ranks), 2.0 + 0.42 * max(depths, 3))
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True, width_ratios=ranks)[0]
    for panel, (label, _), (accepted, verified), shown in zip(
        panels, runs, grids, ranks, strict=True
    ):
        image = _heat_map(panel, accepted[:, :shown], verified[:, :shown], (depths, shown), best)
        hidden = int(verified[:, shown:].sum())
        note = f"\n({hidden} nodes of rank {shown + 1} and above left out)" if hidden else ""
        panel.set_title(textwrap.fill(label, 8 * shown) + note, fontsize=11)
    panels[0].set_ylabel("depth in the tree")
    figure.colorbar(image, ax=list(panels), label="share of verified nodes accepted")


def _share(accepted: np.ndarray, verified: np.ndarray) -> np.ndarray:
    return np.divide(accepted, verified, out=np.full(verified.shape, np.nan), where=verified > 0)


def _heat_map(
    axes: Any, accepted: np.ndarray, verified: np.ndarray, shape: tuple[int, int], best: float
) -> Any:
    """Draw one panel, coloured up to the share `best`. Cells without nodes stay grey."""
    share = np.full(shape, np.nan)
    share[: verified.shape[0], : verified.shape[1]] = _share(accepted, verified)
    axes.set_facecolor("0.9")
    image = axes.imshow(share, cmap="viridis", vmin=0, vmax=best, aspect="auto")
    for (depth, rank), count in np.ndenumerate(verified):
        if count >= MIN_NODES:
            colour = "black" if share[depth, rank] > 0.6 * best else "white"
            axes.text(
                rank,
                depth,
                f"{share[depth, rank]:.2f}",
                ha="center",
                va="center",
                color=colour,
                fontsize=10,
            )
    axes.set_xticks(range(shape[1]), range(1, shape[1] + 1))
    axes.set_yticks(range(shape[0]), range(1, shape[0] + 1))
    axes.set_xlabel("rank among its siblings")
    return image


# ---- acceptance length over queries (TALON, Fig. 4)


def _lengths(figure: Any, runs: Sequence[Run]) -> None:
    longest = max(len(queries) for _, queries in runs)
    figure.set_size_inches(min(14.0, 6.5 + 0.25 * longest * len(runs)), 4.6)
    axes = figure.subplots()
    for number, (label, queries) in enumerate(runs):
        colour, marker = _look(number)
        places = np.arange(1, len(queries) + 1) + (number - (len(runs) - 1) / 2) * 0.7 / len(runs)
        lengths = [Counter(len(cycle.committed) for cycle in query.cycles) for query in queries]
        for place, counts in zip(places, lengths, strict=True):
            sizes = [DOT * count / counts.total() for count in counts.values()]
            axes.scatter(
                [place] * len(counts), list(counts), s=sizes, color=colour, alpha=0.3, linewidths=0
            )
        means = [query.tau for query in queries]
        label = f"{textwrap.fill(label, LABEL_WIDTH)}\nmean {np.mean(means):.2f}"
        axes.plot(places, means, marker=marker, color=colour, linewidth=1.2, label=label)
    axes.set(xlabel="query", ylabel="tokens per verification")
    axes.set_xlim(0.5, longest + 0.5)
    cycles = (cycle for _, queries in runs for query in queries for cycle in query.cycles)
    axes.set_ylim(0, max(len(cycle.committed) for cycle in cycles) + 0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(
        "Acceptance length. Line: mean of a query; dots: its cycles, by area", fontsize=11
    )
    _legend(axes, len(runs))


# ---- draft passes against acceptance length (TALON, Fig. 6)


def _effort(figure: Any, runs: Sequence[Run]) -> None:
    figure.set_size_inches(7.2, 5.4)
    axes = figure.subplots()
    points = [(query.tau, query.delta) for _, queries in runs for query in queries]
    top = 1.08 * max(max(pair) for pair in points)
    axes.plot([0, top], [0, top], "--", color="0.4", label="oracle: τ = δ")
    for number, (label, queries) in enumerate(runs):
        colour, marker = _look(number)
        taus, deltas = [query.tau for query in queries], [query.delta for query in queries]
        axes.scatter(
            taus,
            deltas,
            color=colour,
            marker=marker,
            s=42,
            alpha=0.8,
            label=textwrap.fill(label, LABEL_WIDTH),
        )
    axes.set(xlim=(0, max(tau for tau, _ in points) * 1.15), ylim=(0, top))
    axes.set_xlabel("acceptance length τ (tokens per verification)")
    axes.set_ylabel("draft passes δ per verification")
    axes.grid(alpha=0.3)
    axes.set_title("One point per query; above the line, draft passes are wasted", fontsize=11)
    _legend(axes, len(runs) + 1)


def _look(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]


def _legend(axes: Any, entries: int) -> None:
    """Draw the legend below the plot, where it hides no point."""
    axes.figure.legend(
        loc="outside lower center", ncols=min(2, entries), fontsize=10, frameon=False
    )


OWN = "own"  # state of the target's own token, which is not in the tree
LOOKS: dict[str, dict[str, Any]] = {
    ROOT: {"facecolor": "#ffffff", "edgecolor": "#333333", "linewidth": 1.6},
    ACCEPTED: {"facecolor": "#cfeadd", "edgecolor": "#009e73", "linewidth": 2.0},
    REJECTED: {"facecolor": "#ffffff", "edgecolor": "#d55e00", "linewidth": 1.1},
    PRUNED: {"facecolor": "#ffffff", "edgecolor": "#999999", "linewidth": 1.0, "linestyle": ":"},
    OWN: {"facecolor": "#d3e5f3", "edgecolor": "#0072b2", "linewidth": 2.0},
}
LABELS = {
    ROOT: "committed before",
    ACCEPTED: "proposed and accepted",
    OWN: "the target's own token",
    REJECTED: "verified, not accepted",
    PRUNED: "drafted, not verified",
}
MAX_LETTERS = 11
COLUMN, ROW = 1.45, 0.36  # inches
MARGIN = 0.5
MIN_COLUMNS = 6  # width of the legend
BEND, BOX = 0.55, 0.22  # columns before a node: where its edge bends, and where its box begins


def draw_tree(cycle: TracedCycle, file: Path, *, pruned: bool = False) -> None:
    """Write the tree of `cycle` as an SVG, PNG or PDF file, by suffix. pruned: draw pruned nodes too.

    Raise InputError for another suffix, without matplotlib, or if the file cannot be written.
    """
    layout = _Layout(cycle, pruned)
    size = (COLUMN * layout.columns, ROW * layout.rows + 2 * MARGIN)
    look = {"font.size": 10, "font.family": "monospace"}
    write_figure(
        file,
        "tree",
        lambda figure: _fill(figure, cycle, layout),
        look,
        figsize=size,
        facecolor="white",
    )


@dataclass
class _Layout:
    """Places of nodes: column by depth, row by a walk, most likely child first. -1 is the target's own token."""

    cycle: TracedCycle
    pruned: bool
    places: dict[int, tuple[int, float]] = field(default_factory=dict)
    rows: int = 0

    def __post_init__(self) -> None:
        order, stack = [], [0]
        while stack:
            order.append(stack.pop())
            stack += reversed(self.below(order[-1]))
        # leaves from top to bottom, then each parent in the middle of its children
        for node in order:
            if not self.below(node):
                self.places[node] = (self.depth(node), float(self.rows))
                self.rows += 1
        for node in reversed(order):
            if below := self.below(node):
                rows = [self.places[child][1] for child in below]
                self.places[node] = (self.depth(node), (rows[0] + rows[-1]) / 2)

    @property
    def columns(self) -> int:
        return max(MIN_COLUMNS, 1 + max(column for column, _ in self.places.values()))

    def below(self, node: int) -> list[int]:
        if node < 0:
            return []
        target_nodes = [-1] if self.cycle.has_own and node == self.cycle.accepted[-1] else []
        return target_nodes + [
            n for n in self.cycle.children[node] if self.pruned or self.cycle.states[n] != PRUNED
        ]

    def depth(self, node: int) -> int:
        return len(self.cycle.accepted) if node < 0 else self.cycle.depths[node]


def _fill(figure: Any, cycle: TracedCycle, layout: _Layout) -> None:
    from matplotlib.patches import Patch

    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-0.35, layout.columns - 0.35)
    axes.set_ylim(layout.rows - 1 + MARGIN / ROW + 0.9, -MARGIN / ROW - 0.1)
    states = {node: OWN if node < 0 else cycle.states[node] for node in layout.places}
    for node in layout.places:
        for child in layout.below(node):
            _edge(axes, layout.places[node], layout.places[child], LOOKS[states[child]])
    for node, (column, row) in layout.places.items():
        text = cycle.committed_texts[-1] if node < 0 else cycle.texts[node]
        box = {"boxstyle": "round,pad=0.3", **LOOKS[states[node]]}
        axes.text(column - BOX, row, _shown(text), va="center", zorder=4, bbox=box)
        if node > 0:
            axes.text(
                column - BEND + 0.03,
                row - 0.1,
                f"{cycle.probabilities[node]:.2f}",
                fontsize=7,
                color="#555555",
            )
    handles = [
        Patch(label=LABELS[state], **LOOKS[state]) for state in LABELS if state in states.values()
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), fontsize=9, frameon=False
    )


def _edge(
    axes: Any, start: tuple[float, float], end: tuple[float, float], look: dict[str, Any]
) -> None:
    (x0, y0), (x1, y1) = start, end
    x0, x1, bend = x0 - BOX, x1 - BOX, x1 - BEND
    style = {key: look[key] for key in ("linewidth", "linestyle") if key in look}
    axes.plot(
        [x0, bend, bend, x1],
        [y0, y0, y1, y1],
        color=look["edgecolor"],
        zorder=look["linewidth"],
        **style,
    )


def _shown(text: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    text = repr(text)[1:-1].replace(" ", "␣")
    return literal(text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + "…")

"""Figures of traces: how they are written, and the picture of one cycle's tree, root on the left."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.errors import InputError, require_suffix, restating
from specengine.files import atomic, writing
from specengine.trace.records import ACCEPTED, PRUNED, REJECTED, ROOT, TracedCycle

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito's
MARKERS = "osD^vP"
# Metadata by suffix that would differ in the next run, and is left out.
METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}


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
    with restating(
        ImportError, lambda _: InputError(f"{field}: needs matplotlib, run pip install matplotlib")
    ):
        import matplotlib
        from matplotlib.figure import Figure
    suffix = file.suffix.lower()
    with matplotlib.rc_context({**look, "svg.hashsalt": "specengine"}):
        figure: Any = Figure(**options)
        fill(figure)
        with writing(file, field):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic(file) as temporary:
                figure.savefig(temporary, format=suffix[1:], metadata=METADATA[suffix])


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
    write_figure(
        file,
        "tree",
        lambda figure: _fill(figure, cycle, layout),
        {"font.size": 10, "font.family": "monospace"},
        figsize=(COLUMN * layout.columns, ROW * layout.rows + 2 * MARGIN),
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
            (x0, y0), (x1, y1), look = (
                layout.places[node],
                layout.places[child],
                LOOKS[states[child]],
            )
            style = {key: look[key] for key in ("linewidth", "linestyle") if key in look}
            bend = x1 - BEND
            axes.plot(
                [x0 - BOX, bend, bend, x1 - BOX],
                [y0, y0, y1, y1],
                color=look["edgecolor"],
                zorder=look["linewidth"],
                **style,
            )
    for node, (column, row) in layout.places.items():
        # on one line, with visible spaces
        text = repr(cycle.committed_texts[-1] if node < 0 else cycle.texts[node])[1:-1]
        text = text.replace(" ", "␣")
        text = literal(text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + "…")
        box = {"boxstyle": "round,pad=0.3", **LOOKS[states[node]]}
        axes.text(column - BOX, row, text, va="center", zorder=4, bbox=box)
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

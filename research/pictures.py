"""Plots of one trace or of several, after TALON's Figures 3, 4 and 6; all traces share each plot.

python -m research.pictures run.jsonl other.jsonl --out pictures
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specengine.errors import SpecEngineError, require_input
from specengine.trace import Trace, read_trace
from specengine.trace.pictures import COLOURS, MARKERS, literal, write_figure
from specengine.trace.records import ACCEPTED, PRUNED, Query

MIN_NODES = 5  # a cell with fewer nodes has no number
MIN_RANKS, MAX_RANKS = 4, 12  # columns of a panel
LABEL_WIDTH = 42
DOT = 320.0  # area of all dots of a query, square points


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.pictures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, nargs="+", help="what `--trace` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the three SVG files")
    args = parser.parse_args(arguments)
    try:
        traces = [read_trace(file) for file in args.file]
        files = draw(traces, args.out)
    except SpecEngineError as error:
        print(f"research.pictures: {error}", file=sys.stderr)
        return 2
    prompts = {tuple(tuple(query.prompt_tokens) for query in trace.queries) for trace in traces}
    if len(prompts) > 1:
        print(
            "note: these traces are of different prompts, which the plots compare too",
            file=sys.stderr,
        )
    print(*files, sep="\n")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())

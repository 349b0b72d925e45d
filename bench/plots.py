"""Plot results: kernels by length of the prefix, rules of trees by vocabulary, or methods by speed over plain."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from specengine.benchmark.records import Record
from specengine.benchmark.report import STYLE, draw_speeds
from specengine.trace.pictures import COLOURS, MARKERS, write_figure

DRAWN_PARENTS = 10  # of the cases of tree construction: EAGLE's width
DRAWN_RULES = (
    *("eagle (torch)", "talon (torch)", "eagle (ops)", "talon (ops)"),
    *("salf (ops)", "c2t (ops)", "dynatree (ops)", "ltd (ops)"),
)

Points = dict[str, Any]  # data of a plot, JSON-ready


def draw(records: list[Record], file: Path) -> None:
    """Write an SVG file. Raise InputError without matplotlib or rows, or if the file cannot be written."""
    rows = _attention(records)
    if rows:
        write_figure(
            file, "plot", lambda figure: _curves(figure, rows), STYLE, layout="constrained"
        )
    elif points := construction_points(records):
        write_figure(
            file, "plot", lambda figure: construction(figure, points), STYLE, layout="constrained"
        )
    else:
        draw_speeds(records, file)


def _attention(records: list[Record]) -> list[Record]:
    """Return the rows of tree attention with the most frequent shape of heads."""
    rows = [record for record in records if record["record"] == "attention" and "way" in record]
    shapes = Counter(_shape(row) for row in rows)
    return [row for row in rows if _shape(row) == shapes.most_common(1)[0][0]]


def _shape(row: Record) -> tuple[int, int, int]:
    return row["heads"], row["kv_heads"], row["size"]


def _curves(figure: Any, rows: list[Record]) -> None:
    nodes = sorted({row["nodes"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows if "median" in row))
    across = min(3, len(nodes))
    down = -(-len(nodes) // across)
    figure.set_size_inches(1.0 + 3.6 * across, 1.4 + 2.9 * down)
    panels = list(figure.subplots(down, across, squeeze=False, sharex=True).flat)
    for panel, count in zip(panels, nodes, strict=False):
        own = [row for row in rows if row["nodes"] == count]
        for number, way in enumerate(ways):
            points = sorted(
                (row["prefix"], row["median"])
                for row in own
                if row["way"] == way and "median" in row
            )
            look = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            line = "-" if number < len(COLOURS) else ":"
            panel.plot(
                *zip(*points, strict=True) if points else ([], []),
                line,
                label=way,
                markersize=4,
                **look,
            )
        floor = {
            row["prefix"]: max(row["bytes_us"], row["operations_us"])
            for row in own
            if "bytes_us" in row
        }
        panel.plot(
            *zip(*sorted(floor.items()), strict=True) if floor else ([], []), "k--", label="floor"
        )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(
            title=f"{count} node{'s' * (count > 1)}",
            xlabel="slots before the tree",
            ylabel="microseconds",
        )
        panel.grid(alpha=0.3)
    for panel in panels[len(nodes) :]:
        panel.set_visible(False)
    heads = "{}/{} heads of {}".format(*_shape(rows[0]))
    figure.suptitle(f"Tree attention, {heads}, bfloat16")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=across,
        fontsize=9,
        frameon=False,
    )


def construction_points(records: list[Record]) -> Points:
    """Return mean milliseconds of a layer of 10 parents: by form of the distributions, alpha and rule, [[V, ms], ...].

    TALON's figure 15 shows the means; empty without such cases.
    """
    found: Points = {}
    for record in records:
        if record["record"] == "case" and record["parents"] == DRAWN_PARENTS:
            panel = found.setdefault(record["given"], {}).setdefault(f"{record['alpha']:g}", {})
            for rule in DRAWN_RULES:
                if rule in record["mean_ms"]:
                    panel.setdefault(rule, []).append(
                        [record["vocabulary"], record["mean_ms"][rule]]
                    )
    return found


def construction(figure: Any, points: Points) -> None:
    """Draw a panel for each form and alpha. The numbers are TALON's speed over EAGLE's, both in torch."""
    alphas = list(dict.fromkeys(alpha for panels in points.values() for alpha in panels))
    figure.set_size_inches(1.0 + 2.9 * len(alphas), 0.9 + 2.3 * len(points))
    grid = figure.subplots(len(points), len(alphas), squeeze=False, sharex=True, sharey="row")
    for row, (given, panels) in zip(grid, points.items(), strict=True):
        row[0].set_ylabel(f"{given}\nmilliseconds")
        for axes, alpha in zip(row, alphas, strict=True):
            _layer(axes, panels.get(alpha, {}))
            axes.set_title(f"exponent {alpha}")
        times = [ms for panel in panels.values() for places in panel.values() for _, ms in places]
        row[0].set_ylim(0, 1.2 * max(times))
    for axes in grid[-1]:
        axes.set_xlabel("vocabulary, thousands")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
    )


def _layer(axes: Any, by_rule: Points) -> None:
    for number, rule in enumerate(DRAWN_RULES):
        places = [(vocabulary / 1000, ms) for vocabulary, ms in by_rule.get(rule, [])]
        own = number % 2 if number < 4 else number - 2  # a colour for each policy
        look = {"color": COLOURS[own % len(COLOURS)], "marker": MARKERS[own % len(MARKERS)]}
        line = "-" if number < 2 else ":"
        if places:
            axes.plot(*zip(*places, strict=True), line, label=rule, markersize=4, **look)
    pairs = zip(by_rule.get(DRAWN_RULES[0], []), by_rule.get(DRAWN_RULES[1], []), strict=True)
    for (vocabulary, eagle), (_, talon) in pairs:
        place = (vocabulary / 1000, max(eagle, talon))
        axes.annotate(
            f"{eagle / talon:.2f}",
            place,
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)

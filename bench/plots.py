"""Plot results: kernels by length of the prefix, or methods by speed over plain decoding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from specengine.benchmark import plots
from specengine.benchmark.plots import picture
from specengine.benchmark.tables import Record
from specengine.trace.pictures import COLOURS, MARKERS


def draw(records: list[Record], file: Path) -> None:
    """Write an SVG file. Raise InputError without matplotlib or rows, or if the file cannot be written."""
    rows = _attention(records)
    if rows:
        picture(file, lambda figure: _curves(figure, rows))
    else:
        plots.draw(records, file)


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
            points = sorted((row["prefix"], row["median"]) for row in own if row["way"] == way and "median" in row)
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            line = "-" if number < len(COLOURS) else ":"
            panel.plot(*zip(*points, strict=True) if points else ([], []), line, label=way, markersize=4, **look)
        floor = {row["prefix"]: max(row["bytes_us"], row["operations_us"]) for row in own if "bytes_us" in row}
        panel.plot(*zip(*sorted(floor.items()), strict=True) if floor else ([], []), "k--", label="floor")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(title=f"{count} node{'s' * (count > 1)}", xlabel="slots before the tree", ylabel="microseconds")
        panel.grid(alpha=0.3)
    for panel in panels[len(nodes) :]:
        panel.set_visible(False)
    heads = "{}/{} heads of {}".format(*_shape(rows[0]))
    figure.suptitle(f"Tree attention, {heads}, bfloat16")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=across, fontsize=9, frameon=False
    )

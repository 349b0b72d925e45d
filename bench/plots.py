"""Pictures of what was measured on a device: kernels by the length of the prefix, policies by where trees grow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from specengine.benchmark.tables import Record
from specengine.files import atomic
from specengine.trace.pictures import COLOURS, MARKERS

DRIVEN = ("eager", "static cache", "graphs", "strict")
BAR = 0.22  # inches


def plot(records: list[Record], file: Path) -> str:
    """Draw what these records hold into an SVG file; a line about what was done, or why nothing was."""
    rows, speeds = _attention(records), _speeds(records)
    if not rows and not speeds:
        return f"{file}: nothing in these records is drawn"
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return f"{file}: not drawn, matplotlib is missing (pip install matplotlib)"
    with matplotlib.rc_context({"font.size": 10, "svg.hashsalt": "specengine"}):
        figure = Figure(layout="constrained")
        if rows:
            _curves(figure, rows)
        else:
            _bars(figure, speeds)
        with atomic(file) as part:
            figure.savefig(part, format="svg", metadata={"Date": None})
    return f"{file}: drawn"


# ---- kernels: time against the prefix


def _attention(records: list[Record]) -> list[Record]:
    """The rows of tree attention with the shape of heads that most rows have."""
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


# ---- graphs: speed over captured plain decoding


def _speeds(records: list[Record]) -> dict[str, dict[str, float]]:
    """By policy and how it is driven; `transformers` stands among the policies."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        for way, speed in record.get("speedup_over_plain_graphs", {}).items():
            policy, *rest = way.split(", ")
            found.setdefault(policy, {})[rest[-1] if rest else "eager"] = speed
    return found


def _bars(figure: Any, speeds: dict[str, dict[str, float]]) -> None:
    bars = [(policy, way) for policy in speeds for way in DRIVEN if way in speeds[policy]]
    figure.set_size_inches(8.0, 1.2 + BAR * (len(bars) + len(speeds)))
    axes = figure.subplots()
    places, place = {}, 0.0
    for number, (policy, way) in enumerate(bars):
        place += 2.0 if number and bars[number - 1][0] != policy else 1.0  # a gap before the next policy
        places[policy, way] = place
    for way, colour in zip(DRIVEN, COLOURS, strict=False):
        own = {places[bar]: speeds[bar[0]][way] for bar in bars if bar[1] == way}
        if own:
            drawn = axes.barh(list(own), list(own.values()), color=colour, label=way)
            axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
    middles = [[place for (policy, _), place in places.items() if policy == name] for name in speeds]
    axes.set_yticks([sum(own) / len(own) for own in middles], list(speeds))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(1.0, color="k", linewidth=0.8)
    axes.set(xlabel="tokens per second over captured plain decoding's")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(DRIVEN), fontsize=9, frameon=False)

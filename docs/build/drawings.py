"""Plots of the pages, SVG files in docs/pictures. Each file holds its data, so that a test can compare."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench import plots
from docs.build import results
from docs.build.results import means, records, summaries
from docs.build.tables import WAYS
from specengine.benchmark.summaries import ALL
from specengine.files import atomic
from specengine.trace.pictures import COLOURS

FOLDER = Path(__file__).parents[1] / "pictures"
Points = dict[str, Any]  # data of a plot, JSON-ready


class Drawing(NamedTuple):
    """A plot: alternative text, data, and the function that draws it; None for a copy of a result file."""

    alt: str
    points: Callable[[], Points]
    onto: Callable[[Any, Points], None] | None


def image(name: str, page: Path) -> str:
    """Return the plot in markdown, with a link relative to `page`."""
    link = os.path.relpath(file_of(name), page.parent)
    return f"![{DRAWINGS[name].alt}]({link})"


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.svg"


def is_current(name: str) -> bool:
    """Return whether the file holds the present data, whatever the version of matplotlib."""
    file, drawing = file_of(name), DRAWINGS[name]
    if not file.is_file():
        return False
    if drawing.onto is None:
        return file.read_bytes() == (results.RESULTS / file.name).read_bytes()
    data = re.search(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.DOTALL)
    return data is not None and json.loads(html.unescape(data[1])) == drawing.points()


def draw(name: str) -> None:
    """Write the file of the plot."""
    file, drawing = file_of(name), DRAWINGS[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    if drawing.onto is None:
        shutil.copy(results.RESULTS / file.name, file)
        return
    import matplotlib
    from matplotlib.figure import Figure

    points = drawing.points()
    with (
        matplotlib.rc_context({"font.size": 10, "svg.hashsalt": "specengine"}),
        atomic(file) as temporary,
    ):
        figure = Figure(layout="constrained", facecolor="white")
        drawing.onto(figure, points)
        figure.savefig(
            temporary, format="svg", metadata={"Date": None, "Description": json.dumps(points)}
        )


# ---- data


def _policies() -> Points:
    by_way = summaries("auto-policies.jsonl")
    speeds = {
        way: r["speed_mean"] for (way, name), r in by_way.items() if name == ALL and way != "plain"
    }
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def _answers() -> Points:
    rates = {part: mean["tokens_per_second"] for part, mean in means("cpu-answers.jsonl").items()}
    names = {way: name.replace("`", "") for way, name in WAYS.items()}
    drafted = {names[way]: rate for way, rate in rates["default"].items()}
    plain = {
        f"{names[way]}, no draft": rates["plain"][way]
        for way in ("native", "native int8", "native gguf")
    }
    return dict(sorted({**drafted, **plain}.items(), key=lambda item: -item[1]))


def _thresholds() -> Points:
    by_setting = {r["way"]: r for r in records("replay-sweeps.jsonl") if r["record"] == "replay"}
    curves = {"end-to-end-shipped-head": "two cores", "qwen3-8b-h200": "Qwen3-8B on an H200"}
    steps = [f"{tenths / 10:g}" for tenths in range(10)]
    return {
        f"{label}, {kind}": [
            [float(t), by_setting[f"salf,threshold={t}{end}"]["speedup"][curve]] for t in steps
        ]
        for curve, label in curves.items()
        for kind, end in (("as published", ",fill=false"), ("filled up", ""))
    }


def _construction() -> Points:
    return plots.construction_points(records("tree-construction.jsonl"))


def _bars(label: str, mark: float | None, own: str) -> Callable[[Any, Points], None]:
    """Return a function that draws horizontal bars, with names that begin with `own` coloured and a line at `mark`."""

    def onto(figure: Any, points: Points) -> None:
        figure.set_size_inches(7.6, 0.7 + 0.29 * len(points))
        axes = figure.subplots()
        colours = [COLOURS[0] if name.startswith(own) else "0.65" for name in points]
        bars = axes.barh(list(points), list(points.values()), color=colours, height=0.7)
        axes.bar_label(bars, fmt="%.2f" if mark else "%.0f", fontsize=9, padding=3)
        axes.invert_yaxis()
        if mark:
            axes.axvline(mark, color="k", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.08)
        axes.set_xlabel(label)

    return onto


def _curves(figure: Any, points: Points) -> None:
    figure.set_size_inches(7.6, 3.6)
    axes = figure.subplots()
    for number, (name, line) in enumerate(points.items()):
        style = "-" if "published" in name else "--"
        axes.plot(
            *zip(*line, strict=True),
            style,
            color=COLOURS[number // 2],
            marker="o",
            markersize=4,
            label=name,
        )
    axes.set(xlabel="threshold", ylabel="predicted speed over plain decoding")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def _copied() -> Points:
    return {}


DRAWINGS = {
    "policies": Drawing(
        "Speed of each policy over plain decoding",
        _policies,
        _bars("speed over plain decoding", 1.0, "auto"),
    ),
    "answers": Drawing(
        "Tokens per second of each method", _answers, _bars("tokens per second", None, "specengine")
    ),
    "salf-thresholds": Drawing("SALF's speed by its threshold, replayed", _thresholds, _curves),
    "tree-construction": Drawing(
        "Milliseconds to choose a layer of the tree by vocabulary, by each policy's rule",
        _construction,
        plots.construction,
    ),
    "auto-regret": Drawing(
        "Expected tokens lost over cycles, with counted rates and with stated probabilities",
        _copied,
        None,
    ),
    "ltd-training-cpu": Drawing(
        "Reward in training and speed on held-back answers, two cores", _copied, None
    ),
    "ltd-training-paper": Drawing("The same at the costs of an A100", _copied, None),
}

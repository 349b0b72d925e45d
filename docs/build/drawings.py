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
from specengine.benchmark.records import Record
from specengine.benchmark.summaries import ALL
from specengine.files import atomic
from specengine.trace.pictures import COLOURS, MARKERS

FOLDER = Path(__file__).parents[1] / "pictures"
PARETO = ("eagle", "talon", "salf", "c2t", "dynatree", "ltd", "opt_tree")  # policies of the picture
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


def _pareto() -> Points:
    """Return by cost table and policy what replays with other settings come to: nodes, tau and speed."""
    tables = {
        "two cores": ("replay-sweeps.jsonl", "end-to-end-shipped-head"),
        "Qwen3-8B on an H200": ("replay-sweeps.jsonl", "qwen3-8b-h200"),
        "8B on an A100": ("auto-replay.jsonl", "8b-a100-roofline"),
    }
    points: Points = {}
    for label, (file, costs) in tables.items():
        by_policy: dict[str, list[list[float]]] = {}
        for record in records(file):
            policy = re.split("[,/]", record["way"])[0] if record["record"] == "replay" else ""
            if policy in PARETO:
                figures = [record["gamma"], record["tau"], record["speedup"][costs]]
                by_policy.setdefault(policy, []).append(figures)
        points[label] = {policy: sorted(found) for policy, found in by_policy.items()}
    return points


def _heights() -> Points:
    """Return the mean height and width of the trees of every rule of depth in bench.papers."""
    sets = (record for record in records("papers.jsonl") if record["record"] == "set")
    rows = next(record["rows"] for record in sets if record["set"] == "depth-rules")
    columns = {"height": "height", "nodes of the widest depth": "widest"}
    return {
        label: {row["way"].partition(",")[0]: row[column] for row in rows}
        for label, column in columns.items()
    }


def _decisions() -> Points:
    """Return how often Learning to Draft's networks choose each depth and size, in shares."""
    points: Points = {}
    for label, file, way in (
        ("two cores", "ltd-cpu-amd.jsonl", "ltd: cpu"),
        ("8B on an A100", "ltd-8b-amd.jsonl", "ltd: a100"),
    ):
        row = next(record for record in records(file) if record.get("way") == way)
        for what in ("depths", "sizes"):
            counts = row[what]
            shares = {n: round(count / sum(counts.values()), 4) for n, count in counts.items()}
            points[f"{what[:-1]}, {label}"] = shares
    return points


def _loss_ranks() -> Points:
    heads = [record for record in records("losses.jsonl") if record["record"] == "head"]
    return {
        what: {
            head["loss"]: [
                [rank["rank"], rank[field], *rank[f"{field}_interval"]] for rank in head["by_rank"]
            ]
            for head in heads
        }
        for what, field in (("accuracy", "accuracy"), ("calibration error", "calibration"))
    }


def _chains() -> Points:
    chosen = [r for r in records("auto-replay.jsonl") if r.get("way", "").startswith("chain,")]
    lengths = [int(record["way"].rpartition("=")[2]) for record in chosen]
    costs = {"qwen3-8b-h200": "Qwen3-8B on an H200", "8b-a100-roofline": "8B on an A100"}
    tau = [[n, record["tau"]] for n, record in zip(lengths, chosen, strict=True)]
    return {"acceptance length": tau} | {
        f"speed, {label}": [
            [n, record["speedup"][name]] for n, record in zip(lengths, chosen, strict=True)
        ]
        for name, label in costs.items()
    }


def _rows(name: str) -> list[Record]:
    sets = (record for record in records("papers.jsonl") if record["record"] == "set")
    rows: list[Record] = next(record["rows"] for record in sets if record["set"] == name)
    return rows


def _acceptance() -> Points:
    """Return by rank among siblings the share that the target takes at each depth, of 20 nodes or more."""
    points: Points = {}
    for row in _rows("acceptance"):
        if row["rank"] <= len(COLOURS) and row["nodes"] >= 20:
            points.setdefault(f"rank {row['rank']}", []).append([row["depth"], row["share"]])
    return dict(sorted(points.items()))


def _bias() -> Points:
    names = {
        "taken": "taken by the target",
        "path_probability": "the draft's path probability",
        "c2t": "C2T's confidence",
    }
    return {
        label: [[row["entropy_from"], row[name]] for row in _rows("c2t-bias")]
        for name, label in names.items()
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


def _fronts(figure: Any, points: Points) -> None:
    """Draw tau, then speed at each cost table, against verified nodes."""
    figure.set_size_inches(7.6, 6.4)
    panels = list(figure.subplots(2, 2).flat)
    drawn = [("acceptance length", next(iter(points.values())), 1)]
    drawn += [(f"speed, {label}", by_policy, 2) for label, by_policy in points.items()]
    for panel, (title, by_policy, which) in zip(panels, drawn, strict=True):
        for number, policy in enumerate(PARETO):
            curve = by_policy.get(policy, [])
            panel.plot(
                [figures[0] for figures in curve],
                [figures[which] for figures in curve],
                MARKERS[number % len(MARKERS)],
                color=(*COLOURS, "0.3")[number],
                markersize=4,
                label=policy,
            )
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
    for panel in panels[2:]:
        panel.set_xlabel("nodes verified")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)


def _shares(figure: Any, points: Points) -> None:
    figure.set_size_inches(7.6, 4.6)
    for panel, (title, shares) in zip(figure.subplots(2, 2).flat, points.items(), strict=True):
        numbers = sorted(shares, key=int)
        panel.bar(numbers, [shares[number] for number in numbers], color=COLOURS[0])
        panel.set_title(title, fontsize=10)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("share of the positions", fontsize=10)


def _beside(figure: Any, points: Points) -> None:
    figure.set_size_inches(7.6, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (title, by_name) in zip(panels, points.items(), strict=True):
        panel.barh(list(by_name)[::-1], list(by_name.values())[::-1], color=COLOURS[0])
        panel.set_xlabel(title)
        panel.spines[["top", "right"]].set_visible(False)


def _ranked(figure: Any, points: Points) -> None:
    figure.set_size_inches(7.6, 3.4)
    for panel, (title, by_loss) in zip(figure.subplots(1, 2), points.items(), strict=True):
        for number, (loss, rows) in enumerate(by_loss.items()):
            ranks, values, lows, highs = zip(*rows, strict=True)
            away = [rank + 0.08 * (number - 1.5) for rank in ranks]
            below = [value - low for value, low in zip(values, lows, strict=True)]
            above = [high - value for value, high in zip(values, highs, strict=True)]
            bars = [[max(each, 0) for each in side] for side in (below, above)]
            panel.errorbar(
                away, values, bars, marker="o", markersize=4, color=COLOURS[number], label=loss
            )
        panel.set(title=title, xlabel="rank of the token before", xticks=list(ranks))
        panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)


def _lines(label: str) -> Callable[[Any, Points], None]:
    """Return a function that draws a line for each name, over what `label` says."""

    def onto(figure: Any, points: Points) -> None:
        figure.set_size_inches(7.6, 3.2)
        axes = figure.subplots()
        for number, (name, line) in enumerate(points.items()):
            axes.plot(*zip(*line, strict=True), marker="o", color=COLOURS[number], label=name)
        axes.set(xlabel=label, xticks=[n for n, _ in next(iter(points.values()))])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)

    return onto


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
    "replayed-fronts": Drawing(
        "Acceptance length and speed by verified nodes, each policy with several settings, replayed",
        _pareto,
        _fronts,
    ),
    "ltd-decisions": Drawing(
        "Depths and sizes that Learning to Draft's networks choose", _decisions, _shares
    ),
    "tree-heights": Drawing("Mean height and width of each policy's trees", _heights, _beside),
    "loss-ranks": Drawing(
        "Accuracy and calibration error after the draft's n-th token, by loss", _loss_ranks, _ranked
    ),
    "chains": Drawing(
        "Acceptance length and speed of chains by length, replayed",
        _chains,
        _lines("tokens of the chain"),
    ),
    "acceptance": Drawing(
        "Share of the children of a node on the target's path that it takes, by depth and rank",
        _acceptance,
        _lines("depth"),
    ),
    "c2t-bias": Drawing(
        "How often a node is taken, and what draft and C2T say, by entropy of its parent",
        _bias,
        _lines("entropy of the parent's distribution, from (nats)"),
    ),
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

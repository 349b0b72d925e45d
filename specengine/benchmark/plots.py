"""A picture of a run: every way's speed over plain decoding, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specengine.benchmark.summaries import quartiles, speeds
from specengine.benchmark.tables import Record
from specengine.errors import InputError
from specengine.trace.pictures import COLOURS, MARKERS, write_figure

LOOK = {"font.size": 10}
SPREAD = 0.6  # of the places of sets within a way's band


def draw(records: Sequence[Record], file: Path) -> None:
    """Write an SVG file. InputError as of `write_figure`, and without a row to draw."""
    found = speeds_by_way(records)
    if not found:
        raise InputError(f"plot: the records have no speed over plain decoding to draw into {file.name}")
    write_figure(file, "plot", lambda figure: _fill(figure, found), LOOK, layout="constrained")


def speeds_by_way(records: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """Return speeds over plain decoding by way and set, for ways that ran to the end, without plain decoding."""
    rows = [record for record in records if record["record"] == "row"]
    dropped = {record["way"] for record in records if record["record"] == "not run"}
    plain = {(row["set"], row["id"]): row for row in rows if row["way"] == "plain"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        base = plain.get((row["set"], row["id"]))
        if row["way"] not in ("plain", *dropped) and base is not None and "seconds" in row:
            found.setdefault(row["way"], {}).setdefault(row["set"], []).extend(speeds([row], [base]))
    return found


def _fill(figure: Any, found: dict[str, dict[str, list[float]]]) -> None:
    sets = list(dict.fromkeys(set_ for by_set in found.values() for set_ in by_set))
    figure.set_size_inches(8.0, 1.6 + 0.55 * len(found))
    axes = figure.subplots()
    for place, by_set in enumerate(found.values()):
        low, middle, high = quartiles([speed for own in by_set.values() for speed in own])
        axes.barh(place, high - low, left=low, height=0.8, color="0.88", zorder=1)
        axes.plot([middle, middle], [place - 0.4, place + 0.4], color="0.2", linewidth=1.6, zorder=2)
    for number, set_ in enumerate(sets):
        within = SPREAD * ((number + 0.5) / len(sets) - 0.5)
        points = [(speed, place + within) for place, own in enumerate(found.values()) for speed in own.get(set_, [])]
        look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.scatter(*zip(*points, strict=True), s=18, label=set_, zorder=3, **look)
    axes.axvline(1.0, color="k", linewidth=0.8)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(xlabel="tokens per second over plain decoding's; bars are quartiles, lines medians, points prompts")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(6, len(sets)), fontsize=9, frameon=False)

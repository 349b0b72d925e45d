"""Draw the curve of a training of a draft head: losses, and agreement and tokens per cycle on held-back text.

python -m research.curve FOLDER --out curve.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from specengine.files import atomic
from specengine.train.draft.training import LOG


def plot(log: Path, file: Path) -> bool:
    """Plot losses and agreement on held-back text from `log` into an SVG file. Return False without matplotlib."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]

    def onto(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        _losses(left, [entry for entry in entries if "loss" in entry])
        _agreement(right, [entry for entry in entries if "held_back" in entry])

    return draw(file, (9, 4), onto)


def _losses(axes: Any, entries: list[dict[str, Any]]) -> None:
    steps, losses = [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
    axes.plot(steps, losses, linewidth=0.6, alpha=0.5)
    window = max(1, len(losses) // 50)
    axes.plot(steps, [fmean(losses[max(0, i - window) : i + 1]) for i in range(len(losses))])
    axes.set(xlabel="step", ylabel="training loss")


def _agreement(axes: Any, entries: list[dict[str, Any]]) -> None:
    steps = [entry["step"] for entry in entries]
    for ahead, hits in enumerate(
        zip(*(entry["held_back"]["hits"] for entry in entries), strict=True), start=1
    ):
        axes.plot(steps, hits, marker=".", label=f"{ahead} ahead")
    axes.set(xlabel="step", ylabel="agreement on held-back text", ylim=(0, 1))
    if entries:
        axes.legend()
    lengths = axes.twinx()
    lengths.plot(steps, [entry["held_back"]["tokens_per_cycle"] for entry in entries], "k--")
    lengths.set(ylabel="tokens per cycle of a chain (dashed)")


def draw(file: Path, size: tuple[float, float], onto: Callable[[Any], None]) -> bool:
    """Write an SVG file of `size` inches that `onto` draws. Return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=size, layout="constrained")
    onto(figure)
    with atomic(file) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.curve", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of `train draft`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg", help="file to write")
    args = parser.parse_args(arguments)
    if not (args.folder / LOG).is_file():
        parser.error(
            f"FOLDER: {args.folder} has no {LOG}; accepted the folder of a training that has begun"
        )
    if not plot(args.folder / LOG, args.out):
        parser.error("it needs matplotlib, run pip install matplotlib")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plot a training run of Learning to Draft's networks from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from research.curve import draw


def plot(entries: list[dict[str, Any]], file: Path) -> bool:
    """Draw each stage's training reward and validation speed into an SVG file. Return False without matplotlib."""
    stages = sorted({(entry["stage"], entry["which"]) for entry in entries})

    def onto(figure: Any) -> None:
        for number, (stage, which) in enumerate(stages, start=1):
            axes = figure.add_subplot(1, len(stages), number)
            own = [entry for entry in entries if entry["stage"] == stage]
            rewards = [(entry["steps"], entry["reward"]) for entry in own if "reward" in entry]
            speeds = [
                (entry["steps"], entry["validation"]["speed"])
                for entry in own
                if "validation" in entry
            ]
            axes.plot(*zip(*rewards, strict=True), linewidth=0.8, label="reward in training")
            axes.plot(*zip(*speeds, strict=True), "k.-", label="speed on held-back answers")
            axes.set(title=f"{stage}: {which}", xlabel="decisions")
            if number == 1:
                axes.legend(fontsize="small")

    return draw(file, (3.2 * max(1, len(stages)), 3.4), onto)

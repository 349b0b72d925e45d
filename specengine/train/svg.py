"""Figures of a training, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specengine.files import atomic


def draw(file: Path, size: tuple[float, float], onto: Callable[[Any], None]) -> bool:
    """What `onto` draws onto a matplotlib figure of `size` inches, as an SVG file; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=size, layout="constrained")
    onto(figure)
    with atomic(file) as part:
        figure.savefig(part, format="svg", metadata={"Date": None})
    return True

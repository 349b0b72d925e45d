"""Plots of a training run, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specengine.files import atomic


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

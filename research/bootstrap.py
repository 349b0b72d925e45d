"""95 % intervals by bootstrap: percentiles over draws with replacement."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import TypeVar

SAMPLES = 1000
T = TypeVar("T")


def samples(found: Sequence[T]) -> list[list[T]]:
    """Yield bootstrap samples of a sequence, as many as an interval needs."""
    generator = random.Random(0)
    return [generator.choices(found, k=len(found)) for _ in range(SAMPLES)]


def interval(values: Sequence[float]) -> list[float]:
    """Return the 2.5th and the 97.5th percentile."""
    bounds = statistics.quantiles(values, n=40)
    return [round(bounds[0], 4), round(bounds[-1], 4)]

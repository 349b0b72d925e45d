"""DyJoint: a chain that ends where its whole path is improbable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specengine.ops import Number
from specengine.policies.baselines._chain import StoppedChain


@dataclass
class DyJoint(StoppedChain):
    """Greedy draft tokens while their joint probability is `threshold` or more; the first is always proposed.

    Source: C2T, Table 7.
    """

    threshold: float = 0.08

    presets: ClassVar[dict[str, dict[str, Any]]] = {"c2t-table7": {}}

    def score(self, edge: Number, path: Number) -> Number:
        return path

"""TALON: grow until a node budget is spent; below the first layers, keep what comes near the layer's best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.policies._levels import GatedLevels
from specengine.tree import TokenTree


@dataclass
class Talon(TreePolicy):
    """A confident draft gives deep, narrow trees, an uncertain one shallow, wide ones, always of `budget` nodes.

    The first `robust_layers` layers are the `width` best of all candidates. From then on a candidate stays if its
    path probability is at least `mu` times the layer's largest. Every node that is kept is verified. Without
    `max_depth` the tree can become budget - width levels high, one draft pass each.

    budget         nodes verified, the root included (N)
    width          nodes of each robust layer (K)
    mu             gate, above 0 to 1; 1 grows a chain, small values fill the budget with few layers
    robust_layers  layers without a gate (k)
    max_depth      greatest depth of a node; none: the budget alone ends the growth

    Source: TALON, section 5 and Algorithm 2; defaults of its experiments.
    """

    budget: int = 60
    width: int = 10
    mu: float = 0.03
    robust_layers: int = 1
    max_depth: int | None = None

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "best-qwen3-8b": {"mu": 0.01},
        "best-dsl-8b": {"mu": 0.04},
        "cpu": {"budget": 12, "width": 4, "mu": 0.1},
    }

    def __post_init__(self) -> None:
        require("talon", "budget", self.budget, "1 or more", self.budget >= 1)
        require("talon", "width", self.width, "1 or more", self.width >= 1)
        require("talon", "mu", self.mu, "above 0, up to 1", 0 < self.mu <= 1)
        require("talon", "robust_layers", self.robust_layers, "0 or more", self.robust_layers >= 0)
        depth = self.max_depth
        require("talon", "max_depth", depth, "1 or more, or none", depth is None or depth >= 1)

    @property
    def capacity(self) -> int:
        return self.budget

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        room = self.budget - tree.size
        if tree.passes <= self.robust_layers:
            found = step.best_of_layer(tree, frontier, min(self.width, room))
        else:
            found = step.best_of_layer(tree, frontier, room, log_gate=math.log(self.mu))
        nodes = tree.add(found.parents, found.tokens, found.log_probs)
        return nodes[:0] if tree.size == self.budget or tree.passes == self.max_depth else nodes

    def levels(self) -> GatedLevels | None:
        if self.budget < 2:
            return None
        return GatedLevels(self.budget, self.width, self.mu, self.robust_layers, self.max_depth)

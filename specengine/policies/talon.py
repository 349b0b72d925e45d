"""TALON: grow until a node budget is spent; below the first layers, keep what comes near the layer's best."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from specengine.ops import Nodes, Step, TokenTree, at_most, number, where
from specengine.policies import TreePolicy, require, require_minimum, require_minimum_or_none


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
        require_minimum("talon", self, budget=1, width=1, robust_layers=0)
        require("talon", "mu", self.mu, "above 0, up to 1", 0 < self.mu <= 1)
        require_minimum_or_none("talon", self, "max_depth")

    @property
    def capacity(self) -> int:
        return self.budget

    @property
    def rows(self) -> int:
        return max(self.budget - 1, 1)

    @property
    def passes(self) -> int:
        return max(min(self.budget - 1, self.max_depth or self.budget), 1)

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        passes, room = number(tree.passes), self.budget - number(tree.size)
        robust = passes <= self.robust_layers
        limit = where(robust, at_most(room, self.width), room)
        gate = where(robust, -math.inf, math.log(self.mu))
        candidates = step.candidates(tree, frontier, self.rows, limit=limit, log_gate=gate)
        nodes = tree.add(*step.children(frontier, candidates))
        return nodes.where((number(tree.size) < self.budget) & (passes < self.passes))

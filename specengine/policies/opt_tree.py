"""OPT-Tree: the optimal tree of a given size, grown layer by layer until a layer adds too little."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.policies._ended import OptimalLevels
from specengine.tree import TokenTree


@dataclass
class OptTree(TreePolicy):
    """Every layer is the `nodes` best of its candidates, and the `nodes` best of all layers are verified.

    That is the tree of its size and height with the largest expected acceptance length, the sum of its path
    probabilities. Growth stops when a layer adds no more than `threshold` to that sum.

    nodes      drafted nodes that are verified, the root excluded; also the width of a layer
    threshold  gain in expected accepted tokens that is worth a draft pass; sensibly the ratio of the pass times of
               draft and target
    max_depth  layers, at most
    lag        leave the newest layer out of gain and tree, as the published code does, which wastes a pass per cycle

    Source: OPT-Tree, Wang et al. 2024; defaults of its code.
    """

    nodes: int = 50
    threshold: float = 0.5
    max_depth: int = 10
    lag: bool = False

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "readme": {"nodes": 60},
        "upstream": {"lag": True},
        "cpu": {"nodes": 11, "threshold": 0.1},
    }

    _value: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require("opt_tree", "nodes", self.nodes, "1 or more", self.nodes >= 1)
        require("opt_tree", "threshold", self.threshold, "0 or more", 0 <= self.threshold < math.inf)
        least = 2 if self.lag else 1
        require("opt_tree", "max_depth", self.max_depth, f"{least} or more", self.max_depth >= least)

    @property
    def capacity(self) -> int:
        return 1 + self.nodes * self.max_depth

    @property
    def budget(self) -> int:
        return 1 + self.nodes

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        found = step.best_of_layer(tree, frontier, self.nodes)
        layer = tree.add(found.parents, found.tokens, found.log_probs)
        value = float(self.expected(tree.path_log_probs[self.keep(tree)]))
        before, self._value = (-math.inf if tree.passes == 1 + self.lag else self._value), value
        return layer if self.goes_on(tree.passes, value - before) else layer[:0]

    def keep(self, tree: TokenTree) -> Tensor:
        return ops.select_best(self.counted(tree.path_log_probs, tree.depths, tree.passes), self.budget)

    def levels(self) -> OptimalLevels:
        return OptimalLevels(self)

    def goes_on(self, passes: Any, gain: Any) -> Any:
        """Whether another layer is drafted after so many, of which the newest added `gain`; numbers or tensors."""
        return (passes < self.max_depth) & ((passes <= self.lag) | (gain > self.threshold))

    def counted(self, scores: Tensor, depths: Tensor, passes: int | Tensor) -> Tensor:
        """Path log-probabilities of all nodes, those of a layer that is left out at -inf."""
        if not self.lag:
            return scores
        return scores.masked_fill((depths >= passes) & (depths > 1), -math.inf)  # of one layer none can be left out

    @staticmethod
    def expected(path_log_probs: Tensor) -> Tensor:
        """The sum of the path probabilities of all but the root, which comes first: float64 []."""
        return path_log_probs[1:].to(torch.float64).exp().sum()

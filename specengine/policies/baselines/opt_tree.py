"""OPT-Tree: the optimal tree of a given size, grown layer by layer until a layer adds too little."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specengine.ops import Nodes, Step, TokenTree, doubled, number, precision, select_best, where
from specengine.policies import PerDevice, TreePolicy, require, require_minimum


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

    def __post_init__(self) -> None:
        require_minimum("opt_tree", self, nodes=1, threshold=0, max_depth=2 if self.lag else 1)
        require("opt_tree", "threshold", self.threshold, "0 or more", self.threshold < math.inf)
        # float64 [1]: expected tokens of the tree so far
        self._value = PerDevice(
            lambda device: torch.zeros(1, dtype=precision(torch.device(device)), device=device)
        )

    @property
    def capacity(self) -> int:
        return 1 + self.nodes * self.max_depth

    @property
    def budget(self) -> int:
        return 1 + self.nodes

    @property
    def rows(self) -> int:
        return self.nodes

    @property
    def passes(self) -> int:
        return self.max_depth

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        value = self._value[tree.device]
        layer = tree.add(*step.children(frontier, step.candidates(tree, frontier, self.nodes)))
        passes = number(tree.passes)
        # summed path probabilities of the nodes that would be kept, the root excluded: float64 [1]
        expected = doubled(tree.scores(self.keep(tree))[1:]).exp().sum(0, keepdim=True)
        gain = number(expected) - where(passes == 1 + self.lag, -math.inf, number(value))
        value.copy_(expected)
        return layer.where(
            (passes < self.max_depth) & ((passes <= self.lag) | (gain > self.threshold))
        )

    def keep(self, tree: TokenTree) -> Nodes:
        scores = tree.path_log_probs
        if self.lag:  # the newest layer is left out; of one layer none can be
            scores = scores.masked_fill((tree.depths >= tree.passes) & (tree.depths > 1), -math.inf)
        return select_best(scores, tree.size, self.budget)

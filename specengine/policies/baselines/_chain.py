"""Chains that a rule ends: a module of policies, none itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from specengine import ops
from specengine.ops import Nodes, Number
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree, is_down
from specengine.policies import TreePolicy, require


@dataclass
class StoppedChain(TreePolicy):
    """Greedy draft tokens, at most `length`, while a score of the newest is `threshold` or more."""

    length: int = 10
    threshold: float = 0.5

    rows = 1

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        require(name, "length", self.length, "1 or more", self.length >= 1)
        require(name, "threshold", self.threshold, "0 to 1", 0 <= self.threshold <= 1)

    @property
    def capacity(self) -> int:
        return 1 + self.length

    @property
    def passes(self) -> int:
        return self.length

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        log_probs, tokens = step.best_children(1)
        passes, edge = ops.number(tree.passes), ops.number(log_probs[0])
        path = ops.number(tree.path_log_probs.index_select(0, frontier.ids)) + edge
        # logarithms are compared, as a probability's rounding would differ between devices
        sure = self.score(edge, path) >= (math.log(self.threshold) if self.threshold else -math.inf)
        proposed = (edge > -math.inf) & (sure | (passes == 1))
        if is_down(proposed):
            return frontier.where(proposed)
        nodes = tree.add_children(frontier.where(proposed), tokens, log_probs)
        return nodes.where(sure & (passes < self.length))

    @abstractmethod
    def score(self, edge: Number, path: Number) -> Number:
        """Return the newest token's score from its own and its path's log-probability: a log-probability, float64."""

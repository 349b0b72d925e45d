"""Chains that a rule ends: a module of policies, none itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.tree import TokenTree


@dataclass
class StoppedChain(TreePolicy):
    """Greedy draft tokens, at most `length`, while a score of the newest is `threshold` or more."""

    length: int = 10
    threshold: float = 0.5

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        require(name, "length", self.length, "1 or more", self.length >= 1)
        require(name, "threshold", self.threshold, "0 to 1", 0 <= self.threshold <= 1)

    @property
    def capacity(self) -> int:
        return 1 + self.length

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        log_probs, tokens = step.best_children(1)
        edge = float(log_probs[0, 0])
        score = math.exp(self.score(edge, float(tree.path_log_probs[frontier[0]]) + edge))
        if edge == -math.inf or (score < self.threshold and tree.passes > 1):
            return frontier[:0]
        nodes = tree.add(frontier, tokens[:, 0], log_probs[:, 0])
        return nodes if tree.passes < self.length and score >= self.threshold else nodes[:0]

    @abstractmethod
    def score(self, edge: float, path: float) -> float:
        """The newest token's score, from its log-probability and that of its path; a log-probability too."""

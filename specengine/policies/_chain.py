"""Chains that a rule ends: a module of policies, none itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.policies._ended import StoppedChainLevels
from specengine.tree import TokenTree

Number = TypeVar("Number", float, Tensor)  # in double precision either way


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
        sure = self.is_sure(edge, float(tree.path_log_probs[frontier[0]]))
        if edge == -math.inf or (not sure and tree.passes > 1):
            return frontier[:0]
        nodes = tree.add(frontier, tokens[:, 0], log_probs[:, 0])
        return nodes if tree.passes < self.length and sure else nodes[:0]

    def levels(self) -> StoppedChainLevels:
        return StoppedChainLevels(self)

    def is_sure(self, edge: Number, parent: Number) -> Any:
        """Whether the newest token scores `threshold` or more, by its log-probability and that of its parent's path.

        Logarithms are compared, so that a number on the host and one on the device decide alike.
        """
        return self.score(edge, parent + edge) >= (math.log(self.threshold) if self.threshold else -math.inf)

    @abstractmethod
    def score(self, edge: Number, path: Number) -> Number:
        """The newest token's score, from its log-probability and that of its path; a log-probability too."""

"""A chain: the draft's most likely token, again and again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.policies._levels import BeamLevels
from specengine.tree import TokenTree


@dataclass
class Chain(TreePolicy):
    """`length` greedy draft tokens per cycle, one draft pass each."""

    length: int = 5

    def __post_init__(self) -> None:
        require("chain", "length", self.length, "1 or more", self.length >= 1)

    @property
    def capacity(self) -> int:
        return 1 + self.length

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        nodes = step.add_best_children(tree, frontier, 1)
        return nodes if tree.passes < self.length else nodes[:0]

    def levels(self) -> BeamLevels:
        return BeamLevels(1, self.length)

"""A fixed tree: the same shape every cycle."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.policies._levels import FixedLevels
from specengine.tree import TokenTree


@dataclass
class Fixed(TreePolicy):
    """Every node at depth d gets its `branching[d]` most likely children; all are verified."""

    branching: tuple[int, ...] = (3, 2, 1, 1, 1)

    def __post_init__(self) -> None:
        holds = bool(self.branching) and all(count >= 1 for count in self.branching)
        require("fixed", "branching", self.branching, "one count of 1 or more per depth", holds)

    @property
    def capacity(self) -> int:
        level, total = 1, 1
        for count in self.branching:
            level *= count
            total += level
        return total

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        nodes = step.add_best_children(tree, frontier, self.branching[tree.passes - 1])
        return nodes if tree.passes < len(self.branching) else nodes[:0]

    def levels(self) -> FixedLevels:
        return FixedLevels(self.branching)

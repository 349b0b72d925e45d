"""The EAGLE-2 / EAGLE-3 beam: grow a beam of fixed width, then keep the best nodes of all that were scored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specengine import ops
from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.tree import TokenTree


@dataclass
class Eagle(TreePolicy):
    """Beam of `width` nodes, each with its `width` best children, grown `expansions` times below level 1.

    All scored nodes compete for the `budget` by path probability (the rerank of EAGLE-2); height is expansions + 1.

    width       children per node and nodes drafted from per level
    expansions  levels grown after the first (EAGLE's `depth`)
    budget      nodes verified, the root included (EAGLE's `total_tokens`)
    """

    width: int = 10
    expansions: int = 7
    budget: int = 60

    def __post_init__(self) -> None:
        require("eagle", "width", self.width, "1 or more", self.width >= 1)
        require("eagle", "expansions", self.expansions, "0 or more", self.expansions >= 0)
        require("eagle", "budget", self.budget, "1 or more", self.budget >= 1)

    @property
    def capacity(self) -> int:
        return 1 + self.width + self.expansions * self.width**2

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        nodes = step.add_best_children(tree, frontier, self.width)
        if tree.passes > self.expansions:
            return nodes[:0]
        return nodes[ops.select_best(tree.path_log_probs[nodes], self.width)]

    def keep(self, tree: TokenTree) -> Tensor:
        return ops.select_best(tree.path_log_probs, self.budget)

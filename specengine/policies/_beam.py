"""The beam that the depth rules stop: a module of policies, none itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specengine import ops
from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.tree import TokenTree


@dataclass
class Beam(TreePolicy):
    """EAGLE-2's beam, which a subclass may end early; with a width of 1 it is a chain.

    width       children per node and nodes drafted from per level
    expansions  levels grown after the first, at most
    budget      nodes verified, the root included
    """

    width: int = 10
    expansions: int = 12
    budget: int = 61

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        require(name, "width", self.width, "1 or more", self.width >= 1)
        require(name, "expansions", self.expansions, "0 or more", self.expansions >= 0)
        require(name, "budget", self.budget, "1 or more", self.budget >= 1)

    @property
    def capacity(self) -> int:
        return 1 + self.width + self.expansions * self.width**2

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        nodes = step.add_best_children(tree, frontier, self.width)
        if tree.passes > self.expansions:
            return nodes[:0]
        beam = nodes[ops.select_best(tree.path_log_probs[nodes], self.width)]
        return beam[:0] if len(beam) and self.stops(tree, frontier, step, beam) else beam

    def stops(self, tree: TokenTree, frontier: Tensor, step: Step, beam: Tensor) -> bool:
        """Whether `beam`, the best nodes of the level just scored, is not drafted from any more.

        frontier: int64 [rows], the nodes that `step` holds distributions for; beam: int64 [<= width], their best
        children. `tree.passes - 1` expansions are complete.
        """
        return False

    def keep(self, tree: TokenTree) -> Tensor:
        return ops.select_best(tree.path_log_probs, self.budget)

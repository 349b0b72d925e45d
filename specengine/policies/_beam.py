"""The beam that the depth rules stop: a module of policies, none itself."""

from dataclasses import dataclass
from typing import Any, ClassVar

from specengine.ops import Flag, Nodes, Step, TokenTree, is_down, number
from specengine.policies import TreePolicy, require_minimum


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

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"width": 1, "expansions": 11, "budget": 13},
        "cpu": {"width": 4, "expansions": 4, "budget": 12},
    }

    def __post_init__(self) -> None:
        require_minimum(type(self).__name__.lower(), self, width=1, expansions=0, budget=1)

    @property
    def capacity(self) -> int:
        return 1 + self.width + self.expansions * self.width**2

    @property
    def passes(self) -> int:
        return self.expansions + 1

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        nodes = step.add_best_children(tree, frontier, self.width)
        goes_on = (number(tree.passes) <= self.expansions) & (number(nodes.live) > 0)
        if is_down(goes_on):
            return nodes.where(goes_on)
        beam = tree.best(nodes, self.width)
        return beam.where(goes_on).unless(self.stops(tree, frontier, step, beam))

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        """Return whether to stop before drafting from `beam`, the best nodes of the last level: a bool, or bool [1].

        frontier: the nodes that `step` holds distributions for; beam: their best children, one at least where anything
        was proposed. `tree.passes - 1` expansions are complete.
        """
        return False

    def keep(self, tree: TokenTree) -> Nodes:
        return tree.best_of_all(self.budget)

"""A chain: the draft's most likely token, again and again."""

from dataclasses import dataclass

from specengine.ops import Nodes, Step, TokenTree, number
from specengine.policies import TreePolicy, require_minimum


@dataclass
class Chain(TreePolicy):
    """`length` greedy draft tokens per cycle, one draft pass each."""

    length: int = 5

    ends_early = False
    rows = 1

    def __post_init__(self) -> None:
        require_minimum(type(self).__name__.lower(), self, length=1)

    @property
    def capacity(self) -> int:
        return 1 + self.length

    @property
    def passes(self) -> int:
        return self.length

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        return step.add_best_children(tree, frontier, 1).where(number(tree.passes) < self.length)

"""A fixed tree: the same shape every cycle."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.ops import Nodes, Step, TokenTree, at_most, number
from specengine.policies import PerDevice, TreePolicy, require


@dataclass
class Fixed(TreePolicy):
    """Every node at depth d gets its `branching[d]` most likely children; all are verified."""

    branching: tuple[int, ...] = (3, 2, 1, 1, 1)

    ends_early = False

    def __post_init__(self) -> None:
        require(
            "fixed",
            "branching",
            self.branching,
            "one count of 1 or more per depth",
            bool(self.branching) and min(self.branching) >= 1,
        )
        # int64 [passes]: children of each node, by depth
        self._wanted = PerDevice(
            lambda device: torch.tensor(self.branching, device=device, dtype=torch.int64)
        )

    @property
    def capacity(self) -> int:
        return sum(self._sizes)

    @property
    def rows(self) -> int:
        return max(self._sizes[:-1])

    @property
    def passes(self) -> int:
        return len(self.branching)

    @property
    def _sizes(self) -> list[int]:
        """Return the number of nodes per level, from the root on."""
        return [math.prod(self.branching[:depth]) for depth in range(len(self.branching) + 1)]

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        passes = number(tree.passes)
        level = at_most(passes - 1, self.passes - 1)
        if not isinstance(level, Tensor):
            nodes = step.add_best_children(tree, frontier, self.branching[int(level)])
            return nodes.where(passes < self.passes)
        log_probs, tokens = step.best_children(max(self.branching))
        counts = self._wanted[tree.device].index_select(0, level)
        place = torch.arange(tokens.shape[1], device=tree.device, dtype=torch.int64)
        chosen = (place < counts) & (log_probs > -math.inf)
        nodes = tree.add_children(frontier, tokens, log_probs, chosen, max(self._sizes))
        return nodes.where(passes < self.passes)

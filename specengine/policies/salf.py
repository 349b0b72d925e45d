"""SALF: best-first search with bounded queues, which stops when the next batch is not worth a draft pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from specengine import ops
from specengine.drafters import Step
from specengine.policies import TreePolicy, require
from specengine.policies._levels import BestFirstLevels
from specengine.tree import TokenTree


@dataclass
class Salf(TreePolicy):
    """Draw the `batch` best nodes that were scored, wherever they stand in the tree, and score their children.

    The sum of the path probabilities of a batch never grows from one pass to the next; once it is below `threshold`
    no later pass can be worth more, and the search stops. A threshold of 0 is optimal tree search (SpecExec): it ends
    with the tree of the largest expected acceptance length, the sum of its path probabilities.

    budget     nodes verified, the root included (N)
    batch      nodes per draft pass, at most (B)
    threshold  smallest probability mass of a batch that is worth a pass (th), 0 to below 1
    fill       top the tree up from the queue when the search stops: those nodes are scored already
    max_depth  greatest depth of a node; none: the budget alone bounds it

    Source: SALF & TALF, section 3.3, Algorithm 2, Theorem 1; without `fill` it is the published algorithm, which
    verifies fewer nodes after an early stop.
    """

    budget: int = 60
    batch: int = 10
    threshold: float = 0.6
    fill: bool = True
    max_depth: int | None = None

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"fill": False},
        "optimal": {"threshold": 0.0},
        "best-dsl-8b": {"threshold": 0.5, "fill": False},
        "cpu": {"budget": 12, "batch": 4, "threshold": 0.4},
    }

    _queues: ops.BestFirst = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require("salf", "budget", self.budget, "1 or more", self.budget >= 1)
        require("salf", "batch", self.batch, "1 or more", self.batch >= 1)
        require("salf", "threshold", self.threshold, "0 to below 1", 0 <= self.threshold < 1)
        depth = self.max_depth
        require("salf", "max_depth", depth, "1 or more, or none", depth is None or depth >= 1)

    @property
    def capacity(self) -> int:
        # The best node of each batch is never driven out again, as path probabilities only fall: a batch that is
        # drawn after i others can bring budget - 1 - i nodes into the tree, and no more batches than that exist.
        # Nodes at the greatest depth are drawn beside a batch.
        most = self.batch if self.max_depth is None else self.budget
        drawn = sum(min(most, self.budget - i) for i in range(1, self.budget))
        return 1 + drawn + (self.budget - 1 if self.fill else 0)

    def grow(self, tree: TokenTree, frontier: Tensor, step: Step) -> Tensor:
        if tree.passes == 1:
            self._queues = ops.best_first(self.budget, self.batch, self.max_depth, tree.device)
        found = step.best_of_layer(tree, frontier, self.budget - 1, bound=self._queues.bound)
        depths = tree.depths[found.parents]
        self._queues.push(found.parents, depths, found.tokens, found.log_probs, found.path_log_probs)
        drawn = self._queues.pop()
        nodes = tree.add(drawn.parents, drawn.tokens, drawn.log_probs)
        if len(drawn.expand) and drawn.mass >= self.threshold:
            return nodes[drawn.expand]
        if self.fill:
            scored = self._queues.fill()
            tree.add(scored.parents, scored.tokens, scored.log_probs)
        return nodes[:0]

    def keep(self, tree: TokenTree) -> Tensor:
        return ops.select_best(tree.path_log_probs, self.budget)

    def levels(self) -> BestFirstLevels | None:
        if self.budget < 2:
            return None
        return BestFirstLevels(self.budget, self.batch, self.threshold, self.fill, self.max_depth)

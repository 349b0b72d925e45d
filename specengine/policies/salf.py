"""SALF: best-first search with bounded queues, which stops when the next batch is not worth a draft pass."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specengine.ops import Nodes, Queues, Search, Step, TokenTree, number, step_queues, where
from specengine.policies import (
    PerDevice,
    TreePolicy,
    require,
    require_minimum,
    require_minimum_or_none,
)


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

    def __post_init__(self) -> None:
        require_minimum("salf", self, budget=1, batch=1)
        require("salf", "threshold", self.threshold, "0 to below 1", 0 <= self.threshold < 1)
        require_minimum_or_none("salf", self, "max_depth")
        self._queues = PerDevice(lambda device: Queues.start(self.budget, device))

    @property
    def capacity(self) -> int:
        # The best node of each batch is never driven out again, as path probabilities only fall: a batch that is
        # drawn after i others can bring budget - 1 - i nodes into the tree, and no more batches than that exist.
        # Nodes at the greatest depth are drawn in addition to a batch.
        most = self.batch if self.max_depth is None else self.budget
        return (
            1
            + sum(min(most, self.budget - i) for i in range(1, self.budget))
            + (self.budget - 1 if self.fill else 0)
        )

    @property
    def rows(self) -> int:
        return min(self.batch, self.budget)

    @property
    def passes(self) -> int:
        return max(self.budget - 1, 1)

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        queues = self._queues[tree.device]
        # those of the tree before are still there
        bound = where(number(tree.passes) == 1, -math.inf, queues.bound)
        drawn = step_queues(
            queues,
            step.candidates(tree, frontier, max(self.budget - 1, 1), bound=bound),
            frontier,
            tree.depths,
            step.token_ids,
            tree.passes,
            Search(self.batch, self.max_depth or self.budget, self.threshold, self.fill),
        )
        nodes = tree.add(drawn.parents, drawn.tokens, drawn.log_probs, drawn.live)
        return Nodes(
            nodes.ids.index_select(0, drawn.expand.ids),
            torch.minimum(drawn.expand.live, nodes.live),
        )

    def keep(self, tree: TokenTree) -> Nodes:
        return tree.best_of_all(self.budget)

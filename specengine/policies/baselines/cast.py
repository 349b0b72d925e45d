"""CAST: EAGLE-2's beam and rerank, whose sizes follow from marginal utility over measured costs."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine import ops
from specengine.costs import MEASURED, PassCosts
from specengine.ops import Nodes, Step, TokenTree
from specengine.policies import PerDevice, require_each, require_minimum
from specengine.policies.baselines._priced import Priced

MIN_UTILITY = 1e-300  # utility that ratios are taken to


@dataclass
class Cast(Priced):
    """Draft from the nodes, grow the layers and verify the nodes whose utility over cost is above a threshold each.

    Utility is summed path probability. The unit of costs is the verification of one node. A layer's nodes are drafted
    from, the likeliest first, until the next group brings less than `breadth` per unit of draft time. A further layer
    follows while the utility of these nodes, times the ratio by which it fell in recent layers, is `deeper` per unit of
    their pass. Nodes are verified, the likeliest first, until the next group brings less than `verified` per unit.

    budget    nodes verified, at most, the root included
    children  children per node (K)
    width     nodes drafted from per layer, at most
    passes    draft passes per cycle, at most
    breadth   C1, 0 or more
    deeper    C2, 0 or more
    verified  C3, 0 or more
    recent    layers whose ratios are averaged, over cycles (R)
    costs     `measured`: those of this engine on this machine; or such as stay: PassCosts, a name in
              specengine.costs.PUBLISHED, the file of a costs record

    Source: CAST, Hong et al. 2025 (arXiv 2510.26577), sections 4.1 and 4.2 and Algorithm 1, as public reviews give
    them; the thresholds are those that one of them names, which are tuned for each model. Ours: `recent`; the root
    counts among the nodes verified; Algorithm 1 is done as the last maximum of utility - threshold * cost, which it
    finds where costs rise, and which is also defined where a measured table falls.
    """

    budget: int = 64
    children: int = 10
    width: int = 10
    passes: int = 8
    breadth: float = 4.0
    deeper: float = 3.0
    verified: float = 2.5
    recent: int = 8
    costs: str | PassCosts = MEASURED

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"children": 4, "width": 4, "breadth": 2.0, "deeper": 1.5}
    }

    def __post_init__(self) -> None:
        require_minimum("cast", self, budget=1, children=1, width=1, passes=1, recent=1)
        require_each(
            "cast",
            *(
                (name, getattr(self, name), "0 or more", 0 <= getattr(self, name) < math.inf)
                for name in ("breadth", "deeper", "verified")
            ),
        )
        self.price(self.budget, self.width)
        # utility of the last layer, [1]; then by layer, the newest last, its ratio and whether there was one, [recent]
        self._falls = PerDevice(self._no_falls)

    @property
    def capacity(self) -> int:
        return 1 + self.children * (1 + self.width * (self.passes - 1))

    def state_on(self, device: torch.device) -> tuple[Tensor, ...]:
        return self._falls[device][1:]

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        nodes, prices = (
            step.add_best_children(tree, frontier, self.children),
            self._prices[tree.device],
        )
        scores = tree.scores(tree.best(nodes, self.width)).sort(descending=True).values
        utility = scores.double().exp().cumsum(0)
        costs = prices.draft[1:] / prices.verify[1]
        count = last_best(utility - self.breadth * costs, nodes.live)
        at = (count - 1).clamp(min=0)
        gained, cost = utility.index_select(0, at), costs.index_select(0, at)
        fall = self._fall(
            gained, (ops.number(tree.passes) > 1) & (ops.number(nodes.live) > 0), tree.device
        )
        goes_on = (fall * gained >= self.deeper * cost) & (nodes.live > 0)
        best = ops.select_best(tree.scores(nodes), nodes.live, self.width, count.int())
        beam = Nodes(nodes.ids.index_select(0, best.ids), best.live)
        return beam.where(goes_on).where(ops.number(tree.passes) < self.passes)

    def keep(self, tree: TokenTree) -> Nodes:
        scores = tree.scores(tree.best_of_all(self.budget)).sort(descending=True).values
        verify = self._prices[tree.device].verify[1:]
        worth = scores.double().exp().cumsum(0) - self.verified * verify / verify[0]
        return tree.best_of_all(self.budget, last_best(worth, tree.size).int())

    def _fall(self, gained: Tensor, later: bool | Tensor, device: torch.device) -> Tensor:
        """Note the utility of a layer's beam, float64 [1]; return the mean ratio by which it fell, float64 [1].

        later: whether there is a layer, and it is not the tree's first.
        """
        last, ratios, present = self._falls[device]
        newest = (
            torch.cat([ratios[1:], gained / last.clamp(min=MIN_UTILITY)]),
            torch.cat([present[1:], torch.ones_like(last)]),
        )
        for memory, moved in zip((ratios, present), newest, strict=True):
            memory.copy_(ops.held(ops.where(later, moved, memory)))
        last.copy_(gained)
        return (ratios * present).sum(0, keepdim=True) / present.sum(0, keepdim=True)

    def _no_falls(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        last, ones = (
            torch.ones(size, dtype=torch.float64, device=device) for size in (1, self.recent)
        )
        present = torch.zeros_like(ones)
        present[-1:] = 1.0  # the ratio that the paper begins with
        return last, ones, present


def last_best(worth: Tensor, live: Tensor) -> Tensor:
    """Return how many of the first `live` entries, int32 [1], end with the last maximum: int64 [1], 0 of none."""
    place = torch.arange(len(worth), device=worth.device, dtype=torch.int64)
    there = place < live
    top = worth.masked_fill(~there, -math.inf).amax(0, keepdim=True)
    return torch.where(there & (worth >= top), place + 1, 0).amax(0, keepdim=True)

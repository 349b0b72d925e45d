"""CaDDTree: the tree of DDTree, of the size at which expected tokens over time is greatest."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.costs import MEASURED, PassCosts
from specengine.ops import Nodes, Step, TokenTree
from specengine.policies import require
from specengine.policies.baselines._priced import Priced
from specengine.policies.baselines.ddtree import MAX_BEAM, DDTree


@dataclass
class CaDDTree(DDTree, Priced):
    """Verify the n likeliest nodes, with n at the maximum of expected tokens over the time of draft and verification.

    Expected tokens are the sum of the n path probabilities, the root's included. Where verification costs are convex
    that ratio has one maximum, and the paper stops at the first node that lowers it. Measured costs have steps, so all
    sizes are compared.

    budget  nodes verified, at most, the root included
    block   positions
    width   nodes drafted from in a pass: 1 takes the marginals of a block, as the paper; more give these nodes
            distributions of their own, which only drafts of one position per pass have
    costs   `measured`: those of this engine on this machine; or such as stay: PassCosts, a name in
            specengine.costs.PUBLISHED, the file of a costs record

    Source: CaDDTree, Zhang et al. 2026 (arXiv 2606.01813), and its repository. Ours, for drafts that need several
    passes: `width`, and that a further pass is run only if what it may bring, over what it costs with one node more in
    the verification, is above the ratio reached. It may bring all that hangs from the last layer; of a wider beam the
    share that this pass brought of the one before. Of the paper's drafts the first pass is the only one.
    """

    budget: int = 65
    width: int = 1
    costs: str | PassCosts = MEASURED

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "dflash": {"budget": 1025, "block": 15},
        "steps": {"width": 8},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require("caddtree", "width", self.width, "1 or more", self.width >= 1)
        self.price(self.budget, max(self.width, MAX_BEAM))

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        spent = self.spend(tree, frontier.live)
        layer = self.layer(tree, frontier, step)
        beam = self.beam(tree, layer, step)
        brings = _mass(tree, layer)
        if self.width > 1 and not step.conditioned:  # as much of this beam as it has of the last
            brings = _mass(tree, beam).square() / _mass(tree, frontier)
        _, ratio, more = self._best(tree, spent)
        cost = self._prices[tree.device].draft.index_select(0, beam.live) + more
        return beam.where(self.unfinished(tree, layer)).where(brings > ratio * cost)

    def keep(self, tree: TokenTree) -> Nodes:
        best, _, _ = self._best(tree, self._spent[tree.device])
        return tree.best_of_all(self.budget, best.int())

    def _best(self, tree: TokenTree, spent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best number of nodes to verify, int64 [1]; tokens over cost there, and the cost of one node more.

        spent: float64 [1], of the tree's passes. The last two: float64 [1].
        """
        verify, nodes = self._prices[tree.device].verify, tree.best_of_all(self.budget)
        scores = tree.scores(nodes).sort(descending=True).values
        ratios = scores.double().exp().cumsum(0) / (spent + verify[1:])
        ratios = ratios.masked_fill(scores == -math.inf, -1.0)  # of padding
        place = torch.arange(self.budget, device=tree.device, dtype=torch.int64)
        top = ratios.amax(0, keepdim=True)
        best = place.masked_fill(ratios < top, self.budget).amin(0, keepdim=True) + 1
        more = verify.diff().index_select(0, best.clamp(max=self.budget - 1))
        return best, top, more


def _mass(tree: TokenTree, nodes: Nodes) -> Tensor:
    """Return the summed path probabilities of these nodes: float64 [1]."""
    return tree.scores(nodes).double().exp().sum(0, keepdim=True)

"""SMART: a node enters the tree where its share of the benefit over its share of the cost is above the tree's own."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine import ops
from specengine.costs import MEASURED, PassCosts
from specengine.ops import Candidates, Flag, Nodes, Step, TokenTree
from specengine.policies import require, require_minimum
from specengine.policies.baselines._priced import Priced


@dataclass
class Smart(Priced):
    """Grow the tree layer by layer; of a layer's candidates, the likeliest first, take those that raise the speed-up.

    The speed-up of a tree is the time of its expected tokens in plain decoding over its own, of draft and verification.
    A candidate is taken if `discount` times what it adds to the first, over what it adds to the second, is above the
    speed-up of the tree so far. The next layer hangs from the nodes taken; where none was the tree ends.

    budget    nodes verified, the root included (B)
    children  candidates per node (k)
    width     nodes taken per layer, at most, which are all drafted from
    passes    draft passes per cycle, at most
    discount  of the draft's probabilities, which promise too much; above 0 to 1 (alpha)
    costs     `measured`: those of this engine on this machine; or such as stay: PassCosts, a name in
              specengine.costs.PUBLISHED, the file of a costs record

    Source: SMART, Wang and Zhou 2026 (arXiv 2604.09731), as its abstract and public reviews give it: the rule, the
    discount and the order. Ours: expected tokens are one and the sum of path probabilities, which is what a walk
    brings, where the paper takes a mean over paths; costs are the measured tables, not curves fitted to them; a node
    costs its row of the verification and of the next draft pass, of which a layer's first node pays the start.
    """

    budget: int = 64
    children: int = 10
    width: int = 16
    passes: int = 10
    discount: float = 0.8
    costs: str | PassCosts = MEASURED

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"budget": 201}}

    def __post_init__(self) -> None:
        require_minimum("smart", self, budget=1, children=1, width=1, passes=1)
        require("smart", "discount", self.discount, "above 0, up to 1", 0 < self.discount <= 1)
        self.price(self.budget, self.width)

    @property
    def capacity(self) -> int:
        return self.budget

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        passes, room = ops.number(tree.passes), ops.held(self.budget - ops.number(tree.size))
        spent = self.spend(tree, frontier.live)
        edges, tokens = step.best_children(self.children)
        candidates = ops.best_candidates(
            edges,
            tree.path_log_probs.index_select(0, frontier.ids),
            frontier.live,
            self.width,
            limit=room,
            normalized=True,
        )
        nodes = tree.add(
            frontier.ids.index_select(0, candidates.rows),
            tokens[candidates.rows, candidates.columns],
            candidates.log_probs,
            self._taken(tree, candidates, spent, passes < self.passes),
        )
        return nodes.where((passes < self.passes) & (ops.number(tree.size) < self.budget))

    def _taken(
        self, tree: TokenTree, candidates: Candidates, spent: Tensor, drafts: Flag
    ) -> Tensor:
        """Return how many of the candidates to take, int32 [1]: the first, as later ones bring less at the same cost.

        spent: float64 [1], of the tree's passes; drafts: whether there may be a further one.
        """
        prices, device = self._prices[tree.device], tree.device
        place = torch.arange(self.width + 1, device=device, dtype=torch.int64)
        there = torch.arange(tree.capacity, device=device, dtype=torch.int64) < tree.size
        expected_tokens = (
            tree.path_log_probs.masked_fill(~there, -math.inf).double().exp().sum(0, keepdim=True)
        )
        brings = candidates.scores.double().exp().masked_fill(place[:-1] >= candidates.live, 0.0)
        tokens = expected_tokens + brings.cumsum(0) - brings  # of the tree before each candidate
        # no more have room
        verify = prices.verify.index_select(0, (tree.size + place).clamp(max=self.budget))
        costs = spent + verify + prices.draft * drafts
        raises = (self.discount * brings * costs[:-1] > tokens * costs.diff()) & (
            place[:-1] < candidates.live
        )
        return raises.int().cumprod(0).sum(0, keepdim=True).int()

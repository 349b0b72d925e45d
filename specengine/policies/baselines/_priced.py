"""Rules that read what passes cost: a module of policies, none itself."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specengine import ops
from specengine.costs import ASSUMED, MEASURED, PassCosts, find_costs
from specengine.ops.tree import TokenTree
from specengine.policies import PerDevice, Plan, TreePolicy

if TYPE_CHECKING:
    from specengine.records import Outcome

REPRICED = 16  # cycles between looks at the costs: contexts grow, and other texts come and go
READS, STAYS = Plan(reads_costs=True), Plan()


class PricesByCount(NamedTuple):
    """Costs in any one unit, float64.

    verify    [nodes + 1], entry n: of verifying n nodes, the root included; entry 0 is 0
    draft     [width + 1], entry n: of a draft pass from n nodes; entry 0 is 0
    overhead  [1], of a drafted cycle besides
    """

    verify: Tensor
    draft: Tensor
    overhead: Tensor


class Priced(TreePolicy):
    """A policy with an option `costs`: `measured`, those of this engine on this machine; or such as stay: PassCosts, a
    name in specengine.costs.PUBLISHED, the file of a costs record."""

    costs: str | PassCosts

    def price(self, nodes: int, width: int) -> None:
        """Prepare prices of trees of up to `nodes` nodes, the root included, and of passes from up to `width`."""
        costs = ASSUMED if self.costs == MEASURED else self.costs
        self._sizes, self._known = (
            (nodes, width),
            costs if isinstance(costs, PassCosts) else find_costs(costs),
        )
        self._find: Callable[[], PassCosts] | None = None
        self._context = self._cycles = 0
        self._prices = PerDevice(self._priced)
        self._spent = PerDevice(lambda device: torch.zeros(1, dtype=torch.float64, device=device))

    def plan(self) -> Plan:
        return READS if self.costs == MEASURED else STAYS

    def begin(
        self, tokens: int, sampled: bool = False, costs: Callable[[], PassCosts] | None = None
    ) -> None:
        self._find = costs if self.costs == MEASURED else None
        self._context, self._cycles = tokens, 0
        self._reprice()

    def learn(self, outcome: "Outcome") -> None:
        if outcome.cycle is None:  # within a capture, where the context of the beginning holds
            return
        self._context += len(outcome.cycle.tokens)
        self._cycles += 1
        if self._cycles % REPRICED == 0:
            self._reprice()

    def spend(self, tree: TokenTree, width: Tensor) -> Tensor:
        """Add the tree's newest draft pass, from `width` nodes, int32 [1], to its cost; return that cost, float64 [1].

        A pass from none is none. The first one comes with the overhead.
        """
        prices, spent = self._prices[tree.device], self._spent[tree.device]
        first = (ops.number(tree.passes) == 1) & (ops.number(width) > 0)
        before = ops.where(first, prices.overhead, spent)
        return spent.copy_(before + prices.draft.index_select(0, width))

    def _priced(self, device: torch.device) -> PricesByCount:
        tables = self._known.table(*self._sizes, self._context)
        return PricesByCount(
            tables.verify.double().to(device),
            tables.draft.double().to(device),
            torch.full((1,), self._known.overhead, dtype=torch.float64, device=device),
        )

    @torch.inference_mode()
    def _reprice(self) -> None:
        if self._find is not None:
            self._known = self._find()
        for device, prices in self._prices.items():
            for price, value in zip(prices, self._priced(device), strict=True):
                price.copy_(value)  # captures read this memory

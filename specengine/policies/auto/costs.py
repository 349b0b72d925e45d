"""Seconds of passes at present: measured costs, corrected as cycles are timed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specengine.costs import CostTable, PassCosts, SharedCosts
from specengine.costs.laws import Corrections
from specengine.policies.auto.experts import ExpertReads

if TYPE_CHECKING:
    from specengine.records import Cycle, Seconds

CORRECTION = 0.05  # weight of a cycle of graphs against the costs


class CostCorrections:
    """Corrections of the costs of a target and a draft on this machine, which texts that learn together share."""

    costs: PassCosts | None = None

    def restart(self, costs: PassCosts, nodes: int, width: int) -> None:
        """Forget corrections of other costs."""
        self.costs = costs
        self.verify = Corrections(nodes)
        self.draft = Corrections(width)
        self.shared_draft = Corrections(width)  # of draft passes while other texts are answered


class PredictedSeconds(NamedTuple):
    """Seconds by number, from 0 on.

    measured  of rows of all texts, without corrections
    passes    of draft passes by their width, without corrections
    rows      of rows of all texts
    verify    of nodes of this text
    draft     of draft passes by their width
    """

    measured: list[float]
    passes: list[float]
    rows: list[float]
    verify: list[float]
    draft: list[float]


class CostModel:
    """Predicts seconds of verifications and draft passes; costs that are never observed stay as they are.

    nodes: of a tree, at most; width: of a draft pass, at most.
    """

    def __init__(self, costs: PassCosts, nodes: int, width: int) -> None:
        self.nodes, self.width = nodes, width
        self.context = 0  # tokens
        self.stale = False  # whether prices are to be brought up to date before the next tree
        self.tries = False  # whether the present cycle is priced to try rows that no cycle has
        self.book = CostCorrections()
        # the costs at present: other texts come and go
        self.find: Callable[[], PassCosts] | None = None
        # by experts of a row, and all experts
        self._counted: dict[tuple[int, int], ExpertReads] = {}
        self.predicted = PredictedSeconds([], [], [], [], [])  # until prices are asked for
        self._use(costs)

    @property
    def corrections(self) -> CostCorrections:
        """Corrections of the present costs; new ones where those are of another model, or were measured again."""
        alone = self.base if self.shared is None else self.shared.alone
        if self.book.costs is not alone:
            self.book.restart(alone, self.nodes, self.width)
        return self.book

    def update(self, rests: bool, explores: bool) -> CostTable | None:
        """Return the present prices; None while this text and others rest, as nobody asks for prices then.

        explores: price the next cycle so that it tries more rows than were tried, where that may pay.
        """
        costs = self.base if self.find is None else self.find()
        self.stale = rests and self.shared is not None and isinstance(costs, SharedCosts)
        if self.stale:
            return None
        if costs is not self.base:
            self._use(costs)
        tables = self.price()
        explores = explores and self.find is not None and not self.base.padded
        trial = self.corrections.verify.exploring(self.predicted.rows) if explores else None
        self.tries = trial is not None
        return tables if trial is None else tables._replace(verify=self._by_nodes(trial))

    def price(self) -> CostTable:
        """Return the present prices, and keep them as `predicted`."""
        tables = self.base.table(self.nodes, self.width, self.context)
        rows, corrections, shared = tables.verify, self.corrections, self.shared
        draft = corrections.draft
        if shared is not None:
            rows = shared.alone.table(self.nodes + shared.others, 1, self.context).verify
            draft = corrections.shared_draft
        if self.experts is not None:
            rows = (rows + self.experts.difference(self.base, self.nodes)).clamp(min=0)
        measured, passes = rows.tolist(), tables.draft.tolist()
        corrected = corrections.verify.column(measured)
        prices = CostTable(self._by_nodes(corrected), _tensor(draft.column(passes)))
        self.predicted = PredictedSeconds(
            measured, passes, corrected, prices.verify.tolist(), prices.draft.tolist()
        )
        return prices

    def expert_prices(self) -> list[float]:
        """Return what experts cost and how many are new, as Throughput has it; nothing for a dense model."""
        return [] if self.experts is None else self.experts.prices(self.expert_seconds)

    @property
    def expert_seconds(self) -> float:
        """Seconds of reading one expert more."""
        return self.corrections.verify.factor * self.base.expert

    # ---- what cycles took

    def observe(self, cycle: "Cycle", lost: float, passes: int, drafted: int) -> float:
        """Correct prices by a cycle's rows and draft passes; return the seconds that it lost against other cycles.

        lost: those by this text's clock; that of several texts, which wait for one another, goes by forwards. passes,
        drafted: draft passes, and nodes that these drafted from together, as if all were as wide; 0 of a plain cycle.
        """
        shared, seconds, corrections = self.shared, cycle.seconds, self.corrections
        if shared is None:
            rows = len(cycle.tree)
            took = (
                seconds.verify
                + seconds.walk
                + (seconds.commit if self.base.chains else 0.0)
                - (0.0 if self.experts is None else self.experts.extra)
            )
        else:
            rows, took = shared.forward() or (0, 0.0)
            lost = took - self.predicted.rows[shared.others + 1]
        if 0 < rows < len(self.predicted.measured):
            corrections.verify.observe(self.predicted.measured, rows, took)
        if passes:
            width = min(max(1, round(drafted / passes)), self.width)
            draft = corrections.draft if shared is None else corrections.shared_draft
            draft.observe(self.predicted.passes, width, seconds.draft + seconds.policy, passes)
        return lost

    def observe_graphs(self, seconds: "Seconds", passes: int, nodes: int) -> None:
        """Correct the costs of graphs, all verifications alike, and all passes; nodes: those that had room."""
        verify, draft = self.predicted.verify[nodes], self.predicted.draft[-1]
        self.corrections.verify.observe_all(verify, seconds.verify + seconds.walk, CORRECTION)
        expected = passes * draft + self.base.overhead if passes else 0.0
        self.corrections.draft.observe_all(
            expected, seconds.draft + seconds.policy + seconds.commit, CORRECTION
        )

    # ---- its parts

    def _use(self, costs: PassCosts) -> None:
        self.base = costs
        self.shared = costs if isinstance(costs, SharedCosts) else None
        self.experts: ExpertReads | None = None
        if costs.expert > 0 and costs.experts:
            each = int(costs.experts[1])
            self.experts = self._counted.setdefault(
                (each, costs.all_experts), ExpertReads(each, costs.all_experts)
            )
            self.experts.extra = 0.0

    def _by_nodes(self, rows: list[float]) -> Tensor:
        """Return the price of this text's nodes, by their number; rows: seconds of a batch's rows, by their number."""
        return _tensor(rows) if self.shared is None else self.shared.added(_tensor(rows))


def _tensor(column: list[float]) -> Tensor:
    return torch.tensor(column, dtype=torch.float32, device="cpu")

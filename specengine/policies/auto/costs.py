"""Seconds of passes at present: measured costs, corrected as cycles are timed.

Those of a mixture of experts grow by the experts that the nodes of a tree add to a forward, counted by their relation.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from specengine.costs import CostTable, PassCosts, SharedCosts, interpolated
from specengine.costs.laws import Corrections
from specengine.ops.tree import TokenTree
from specengine.ops.worth import RELATIONS, relation_of

if TYPE_CHECKING:
    from specengine.records import Cycle, Seconds

CORRECTION = 0.05  # weight of a cycle of graphs against the costs
WIDER_ROWS = 4.0  # that a wider count of experts stands for in a narrower one
COUNTED_ROWS = 1000.0  # that a count of experts remembers


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


# ---- experts


class ExpertReads:
    """Predict how many experts each node of a tree adds to those that the nodes before it use.

    each, existing: experts that a row uses, and that there are, over all layers.

    Where a share of all experts is read already, so large a share of a row's is not new if its experts are independent
    of them: that is what it begins with, and n rows read all * (1 - (1 - each / all)^n). Texts are not like that: a
    token uses some of its parent's experts, and alternatives at one place some of each other's. So it counts how many
    experts were new, over how many would have been: for first and for later siblings, and for each relation to the
    nodes before (ops.worth.relation_of). The narrower count is trusted as it grows.
    """

    def __init__(self, each: int, existing: int) -> None:
        self.each, self.existing = each, existing
        self.extra = 0.0  # seconds of experts that the last tree read and its price had not
        self._expected: list[float] = []  # experts that prices take each node to add
        self._counts = [_Count() for _ in range(RELATIONS)]

    def learn(self, parents: Sequence[int], depths: Sequence[int], added: Sequence[int]) -> None:
        """Count a verified tree: of each node its parent, its depth, and the experts that it added; the root first."""
        read = added[0]
        for relation, new in zip(relations(parents, depths), added[1:], strict=True):
            self._counts[relation].add(new, self.each * (1 - read / self.existing))
            read += new

    def ratios(self) -> list[float]:
        """Return how many experts were new over how many would have been, by relation."""
        kinds = [_Count.sum(self._counts[kind::2]).ratio(1.0) for kind in range(2)]
        return [count.ratio(kinds[relation % 2]) for relation, count in enumerate(self._counts)]

    def least(self, nodes: int) -> list[float]:
        """Return how many experts each node adds, the root first, if all are of the relation that adds least."""
        return self._added([min(self.ratios())] * (nodes - 1))

    def difference(self, costs: PassCosts, nodes: int) -> Tensor:
        """Return by nodes the cost of reading as many experts as trees do here, less that in the measured costs.

        Each node counts as one of the relation that adds the fewest: such a node is mostly there to be drafted.
        """
        self._expected = self.least(nodes)
        read, measured = torch.tensor(
            [
                [0.0, *itertools.accumulate(self._expected)],
                [0.0, *(interpolated(costs.experts, n) for n in range(1, nodes + 1))],
            ],
            dtype=torch.float32,
            device="cpu",
        ).unbind()
        return costs.expert * (read - measured)

    def prices(self, seconds: float) -> list[float]:
        """Return what a row's experts cost and how many are new, as Throughput has it; seconds: of one expert."""
        return [seconds * self.each, self.each / self.existing, *self.ratios()]

    def observe(self, tree: TokenTree, added: Sequence[int], seconds: float) -> float:
        """Count a verified tree; return, and keep as `extra`, what it took beyond its price; seconds: of one expert."""
        self.learn(tree.parents.tolist(), tree.depths.tolist(), added)
        self.extra = seconds * (sum(added) - sum(self._expected[: len(added)]))
        return self.extra

    def _added(self, ratios: Iterable[float]) -> list[float]:
        added, read = [float(self.each)], float(self.each)
        for ratio in ratios:
            added.append(self.each * min(1.0, ratio * (1 - read / self.existing)))
            read += added[-1]
        return added


class _Count:
    """Sums over rows: new experts, how many of independent rows would have been, and the rows."""

    def __init__(self, new: float = 0.0, independent: float = 0.0, rows: float = 0.0) -> None:
        self.new, self.independent, self.rows = new, independent, rows

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        parts = ((count.new, count.independent, count.rows) for count in counts)
        return cls(*map(sum, zip(*parts, strict=True)))

    def add(self, new: float, independent: float) -> None:
        decay = min(1.0, COUNTED_ROWS / (self.rows + 1))
        self.new, self.independent = decay * self.new + new, decay * self.independent + independent
        self.rows = decay * self.rows + 1

    def ratio(self, wider: float) -> float:
        """Return new over independent experts; `wider`, that of a wider count, stands for WIDER_ROWS rows."""
        beside = WIDER_ROWS * (self.independent / self.rows if self.independent else 1.0)
        return (self.new + beside * wider) / (self.independent + beside)


def relations(parents: Sequence[int], depths: Sequence[int]) -> list[int]:
    """Return the relation of each node below the root to the nodes before it."""
    first = {parent: node for node, parent in reversed([*enumerate(parents)][1:])}
    return [
        relation_of(depths[node], first[parents[node]] < node) for node in range(1, len(parents))
    ]

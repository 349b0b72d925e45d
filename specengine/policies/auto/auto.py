"""auto: the tree that pays, by measured costs of a cycle and counted chances of its nodes; none where none does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from specengine import ops
from specengine.costs import ASSUMED, MEASURED, PassCosts, find_costs
from specengine.ops import Beside, Drafted, Free, Limits, Nodes, Source, Step, TokenTree
from specengine.policies import PerDevice, Plan, TreePolicy, require_each, require_minimum
from specengine.policies.auto.costs import CostModel
from specengine.policies.auto.pacing import Pace
from specengine.policies.auto.search import DeviceSearch

if TYPE_CHECKING:
    from specengine.records import Cycle, Outcome

PLAIN_REASON = "no draft promised more than it costs, or trees had not paid and rested"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of draft passes that are compared
MAX_ROUNDS = 64  # each is played through for every width before every pass
MIN_PATH = 1e-4  # chance of a path that becomes a node
LEAVES, MAX_FREE = 12, 20  # nodes asked for free continuations, and the number of these
MIN_FREE = 0.03  # stated probability of such a path
# stated probability of a free path by which a cycle may do without a draft pass
MIN_FREE_PASS = 0.5
REPRICED = 16  # cycles between repricings


@dataclass
class Auto(TreePolicy):
    """Draft while one more pass is expected to bring more tokens than its time is worth, and verify what pays.

    A token's chance is counted, not stated: how often tokens of that stated probability, rank, depth and source have
    been accepted by this engine (ops.Counts). Time is priced at the rate at which the engine has been
    committing tokens, at least that of plain decoding: a pass or a node pays if it brings more than its seconds would
    elsewhere, the rule that maximises the ratio of tokens to seconds in the long run (Dinkelbach 1967). So there is no
    threshold; the options only cap. Where even the root's pass does not pay, the cycle decodes plainly; after
    `patience` such cycles one pass looks whether that still holds.

    budget      nodes verified, the root included
    width       nodes drafted from at once
    max_passes  draft passes per cycle
    rounds      passes that are thought ahead
    costs       `measured`: those of this engine on this machine, corrected as cycles are timed; or such as stay:
                PassCosts, a name in specengine.costs.PUBLISHED, the file of a costs record

    Related: SMART (arXiv 2604.09731) and CaDDTree (arXiv 2606.01813) weigh costs as well.
    """

    budget: int = 64
    width: int = 8
    max_passes: int = 12
    rounds: int = 2
    costs: str | PassCosts = MEASURED

    # cycles in a row without a draft pass, after which one looks whether it pays again
    patience: ClassVar[int] = 16

    def __post_init__(self) -> None:
        require_minimum("auto", self, budget=1, width=1, max_passes=1, rounds=1)
        require_each(
            "auto",
            ("rounds", self.rounds, f"1 to {MAX_ROUNDS}", self.rounds <= MAX_ROUNDS),
            (
                "costs",
                self.costs,
                f"{MEASURED}, PassCosts, a name or a file",
                isinstance(self.costs, str | PassCosts),
            ),
        )
        costs = ASSUMED if self.costs == MEASURED else self.costs
        self._costs = CostModel(
            find_costs(costs) if isinstance(costs, str) else costs, self.budget, self.width
        )
        self._limits = Limits(math.log(MIN_PATH), self.budget, self.rounds, self.max_passes)
        self._state = PerDevice(self._start)
        # state of the one that it learns together with
        self._together: PerDevice[DeviceSearch] | None = None
        self._group = 0  # of answers: greedy, sampled
        self._paces = Pace(), Pace()  # by group
        self._pace = self._paces[0]
        self._rests = False  # in this cycle
        self._cycles = 0
        self._learning = 0.0  # seconds that the last cycle's `learn` took

    @property
    def capacity(self) -> int:
        return 1 + self.budget * (self.max_passes + 1)

    @property
    def passes(self) -> int:
        return self.max_passes

    def state_on(self, device: torch.device) -> tuple[Tensor, ...]:
        state = self._state[device]
        search = state.bound
        return *search.counts, search.throughput.recent, *search.throughput.prices, state.skipped

    def plan(self) -> Plan:
        costs = self._costs
        plain = (
            costs.predicted.verify[1] if costs.base.measured and costs.predicted.verify else None
        )
        # all texts, or none
        self._rests = self._pace.resting > 0 if costs.shared is None else costs.shared.resting()
        learns = costs.shared is None or not self._rests
        if not learns:
            self._count(1)
        elif costs.stale:
            self.reprice()
        measured = self.costs == MEASURED
        return Plan(
            self.patience, self._rests, PLAIN_REASON, plain, measured, learns, times=measured
        )

    def begin(
        self, tokens: int, sampled: bool = False, costs: Callable[[], PassCosts] | None = None
    ) -> None:
        self._costs.context = tokens
        self._costs.find = costs if self.costs == MEASURED else None
        self._group = int(sampled)
        self._pace = self._paces[self._group]
        self._pace.begin()
        self.reprice()
        for state in self._state.values():
            state.enter(self._group, state.trained)

    def learn_with(self, other: Auto) -> None:
        """Share statistics and the price of a second with the policy of another text in the same batch.

        So a node is drafted in the text where it promises most, over all texts.
        """
        self._together = other._state
        self._costs.book = other._costs.book
        self._state.clear()

    # ---- a cycle

    def _first(self, tree: TokenTree, state: DeviceSearch) -> Tensor:
        """Return whether the root's pass pays or is due, int32 [1]."""
        if (trained := tree.origin == "draft") is not state.trained:
            state.enter(self._group, trained)
        free = self._free(tree) if ops.is_free(tree.size) else None
        return ops.start_search(
            tree.arrays,
            tree.size,
            state.bound,
            self.rounds,
            free,
            (self.budget, math.log(MIN_FREE_PASS)),
            state.skipped,
            self.patience,
        )

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        state = self._state[tree.device]
        drafted = step.unmixed or Drafted(step.logits, step.token_ids, step.normalized, step.marks)
        if not drafted.logits.shape[0]:
            return Nodes(frontier.ids, self._first(tree, state))
        limits = self._limits._replace(budget=1) if self._costs.base.chains else self._limits
        return ops.grow_likely(tree.arrays, tree.counters, frontier, drafted, state.bound, limits)

    def keep(self, tree: TokenTree) -> Nodes:
        state = self._state[tree.device]
        chains = (
            self._costs.base.chains
        )  # what was drafted is learnt from; more of one path costs nothing
        free = (1, self.max_passes, -math.inf) if chains else (LEAVES, MAX_FREE, math.log(MIN_FREE))
        return ops.keep_likely(
            tree.arrays, tree.size, state.bound, self._free(tree), free, self.budget
        )

    def learn(self, outcome: Outcome) -> None:
        began = time.perf_counter()
        tree, path, chosen, cycle = outcome
        if cycle is not None and cycle.learnt:  # inside a graph, all but its times
            if self.costs == MEASURED and cycle.seconds.split:
                self._time_graphs(cycle, cycle.seconds.model)
                self._count(len(cycle.tokens))
            return
        rested = self._rests and cycle is not None
        if not rested:
            ops.count_outcomes(tree.arrays, tree.size, path, chosen, self._state[tree.device].bound)
        if cycle is None:
            return
        state, experts = self._state[tree.device], self._costs.experts
        if experts is not None and cycle.experts is not None:
            extra = experts.observe(cycle.tree, cycle.experts.tolist(), self._costs.expert_seconds)
            state.bound.throughput.recent[1] += 0.0 if rested else extra
        if timed := self.costs == MEASURED and cycle.seconds.split:
            self._time(cycle, state, rested)
        if timed or experts is not None:
            self._count(len(cycle.tokens))
        self._learning = time.perf_counter() - began

    def _time(self, cycle: Cycle, state: DeviceSearch, rested: bool) -> None:
        """Learn from the time that a cycle took: whether trees pay, and what its rows and passes cost."""
        seconds, costs = cycle.seconds, self._costs
        if costs.base.padded:
            self._time_graphs(cycle, seconds.total)
        else:
            if costs.shared is None:
                total = seconds.total if rested else seconds.total + self._learning
                plain = costs.predicted.measured[1]
                self._pace.observe(
                    len(cycle.tokens),
                    total,
                    plain,
                    expected=costs.predicted.rows[1] / plain,
                    repeated=cycle.repeated,
                )
            tokens, spent = state.bound.throughput.recent.tolist()
            grown = cycle.tree if cycle.grown is None else cycle.grown
            passes = 0 if rested else int(grown.passes)
            drafted = int(state.bound.notes.drafted[: len(grown)].sum()) if passes else 0
            lost = costs.observe(
                cycle, seconds.total - len(cycle.tokens) * spent / tokens, passes, drafted
            )
            if costs.tries and not rested:
                costs.corrections.verify.charge(costs.predicted.rows[1], lost)
                self.reprice()
        if rested and not self._pace.resting:
            state.skipped.fill_(self.patience)  # the draft is looked at as well

    def _time_graphs(self, cycle: Cycle, took: float) -> None:
        """Learn from a cycle of graphs that took `took` seconds; cycles without graphs say nothing about graphs."""
        passes = int(cycle.tree.passes)
        if cycle.seconds.captured and self._costs.base.padded:
            self._pace.observe(
                len(cycle.tokens), took, self._costs.predicted.measured[1], passes > 0
            )
            # nobody read how many nodes a tree had that the last pass ended
            self._costs.observe_graphs(
                cycle.seconds, passes, self.budget if passes == self.max_passes else len(cycle.tree)
            )

    def _count(self, tokens: int) -> None:
        self._costs.context += tokens
        self._cycles += 1
        if self._cycles % REPRICED == 0 or self._cycles < REPRICED:
            self.reprice(explores=True)

    # ---- its parts

    def _free(self, tree: TokenTree) -> Source:
        """Return where ops ask for continuations that need no draft pass: one path of them where trees are chains."""
        if tree.free is None or (isinstance(tree.free, Beside) and not self._costs.base.chains):
            return tree.free
        below = likeliest_path if self._costs.base.chains else tree.free
        return lambda nodes, *most: below(tree, Nodes(*nodes), *most)

    def _start(self, device: torch.device) -> DeviceSearch:
        costs = self._costs
        widths = torch.tensor(
            [n for n in WIDTHS if n < self.width] + [self.width], device=device, dtype=torch.int64
        )
        state = DeviceSearch(
            self.capacity, widths, costs.price(), costs.base.overhead, costs.expert_prices(), device
        )
        state.enter(self._group, trained=True)
        if self._together is not None:
            state.share(self._together[device])
        return state

    @torch.inference_mode()  # a server reads the plan outside of it
    def reprice(self, explores: bool = False) -> None:
        """Bring prices up to date: by corrections, by the length of the text, by texts that came or went with it.

        explores: price the next cycle so that it tries more rows than were tried, where that may pay.
        """
        costs = self._costs
        tables = costs.update(self._rests, explores)
        if tables is not None:
            experts = costs.expert_prices()
            for state in self._state.values():
                state.price(tables, costs.base.overhead, experts)


def likeliest_path(tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
    """Return up to `most` continuations that need no draft pass, each the likeliest below the one before."""
    assert tree.free is not None
    grown, steps = tree.to(tree.device), list[Free]()
    while len(steps) < most and (step := tree.free(grown, nodes, 1, least)) and step.tokens:
        nodes = grown.graft(step.parents, step.tokens, step.log_probs)
        steps.append(step)
    return Free(*(list(chain(*parts)) for parts in zip(*steps, strict=True))) if steps else None

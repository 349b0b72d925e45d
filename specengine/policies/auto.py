"""auto: the tree that pays, by measured costs of a cycle and counted chances of its nodes; none where none does."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from specengine import ops
from specengine.costs import ASSUMED, CostTable, PassCosts, SharedCosts, find_costs, interpolated
from specengine.costs.laws import Corrections
from specengine.errors import InputError
from specengine.ops import Counts, Drafted, Limits, Nodes, Notes, Prices, Throughput
from specengine.ops.select import Step
from specengine.ops.tree import Beside, TokenTree
from specengine.ops.worth import (
    LEVELS,
    MAX_CHANCE,
    MIN_CHANCE,
    RELATIONS,
    Source,
    relation_of,
)
from specengine.policies import PerDevice, Plan, TreePolicy, require

if TYPE_CHECKING:
    from specengine.records import Cycle, Outcome

MEASURED = "measured"
PLAIN_REASON = "no draft promised more than it costs, or trees had not paid and rested"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of draft passes that are compared
MAX_ROUNDS = 64  # each is played through for every width before every pass
MIN_PATH = 1e-4  # chance of a path that becomes a node
LEAVES, MAX_FREE = 12, 20  # nodes asked for free continuations, and the number of these
MIN_FREE = 0.03  # stated probability of such a path
SURE = 0.5  # stated probability of a free path by which a cycle may do without a draft pass
CORRECTION, REPRICED = 0.05, 16  # weight of a cycle's time against the measured costs; cycles between repricings


SHARED = "hits", "tries", "table"  # of Counts, between texts; how sure a draft's first tokens are is each text's own
PRIOR = Path(__file__).parent / "networks" / "chances.safetensors"
DOUBT = 8.0  # tries that a prior counts for


class _Corrections:
    """Corrections of the costs of a target and a draft on this machine, which texts that learn together share."""

    def __init__(self, costs: PassCosts, rows: int, width: int) -> None:
        self.costs = costs
        self.verify = Corrections(rows)
        self.draft = Corrections(width)
        self.shared_draft = Corrections(width)  # of draft passes while other texts are answered


class _State:
    """State of the rule on a device; skipped: int32 [1], cycles since the last draft pass."""

    def __init__(self, capacity: int, widths: Tensor, tables: CostTable, beside: float, device: torch.device) -> None:
        self.counts, self.notes = _counts(device), _notes(capacity, device)
        seconds = CostTable(*(table.to(device, copy=True) for table in tables))
        plain = seconds.verify[1:2]
        prices = Prices(torch.zeros_like(seconds.verify), torch.zeros_like(seconds.draft), widths)
        recent = torch.cat([torch.ones_like(plain), plain]) * DOUBT
        self.skipped, verified, self.none = torch.zeros(3, 1, dtype=torch.int32, device=device).unbind()
        drafting = torch.zeros(1, device=device, dtype=torch.float32)
        others = torch.full_like(drafting, beside), drafting.new_zeros(0)
        self.throughput = Throughput(*seconds, prices, recent, drafting, verified, *others)
        ops.update_throughput(self.throughput, self.none)
        self.books = self.counts, self.notes, self.throughput

    def relate(self, experts: Tensor) -> None:
        """Price nodes by their relation as well, as Throughput has it."""
        self.throughput = self.throughput._replace(experts=experts)
        self.books = self.counts, self.notes, self.throughput

    def share(self, other: _State) -> None:
        """Count by stated chance what is accepted, and tokens over seconds, together with another state."""
        self.counts = self.counts._replace(**{name: getattr(other.counts, name) for name in SHARED})
        self.throughput = self.throughput._replace(recent=other.throughput.recent)
        self.books = self.counts, self.notes, self.throughput


@cache
def _prior() -> tuple[Tensor, Tensor]:
    """Return chances and a profile to begin with, as bench.chances counted them."""
    counted = load_file(PRIOR)
    return counted["table"].clamp(MIN_CHANCE, MAX_CHANCE), counted["profile"]


def _counts(device: torch.device) -> Counts:
    """Return the counts of a fresh engine: two groups, for greedy and sampled answers."""
    table, profile = _prior()
    tries, passes = torch.full_like(table, DOUBT), torch.full((LEVELS,), DOUBT, dtype=torch.float32, device="cpu")
    group = torch.zeros(1, dtype=torch.int64, device="cpu")
    parts = tries * table, tries, table, passes[:, None] * profile, passes, profile, group
    return Counts(*(part.to(device, copy=True).contiguous() for part in parts))


def _notes(capacity: int, device: torch.device) -> Notes:
    cells, places = torch.zeros(2, capacity + 1, dtype=torch.int64, device=device).unbind()
    waiting, drafted = torch.zeros(2, capacity + 1, dtype=torch.bool, device=device).unbind()
    return Notes(torch.zeros(capacity + 1, device=device, dtype=torch.float32), cells, places, waiting, drafted)


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

    patience: ClassVar[int] = 16  # cycles in a row without a draft pass, after which one looks whether it pays again

    _state: PerDevice[_State] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("budget", "width", "max_passes", "rounds"):
            value = getattr(self, name)
            require("auto", name, value, "1 or more", value >= 1)
        require("auto", "rounds", self.rounds, f"1 to {MAX_ROUNDS}", self.rounds <= MAX_ROUNDS)
        self._limits = Limits(math.log(MIN_PATH), self.budget, self.rounds, self.max_passes)
        self._costs = ASSUMED if self.costs == MEASURED else _costs_of(self.costs)
        self._learnt: ExpertReads | None = None
        self._reads: ExpertReads | None = None  # the same, where the costs price experts
        self._added: list[float] = []  # experts that the costs take each node to add
        self._count_experts()
        self._context, self._group = 0, 0
        self._timed = 0
        self._learning = 0.0  # seconds that the last cycle's `learn` took
        self._corrections: _Corrections | None = None
        self._leader = self  # of those that it learns together with
        self._tries = False  # whether the present cycle is priced to try rows that no cycle has
        self._rests = False  # in this cycle
        self._stale = False  # whether prices are to be brought up to date before the next tree
        self._find: Callable[[], PassCosts] | None = None  # the costs at present: other texts come and go
        self._paces = Pace(), Pace()  # of greedy and of sampled answers
        self._measured: tuple[list[float], list[float]] = [], []  # seconds by rows and by width, without corrections
        self._rows: list[float] = []  # seconds of so many rows, of all texts together, with corrections
        self._priced: tuple[list[float], list[float]] = [], []  # seconds by nodes and by width, with corrections
        self._state = PerDevice(self._start)

    @property
    def capacity(self) -> int:
        return 1 + self.budget * (self.max_passes + 1)

    @property
    def rows(self) -> int:
        return self.width

    @property
    def passes(self) -> int:
        return self.max_passes

    def state_on(self, device: torch.device) -> tuple[Tensor, ...]:
        state = self._state[device]
        return *state.counts, state.throughput.recent, *state.throughput.prices, state.skipped

    def plan(self) -> Plan:
        plain = self._priced[0][1] if self._costs.measured and self._priced[0] else None
        shared = self._costs if isinstance(self._costs, SharedCosts) else None  # of several texts all rest, or none
        self._rests = self._pace.resting > 0 if shared is None else shared.resting()
        learns = shared is None or not self._rests
        if not learns:
            self._count(1)
        elif self._stale:
            self._reprice()
        measured = self.costs == MEASURED
        return Plan(self.patience, self._rests, PLAIN_REASON, plain, measured, learns, times=measured)

    def begin(self, tokens: int, sampled: bool = False, costs: Callable[[], PassCosts] | None = None) -> None:
        self._find = costs if self.costs == MEASURED else None
        self._context, self._group = tokens, int(sampled)
        self._pace.begin()
        self._reprice()
        for state in self._state.values():
            state.counts.group.fill_(self._group)

    def learn_with(self, other: Auto) -> None:
        """Learn together with another one, whose texts are answered beside this one's, and price seconds alike.

        So a node is drafted in the text where it promises most, over all texts.
        """
        self._leader = other
        self._state.clear()

    # ---- a cycle

    def _first(self, tree: TokenTree, state: _State) -> Nodes:
        """Return the root if its pass pays or is due, else nothing."""
        free = _source(tree) if ops.is_free(tree.size) else None
        given = self.rounds, free, (self.budget, math.log(SURE))
        pays = ops.number(ops.start_search(tree.arrays, tree.size, *state.books, *given)) > 0
        skipped = ops.number(state.skipped)
        asked = pays | (skipped >= self.patience)
        if isinstance(asked, Tensor):
            state.skipped.copy_(torch.where(asked, 0, skipped + 1))
        else:
            state.skipped.fill_(0 if asked else skipped + 1)
        return tree.root_alone().where(asked)

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        state = self._state[tree.device]
        drafted = step.unmixed or Drafted(step.logits, step.token_ids, step.normalized, step.marks)
        if not drafted.logits.shape[0]:
            return self._first(tree, state)
        return ops.grow_likely(tree.arrays, tree.counters, frontier, drafted, *state.books, self._limits)

    def keep(self, tree: TokenTree) -> Nodes:
        state = self._state[tree.device]
        asked = LEAVES, MAX_FREE, math.log(MIN_FREE)
        return ops.keep_likely(tree.arrays, tree.size, *state.books, _source(tree), asked, self.budget)

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
            ops.count_outcomes(tree.arrays, tree.size, path, chosen, *self._state[tree.device].books)
        if cycle is None:
            return
        state, timed = self._state[tree.device], self.costs == MEASURED and cycle.seconds.split
        if self._reads is not None and cycle.experts is not None:
            self._read(cycle, state, self._reads, cycle.experts.tolist(), rested)
        if timed and self._costs.padded:
            self._time_graphs(cycle, cycle.seconds.total)
        elif timed:
            self._time(cycle, state, rested)
        if timed and rested and not self._pace.resting:
            state.skipped.fill_(self.patience)  # the draft is looked at as well
        if timed or self._reads is not None:
            self._count(len(cycle.tokens))
        self._learning = time.perf_counter() - began

    def _read(self, cycle: Cycle, state: _State, reads: ExpertReads, added: list[int], rested: bool) -> None:
        """Learn from the experts that a tree read, and count the seconds of those that the costs had not."""
        reads.learn(cycle.tree.parents.tolist(), cycle.tree.depths.tolist(), added)
        factor = self._correction.verify.factor if self.costs == MEASURED else 1.0
        self._more = factor * self._costs.expert * (sum(added) - sum(self._added[: len(added)]))
        if not rested:
            state.throughput.recent[1] += self._more

    def _time(self, cycle: Cycle, state: _State, rested: bool) -> None:
        """Correct the measured costs by the time that a cycle took, each for its own number of rows."""
        seconds, costs, correction = cycle.seconds, self._costs, self._correction
        by_rows, by_width = self._measured
        tokens, spent = state.throughput.recent.tolist()
        if isinstance(costs, SharedCosts):
            rows, took = costs.forward() or (0, 0.0)
            lost = took - self._rows[costs.others + 1]
        else:
            rows = len(cycle.tree)
            took = seconds.verify + seconds.walk - (self._more if self._reads is not None else 0.0)
            lost = seconds.total - len(cycle.tokens) * spent / tokens
            total = seconds.total if rested else seconds.total + self._learning
            self._pace.observe(len(cycle.tokens), total, by_rows[1], expected=self._rows[1] / by_rows[1])
        if 0 < rows < len(by_rows):
            correction.verify.observe(by_rows, rows, took)
        grown = cycle.tree if cycle.grown is None else cycle.grown
        if not rested and (passes := int(grown.passes)):
            drafted = int(state.notes.drafted[: len(grown)].sum())
            width = min(max(1, round(drafted / passes)), self.width)  # as if all passes were as wide
            draft = correction.shared_draft if isinstance(costs, SharedCosts) else correction.draft
            draft.observe(by_width, width, seconds.draft + seconds.policy, passes)
        if self._tries and not rested:
            correction.verify.charge(self._rows[1], lost)
            self._reprice()

    def _time_graphs(self, cycle: Cycle, took: float) -> None:
        """Correct the costs of graphs by a cycle of graphs that took so many seconds; others say nothing of them.

        Every tree takes as long to verify as any other, and every pass as long as any other.
        """
        seconds, passes = cycle.seconds, int(cycle.tree.passes)
        if not (seconds.captured and self._costs.padded):
            return
        plain = self._measured[0][1]
        self._pace.observe(len(cycle.tokens), took, plain, passes > 0)
        parts = seconds.verify + seconds.walk, seconds.draft + seconds.policy + seconds.commit
        verify, draft = self._priced
        expected = verify[1], passes * draft[-1] + self._costs.overhead if passes else 0.0
        corrections = self._correction.verify, self._correction.draft
        for correction, measured, predicted in zip(corrections, parts, expected, strict=True):
            correction.observe_all(predicted, measured, CORRECTION)

    def _count(self, tokens: int) -> None:
        self._context += tokens
        self._timed += 1
        if self._timed % REPRICED == 0 or self._timed < REPRICED:
            self._reprice()
            self._explore()

    # ---- its parts

    @property
    def _pace(self) -> Pace:
        return self._paces[self._group]

    @property
    def _correction(self) -> _Corrections:
        """Corrections of the present costs; new ones where those are of another model, or were measured again."""
        leader: Auto = self._leader
        costs = self._costs.alone if isinstance(self._costs, SharedCosts) else self._costs
        if leader._corrections is None or leader._corrections.costs is not costs:
            leader._corrections = _Corrections(costs, self.budget, self.width)
        return leader._corrections

    def _start(self, device: torch.device) -> _State:
        widths = torch.tensor([n for n in WIDTHS if n < self.width] + [self.width], device=device, dtype=torch.int64)
        state = _State(self.capacity, widths, self._tables(), self._costs.overhead, device)
        state.counts.group.fill_(self._group)
        if self._reads is not None:
            state.relate(self._related(device))
        leader: Auto = self._leader
        if leader is not self:
            state.share(leader._state[device])
        return state

    def _tables(self) -> CostTable:
        costs = self._costs
        tables = costs.table(self.budget, self.width, self._context)
        if self._reads is not None:
            tables = self._with_experts(tables, self._reads)
        if self.costs == MEASURED:
            tables = self._corrected(tables)
        self._priced = tables.verify.tolist(), tables.draft.tolist()
        return tables

    def _corrected(self, tables: CostTable) -> CostTable:
        costs, correction, rows, draft = self._costs, self._correction, tables.verify, self._correction.draft
        if isinstance(costs, SharedCosts):
            rows = costs.alone.table(self.budget + costs.others, 1, self._context).verify
            draft = correction.shared_draft
        self._measured = rows.tolist(), tables.draft.tolist()
        self._rows = correction.verify.column(self._measured[0])
        return CostTable(self._by_nodes(self._rows), _tensor(draft.column(self._measured[1])))

    def _by_nodes(self, rows: list[float]) -> Tensor:
        """Return the price of so many nodes of this text; rows: seconds of rows of all texts together."""
        costs = self._costs
        return costs.added(_tensor(rows)) if isinstance(costs, SharedCosts) else _tensor(rows)

    @torch.inference_mode()  # a server reads the plan outside of it
    def _reprice(self) -> None:
        found = self._costs if self._find is None else self._find()
        both = isinstance(found, SharedCosts) and isinstance(self._costs, SharedCosts)
        self._stale = both and self._rests  # nobody asks for prices now
        if self._stale:
            return
        if found is not self._costs:
            self._costs = found
            self._count_experts()
        self._tries = False
        tables = self._tables()
        for state in self._state.values():
            state.throughput.verify.copy_(tables.verify, non_blocking=True)  # whose host has other things to do
            state.throughput.draft.copy_(tables.draft, non_blocking=True)
            state.throughput.overhead.fill_(self._costs.overhead)
            if self._reads is not None or state.throughput.experts.numel():
                state.relate(self._related(state.throughput.experts.device))
            ops.update_throughput(state.throughput, state.none)

    def _explore(self) -> None:
        """Price the next cycle so that it tries more rows than were tried, where that may pay."""
        if self._find is None or self._costs.padded or self._stale:
            return
        trial = self._correction.verify.exploring(self._rows)
        if trial is None:
            return
        self._tries = True
        for state in self._state.values():
            state.throughput.verify.copy_(self._by_nodes(trial))
            ops.update_throughput(state.throughput, state.none)

    # ---- experts

    def _count_experts(self) -> None:
        """Begin to count experts where the costs price them, or go on if they are those of the same target."""
        costs, self._more = self._costs, 0.0
        priced, known = costs.expert > 0 and bool(costs.experts), self._learnt
        if priced and (known is None or (known.each, known.existing) != (costs.experts[1], costs.all_experts)):
            self._learnt = ExpertReads(int(costs.experts[1]), costs.all_experts)
        self._reads = self._learnt if priced else None

    def _with_experts(self, tables: CostTable, reads: ExpertReads) -> CostTable:
        """Return costs of verifications that read as many experts as trees do here, not as when they were measured.

        Each node counts as one of the relation that adds the fewest: such a node is mostly there to be drafted.
        """
        self._added = reads.least(self.budget)
        usual = (interpolated(self._costs.experts, n) for n in range(1, self.budget + 1))
        both = [0.0, *itertools.accumulate(self._added)], [0.0, *usual]
        read, measured = torch.tensor(both, dtype=torch.float32, device="cpu")
        verify = tables.verify + self._costs.expert * (read - measured)
        return tables._replace(verify=verify.clamp(min=0))

    def _related(self, device: torch.device) -> Tensor:
        """Return what experts cost and how many are new, as Throughput has it."""
        if (reads := self._reads) is None:
            return torch.zeros(0, device=device, dtype=torch.float32)
        factor = self._correction.verify.factor if self.costs == MEASURED else 1.0
        seconds = factor * self._costs.expert * reads.each
        numbers = seconds, reads.each / reads.existing, *reads.ratios()
        return torch.tensor(numbers, device=device, dtype=torch.float32)


def _tensor(column: list[float]) -> Tensor:
    return torch.tensor(column, dtype=torch.float32, device="cpu")


def _source(tree: TokenTree) -> Source:
    """Return where ops ask for continuations that need no draft pass."""
    free = tree.free
    return free if free is None or isinstance(free, Beside) else lambda nodes, *most: free(tree, Nodes(*nodes), *most)


def _costs_of(costs: str | PassCosts) -> PassCosts:
    if isinstance(costs, PassCosts):
        return costs
    if not isinstance(costs, str):
        raise InputError(f"policy auto.costs: got {costs!r}, accepted {MEASURED}, PassCosts, a name or a file")
    return find_costs(costs)


MEMORY = 0.97  # of what cycles with trees brought, per cycle
HOPE, NEW_TEXT, AGAIN = 0.2, 0.03, 0.01  # tokens per cycle that trees are credited with: at first, in a new text, later
SMALL_GAIN, TIMED = 0.1, 4  # tokens per cycle below which plain cycles are timed, and so many of them
FIRST_REST, MAX_REST = 32, 128  # cycles of a rest
MIN_TRIAL, MAX_TRIAL = 3, 16  # cycles with trees after a rest, whose own mean decides whether to rest again
MAX_LOST = 2  # texts in a row in which trees did not pay, after which a text begins with a rest
STANDARD_ERRORS = 1.0  # standard errors by which gains are below nothing
PLAIN_WINDOW = 16  # plain cycles that a median is of
SPREAD = 0.05  # tokens squared: variance of a cycle's gain, to begin with
MIN_GAIN = -2.0  # tokens: what a cycle loses at most, as a machine that was busy elsewhere says nothing of trees


class Pace:
    """Weighs the tokens of trees against those of plain decoding in the same time, by the clock.

    Prices compare nodes and passes; they leave out the time of the comparison itself. A cycle's gain is its committed
    tokens less those that plain decoding commits in its time. Where recent gains become small a few cycles rest: they
    decode plainly and are timed. Where gains fall below nothing more cycles rest. A trial of a few with trees follows:
    their own mean decides whether to go on or to rest for twice as long.
    """

    def __init__(self) -> None:
        self.resting = 0  # cycles to go
        self._gain, self._spread = HOPE, SPREAD
        self._length, self._worked = FIRST_REST, FIRST_REST
        self._trial_gain = 0.0  # of all cycles since the last rest
        self._plain = deque[float](maxlen=PLAIN_WINDOW)  # what plain cycles took over what they were thought to take
        self._new = True
        self._lost = 0  # texts in a row in which trees did not pay

    def begin(self) -> None:
        """Begin another text, which may be of another kind; with a rest where trees did not pay in texts before.

        So a draft that is not expected to pay is not asked at once, and need not take in the prompt.
        """
        has_lost = self.resting > 0 or self._worked < FIRST_REST
        self._lost = self._lost + 1 if has_lost else 0
        self.resting = (self.resting or FIRST_REST) if self._lost >= MAX_LOST else 0
        self._length, self._worked, self._new = FIRST_REST, FIRST_REST, not self.resting
        self._gain = max(self._gain, NEW_TEXT)

    def observe(self, tokens: int, seconds: float, plain: float, drafted: bool = False, expected: float = 1.0) -> None:
        """Take in a cycle of so many tokens and seconds.

        plain: the predicted seconds of a plain cycle; drafted: whether it drafted although it was to rest; expected:
        what a plain cycle is thought to take over `plain`, until some were timed.
        """
        if self.resting:
            if not drafted:
                self._plain.append(seconds / plain)
            self.resting -= 1
            if not self.resting:
                self._gain, self._worked = max(self._gain, AGAIN), -1
                self._trial_gain = 0.0
            return
        self._worked += 1
        if not self._worked:  # the first one after a rest also does what the rest had left
            return
        gain = tokens - seconds / (plain * (statistics.median(self._plain) if self._plain else expected))
        gain = max(gain, MIN_GAIN)
        off = gain - self._gain
        self._gain += off * (1 - MEMORY)
        self._spread += (off * off - self._spread) * (1 - MEMORY)
        self._trial_gain += gain
        mean, variance = self._gain, self._spread * (1 - MEMORY) / 2
        if MIN_TRIAL <= self._worked <= MAX_TRIAL:
            mean, variance = self._trial_gain / self._worked, self._spread / self._worked
        if mean < -STANDARD_ERRORS * math.sqrt(variance):
            self._length = FIRST_REST if self._worked >= FIRST_REST else min(2 * self._length, MAX_REST)
            self.resting, self._new = self._length, False
        elif self._gain < SMALL_GAIN and self._new:
            self.resting, self._new = TIMED, False


WIDER_ROWS = 4.0  # that a wider count stands for in a narrower one
COUNTED_ROWS = 1000.0  # that a count remembers


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

    def _added(self, ratios: Iterable[float]) -> list[float]:
        found, read = [float(self.each)], float(self.each)
        for ratio in ratios:
            found.append(self.each * min(1.0, ratio * (1 - read / self.existing)))
            read += found[-1]
        return found


class _Count:
    """Sums over rows: new experts, how many of independent rows would have been, and the rows."""

    def __init__(self, new: float = 0.0, independent: float = 0.0, rows: float = 0.0) -> None:
        self.new, self.independent, self.rows = new, independent, rows

    @classmethod
    def sum(cls, counts: Iterable[_Count]) -> _Count:
        parts = [(count.new, count.independent, count.rows) for count in counts]
        return cls(*(sum(column) for column in zip(*parts, strict=True)))

    def add(self, new: float, independent: float) -> None:
        kept = min(1.0, COUNTED_ROWS / (self.rows + 1))
        self.new, self.independent = kept * self.new + new, kept * self.independent + independent
        self.rows = kept * self.rows + 1

    def ratio(self, wider: float) -> float:
        """Return new over independent experts; `wider`, that of a wider count, stands for WIDER_ROWS rows."""
        beside = WIDER_ROWS * (self.independent / self.rows if self.independent else 1.0)
        return (self.new + beside * wider) / (self.independent + beside)


def relations(parents: Sequence[int], depths: Sequence[int]) -> list[int]:
    """Return the relation of each node below the root to the nodes before it."""
    seen, found = set[int](), list[int]()
    for parent, depth in zip(parents[1:], depths[1:], strict=True):
        found.append(relation_of(depth, parent in seen))
        seen.add(parent)
    return found

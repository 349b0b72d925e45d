"""Measure verifications, draft passes and the rest of a cycle on this machine, by synthetic cycles.

Other programs make single cycles longer, never shorter. So each cost is the lower quartile of many cycles, whose sizes
take turns, and the costs of all sizes keep the laws of `specengine.costs.laws`.
"""

import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from specengine.costs import PassCosts, Points, busy as busy, interpolated
from specengine.costs.laws import lawful
from specengine.drafters import Drafter, reserve
from specengine.errors import require
from specengine.models import Target
from specengine.ops import Nodes, TokenTree
from specengine.ops.cuda_graphs import room
from specengine.records import Cycle, Seconds

CONTEXTS = (64, 1024)  # tokens in the cache
SECONDS = 3.0
MAX_CYCLES = 200  # a measurement takes at most the time of this many cycles of one node
LOW = 0.25  # quantile of the times that a cost is
SHORT_SHARE = 0.6  # share of the time for the short context
EXPERT_SHARE = 0.15  # share of the time for the price of an expert
ALIKE = (8, 16, 32)  # rows of the trees that it is measured by
ROUNDS = 4  # rounds that a plan must have time for; the first one warms up
# of cycles on a device before any is measured: a clock that idled takes so long to rise
WARM_SECONDS = 0.2
REHEARSED = 4  # cycles that a driver rehearses at once
MIN_SAVING = 1.05  # time of the next more rows over that of fewer that is worth a graph of these


class MeasuringPlan(NamedTuple):
    """Numbers of nodes that one round of cycles measures.

    The time of a matrix product steps where a block of 16 rows is full. So the plans have counts on both sides of
    steps, and 96 after the last one: the slope that continues from there covers several blocks. Without such blocks
    few rows wait for the weights and more for arithmetic, so every plan has 4 and 8.
    """

    nodes: tuple[int, ...]
    widths: tuple[int, ...]


SMALLEST_PLAN = MeasuringPlan((1, 64, 16, 8, 4), (1, 16, 4))
SHORT_PLANS = (
    MeasuringPlan((1, 64, 16, 8, 4, 17, 32, 33, 48, 49, 96), (1, 16, 4, 8)),
    MeasuringPlan((1, 64, 16, 8, 4, 17, 32, 33, 48, 49, 96, 2, 24), (1, 16, 4, 8, 2)),
)
LONG_PLANS = (MeasuringPlan((1, 64, 16, 8, 4, 17, 32, 33), (1, 16, 4)),)
PADDED_PLANS = (MeasuringPlan((1, 64, 16, 8, 4, 32, 96), (1, 16, 4, 8)),)


class Driver(Protocol):
    """A driver that runs an engine's cycles as graphs; it belongs to a storey above, which hands it in.

    policy, budget  of its trees; grows_there: whether trees grow in graphs
    """

    policy: Any
    budget: int
    grows_there: bool

    def reserve(self, tokens: int) -> None:
        """Make room for this number of tokens and the trees after them."""

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        """Return logits and features of every node, by a graph of `budget` rows."""

    def rehearse(self, root: int, count: int) -> dict[str, list[float]]:
        """Run cycles below a token and undo them; return the seconds of their parts by name."""


@dataclass
class _Samples:
    """Seconds by number of nodes at one context length, in the order of measurement."""

    verify: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    root: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    # that a verification read
    experts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def costs(self) -> tuple[Points, Points]:
        """Return lawful costs of verifications by nodes, and of draft passes by width."""
        return _costs(self.verify, SMALLEST_PLAN.nodes), _costs(self.draft, SMALLEST_PLAN.widths)

    def spread(self) -> Points:
        """Return, by nodes, the interquartile range of a verification's seconds over their lower quartile."""
        return {
            n: _quantile(times, 0.75) / _quantile(times, LOW) - 1
            for n, times in sorted(self.verify.items())
        }

    def overhead(self) -> float:
        """Return the time of both commits and the extra time of the first draft pass."""
        _, draft = self.costs()
        return _quantile(self.commit, LOW) + max(
            0.0, _quantile(self.root, LOW) - interpolated(draft, 1)
        )


@torch.inference_mode()
def measure(
    target: Target,
    drafter: Drafter | None,
    driver: Driver | None = None,
    *,
    seconds: float = SECONDS,
) -> PassCosts:
    """Measure the seconds of verifying n nodes, of drafting from n nodes, and of the rest of a cycle.

    driver: of the engine that runs target and drafter, if it captures; seconds: maximum time, except for the cycles
    that give the first two points. It stops earlier if 200 cycles of one node take less. On a CUDA device it begins
    once kernels are compiled, graphs captured and clocks up, which takes its own time.

    The cycles have random tokens at two context lengths, if the model's context allows it, and greedy choices. Lookup
    finds nothing in random tokens, which is its cheaper case. Without a drafter, draft passes cost nothing. All caches
    are empty afterwards. No generation may be running.

    With a captured target the result is `padded`. Where trees grow in the driver's graphs, these are timed as cycles
    run them: a draft pass with the policy's rule, a verification with walk and commit, by each number of rows that is
    worth a graph, and as overhead what a cycle takes besides. Elsewhere the driver's graph verifies.
    """
    require("seconds", seconds, "above 0", seconds > 0)
    if driver is not None and (driver.policy is None) != (drafter is None):
        driver = None  # of an engine that does not draft
    began = time.perf_counter()
    before = processor_times()
    cycles = SyntheticCycles(target, drafter, max(contexts(target)), driver)
    try:
        with target.running():
            if driver is not None and driver.grows_there:
                costs = _rehearsed(cycles, driver, seconds)
            else:
                if target.device.type == "cuda":
                    began = _warm(cycles)
                costs = _measured(cycles, began, seconds)
    finally:
        cycles.end()
    return replace(costs, load=share_of_others(before) or 0.0)


def _warm(cycles: "SyntheticCycles") -> float:
    """Run the narrowest and the widest cycles until the device is warm; return the time then.

    Compiles, captures and allocates before anything is measured.
    """
    cycles.begin(contexts(cycles.target)[0])
    plan = cycles.plan(SMALLEST_PLAN)
    for width in plan.widths:
        for nodes in dict.fromkeys((min(plan.nodes), max(plan.nodes))):
            cycles.cycle(nodes, width)
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        cycles.cycle(max(plan.nodes), max(plan.widths))
    cycles.end()  # so that a prompt is read again
    return time.perf_counter()


def _rehearsed(cycles: "SyntheticCycles", driver: Driver, seconds: float) -> PassCosts:
    """Measure a driver's graphs, at each context the medians of cycles that it rehearses."""
    short, long = contexts(cycles.target)
    cycles.begin(short)
    driver.rehearse(cycles.root, 1)  # compiles and captures
    until = time.perf_counter() + (WARM_SECONDS if cycles.target.device.type == "cuda" else 0.0)
    while time.perf_counter() < until:
        driver.rehearse(cycles.root, REHEARSED)
    began = time.perf_counter()
    parts = _parts(cycles, driver, began + (SHORT_SHARE if long > short else 1) * seconds)
    verify, draft = points = _points(driver, parts)
    overhead = parts["first"] + max(0.0, parts["root"] - max(draft.values())) + parts["end"]

    def later() -> tuple[Points, Points]:
        driver.rehearse(cycles.root, 1)
        return _points(driver, _parts(cycles, driver, began + seconds))

    growths = _growths(cycles, points, short, long, later)
    return PassCosts(
        "measured",
        verify,
        draft,
        source="measured",
        measured=True,
        overhead=overhead,
        context=short,
        verify_growth=growths[0],
        draft_growth=growths[1],
        padded=True,
    )


def _points(driver: Driver, parts: dict[str, float]) -> tuple[Points, Points]:
    """Return the costs of a root alone and of trees by rows, where fewer take less, and of the one size of passes."""
    width = 1 if driver.policy is None else driver.policy.rows
    verify = {driver.budget: parts["finish"]}
    for name, seconds in parts.items():  # by falling numbers of rows
        if name.startswith("finish ") and MIN_SAVING * seconds < min(verify.values()):
            verify[int(name.split()[1])] = seconds
    if parts["plain"]:
        verify[1] = parts["plain"]
    return verify, {width: parts["level"] or parts["root"]}


def _parts(cycles: "SyntheticCycles", driver: Driver, until: float) -> dict[str, float]:
    """Return the medians of the parts of rehearsed cycles, of MAX_CYCLES at most and of a few where time is short.

    A part that cycles do not have takes 0 seconds.
    """
    by_part = defaultdict[str, list[float]](list)
    while True:
        for name, times in driver.rehearse(cycles.root, REHEARSED).items():
            by_part[name] += times
        if time.perf_counter() >= until or len(by_part["finish"]) >= MAX_CYCLES:
            return defaultdict(
                float, {name: statistics.median(times) for name, times in by_part.items()}
            )


def contexts(target: Target) -> tuple[int, int]:
    """Return the short and the long context to measure at, in tokens; twice the same if the model's is short."""
    limit = max(1, target.max_context - (MAX_CHAIN + DRIFT if target.paths else 2 * MAX_PATH))
    short, long = (min(context, limit) for context in CONTEXTS)
    return short, long if long >= 2 * short else short


def _measured(cycles: "SyntheticCycles", began: float, seconds: float) -> PassCosts:
    short, long = contexts(cycles.target)
    prefill = cycles.begin(short)
    first = cycles.cycle(1, 1)
    if sum(first) < seconds / 20:
        # the first cycle has warmed up
        first = min((cycles.cycle(1, 1) for _ in range(3)), key=sum)
    padded = cycles.target.captured
    allowed = min(seconds, MAX_CYCLES * sum(first))
    share = SHORT_SHARE if long > short else 1
    plans = PADDED_PLANS if padded else SHORT_PLANS
    samples = _rounds(cycles, plans if cycles.driver is None else (), began + share * allowed)
    verify, draft = samples.costs()
    expert = (
        0.0
        if cycles.target.experts is None
        else _expert(cycles, time.perf_counter() + EXPERT_SHARE * allowed)
    )
    smallest = len(cycles.plan(SMALLEST_PLAN).nodes)
    remaining = began + allowed - time.perf_counter() - (smallest + 1) * verify[max(verify)]
    long = min(long, int(short * remaining / prefill)) if remaining > 0 else short
    growths = _growths(
        cycles,
        (verify, draft),
        short,
        long,
        lambda: _rounds(cycles, () if padded else LONG_PLANS, began + allowed).costs(),
    )
    return PassCosts(
        "measured",
        verify,
        draft if cycles.drafter is not None else {1: 0.0},
        source="measured",
        measured=True,
        overhead=samples.overhead(),
        spread=samples.spread(),
        context=short,
        verify_growth=growths[0],
        draft_growth=growths[1] if cycles.drafter is not None else {},
        padded=padded,
        chains=cycles.target.paths,
        experts={n: statistics.median(samples.experts[n]) for n in verify}
        if samples.experts
        else {},
        all_experts=count_experts(cycles.target) if samples.experts else 0,
        expert=expert,
    )


def count_experts(target: Target) -> int:
    """Return how many experts a target's layers have that its forwards count, 0 where they count none."""
    routes = getattr(getattr(target, "lm", None), "routes", None)
    return 0 if routes is None else int(routes.all)


def _expert(cycles: "SyntheticCycles", until: float) -> float:
    """Return the seconds of reading one expert more: as many rows, of one token and of many."""
    differences = list[tuple[float, float]]()
    for nodes in itertools.cycle(ALIKE):
        (slow, many), (fast, few) = (cycles.star(nodes, alike=alike) for alike in (False, True))
        differences.append((slow - fast, many - few))
        if len(differences) > len(ALIKE) and (
            time.perf_counter() > until or len(differences) > MAX_CYCLES
        ):
            break
    # the first one warms up
    seconds = [slower / more for slower, more in differences[1:] if more > 0]
    return max(0.0, statistics.median(seconds)) if seconds else 0.0


def _rounds(cycles: "SyntheticCycles", plans: Sequence[MeasuringPlan], until: float) -> _Samples:
    """Run a round of the smallest plan, then rounds of the largest plan that there is time for."""
    samples, plan = _Samples(), cycles.plan(SMALLEST_PLAN)
    _round(cycles, plan, samples, until)
    for larger in map(cycles.plan, plans):
        if time.perf_counter() + ROUNDS * _seconds(larger, samples) < until:
            plan = larger
    while time.perf_counter() < until:
        _round(cycles, plan, samples, until)
    return samples


def _round(cycles: "SyntheticCycles", plan: MeasuringPlan, samples: _Samples, until: float) -> None:
    for place, (nodes, width) in enumerate(
        zip(plan.nodes, itertools.cycle(plan.widths), strict=False)
    ):
        if (len(samples.verify) > 1 or place > 1) and time.perf_counter() > until:
            return
        times = cycles.cycle(nodes, width)
        samples.verify[nodes].append(times.verify)
        samples.draft[width].append(times.step)
        samples.root.append(times.root)
        samples.commit.append(times.commit)
        if cycles.target.experts is not None:
            samples.experts[nodes].append(float(cycles.target.experts.sum()))


def _seconds(plan: MeasuringPlan, samples: _Samples) -> float:
    """Return the time that a round of this plan is expected to take."""
    verify, draft = samples.costs()
    rest = (
        _quantile(samples.root, LOW)
        + _quantile(samples.commit, LOW)
        + interpolated(draft, max(plan.widths))
    )
    return sum(rest + interpolated(verify, nodes) for nodes in plan.nodes)


def _growths(
    cycles: "SyntheticCycles",
    points: tuple[Points, Points],
    short: int,
    long: int,
    measured: Callable[[], tuple[Points, Points]],
) -> list[Points]:
    """Return by how much each of these costs grows per token up to `long`, as `measured` there; none if it is near."""
    if long < 2 * short:
        return [{}, {}]
    cycles.begin(long)
    return [
        {n: max(0.0, after[n] - before[n]) / (long - short) for n in sorted(before.keys() & after)}
        for before, after in zip(points, measured(), strict=True)
    ]


def _costs(samples: dict[int, list[float]], always: Sequence[int]) -> Points:
    chosen = {n: times for n, times in sorted(samples.items()) if n in always or len(times) > 1}
    return lawful(
        {n: _quantile(times, LOW) for n, times in chosen.items()},
        {n: len(chosen[n]) for n in chosen},
    )


def _quantile(times: list[float], share: float) -> float:
    """Return the time below which this share of the times lies; the first one warms up and does not count."""
    ordered = sorted(times[1:] or times)
    return ordered[int(share * (len(ordered) - 1) + 0.5)]


T = TypeVar("T")

MAX_NODES, MAX_WIDTH = 96, 16  # the largest tree and draft pass of a plan
CHILDREN = 3  # children per node of a verified tree
DRIFT = 32  # tokens by which cycles may lengthen the context before it is rewound
MAX_PATH = 8  # tokens that a cycle can add, and depth that a tree with branches can have
MAX_CHAIN = 32  # nodes of a chain
# slots of the draft's scratch: a capture runs a pass several times
DRAFT_SLOTS = 4 * (MAX_WIDTH + 1)


class CycleTimes(NamedTuple):
    """Seconds of one cycle: the first draft pass, a further one, verification, both commits."""

    root: float
    step: float
    verify: float
    commit: float


class SyntheticCycles:
    """Cycles of `target` and `drafter` on random tokens, at contexts of up to `max_context` tokens.

    Only the caches change; `end` clears them. Runs inside inference mode and `target.running()`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        max_context: int,
        driver: Driver | None = None,
    ) -> None:
        self.target, self.drafter, self.driver = target, drafter, driver
        self._random = torch.Generator().manual_seed(0)
        self._prompt: list[int] = []
        self.root = self._tokens(1)[0]
        self._branching = 1 if target.paths else min(CHILDREN, target.vocab_size)
        self._verified: dict[int, TokenTree] = {}  # created once, because captures read them
        self._drafted: dict[int, tuple[TokenTree, Nodes]] = {}
        self.end()  # clear the caches of an earlier generation
        target.want(() if drafter is None else drafter.traits.features)
        tokens = max_context + DRIFT + 2 * MAX_PATH
        slots = room(tokens + MAX_NODES + getattr(target, "strict_rows", 0))
        if driver is not None:  # once, because captures read buffers that must not move
            driver.reserve(tokens)
        else:  # as in engine/captured.py: attention without a kernel of its own runs over all slots
            target.reserve(slots, 0)
            reserve(drafter, tokens, DRAFT_SLOTS, MAX_PATH)

    def plan(self, plan: MeasuringPlan) -> MeasuringPlan:
        """Return the plan, with verifications of a driver's one size where there is a driver, and of short chains."""
        if self.driver is not None:
            return plan._replace(nodes=(min(self.driver.budget, MAX_NODES),) * len(plan.widths))
        most = MAX_CHAIN if self.target.paths else MAX_NODES
        return plan._replace(nodes=tuple(count for count in plan.nodes if count <= most))

    def begin(self, context: int) -> float:
        """Fill both caches with `context` tokens. Return the seconds that it took."""
        self._prompt += self._tokens(context - len(self._prompt))
        self._prompt = self._prompt[:context]
        return self._timed(self._rewind)[0]

    def cycle(self, nodes: int, width: int) -> CycleTimes:
        """Draft from the root and from `width` nodes, verify `nodes` nodes, commit a path. Return the times."""
        if len(self.target.tokens) + MAX_PATH > min(
            len(self._prompt) + DRIFT, self.target.max_context
        ):
            self._rewind()
        if nodes not in self._verified:
            self._verified[nodes] = self._tree_of(nodes)
        tree = self._verified[nodes]
        root, step = self._draft(width)
        verify, features = self._timed(lambda: self._verify(tree))
        commit, _ = self._timed(lambda: self._commit(tree, features))
        # of paths, every cycle here runs the accepted one again, as few others do
        return CycleTimes(root, step, verify, 0.0 if self.target.paths else commit)

    def star(self, nodes: int, *, alike: bool) -> tuple[float, float]:
        """Verify a root and its children, whose tokens are one and the same or differ.

        Returns the seconds, and the number of experts that were read. Commits nothing.
        """
        tree, _ = self._star_of(min(nodes, self.target.vocab_size) - 1)
        if alike:
            tree.tokens.fill_(self.root)
        seconds, _ = self._timed(lambda: self._verify(tree))
        return seconds, float(cast(Tensor, self.target.experts).sum())

    def end(self) -> None:
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()

    # ---- steps of a cycle

    def _draft(self, width: int) -> tuple[float, float]:
        drafter: Any = self.drafter
        if drafter is None:
            return 0.0, 0.0
        if width not in self._drafted:
            self._drafted[width] = self._star_of(min(width, self.target.vocab_size))
        tree, frontier = self._drafted[width]

        return self._timed(lambda: drafter.root(tree))[0], self._timed(
            lambda: drafter.step(tree, frontier)
        )[0]

    def _verify(self, tree: TokenTree) -> Tensor | None:
        """Verify a tree and choose greedily, as the engine does. Return the features of its nodes."""
        choice = self.target.choose(tree) if self.driver is None else None
        if choice is not None:
            return choice.features
        logits, features = (self.target if self.driver is None else self.driver).verify(tree)
        logits.argmax(-1).tolist()  # which waits for a device
        return features

    def _commit(self, tree: TokenTree, features: Tensor | None) -> None:
        path = [0, 1, 1 + self._branching] if len(tree) > 1 + self._branching else [0]
        self.target.commit(tree, path)
        if self.drafter is not None:
            tokens = [*tree.tokens[path[1:]].tolist(), self.root]
            self.drafter.accept(Cycle(tree, path, tokens, Seconds(), len(tree) - 1, features))

    # ---- trees, caches, clocks

    def _tree_of(self, nodes: int) -> TokenTree:
        """Return a tree of `nodes` nodes, each with the same number of children until the nodes run out."""
        parents = [(node - 1) // self._branching for node in range(nodes)]
        below = (
            (self.root + 7 * parents[node] + node % self._branching) % self.target.vocab_size
            for node in range(1, nodes)
        )
        return TokenTree.of_lists([self.root, *below], parents, self.target.device)

    def _star_of(self, width: int) -> tuple[TokenTree, Nodes]:
        """Return a tree of a root and `width` children, and the children as a frontier."""
        device = torch.device("cpu") if self.drafter is None else self.drafter.device
        tree = TokenTree.root(self.root, width + 1, device)
        tokens = (
            self.root + torch.arange(width, device=device, dtype=torch.int64)
        ) % self.target.vocab_size
        return tree, tree.add(
            torch.zeros_like(tokens), tokens, -torch.ones(width, device=device, dtype=torch.float32)
        )

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(
            self.target.vocab_size,
            (max(0, count),),
            generator=self._random,
            dtype=torch.int64,
            device="cpu",
        ).tolist()

    def _rewind(self) -> None:
        prompt, drafter = self._prompt, self.drafter
        cached = min(
            self.target.cached(prompt), len(prompt) if drafter is None else drafter.cached(prompt)
        )
        features = self.target.prefill(prompt, cached)
        if drafter is not None:
            drafter.begin(prompt, features)

    def _timed(self, function: Callable[[], T]) -> tuple[float, T]:
        self._wait()
        began = time.perf_counter()
        result = function()
        self._wait()
        return time.perf_counter() - began, result

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        elif self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)


# ---- what other programs take of the processors, as Linux counts it

PROCESSOR_TIMES = Path("/proc/stat")
MIN_SECONDS = 0.1  # between two readings of them: the system counts hundredths of a second


class ProcessorTimes(NamedTuple):
    """Counters at one moment, in seconds: the clock, of all processors in use and stolen, and of this process."""

    clock: float
    in_use: float
    own: float


def processor_times() -> ProcessorTimes | None:
    """Return the counters now; None where the system does not tell them."""
    try:
        line = PROCESSOR_TIMES.read_text(encoding="ascii").splitlines()[0]
        user, nice, system, _, _, irq, softirq, steal = (
            float(field) for field in line.split()[1:9]
        )
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return ProcessorTimes(
        time.monotonic(),
        (user + nice + system + irq + softirq + steal) / ticks,
        time.process_time(),
    )


def share_of_others(before: ProcessorTimes | None) -> float | None:
    """Return the share of all processors, 0 to 1, that others took since then; None if unknown or too short a time."""
    now = processor_times()
    if before is None or now is None or now.clock - before.clock < MIN_SECONDS:
        return None
    others = (now.in_use - before.in_use) - (now.own - before.own)
    return min(1.0, max(0.0, others / ((now.clock - before.clock) * (os.cpu_count() or 1))))

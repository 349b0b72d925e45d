"""What verifications, draft passes and the rest of a cycle take here: medians of interleaved, made-up cycles."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from specengine.costs import Costs, Points, interpolated
from specengine.cuda_graphs import Graphs, room
from specengine.errors import require
from specengine.models import Target
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds

if TYPE_CHECKING:
    from specengine.drafters import Drafter

CONTEXTS = (64, 1024)  # tokens in the cache
SECONDS = 3.0
MOST_CYCLES = 200  # cycles of one node in whose time a calibration is done, where that is less
NEAR_SHARE = 0.6  # of the time, for the short context
ROUNDS = 4  # that a plan must have time for; the first one warms up


class Plan(NamedTuple):
    """Counts that one round of cycles goes through.

    A processor's matrix products step where a block of 16 rows is full, so both sides of steps are among them, and 96
    behind the last one, so that the slope that goes on from there is one over several blocks.
    """

    nodes: tuple[int, ...]
    widths: tuple[int, ...]


FEWEST = Plan((1, 64, 16), (1, 16, 4))
NEAR = (
    Plan((1, 64, 16, 17, 32, 33, 48, 49, 96, 8), (1, 16, 4, 8)),
    Plan((1, 64, 16, 17, 32, 33, 48, 49, 96, 8, 2, 24, 4), (1, 16, 4, 8, 2)),
)
FAR = (Plan((1, 64, 16, 17, 32, 33), (1, 16, 4)),)
PADDED = (Plan((1, 64, 16, 32, 96, 8), (1, 16, 4, 8)),)


@dataclass
class _Found:
    """Seconds by count, in the order of their measurement, behind one context."""

    verify: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    root: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    def medians(self) -> tuple[Points, Points]:
        return _medians(self.verify, FEWEST.nodes), _medians(self.draft, FEWEST.widths)

    def overhead(self) -> float:
        """Both commits, and what the first draft pass takes beyond another one."""
        _, draft = self.medians()
        return _median(self.commit) + max(0.0, _median(self.root) - interpolated(draft, 1))


@torch.inference_mode()
def measure(target: Target, drafter: Drafter | None, *, seconds: float = SECONDS) -> Costs:
    """Seconds of verifying n nodes, of drafting from n nodes, and of what else a cycle does, on this machine.

    Random tokens, behind two contexts where the model's allows it; verification with the greedy choice, as an engine
    does it. A lookup beside the draft finds nothing in random tokens, which is its cheaper case. Without a drafter its
    passes cost nothing. The caches are empty afterwards; no generation may be under way.

    seconds  at most, but for the fewest cycles that give two points; less where 200 cycles of one node take less,
             but for captures on a device

    Of a captured target the verification of n rows is captured as a graph of its own, and so are the draft's passes;
    the result is `padded`: an engine's trees all take what its largest tree does.
    """
    require("seconds", seconds, "above 0", seconds > 0)
    began = time.perf_counter()
    cycles = MadeUpCycles(target, drafter, max(contexts(target)))
    try:
        with target.running():
            return _measured(cycles, began, seconds)
    finally:
        cycles.end()


def contexts(target: Target) -> tuple[int, int]:
    """The short and the long context that costs are measured behind, in tokens; one where the model's is short."""
    most = max(1, target.max_context - 2 * LONGEST)
    near, far = (min(context, most) for context in CONTEXTS)
    return near, far if far >= 2 * near else near


def _measured(cycles: MadeUpCycles, began: float, seconds: float) -> Costs:
    near, far = contexts(cycles.target)
    prefill = cycles.begin(near)
    first = cycles.cycle(1, 1)
    if sum(first) < seconds / 20:
        first = min((cycles.cycle(1, 1) for _ in range(3)), key=sum)  # the one before has warmed up
    padded = cycles.target.captured
    captures = padded and cycles.target.device.type == "cuda"  # each takes longer than many cycles
    allowed = seconds if captures else min(seconds, MOST_CYCLES * sum(first))
    found = _rounds(cycles, PADDED if padded else NEAR, began + (NEAR_SHARE if far > near else 1) * allowed)
    verify, draft = found.medians()
    left = began + allowed - time.perf_counter() - (len(FEWEST.nodes) + 1) * verify[max(verify)]
    far = min(far, int(near * left / prefill)) if left > 0 else near
    growths: list[Points] = [{}, {}]
    if far >= 2 * near:
        cycles.begin(far)
        later = _rounds(cycles, () if padded else FAR, began + allowed).medians()
        growths = [_growth(before, after, far - near) for before, after in zip((verify, draft), later, strict=True)]
    return Costs(
        "measured",
        verify,
        draft if cycles.drafter is not None else {1: 0.0},
        source="measured",
        measured=True,
        overhead=found.overhead(),
        context=near,
        verify_growth=growths[0],
        draft_growth=growths[1] if cycles.drafter is not None else {},
        padded=padded,
    )


def _rounds(cycles: MadeUpCycles, plans: Sequence[Plan], until: float) -> _Found:
    """Rounds of the fewest cycles, then of the fullest plan that there is time for."""
    found, plan = _Found(), FEWEST
    _round(cycles, plan, found, until)
    for fuller in plans:
        if time.perf_counter() + ROUNDS * _seconds(fuller, found) < until:
            plan = fuller
    while time.perf_counter() < until:
        _round(cycles, plan, found, until)
    return found


def _round(cycles: MadeUpCycles, plan: Plan, found: _Found, until: float) -> None:
    for nodes, width in zip(plan.nodes, itertools.cycle(plan.widths), strict=False):
        if len(found.verify) > 1 and time.perf_counter() > until:
            return
        took = cycles.cycle(nodes, width)
        found.verify[nodes].append(took.verify)
        found.draft[width].append(took.step)
        found.root.append(took.root)
        found.commit.append(took.commit)


def _seconds(plan: Plan, found: _Found) -> float:
    """Of a round of this plan."""
    verify, draft = found.medians()
    beside = _median(found.root) + _median(found.commit) + interpolated(draft, max(plan.widths))
    return sum(beside + interpolated(verify, nodes) for nodes in plan.nodes)


def _growth(near: Points, far: Points, tokens: int) -> Points:
    return {n: max(0.0, far[n] - near[n]) / tokens for n in sorted(near.keys() & far.keys())}


def _medians(samples: dict[int, list[float]], always: Sequence[int]) -> Points:
    return {n: _median(took) for n, took in sorted(samples.items()) if n in always or len(took) > 1}


def _median(took: list[float]) -> float:
    return statistics.median(took[1:] or took)  # the first one warms up


T = TypeVar("T")

MOST_NODES, MOST_WIDTH = 96, 16  # that are measured
CHILDREN = 3  # of a node of a verified tree
PATH = 3  # nodes that a cycle commits, of trees that are deep enough
DRIFT = 32  # tokens by which cycles may lengthen the context that they stand for
LONGEST = 8  # tokens that a cycle can add, or that a tree can be deep
DRAFTED = 4 * (MOST_WIDTH + 1)  # slots of the draft's scratch: a capture runs a pass several times

Verified = tuple[list[int], Tensor | None]


class Sample(NamedTuple):
    """Seconds of one cycle: the draft's first pass and a further one, verification, both commits."""

    root: float
    step: float
    verify: float
    commit: float


class MadeUpCycles:
    """Cycles of `target` and `drafter`, which may be None, behind a context of up to `longest` random tokens.

    Nothing but the caches is touched; `end` clears those. Runs inside inference mode and `target.running()`.
    """

    def __init__(self, target: Target, drafter: Drafter | None, longest: int) -> None:
        self.target, self.drafter = target, drafter
        self.graphs = Graphs(target.device) if target.captured else None
        self._random = torch.Generator().manual_seed(0)
        self._prompt: list[int] = []
        self._root = self._tokens(1)[0]
        self._branching = min(CHILDREN, target.vocab_size)
        self._verified: dict[int, TokenTree] = {}  # made once, as captures read them
        self._drafted: dict[int, tuple[TokenTree, Nodes]] = {}
        self.end()  # what a generation before has left
        target.want(() if drafter is None else drafter.traits.features)
        self._reserve(longest)

    def begin(self, context: int) -> float:
        """Make both caches hold `context` tokens; the seconds that this took."""
        self._prompt += self._tokens(context - len(self._prompt))
        self._prompt = self._prompt[:context]
        return self._timed(self._rewind)[0]

    def cycle(self, nodes: int, width: int) -> Sample:
        """Draft from the root and from `width` nodes, verify `nodes` nodes, commit a path."""
        if len(self.target.tokens) + LONGEST > min(len(self._prompt) + DRIFT, self.target.max_context):
            self._rewind()
        if nodes not in self._verified:
            self._verified[nodes] = self._tree_of(nodes)
        tree = self._verified[nodes]
        root, step = self._draft(width)
        verify, (_, features) = self._timed(self._verification(tree))
        commit, _ = self._timed(lambda: self._commit(tree, features))
        return Sample(root, step, verify, commit)

    def end(self) -> None:
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()

    # ---- the parts of a cycle

    def _draft(self, width: int) -> tuple[float, float]:
        drafter: Any = self.drafter
        if drafter is None:
            return 0.0, 0.0
        if width not in self._drafted:
            self._drafted[width] = self._star_of(min(width, self.target.vocab_size))
        tree, frontier = self._drafted[width]

        def root() -> object:
            return drafter.root(tree)

        def step() -> object:
            return drafter.step(tree, frontier)

        if self.graphs is None or not _is_captured(drafter):
            return self._timed(root)[0], self._timed(step)[0]
        names = ("root", width), ("step", width)
        self._capture(list(zip(names, (root, step), strict=True)), drafter.reads, drafter.state)
        first = self._timed(partial(self._replay, names[0], drafter.reads, root))[0]
        return first, self._timed(partial(self._replay, names[1], drafter.reads, step))[0]

    def _verification(self, tree: TokenTree) -> Callable[[], Verified]:
        """What verifies this tree and chooses greedily, as the engine does it."""
        target = self.target

        def chosen() -> tuple[Tensor, Tensor | None]:
            logits, features = target.verify(tree)
            return logits.argmax(-1), features

        def eager() -> Verified:
            found = target.choose(tree)
            if found is None:
                tokens, features = chosen()
                return tokens.tolist(), features
            return found.tokens, found.features

        if self.graphs is None or not isinstance(target, HuggingFaceTarget):
            return eager
        name, reads = ("verify", tree.capacity), (target.cache.slab,)
        self._capture([(name, chosen)], reads, (target.cache.filled,))

        def replayed() -> Verified:
            tokens, features = self._replay(name, reads, chosen)
            return tokens.tolist(), features

        return replayed

    def _commit(self, tree: TokenTree, features: Tensor | None) -> None:
        path = [0, 1, 1 + self._branching] if len(tree) > 1 + self._branching else [0]
        self.target.commit(tree, path)
        if self.drafter is not None:
            tokens = [*tree.tokens[path[1:]].tolist(), self._root]
            self.drafter.accept(Cycle(tree, path, tokens, Seconds(), len(tree) - 1, features))

    # ---- trees, caches, clocks

    def _tree_of(self, nodes: int) -> TokenTree:
        """Of so many nodes, every one with the same number of children, as far as they go."""
        ids, branching = torch.arange(nodes, dtype=torch.int64, device="cpu"), self._branching
        parents = torch.div(ids - 1, branching, rounding_mode="floor")
        depths = [0]
        for parent in parents[1:].tolist():
            depths.append(depths[parent] + 1)
        tokens = (self._root + 7 * parents + ids % branching) % self.target.vocab_size
        tokens[0] = self._root
        edges = -(ids > 0).float()
        levels = torch.tensor(depths, dtype=torch.int64, device="cpu")
        arrays = tokens, parents, levels, edges, -levels.float()
        tokens, parents, levels, edges, paths = (array.to(self.target.device) for array in arrays)
        return TokenTree.of(tokens, parents, levels, edges, paths)

    def _star_of(self, width: int) -> tuple[TokenTree, Nodes]:
        """So many children under a root, and they as a frontier."""
        device = torch.device("cpu") if self.drafter is None else self.drafter.device
        tree = TokenTree.root(self._root, width + 1, device)
        tokens = (self._root + torch.arange(width, device=device, dtype=torch.int64)) % self.target.vocab_size
        return tree, tree.add(torch.zeros_like(tokens), tokens, -torch.ones(width, device=device, dtype=torch.float32))

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(
            self.target.vocab_size, (max(0, count),), generator=self._random, dtype=torch.int64, device="cpu"
        ).tolist()

    def _reserve(self, context: int) -> None:
        """Once for all: captures read buffers that must not move."""
        tokens = context + DRIFT + 2 * LONGEST
        if self.graphs is None:
            self.target.reserve(tokens, MOST_NODES)
        else:  # as captured.py does it: attention that is no kernel of its own runs over all slots
            self.target.reserve(room(tokens + MOST_NODES + getattr(self.target, "strict_rows", 0)), 0)
        innermost: Any = self.drafter
        while hasattr(innermost, "inner"):  # of those that wrap another
            innermost = innermost.inner
        if _is_captured(innermost):
            innermost.reserve(tokens, DRAFTED, LONGEST)

    def _rewind(self) -> None:
        known, drafter = self._prompt, self.drafter
        kept = min(self.target.cached(known), len(known) if drafter is None else drafter.cached(known))
        features = self.target.prefill(known, kept)
        if drafter is not None:
            drafter.begin(known, features)

    def _capture(
        self, parts: Sequence[tuple[Hashable, Callable[[], object]]], reads: Sequence[Tensor], state: Sequence[Tensor]
    ) -> None:
        """Capture what is not captured yet. That runs the functions, so what lasts longer than a tree is put back."""
        assert self.graphs is not None
        if all(self.graphs.has(name, reads) for name, _ in parts):
            return
        kept = [tensor.clone() for tensor in state]
        for name, function in parts:
            self.graphs.run(name, reads, function)
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)

    def _replay(self, name: Hashable, reads: Sequence[Tensor], function: Callable[[], T]) -> T:
        assert self.graphs is not None
        return self.graphs.run(name, reads, function)

    def _timed(self, function: Callable[[], T]) -> tuple[float, T]:
        self._wait()
        began = time.perf_counter()
        found = function()
        self._wait()
        return time.perf_counter() - began, found

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def _is_captured(drafter: Any) -> bool:
    """Return whether this is a CapturedDrafter, a class of a package above this one."""
    return hasattr(drafter, "reads")

"""What verifications, draft passes and the rest of a cycle take here: medians of interleaved, made-up cycles."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specengine.calibration.cycles import LONGEST, MadeUpCycles
from specengine.costs import Costs, Points, interpolated
from specengine.drafters import Drafter
from specengine.errors import require
from specengine.models import Target

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

"""Best-first queues: the candidates of a layer go into the queue, the next batch comes out of it, in one launch.

`_step` is one program, with a lane for each entry of the three lists that meet: G (the scores of accepted nodes), Q
(scored, not yet drawn) and the candidates. All are best first, so an entry's place in a merged list is its own place
plus the number of better ones in the other list, which a binary search finds; the six searches go side by side. Nothing
is sorted, and nothing is written before all has been read. Of equal scores those of G come first, then those of Q, then
the candidates; within a list the order stays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_BUDGET = 1024


class Queues(NamedTuple):
    """The queues of a search, best first, behind their ends scores of -inf. accepted, scores, log_probs: float32
    [budget], scores of G, of Q, and the edges of Q; parents, depths, tokens: int64 [budget], of Q."""

    accepted: Tensor
    scores: Tensor
    log_probs: Tensor
    parents: Tensor
    depths: Tensor
    tokens: Tensor


class Candidates(NamedTuple):
    """Scored continuations of a frontier, best first, `count` of them (int32 [1]). rows, columns: int64 [m], places in
    the frontier and in the draft's vocabulary; log_probs, scores: float32 [m], of the edge and of the path, not NaN;
    those of a score of -inf do not count."""

    rows: Tensor
    columns: Tensor
    log_probs: Tensor
    scores: Tensor
    count: Tensor


class Drawn(NamedTuple):
    """Entries that become nodes, best first. parents, tokens: int64 [budget]; log_probs: float32 [budget]; count: int32
    [1], behind which they are undefined; expand: int64 [min(batch, budget)], ascending indices of those to draft from,
    0 behind `expanded`, int32 [1]."""

    parents: Tensor
    tokens: Tensor
    log_probs: Tensor
    count: Tensor
    expand: Tensor
    expanded: Tensor


# ---- meaning


class Left(NamedTuple):
    """What a step leaves: the scores of G; Q and what was drawn as (score, edge, parent, depth, token); and which of
    these to draft from."""

    accepted: list[float]
    queue: list[tuple[float, float, int, int, int]]
    nodes: list[tuple[float, float, int, int, int]]
    expand: list[int]


def reference(
    queues: Queues,
    candidates: Candidates,
    nodes: Tensor,
    depths: Tensor,
    *,
    level: int,
    batch: int,
    max_depth: int,
    threshold: float,
    target_ids: Tensor | None = None,
) -> Left:
    """What `step_queues` leaves where the frontier is not empty, by sorting lists."""
    budget = queues.accepted.shape[0]
    accepted, queue = [0.0], []
    if level != 1:
        accepted = [score for score in queues.accepted.tolist() if score > -math.inf]
        queue = list(zip(*(array.tolist() for array in queues[1:]), strict=True))
    made = zip(*(array[: int(candidates.count)].tolist() for array in candidates[:4]), strict=True)
    for row, column, edge, score in made:
        token = column if target_ids is None else int(target_ids[column])
        queue.append((score, edge, int(nodes[row]), int(depths[row]) + 1, token))
    queue = sorted((entry for entry in queue if entry[0] > -math.inf), key=lambda entry: -entry[0])[:budget]  # stable
    inner = [place for place, entry in enumerate(queue) if entry[3] < max_depth]
    count = inner[batch - 1] + 1 if len(inner) >= batch else len(queue)
    ranked = [(-score, -1) for score in accepted] + [(-entry[0], place) for place, entry in enumerate(queue[:count])]
    ranked = sorted(ranked, key=lambda pair: pair[0])[:budget]
    drawn = [queue[place] for _, place in ranked if place >= 0]
    worst = -ranked[-1][0] if len(ranked) == budget else -math.inf
    expand = [place for place, entry in enumerate(drawn) if entry[0] > worst and entry[3] < max_depth]
    if math.fsum(math.exp(drawn[place][0]) for place in expand) < threshold:
        expand = []
    return Left([-score for score, _ in ranked], queue[count:], drawn, expand)


# ---- kernels


@triton.jit
def _further(seen, step: tl.constexpr, scores, count, x, AS_GOOD: tl.constexpr):
    """A step of a binary search: how many of the first `count` scores, which descend, are better than x, or as good."""
    then = seen + step
    other = tl.load(scores + then - 1, mask=then <= count, other=float("-inf"))
    better = other > x
    if AS_GOOD:
        better = other >= x
    return tl.where((then <= count) & better, then, seen)


@triton.jit
def _counts(old_high, new_high, old_low, new_low):
    """How many of each pair of flags are set, by one sum."""
    high, low = old_high.to(tl.int32) + new_high.to(tl.int32), old_low.to(tl.int32) + new_low.to(tl.int32)
    both = tl.sum(high * 65536 + low, 0)
    return both >> 16, both & 65535


@triton.jit
def _put(values, place, drawn, comes_out, stays, queue, out):
    tl.store(out + place, values, mask=comes_out)
    tl.store(queue + place - drawn, values, mask=stays)


@triton.jit(do_not_specialize=["budget", "most", "max_depth", "width"])
def _step(
    accepted,
    scores,
    log_probs,
    parents,
    depths,
    tokens,
    rows,
    columns,
    new_log_probs,
    new_scores,
    new_count,
    nodes,
    node_depths,
    live,
    target_ids,
    level,
    out_parents,
    out_tokens,
    out_log_probs,
    out_count,
    expand,
    expanded,
    threshold: tl.float64,
    budget,
    most,
    max_depth,
    width,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    inside, given, lowest = lane < budget, lane < most, float("-inf")
    going, begins = tl.load(live) > 0, tl.load(level) == 1
    known, made = tl.where(begins, 0, budget), tl.minimum(tl.load(new_count), most)
    top = tl.load(accepted + lane, mask=inside, other=lowest)
    old = tl.load(scores + lane, mask=inside, other=lowest)
    new = tl.load(new_scores + lane, mask=given, other=lowest)
    old_edge, new_edge = tl.load(log_probs + lane, mask=inside), tl.load(new_log_probs + lane, mask=given)
    old_parent, old_token = tl.load(parents + lane, mask=inside), tl.load(tokens + lane, mask=inside)
    old_depth = tl.load(depths + lane, mask=inside)
    row, new_token = tl.load(rows + lane, mask=given), tl.load(columns + lane, mask=given)
    there = lane < made
    top = tl.where(begins, tl.where(lane == 0, 0.0, lowest), top)  # the root
    old = tl.where(begins, lowest, old)
    new = tl.where(there, new, lowest)
    new_parent = tl.load(nodes + row, mask=there)
    new_depth = tl.load(node_depths + row, mask=there) + 1
    if target_ids is not None:
        new_token = tl.load(target_ids + new_token, mask=there)

    # how many entries of the one list rank before each entry of the other
    none = tl.zeros([BLOCK], tl.int32)
    old_over_top, new_over_top, top_over_old, new_over_old, top_over_new, old_over_new = (none,) * 6
    for i in tl.static_range(STEPS):
        old_over_top = _further(old_over_top, BLOCK >> i, scores, known, top, False)
        new_over_top = _further(new_over_top, BLOCK >> i, new_scores, made, top, False)
        top_over_old = _further(top_over_old, BLOCK >> i, accepted, known, old, True)
        new_over_old = _further(new_over_old, BLOCK >> i, new_scores, made, old, False)
        top_over_new = _further(top_over_new, BLOCK >> i, accepted, known, new, True)
        old_over_new = _further(old_over_new, BLOCK >> i, scores, known, new, True)
    top_over_new = tl.where(begins, (new <= 0.0).to(tl.int32), top_over_new)

    # places in Q, and before each entry of Q those that can be drafted from: a batch has so many
    old_place, new_place = lane + new_over_old, lane + old_over_new
    old_in, new_in = (old > lowest) & (old_place < budget), (new > lowest) & (new_place < budget)
    old_inner, new_inner = old_in & (old_depth < max_depth), new_in & (new_depth < max_depth)
    both = old_inner.to(tl.int32) * 65536 + new_inner.to(tl.int32)
    before = tl.cumsum(both, 0) - both
    old_rank = (before >> 16) + (tl.gather(before, tl.minimum(new_over_old, BLOCK - 1), 0) & 65535)
    new_rank = (before & 65535) + (tl.gather(before, tl.minimum(old_over_new, BLOCK - 1), 0) >> 16)
    old_drawn, new_drawn = old_in & (old_rank < width), new_in & (new_rank < width)
    drawn, held = _counts(old_drawn, new_drawn, old_in, new_in)

    # places in G of what it has and of what was drawn, the first `drawn` of Q
    top_place = lane + tl.minimum(drawn, old_over_top + new_over_top)
    old_top, new_top = old_place + top_over_old, new_place + top_over_new
    old_kept, new_kept = old_drawn & (old_top < budget), new_drawn & (new_top < budget)
    last = tl.where(top_place == budget - 1, top, lowest)
    last = tl.where(old_kept & (old_top == budget - 1), old, last)
    last = tl.where(new_kept & (new_top == budget - 1), new, last)
    worst = tl.max(last, 0)  # -inf where G is not full
    old_expands, new_expands = old_kept & old_inner & (old > worst), new_kept & new_inner & (new > worst)
    kept, drafted = _counts(old_kept, new_kept, old_expands, new_expands)
    mass = tl.where(old_expands, tl.exp(old.to(tl.float64)), 0.0)
    mass = tl.sum(mass + tl.where(new_expands, tl.exp(new.to(tl.float64)), 0.0), 0)
    goes_on = going & (mass >= tl.full([], threshold, tl.float64))  # the interpreter has it as a number
    chosen = tl.where(goes_on, drafted, 0)

    tl.debug_barrier()  # other lanes have read what is written over now
    tl.store(accepted + top_place, top, mask=going & (top_place < budget))
    tl.store(accepted + old_top, old, mask=going & old_kept)
    tl.store(accepted + new_top, new, mask=going & new_kept)
    old_drawn, new_drawn = going & old_drawn, going & new_drawn
    old_stays, new_stays = going & old_in & (old_place >= drawn), going & new_in & (new_place >= drawn)
    _put(old_parent, old_place, drawn, old_drawn, old_stays, parents, out_parents)
    _put(new_parent, new_place, drawn, new_drawn, new_stays, parents, out_parents)
    _put(old_token, old_place, drawn, old_drawn, old_stays, tokens, out_tokens)
    _put(new_token, new_place, drawn, new_drawn, new_stays, tokens, out_tokens)
    _put(old_edge, old_place, drawn, old_drawn, old_stays, log_probs, out_log_probs)
    _put(new_edge, new_place, drawn, new_drawn, new_stays, log_probs, out_log_probs)
    tl.store(depths + old_place - drawn, old_depth, mask=old_stays)
    tl.store(depths + new_place - drawn, new_depth, mask=new_stays)
    tl.store(scores + old_place - drawn, old, mask=old_stays)
    tl.store(scores + new_place - drawn, new, mask=new_stays)
    tl.store(scores + lane, tl.full([BLOCK], lowest, tl.float32), mask=going & inside & (lane >= held - drawn))
    tl.store(expand + old_rank, old_place.to(tl.int64), mask=goes_on & old_expands)
    tl.store(expand + new_rank, new_place.to(tl.int64), mask=goes_on & new_expands)
    tl.store(expand + lane, tl.zeros([BLOCK], tl.int64), mask=(lane >= chosen) & (lane < width))
    tl.store(out_count, tl.where(going, kept, 0))
    tl.store(expanded, chosen)


@triton.jit(do_not_specialize=["budget"])
def _fill(accepted, scores, out_count, expand, expanded, budget, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    top = tl.load(accepted + lane, mask=lane < budget, other=0.0)  # no room where nothing is
    old = tl.load(scores + lane, mask=lane < budget, other=float("-inf"))
    room = tl.sum((top == float("-inf")).to(tl.int32), 0)
    tl.store(out_count, tl.minimum(room, tl.sum((old > float("-inf")).to(tl.int32), 0)))
    tl.store(expand, tl.zeros([], tl.int64))
    tl.store(expanded, 0)


# ---- launchers


def step_queues(
    queues: Queues,
    candidates: Candidates,
    nodes: Tensor,
    depths: Tensor,
    live: Tensor,
    level: Tensor,
    *,
    batch: int,
    max_depth: int,
    threshold: float,
    target_ids: Tensor | None = None,
    out: Drawn | None = None,
) -> Drawn:
    """Put the candidates into Q, which keeps the `budget` best, and move a batch of the best from Q to G, likewise.

    queues: changed in place; at level (int32 [1]) 1 they begin with the root alone, in G, whatever they held.
    candidates: what stands behind their count is not used. nodes, depths: int64 [W], of the frontier; live: int32 [1],
    how many there are: where none, nothing changes and nothing is drawn. target_ids: int64 [draft vocabulary], the
    tokens of the columns, or None where they are the columns.
    A batch ends with the `batch`-th entry of a depth below max_depth. What G keeps of it becomes nodes; those better
    than the worst of a full G and of a depth below max_depth are drafted from, unless their path probabilities sum up
    to less than `threshold`, in float64. Capturable; allocates nothing where `out` (`drawn_for`) is given.
    """
    budget, given = _budget_of(queues), candidates.scores.shape[0]
    whole, real, numbers = candidates[:2], candidates[2:4], (candidates.count, live, level)
    if not _are(torch.int64, given, *whole) or not _are(torch.float32, given, *real):
        raise ValueError(f"candidates: int64 [{given}] x 2, float32 [{given}] x 2 are needed")
    if not _are(torch.int64, nodes.shape[0], nodes, depths) or not _are(torch.int32, 1, *numbers):
        raise ValueError("nodes, depths, live, level, candidates.count: int64 [W] x 2, int32 [1] x 3 are needed")
    if batch < 1 or max_depth < 1:
        raise ValueError(f"batch, max_depth: got {batch}, {max_depth}, accepted 1 or more")
    block, width = _block(budget), min(batch, budget)
    out = drawn_for(budget, width, queues.scores.device) if out is None else out
    _step[(1,)](
        *queues,
        *candidates,
        nodes,
        depths,
        live,
        target_ids,
        level,
        *out,
        threshold,
        budget,
        min(given, budget),
        max_depth,
        width,
        BLOCK=block,
        STEPS=block.bit_length(),
        num_warps=min(8, block // 32),
    )
    return out


def fill_queues(queues: Queues) -> Drawn:
    """The first entries of Q, as many as G has room for, none of them to draft from; the queues stay. Capturable."""
    budget = _budget_of(queues)
    block, out = _block(budget), drawn_for(1, 1, queues.scores.device)
    drawn = out._replace(parents=queues.parents, tokens=queues.tokens, log_probs=queues.log_probs)
    _fill[(1,)](*queues[:2], *drawn[3:], budget, BLOCK=block, num_warps=min(8, block // 32))
    return drawn


def drawn_for(budget: int, width: int, device: torch.device | str) -> Drawn:
    """Room for what `step_queues` draws; width: the smaller of batch and budget."""
    parents, tokens = torch.empty(2, budget, dtype=torch.int64, device=device)
    count, expanded = torch.empty(2, dtype=torch.int32, device=device).split(1)
    log_probs = torch.empty(budget, dtype=torch.float32, device=device)
    return Drawn(parents, tokens, log_probs, count, torch.empty(width, dtype=torch.int64, device=device), expanded)


def _block(budget: int) -> int:
    return max(32, triton.next_power_of_2(budget))


def _budget_of(queues: Queues) -> int:
    budget = queues.scores.shape[0]
    if not 1 <= budget <= MOST_BUDGET:
        raise ValueError(f"queues: a budget of {budget}, accepted 1 to {MOST_BUDGET}")
    if not _are(torch.float32, budget, *queues[:3]) or not _are(torch.int64, budget, *queues[3:]):
        raise ValueError(f"queues: float32 [{budget}] x 3, int64 [{budget}] x 3 are needed")
    return budget


def _are(dtype: torch.dtype, size: int, *tensors: Tensor) -> bool:
    return all(tensor.dtype is dtype and tensor.shape == (size,) and tensor.is_contiguous() for tensor in tensors)

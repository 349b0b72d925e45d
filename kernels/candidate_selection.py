"""Candidate selection: the best continuations of a whole layer of draft rows, by path log-probability.

Three launches, whatever the input: `_stats` reads the logits once (softmax sums, maxima of groups of columns),
`_filter` reads them again and keeps what can be among the best, `_rank` places each kept candidate by counting the
better ones. The k-th largest group maximum bounds the k-th best candidate from below (k groups hold at least k
candidates that good), so few survive the filter. Survivors find their place in the scratch by an atomic counter, in any
order; the ranks make the result independent of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 3e38  # what +inf counts as; NaN counts as -inf
TILE = 4096  # columns per program; fewer where that leaves multiprocessors idle, more where rows are many
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
MOST_STATISTICS = 2048  # tile or group maxima, of all rows, that a program of `_filter` holds
# candidates per program of `_rank`, and how many others it compares them with at a time
RANKED, RIVALS = 128, 32
MOST_RANKERS = 128
# Launch options of kernels that sum products over lanes. Of two lanes that exchange their products, each would fuse its
# own into the addition, without rounding it, so that one sum would come out differently in each lane.
EVEN = {"enable_fp_fusion": False}


class Selection(NamedTuple):
    """Candidates, best first; from `count` on rows and tokens are 0, log-probabilities and scores -inf.

    rows, tokens: int64 [R]; log_probs: float32 [R], of the edge; scores: float32 [R], of the path; count: int32 [1];
    anchor: float32 [1], the layer's best score.
    """

    rows: Tensor
    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    count: Tensor
    anchor: Tensor


# ---- meaning


def reference(
    logits: Tensor,
    parents: Tensor,
    budget: int,
    *,
    log_gate: float = -math.inf,
    bound: float = -math.inf,
    normalized: bool = False,
) -> Selection:
    """Compute `select_candidates` in plain torch; float64 logits are computed in float64."""
    values = _defined(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    peak = values.max(1, keepdim=True).values.clamp(min=torch.finfo(torch.float32).min)
    log_sum = (values - peak).exp().sum(1, keepdim=True).log().clamp(min=0.0)
    log_probs = values if normalized else values - peak - log_sum
    scores = _defined(parents.to(values.dtype))[:, None] + log_probs
    anchor = scores.max()
    passes = (scores >= anchor + log_gate) & (scores > bound) & (scores > -math.inf)
    found = [
        (-scores[r, c].item(), r, -values[r, c].item(), c) for r, c in passes.nonzero().tolist()
    ]
    best = sorted(found)[:budget]
    row, token = (
        torch.tensor([entry[i] for entry in best], dtype=torch.int64, device="cpu") for i in (1, 3)
    )
    count = torch.tensor([len(best)], dtype=torch.int32, device="cpu")
    return Selection(row, token, log_probs[row, token], scores[row, token], count, anchor[None])


def _defined(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf).clamp(max=LARGEST)


# ---- kernels


@triton.jit
def _read(row, column, live, LARGEST: tl.constexpr):
    """Read float32 values without NaN and +inf; -inf where `live` is not set."""
    x = tl.load(row + column, mask=live, other=float("-inf")).to(tl.float32)
    # before any maximum: what that makes of NaN differs between devices
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(x > LARGEST, LARGEST, x)


@triton.jit
def _order(x):
    """Map floats to int32 in the same order; both zeros become the same number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x, index):
    """Map (x descending, index ascending) to descending int64 keys."""
    return (_order(x).to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@triton.jit
def _key_value(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_index(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _edge(order, wanted, least, quarter, ROUNDS: tl.constexpr):
    """Find the largest number, `least` or more, that `wanted` of these reach; each round finds two of its bits.

    A round counts for three numbers at once, in 20 bits each, so that it costs one reduction.
    """
    for _ in range(ROUNDS):
        one, two, three = least + quarter, least + 2 * quarter, least + 3 * quarter
        reach = (
            (order >= one).to(tl.int64)
            + ((order >= two).to(tl.int64) << 20)
            + ((order >= three).to(tl.int64) << 40)
        )
        counts = tl.sum(reach, 0)
        enough = ((counts & 0xFFFFF) >= wanted).to(tl.int32)
        enough += (((counts >> 20) & 0xFFFFF) >= wanted).to(tl.int32) + (
            (counts >> 40) >= wanted
        ).to(tl.int32)
        least += enough * quarter
        quarter = quarter >> 2
    return least


@triton.jit
def _given(source, ON_DEVICE: tl.constexpr):
    """Read a device scalar, or take a number of the host."""
    return tl.load(source) if ON_DEVICE else source


@triton.jit(do_not_specialize_on_alignment=["parents"])
def _stats(
    logits,
    parents,
    tile_peak,
    tile_sum,
    group_peak,
    survivors,
    row_stride,
    columns,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, tile = tl.program_id(1), tl.program_id(0)
    column = tile * TILE + tl.arange(0, TILE)
    # nothing of a dead row; NaN is dead too
    end = tl.where(tl.load(parents + row) > float("-inf"), columns, 0)
    x = _read(logits + row.to(tl.int64) * row_stride, column, column < end, LARGEST)
    groups: tl.constexpr = TILE // GROUP
    tops = tl.max(tl.reshape(x, [groups, GROUP]), 1)
    peak = tl.max(tops, 0)
    place = row * tl.num_programs(0) + tile
    tl.store(group_peak + place * groups + tl.arange(0, groups), tops)
    tl.store(tile_peak + place, peak)
    tl.store(tile_sum + place, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    if place == 0:
        tl.store(survivors, 0)  # counted by the next kernel


@triton.jit(
    do_not_specialize=["budget", "most", "rows"],
    do_not_specialize_on_alignment=["parents", "anchor", "log_gate", "bound", "budget"],
)
def _filter(
    logits,
    parents,
    tile_peak,
    tile_sum,
    group_peak,
    survivors,
    row_peak,
    row_log_sum,
    path_keys,
    edge_keys,
    anchor,
    log_gate,
    bound,
    budget,
    most,
    row_stride,
    rows,
    columns,
    TILE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUPS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GATE_ON_DEVICE: tl.constexpr,
    BOUND_ON_DEVICE: tl.constexpr,
    BUDGET_ON_DEVICE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, tile, tiles = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    wanted = tl.minimum(_given(budget, BUDGET_ON_DEVICE), most)
    # every program merges the statistics of all rows for itself: they are small, and nobody waits for anybody
    r, t, g = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_G)
    parent = _read(parents, r, r < rows, LARGEST)
    some = (r < rows)[:, None] & (t < tiles)[None, :]
    peaks = tl.load(tile_peak + r[:, None] * tiles + t[None, :], mask=some, other=float("-inf"))
    sums = tl.load(tile_sum + r[:, None] * tiles + t[None, :], mask=some, other=0.0)
    finite_peak = tl.maximum(tl.max(peaks, 1), -3.4028234663852886e38)
    log_sum = tl.log(tl.maximum(tl.sum(sums * tl.exp(peaks - finite_peak[:, None]), 1), 1.0))
    if NORMALIZED:
        finite_peak, log_sum = tl.zeros_like(finite_peak), tl.zeros_like(log_sum)
    groups = tiles * GROUPS
    some = (r < rows)[:, None] & (g < groups)[None, :]
    tops = tl.load(group_peak + r[:, None] * groups + g[None, :], mask=some, other=float("-inf"))
    tops = parent[:, None] + ((tops - finite_peak[:, None]) - log_sum[:, None])
    best = tl.max(tl.max(tops, 1), 0)

    # the `wanted`-th largest group maximum, its lower 16 bits dropped: that many candidates are at least as good
    high = tl.reshape(_order(tops) >> 16, [BLOCK_W * BLOCK_G])
    least = _edge(high, wanted, tl.full([], -32768, tl.int32), tl.full([], 1 << 14, tl.int32), 8)

    own = r == row
    own_peak = tl.sum(tl.where(own, finite_peak, 0.0), 0)
    own_log_sum = tl.sum(tl.where(own, log_sum, 0.0), 0)
    own_parent = tl.max(tl.where(own, parent, float("-inf")), 0)
    if tile == 0:
        tl.store(row_peak + row, own_peak)
        tl.store(row_log_sum + row, own_log_sum)
        if row == 0:
            tl.store(anchor, best)

    column = tile * TILE + tl.arange(0, TILE)
    end = tl.where(own_parent > float("-inf"), columns, 0)
    x = _read(logits + row.to(tl.int64) * row_stride, column, column < end, LARGEST)
    score = own_parent + ((x - own_peak) - own_log_sum)
    gate = best + _given(log_gate, GATE_ON_DEVICE)
    keep = (score > float("-inf")) & (score > _given(bound, BOUND_ON_DEVICE)) & (score >= gate)
    keep &= (_order(score) >> 16) >= least
    found = tl.sum(keep.to(tl.int32), 0)
    if found > 0:
        order = _order(x)
        if found > wanted:
            # no more than `wanted` of one tile can be among the best; of equals the first columns
            lowest = tl.full([], -0x80000000, tl.int32)
            least = _edge(
                tl.where(keep, order, lowest), wanted, lowest, tl.full([], 1 << 30, tl.int32), 16
            )
            better = keep & (order > least)
            equal = (keep & (order == least)).to(tl.int32)
            room = wanted - tl.sum(better.to(tl.int32), 0)
            keep = better | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
            found = tl.sum(keep.to(tl.int32), 0)
        place = tl.atomic_add(survivors, found) + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(path_keys + place, _key(score, tl.zeros([TILE], tl.int32) + row), mask=keep)
        tl.store(edge_keys + place, _key(x, column), mask=keep)


@triton.jit(do_not_specialize=["budget", "most"], do_not_specialize_on_alignment=["budget"])
def _rank(
    path_keys,
    edge_keys,
    survivors,
    row_peak,
    row_log_sum,
    out_rows,
    out_tokens,
    out_log_probs,
    out_scores,
    out_count,
    budget,
    most,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BUDGET_ON_DEVICE: tl.constexpr,
):
    found, wanted = tl.load(survivors), tl.minimum(_given(budget, BUDGET_ON_DEVICE), most)
    lane = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, found, tl.num_programs(0) * BLOCK):
        own = start + lane
        path = tl.load(path_keys + own, mask=own < found, other=0)
        edge = tl.load(edge_keys + own, mask=own < found, other=0)
        rank = tl.zeros([BLOCK], tl.int32)
        for first in range(0, found, RIVALS):
            other = first + tl.arange(0, RIVALS)
            other_path = tl.load(path_keys + other, mask=other < found, other=-0x8000000000000000)[
                None, :
            ]
            other_edge = tl.load(edge_keys + other, mask=other < found, other=-0x8000000000000000)[
                None, :
            ]
            better = (other_path > path[:, None]) | (
                (other_path == path[:, None]) & (other_edge > edge[:, None])
            )
            rank += tl.sum(better.to(tl.int32), 1)
        chosen = (own < found) & (rank < wanted)
        row = _key_index(path)
        peak = tl.load(row_peak + row, mask=chosen, other=0.0)
        log_sum = tl.load(row_log_sum + row, mask=chosen, other=0.0)
        tl.store(out_rows + rank, row, mask=chosen)
        tl.store(out_tokens + rank, _key_index(edge), mask=chosen)
        tl.store(out_log_probs + rank, (_key_value(edge) - peak) - log_sum, mask=chosen)
        tl.store(out_scores + rank, _key_value(path), mask=chosen)
    if tl.program_id(0) == 0:
        kept = tl.minimum(found, wanted)
        tl.store(out_count, kept)
        place = tl.arange(0, BLOCK_R)
        unused = (place >= kept) & (place < most)
        tl.store(out_rows + place, tl.zeros([BLOCK_R], tl.int64), mask=unused)
        tl.store(out_tokens + place, tl.zeros([BLOCK_R], tl.int64), mask=unused)
        tl.store(out_log_probs + place, tl.full([BLOCK_R], float("-inf"), tl.float32), mask=unused)
        tl.store(out_scores + place, tl.full([BLOCK_R], float("-inf"), tl.float32), mask=unused)


# ---- launcher


class Cut(NamedTuple):
    """Partition of the logits: columns per program, columns per group, programs per row."""

    tile: int
    group: int
    tiles: int


def fits(rows: int, columns: int) -> bool:
    """Return whether a program can hold the statistics of all rows: 128 rows of 128k columns, 64 of 248k."""
    tiles = triton.cdiv(columns, 2 * TILE)
    return triton.next_power_of_2(rows) * triton.next_power_of_2(tiles) <= MOST_STATISTICS


def cut_for(rows: int, columns: int) -> Cut:
    """Return the shipped cut of [rows, columns] that `fits`."""
    width = triton.next_power_of_2(rows)
    for tile in (TILE // 4, TILE // 2, TILE, 2 * TILE):
        tile = min(tile, max(128, triton.next_power_of_2(columns)))
        tiles = triton.cdiv(columns, tile)
        groups = MOST_STATISTICS // (width * triton.next_power_of_2(tiles))
        if groups and (tile >= TILE or rows * tiles <= ENOUGH_PROGRAMS):
            return Cut(tile, max(8, tile // groups), tiles)
    raise ValueError(f"logits: [{rows}, {columns}] are too many for one selection")


class Workspace(NamedTuple):
    """Scratch of any content: float32 and int64 and int32 parts."""

    floats: Tensor
    keys: Tensor
    survivors: Tensor


def aligned(entries: int) -> int:
    """Round up a number of entries, so that what follows in a workspace is aligned to 16 bytes."""
    return -(-entries // 4) * 4


def parts_of(rows: int, cut: Cut, most: int) -> tuple[list[int], int]:
    """Return the entries of a workspace's float32 parts, and of each of its two lists of keys."""
    places, groups = aligned(rows * cut.tiles), cut.tile // cut.group
    floats = [places, places, aligned(rows * cut.tiles * groups), aligned(rows), aligned(rows)]
    return floats, aligned(rows * cut.tiles * min(most, cut.tile))


def workspace_for(logits: Tensor, most: int) -> Workspace:
    """Allocate scratch for `select_candidates` with up to `most` candidates of logits of this shape."""
    floats, keys = parts_of(logits.shape[0], cut_for(*logits.shape), most)
    return Workspace(
        torch.empty(sum(floats), dtype=torch.float32, device=logits.device),
        torch.empty(2 * keys, dtype=torch.int64, device=logits.device),
        torch.empty(1, dtype=torch.int32, device=logits.device),
    )


def selection_for(logits: Tensor, most: int) -> Selection:
    """Allocate the outputs of `select_candidates`."""
    device = logits.device
    whole = [torch.empty(most, dtype=torch.int64, device=device) for _ in range(2)]
    real = [torch.empty(size, dtype=torch.float32, device=device) for size in (most, most, 1)]
    return Selection(*whole, *real[:2], torch.empty(1, dtype=torch.int32, device=device), real[2])


def select_candidates(
    logits: Tensor,
    parents: Tensor,
    most: int,
    *,
    budget: Tensor | None = None,
    log_gate: Tensor | float = -math.inf,
    bound: Tensor | float = -math.inf,
    normalized: bool = False,
    out: Selection | None = None,
    workspace: Workspace | None = None,
) -> Selection:
    """Select the best `most` continuations of all rows that pass gate and bound, best first.

    logits: [W, V], last dimension contiguous; NaN counts as -inf, +inf as 3e38; `normalized` says that they are
    log-probabilities. parents: float32 [W], the rows' own path log-probabilities, -inf for padding. A candidate's score
    is its parent's plus its log-probability, in float32. budget: int32 [1] on the device, at most `most`; None means
    `most`. log_gate: with m the layer's best score, only scores of m + log_gate and above pass. bound: only scores
    above it pass; both numbers or float32 [1] on the device. Scores of -inf never pass.
    Order: (score descending, row ascending, logit descending, token ascending). Capturable; allocates nothing where
    `out` (`selection_for`) and `workspace` (`workspace_for`) are given. Three launches; the last takes time quadratic
    in the candidates at or above the bound, which only rows of equal logits make many.
    """
    _check(logits, parents, most)
    rows, columns = logits.shape
    cut = cut_for(rows, columns)
    out = selection_for(logits, most) if out is None else out
    workspace = workspace_for(logits, most) if workspace is None else workspace
    groups, (floats, capacity) = cut.tile // cut.group, parts_of(rows, cut, most)
    tile_peak, tile_sum, group_peak, row_peak, row_log_sum = workspace.floats.split(floats)
    path_keys, edge_keys = workspace.keys.split(capacity)
    grid = (cut.tiles, rows)
    statistics = (tile_peak, tile_sum, group_peak, workspace.survivors)
    _stats[grid](
        logits,
        parents,
        *statistics,
        logits.stride(0),
        columns,
        TILE=cut.tile,
        GROUP=cut.group,
        LARGEST=LARGEST,
        num_warps=max(4, cut.tile // 512),
    )
    wanted = most if budget is None else budget
    _filter[grid](
        logits,
        parents,
        *statistics,
        row_peak,
        row_log_sum,
        path_keys,
        edge_keys,
        out.anchor,
        log_gate,
        bound,
        wanted,
        most,
        logits.stride(0),
        rows,
        columns,
        TILE=cut.tile,
        BLOCK_W=triton.next_power_of_2(rows),
        BLOCK_T=triton.next_power_of_2(cut.tiles),
        BLOCK_G=triton.next_power_of_2(cut.tiles * groups),
        GROUPS=groups,
        NORMALIZED=normalized,
        GATE_ON_DEVICE=isinstance(log_gate, Tensor),
        BOUND_ON_DEVICE=isinstance(bound, Tensor),
        BUDGET_ON_DEVICE=isinstance(wanted, Tensor),
        LARGEST=LARGEST,
        num_warps=max(4, cut.tile // 256),  # with fewer, registers spill
        **EVEN,
    )
    _rank[(min(triton.cdiv(capacity, RANKED), MOST_RANKERS),)](
        path_keys,
        edge_keys,
        workspace.survivors,
        row_peak,
        row_log_sum,
        out.rows,
        out.tokens,
        out.log_probs,
        out.scores,
        out.count,
        wanted,
        most,
        BLOCK=RANKED,
        RIVALS=RIVALS,
        BLOCK_R=triton.next_power_of_2(most),
        BUDGET_ON_DEVICE=isinstance(wanted, Tensor),
        num_warps=4,
    )
    return out


def _check(logits: Tensor, parents: Tensor, most: int) -> None:
    if (
        logits.dim() != 2
        or logits.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or logits.stride(1) != 1
    ):
        raise ValueError(
            f"logits: floating [W, V], dense along V, is needed, got {logits.dtype} {list(logits.shape)}"
        )
    if (
        parents.dtype is not torch.float32
        or parents.shape != logits.shape[:1]
        or not parents.is_contiguous()
    ):
        raise ValueError(
            f"parents: float32 [{logits.shape[0]}] is needed, got {parents.dtype} {list(parents.shape)}"
        )
    if most < 1:
        raise ValueError(f"most: got {most}, accepted 1 or more")

"""The best columns of each row, in order, with their log-probabilities.

Three launches, as `candidate_selection` has, but each row for itself: `_outline` reads the logits once (softmax sums,
maxima of groups of columns), `_pick` reads them again and keeps what is not below the k-th largest of its row's group
maxima, of one tile no more than k, `_place` ranks what was kept by counting the better ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from specengine_kernels.candidate_selection import (
    EVEN,
    LARGEST,
    RANKED,
    RIVALS,
    _edge,
    _key,
    _key_index,
    _key_value,
    _order,
    _read,
    aligned,
)
from specengine_kernels.entropy import cut_for
from torch import Tensor

MOST_GROUPS = 2048  # of a row
MOST_PLACERS = 8  # programs per row of `_place`


# ---- meaning


def reference(logits: Tensor, k: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `top_children` in plain torch and float64."""
    values = (
        logits.double()
        .nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
        .clamp(max=LARGEST)
    )
    best, columns = (part[:, :k] for part in values.sort(dim=1, descending=True, stable=True))
    if not normalized:
        # finite also in rows of -inf alone
        peak = best[:, :1].clamp(min=torch.finfo(torch.float32).min)
        best = best - peak - (values - peak).exp().sum(1, keepdim=True).clamp(min=1.0).log()
    return best.float(), columns


# ---- kernels


@triton.jit
def _outline(
    logits,
    tile_peak,
    tile_sum,
    group_peak,
    kept_counts,
    row_stride,
    columns,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, tile = tl.program_id(1), tl.program_id(0)
    column = tile * TILE + tl.arange(0, TILE)
    x = _read(logits + row.to(tl.int64) * row_stride, column, column < columns, LARGEST)
    groups: tl.constexpr = TILE // GROUP
    tops = tl.max(tl.reshape(x, [groups, GROUP]), 1)
    peak = tl.max(tops, 0)
    place = row * tl.num_programs(0) + tile
    tl.store(group_peak + place * groups + tl.arange(0, groups), tops)
    tl.store(tile_peak + place, peak)
    tl.store(tile_sum + place, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    if tile == 0:
        tl.store(kept_counts + row, 0)  # counted by the next kernel


@triton.jit(do_not_specialize=["k", "capacity"])
def _pick(
    logits,
    group_peak,
    kept_counts,
    keys,
    row_stride,
    columns,
    k,
    capacity,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, tile, tiles = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    groups = tiles * GROUPS
    g = tl.arange(0, BLOCK_G)
    tops = tl.load(group_peak + row * groups + g, mask=g < groups, other=float("-inf"))
    # the k-th largest group maximum, its lower 16 bits dropped: k columns are at least as good
    high = tl.where(g < groups, _order(tops) >> 16, -32769)
    least = _edge(high, k, tl.full([], -32768, tl.int32), tl.full([], 1 << 14, tl.int32), 8)

    column = tile * TILE + tl.arange(0, TILE)
    x = _read(logits + row.to(tl.int64) * row_stride, column, column < columns, LARGEST)
    order = _order(x)
    keep = (column < columns) & ((order >> 16) >= least)
    found = tl.sum(keep.to(tl.int32), 0)
    if found > 0:
        if found > k:  # of equals the first columns
            lowest = tl.full([], -0x80000000, tl.int32)
            least = _edge(
                tl.where(keep, order, lowest), k, lowest, tl.full([], 1 << 30, tl.int32), 16
            )
            better = keep & (order > least)
            equal = (keep & (order == least)).to(tl.int32)
            keep = better | (
                (equal > 0) & (tl.cumsum(equal, 0) <= k - tl.sum(better.to(tl.int32), 0))
            )
            found = tl.sum(keep.to(tl.int32), 0)
        place = tl.atomic_add(kept_counts + row, found) + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(keys + row.to(tl.int64) * capacity + place, _key(x, column), mask=keep)


@triton.jit(do_not_specialize=["k", "capacity", "tiles"])
def _place(
    tile_peak,
    tile_sum,
    kept_counts,
    keys,
    log_probs,
    best,
    k,
    capacity,
    tiles,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    row = tl.program_id(1)
    t = tl.arange(0, BLOCK_T)
    peaks = tl.load(tile_peak + row * tiles + t, mask=t < tiles, other=float("-inf"))
    sums = tl.load(tile_sum + row * tiles + t, mask=t < tiles, other=0.0)
    peak = tl.maximum(tl.max(peaks, 0), -3.4028234663852886e38)
    log_sum = tl.log(tl.maximum(tl.sum(sums * tl.exp(peaks - peak), 0), 1.0))
    found, lane = tl.load(kept_counts + row), tl.arange(0, BLOCK)
    keys += row.to(tl.int64) * capacity
    for start in range(tl.program_id(0) * BLOCK, found, tl.num_programs(0) * BLOCK):
        own = start + lane
        key = tl.load(keys + own, mask=own < found, other=0)
        rank = tl.zeros([BLOCK], tl.int32)
        for first in range(0, found, RIVALS):
            other = first + tl.arange(0, RIVALS)
            rival = tl.load(keys + other, mask=other < found, other=-0x8000000000000000)
            rank += tl.sum((rival[None, :] > key[:, None]).to(tl.int32), 1)
        chosen = (own < found) & (rank < k)
        value = _key_value(key)
        if not NORMALIZED:
            value = (value - peak) - log_sum
        tl.store(log_probs + row * k + rank, value, mask=chosen)
        tl.store(best + row * k + rank, _key_index(key), mask=chosen)


# ---- launcher


class Workspace(NamedTuple):
    """Scratch of any content: float32, int64, and int32 [W]."""

    floats: Tensor
    keys: Tensor
    counts: Tensor


def workspace_for(logits: Tensor, k: int) -> Workspace:
    """Allocate scratch for `top_children` of logits of this shape."""
    rows, (tile, tiles) = logits.shape[0], cut_for(*logits.shape)
    return Workspace(
        torch.empty(sum(_parts(rows, tile, tiles)), dtype=torch.float32, device=logits.device),
        torch.empty(rows * tiles * min(k, tile), dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.int32, device=logits.device),
    )


def _parts(rows: int, tile: int, tiles: int) -> list[int]:
    """Return the entries of the float32 parts of a workspace."""
    return [
        aligned(rows * tiles * _groups(tile, tiles)),
        aligned(rows * tiles),
        aligned(rows * tiles),
    ]


def _groups(tile: int, tiles: int) -> int:
    """Return the groups per tile: as many as a program of `_pick` holds of its row, with 8 columns or more each."""
    return max(1, min(tile // 8, MOST_GROUPS // triton.next_power_of_2(tiles)))


def top_children(
    logits: Tensor,
    k: int,
    normalized: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Select each row's best k columns by (value descending, column ascending), with log-probabilities over the row.

    logits: [W, V], last dimension contiguous, k <= V; NaN counts as -inf, +inf as 3e38; `normalized` says that they are
    log-probabilities. Returns log-probabilities float32 and columns int64, both [W, k]; columns of -inf come last, with
    -inf. Capturable; allocates nothing where `out` and `workspace` (`workspace_for`) are given. Three launches; the
    last takes time quadratic in what is kept of a row: about k, or k of each tile where its logits are equal.
    """
    _check(logits, k)
    rows, columns = logits.shape
    tile, tiles = cut_for(rows, columns)
    if out is None:
        log_probs = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        out = log_probs, torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    workspace = workspace_for(logits, k) if workspace is None else workspace
    groups, capacity = _groups(tile, tiles), tiles * min(k, tile)
    group_peak, tile_peak, tile_sum = workspace.floats.split(_parts(rows, tile, tiles))
    grid, warps, block_t = (tiles, rows), max(4, tile // 512), triton.next_power_of_2(tiles)
    _outline[grid](
        logits,
        tile_peak,
        tile_sum,
        group_peak,
        workspace.counts,
        logits.stride(0),
        columns,
        TILE=tile,
        GROUP=tile // groups,
        LARGEST=LARGEST,
        num_warps=warps,
    )
    _pick[grid](
        logits,
        group_peak,
        workspace.counts,
        workspace.keys,
        logits.stride(0),
        columns,
        k,
        capacity,
        TILE=tile,
        GROUPS=groups,
        BLOCK_G=block_t * groups,
        LARGEST=LARGEST,
        num_warps=warps,
    )
    _place[(min(triton.cdiv(capacity, RANKED), MOST_PLACERS), rows)](
        tile_peak,
        tile_sum,
        workspace.counts,
        workspace.keys,
        *out,
        k,
        capacity,
        tiles,
        BLOCK_T=block_t,
        BLOCK=RANKED,
        RIVALS=RIVALS,
        NORMALIZED=normalized,
        num_warps=4,
        **EVEN,
    )
    return out


def _check(logits: Tensor, k: int) -> None:
    if (
        logits.dim() != 2
        or logits.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or logits.stride(1) != 1
    ):
        raise ValueError(
            f"logits: floating [W, V], dense along V, is needed, got {logits.dtype} {list(logits.shape)}"
        )
    if not logits.numel() or not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"logits, k: got {list(logits.shape)}, {k}, accepted are one row or more, 1 to V"
        )

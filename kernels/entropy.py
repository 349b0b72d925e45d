"""Entropy over the likeliest columns of each row, without sorting it.

Four launches: `_sums` reads the logits once (each tile's peak and softmax sums), `_count` makes a histogram of how far
below its row's peak each column is, `_split` adds up what lies above the bin in which the `top`-th column is and keeps
that bin's columns, `_add_up` finds the `top`-th among those, digit by digit, and sums. Where all columns count, the
first and the last do. Equal columns contribute equally, so ties at the cut are a number and have no order.

What is stored by atomic addition are integers, and the kept columns come in any order: they are counted and summed as
integers, so the result does not depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from specengine_kernels.candidate_selection import LARGEST, _read, aligned
from torch import Tensor

TILE = 4096  # columns per program; fewer where that leaves multiprocessors idle
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
BLOCK = 2048  # kept columns that `_add_up` reads at a time
# A bin is an exponent and four bits of a mantissa, from 2**-9 (the first bin: and nearer) up to 128 nats below the
# peak; what is fainter adds nothing to a float32. More bins would keep fewer columns, but a histogram's time is theirs.
BINS, BIN_SHIFT, FIRST_BIN = 256, 19, (127 - 9) << 4
DIGIT = 8  # bits that `_add_up` finds at a time; 2**DIGIT is BINS
# what 1 is as an integer in sums of kept columns; less than a unit lost by each of 2**18: 2.4e-7
FIXED = 2.0**40


# ---- meaning


def reference(logits: Tensor, top: int, normalized: bool = False) -> Tensor:
    """Compute `top_entropy` in plain torch and float64."""
    values = (
        logits.double()
        .nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
        .clamp(max=LARGEST)
    )
    best = values.topk(min(top, values.shape[1])).values
    if not normalized:
        # finite also in rows of -inf alone
        peak = best[:, :1].clamp(min=torch.finfo(torch.float32).min)
        best = best - peak - (values - peak).exp().sum(1, keepdim=True).clamp(min=1.0).log()
    return -torch.where(best > -torch.inf, best.exp() * best, 0.0).sum(1).float()


# ---- kernels


@triton.jit
def _sums(
    logits,
    tile_peak,
    tile_sum,
    tile_weighted,
    histogram,
    kept_counts,
    row_stride,
    columns,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, tile = tl.program_id(1), tl.program_id(0)
    column = tile * TILE + tl.arange(0, TILE)
    x = _read(logits + row.to(tl.int64) * row_stride, column, column < columns, LARGEST)
    peak = tl.max(x, 0)
    below = tl.where(peak == float("-inf"), 0.0, peak) - x
    weight = tl.exp(-below)
    place = row * tl.num_programs(0) + tile
    tl.store(tile_peak + place, peak)
    tl.store(tile_sum + place, tl.sum(weight, 0))
    if WHOLE:
        tl.store(tile_weighted + place, tl.sum(weight * tl.where(weight > 0.0, below, 0.0), 0))
    elif tile == 0:  # counted by the next kernels
        tl.store(histogram + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(kept_counts + row, 0)


@triton.jit
def _below_peak(
    logits,
    tile_peak,
    columns,
    row_stride,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Return how far this tile's columns are below their row's peak, float32 [TILE]; inf where there is none."""
    row, tile, tiles = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    t = tl.arange(0, BLOCK_T)
    peak = tl.max(tl.load(tile_peak + row * tiles + t, mask=t < tiles, other=float("-inf")), 0)
    column = tile * TILE + tl.arange(0, TILE)
    x = _read(logits + row.to(tl.int64) * row_stride, column, column < columns, LARGEST)
    return tl.abs(tl.maximum(peak, -3.4028234663852886e38) - x)  # not -0.0


@triton.jit
def _bin(below, FIRST_BIN: tl.constexpr, BIN_SHIFT: tl.constexpr):
    """Return the bin, which ascends with `below`; columns in bin BINS and above add nothing."""
    return tl.maximum((below.to(tl.int32, bitcast=True) >> BIN_SHIFT) - FIRST_BIN, 0)


@triton.jit
def _window(histogram, row, top, BINS: tl.constexpr):
    """Return the bin of the `top`-th column, or BINS if there are fewer, and how many of its columns are wanted."""
    counts = tl.load(histogram + row * BINS + tl.arange(0, BINS))
    above = tl.cumsum(counts, 0) < top
    return tl.sum(above.to(tl.int32), 0), top - tl.sum(tl.where(above, counts, 0), 0)


@triton.jit
def _count(
    logits,
    tile_peak,
    histogram,
    row_stride,
    columns,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    BIN_SHIFT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    below = _below_peak(logits, tile_peak, columns, row_stride, TILE, BLOCK_T, LARGEST)
    place = _bin(below, FIRST_BIN, BIN_SHIFT)
    counts = tl.histogram(tl.minimum(place, BINS - 1), BINS, mask=place < BINS)
    tl.atomic_add(
        histogram + tl.program_id(1) * BINS + tl.arange(0, BINS),
        counts,
        mask=counts > 0,
        sem="relaxed",
    )


@triton.jit(do_not_specialize=["top"])
def _split(
    logits,
    tile_peak,
    best_sum,
    best_weighted,
    histogram,
    kept_counts,
    kept,
    row_stride,
    columns,
    top,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    BIN_SHIFT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, tile = tl.program_id(1), tl.program_id(0)
    window, _ = _window(histogram, row, top, BINS)
    below = _below_peak(logits, tile_peak, columns, row_stride, TILE, BLOCK_T, LARGEST)
    place = _bin(below, FIRST_BIN, BIN_SHIFT)
    above = place < window
    weight = tl.where(above, tl.exp(-below), 0.0)
    partial = row * tl.num_programs(0) + tile
    tl.store(best_sum + partial, tl.sum(weight, 0))
    tl.store(best_weighted + partial, tl.sum(weight * tl.where(above, below, 0.0), 0))
    inside = (place == window) & (place < BINS)
    found = tl.sum(inside.to(tl.int32), 0)
    if found > 0:
        first = tl.atomic_add(kept_counts + row, found, sem="relaxed")
        to = first + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(kept + row.to(tl.int64) * columns + to, below, mask=inside)


@triton.jit(do_not_specialize=["columns", "top", "tiles"])
def _add_up(
    tile_peak,
    tile_sum,
    best_sum,
    best_weighted,
    histogram,
    kept_counts,
    kept,
    out,
    columns,
    top,
    tiles,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    BIN_SHIFT: tl.constexpr,
    DIGIT: tl.constexpr,
    FIXED: tl.constexpr,
    WHOLE: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    row = tl.program_id(0)
    t = tl.arange(0, BLOCK_T)
    at, live = row * tiles + t, t < tiles
    peaks = tl.load(tile_peak + at, mask=live, other=float("-inf"))
    peak = tl.max(peaks, 0)
    finite_peak = tl.maximum(peak, -3.4028234663852886e38)
    under = finite_peak - peaks
    share = tl.exp(-under)
    sums = share * tl.load(tile_sum + at, mask=live, other=0.0)
    whole = tl.sum(sums, 0)  # of the row: exp(x - peak)
    weighted = tl.load(best_weighted + at, mask=live, other=0.0)
    if WHOLE:  # of what counts: exp(x - peak), and the same times peak - x
        some = whole
        distant = tl.sum(share * weighted + sums * tl.where(share > 0.0, under, 0.0), 0)
    else:
        some = tl.sum(tl.load(best_sum + at, mask=live, other=0.0), 0)
        distant = tl.sum(weighted, 0)
        found = tl.load(kept_counts + row)
        if found > 0:
            window, wanted = _window(histogram, row, top, BINS)
            kept += row.to(tl.int64) * columns
            base = tl.where(window == 0, 0, (window + FIRST_BIN) << BIN_SHIFT)
            lane = tl.arange(0, BLOCK)
            # bits of the `wanted`-th of those kept, the nearest to the peak first, from the window's lower end
            edge = tl.zeros([], tl.int32)
            shift = tl.where(window == 0, 3 * DIGIT, 2 * DIGIT)  # of 30 or 19 bits
            while shift >= 0:
                counts = tl.zeros([BINS], tl.int32)
                for start in range(0, found, BLOCK):
                    own = start + lane < found
                    bits = (
                        tl.load(kept + start + lane, mask=own, other=0.0).to(tl.int32, bitcast=True)
                        - base
                    )
                    own &= (bits >> shift) >> DIGIT == (edge >> shift) >> DIGIT
                    counts += tl.histogram((bits >> shift) & (BINS - 1), BINS, mask=own)
                nearer = tl.cumsum(counts, 0) < wanted
                wanted -= tl.sum(tl.where(nearer, counts, 0), 0)
                edge |= tl.sum(nearer.to(tl.int32), 0) << shift
                shift -= DIGIT
            fixed_sum, fixed_weighted = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
            for start in range(0, found, BLOCK):
                below = tl.load(kept + start + lane, mask=start + lane < found, other=float("inf"))
                nearer = below.to(tl.int32, bitcast=True) - base < edge
                weight = tl.where(nearer, tl.exp(-below), 0.0)
                fixed_sum += tl.sum((weight * FIXED).to(tl.int64), 0)
                fixed_weighted += tl.sum(
                    (weight * tl.where(nearer, below, 0.0) * FIXED).to(tl.int64), 0
                )
            last = (base + edge).to(tl.float32, bitcast=True)
            ties = wanted * tl.exp(-last)
            some += (fixed_sum.to(tl.float64) / FIXED).to(tl.float32) + ties
            distant += (fixed_weighted.to(tl.float64) / FIXED).to(tl.float32) + ties * last
    # p = exp(x - peak) * scale and log p = x - peak - offset
    if NORMALIZED:
        scale, offset = tl.exp(finite_peak), -finite_peak
    else:
        scale, offset = 1.0 / tl.maximum(whole, 1.0), tl.log(tl.maximum(whole, 1.0))
    entropy = scale * (offset * some + distant)
    tl.store(out + row, tl.where((peak > float("-inf")) & (scale > 0.0), entropy, 0.0))


# ---- launcher


class Cut(NamedTuple):
    """Partition of the logits: columns per program, programs per row."""

    tile: int
    tiles: int


def cut_for(rows: int, columns: int) -> Cut:
    """Return the shipped cut of [rows, columns]."""
    widest = min(TILE, max(128, triton.next_power_of_2(columns)))
    tile = min(TILE // 4, widest)
    while tile < widest and rows * triton.cdiv(columns, tile) > ENOUGH_PROGRAMS:
        tile *= 2
    return Cut(tile, triton.cdiv(columns, tile))


class Workspace(NamedTuple):
    """Scratch of any content: float32, int32, and float32 for as many columns as the logits have."""

    floats: Tensor
    counts: Tensor
    kept: Tensor


def workspace_for(logits: Tensor, top: int) -> Workspace:
    """Allocate scratch for `top_entropy` of logits of this shape."""
    (rows, columns), whole = logits.shape, top >= logits.shape[1]
    return Workspace(
        torch.empty(
            4 * aligned(rows * cut_for(rows, columns).tiles),
            dtype=torch.float32,
            device=logits.device,
        ),
        torch.empty(1 if whole else rows * (BINS + 1), dtype=torch.int32, device=logits.device),
        torch.empty(1 if whole else rows * columns, dtype=torch.float32, device=logits.device),
    )


def top_entropy(
    logits: Tensor,
    top: int,
    normalized: bool = False,
    *,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Return -sum p log p over the `top` likeliest columns of each row, float32 [W], in nats; p is over the whole row.

    logits: [W, V], last dimension contiguous; NaN counts as -inf, +inf as 3e38; `normalized` says that they are
    log-probabilities. 0 for a row of -inf alone. Columns of 128 nats and more below their row's peak count as -inf.
    Capturable; allocates nothing where `out` and `workspace` (`workspace_for`) are given. Four launches, two where
    `top` is V or more; the last takes time linear in the columns of the cut's bin, which only rows of nearly equal
    logits make many.
    """
    _check(logits, top, out)
    rows, columns = logits.shape
    tile, tiles = cut_for(rows, columns)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device) if out is None else out
    workspace = workspace_for(logits, top) if workspace is None else workspace
    tile_peak, tile_sum, best_sum, best_weighted = workspace.floats.split(aligned(rows * tiles))
    whole = top >= columns
    histogram, kept_counts = workspace.counts, workspace.counts[0 if whole else rows * BINS :]
    grid, warps, block_t = (tiles, rows), max(4, tile // 512), triton.next_power_of_2(tiles)
    bins = {"BINS": BINS, "FIRST_BIN": FIRST_BIN, "BIN_SHIFT": BIN_SHIFT}
    _sums[grid](
        logits,
        tile_peak,
        tile_sum,
        best_weighted,
        histogram,
        kept_counts,
        logits.stride(0),
        columns,
        TILE=tile,
        BINS=BINS,
        WHOLE=whole,
        LARGEST=LARGEST,
        num_warps=warps,
    )
    if not whole:
        tiled = {"TILE": tile, "BLOCK_T": block_t, **bins, "LARGEST": LARGEST, "num_warps": warps}
        _count[grid](logits, tile_peak, histogram, logits.stride(0), columns, **tiled)
        _split[grid](
            logits,
            tile_peak,
            best_sum,
            best_weighted,
            histogram,
            kept_counts,
            workspace.kept,
            logits.stride(0),
            columns,
            top,
            **tiled,
        )
    _add_up[(rows,)](
        tile_peak,
        tile_sum,
        best_sum,
        best_weighted,
        histogram,
        kept_counts,
        workspace.kept,
        out,
        columns,
        top,
        tiles,
        BLOCK_T=block_t,
        BLOCK=BLOCK,
        **bins,
        DIGIT=DIGIT,
        FIXED=FIXED,
        WHOLE=whole,
        NORMALIZED=normalized,
        num_warps=8,
    )
    return out


def _check(logits: Tensor, top: int, out: Tensor | None) -> None:
    if (
        logits.dim() != 2
        or logits.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or logits.stride(1) != 1
    ):
        raise ValueError(
            f"logits: floating [W, V], dense along V, is needed, got {logits.dtype} {list(logits.shape)}"
        )
    if not logits.numel() or top < 1:
        raise ValueError(
            f"logits, top: got {list(logits.shape)}, {top}, accepted are one row, one column, 1 or more"
        )
    if out is not None and (out.dtype is not torch.float32 or out.shape != logits.shape[:1]):
        raise ValueError(
            f"out: float32 [{logits.shape[0]}] is needed, got {out.dtype} {list(out.shape)}"
        )

"""Verification: the target's choice after every node, then the walk down the tree along these choices.

`_draw` cuts each row of logits into slices and finds the best of each: the largest logit, or where a seed is given the
largest sum of logit / temperature and Gumbel noise. The noise of a column is a pure function of (seed, position,
column), so a tree draws what plain decoding draws. Tiles that no noise can lift to the best are not given any.
`_merge` takes the best of the slices; `_walk` descends with one search over all nodes per accepted node. Ties go to the
first column, whatever the slices.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 3e38  # what +inf counts as once logits are divided by the temperature
MOST_NOISE = 22.875  # -log(-log(1 - 2**-33)) = 22.8738...
TILE = 1024  # columns that a program reads at a time
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
MOST_SLICES = 64
MOST_NODES = 1024  # of a walk


# ---- meaning


def reference(logits: Tensor, positions: Tensor, seed: int | None = None, temperature: float = 1.0) -> Tensor:
    """What `choose_tokens` gives, in plain torch and float64."""
    finite = torch.isfinite(logits)
    scores = logits.double().where(finite, -math.inf)
    if seed is not None:
        scaled = (logits.float() / temperature).clamp(max=LARGEST).double().where(finite, -math.inf)
        uniform = torch.stack([_uniform(seed, position, logits.shape[1]) for position in positions.tolist()])
        scores = scaled - torch.log(-torch.log(uniform)).to(scaled.device)
    return torch.where(finite.any(1), scores.argmax(1), -1)


def _uniform(seed: int, position: int, columns: int) -> Tensor:
    """(x + 0.5) / 2**32; x is word i % 4 of Philox4x32-10 with counter (i // 4, position, 0) and the seed as key."""
    low = 0xFFFFFFFF
    fixed = [torch.tensor(part) for part in (position & low, position >> 32 & low, 0)]
    counter = [torch.arange(-(-columns // 4)), *fixed]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):
        products = [_product(counter[0], 0xD2511F53), _product(counter[2], 0xCD9E8D57)]
        (high0, low0), (high1, low1) = products
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    words = torch.stack(torch.broadcast_tensors(*counter), 1).reshape(-1)[:columns]
    return (words.double() + 0.5) / 2.0**32


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits, by halves of the factor: the product itself exceeds int64."""
    upper, lower = word * (factor >> 16), word * (factor & 0xFFFF)
    carried = (upper & 0xFFFF) * 65536 + lower
    return (upper >> 16) + (carried >> 32), carried & 0xFFFFFFFF


def reference_walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> tuple[list[int], int]:
    """The path and the bonus token that `walk` finds; an empty path where the root's choice is -1."""
    path: list[int] = [0] if int(chosen[0]) >= 0 else []
    for node in range(1, len(tokens)):
        follows = bool(path) and int(parents[node]) == path[-1] and int(tokens[node]) == int(chosen[path[-1]])
        if follows and int(chosen[node]) >= 0:
            path.append(node)
    return path, int(chosen[path[-1]]) if path else -1


# ---- kernels


@triton.jit
def _draw(
    logits,
    positions,
    seed,
    temperature,
    values,
    columns_of_values,
    chosen,
    row_stride,
    columns,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLED: tl.constexpr,
    LARGEST: tl.constexpr,
    MOST_NOISE: tl.constexpr,
):
    row, part = tl.program_id(1), tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    quads, words = tl.arange(0, TILE // 4), tl.arange(0, 4)
    tiles = tl.cdiv(columns, TILE)
    share = tl.cdiv(tiles, SLICES)
    best = tl.full([], float("-inf"), tl.float64)
    best_column = tl.full([], -1, tl.int32)
    if SAMPLED:
        position, key, divisor = tl.load(positions + row), tl.load(seed), tl.load(temperature)
    for tile in range(part * share, tl.minimum((part + 1) * share, tiles)):
        counter = tile * (TILE // 4) + quads
        column = counter[:, None] * 4 + words[None, :]
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        x = tl.where((x == x) & (x < float("inf")), x, float("-inf"))
        if SAMPLED:
            x = tl.minimum(tl.div_rn(x, tl.zeros_like(x) + divisor), LARGEST)
        peak = tl.max(tl.max(x, 1), 0)
        most = peak.to(tl.float64)
        if SAMPLED:
            most += MOST_NOISE
        if (peak > float("-inf")) & (most >= best):
            score = x.to(tl.float64)
            if SAMPLED:
                low = (position & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(counter).to(tl.uint32)
                high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(counter).to(tl.uint32)
                r0, r1, r2, r3 = tl.philox(key, counter.to(tl.uint32), low, high, tl.zeros_like(low))
                left = tl.where(words[None, :] == 0, r0[:, None], r1[:, None])
                right = tl.where(words[None, :] == 2, r2[:, None], r3[:, None])
                bits = tl.where(words[None, :] < 2, left, right)
                uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
                score -= tl.log(-tl.log(uniform))
            top = tl.max(tl.max(score, 1), 0)
            first = tl.min(tl.min(tl.where((score == top) & (x > float("-inf")), column, 0x7FFFFFFF), 1), 0)
            best_column = tl.where(top > best, first, best_column)
            best = tl.maximum(top, best)
    if SLICES == 1:
        tl.store(chosen + row, best_column.to(tl.int64))
    else:
        tl.store(values + row * SLICES + part, best)
        tl.store(columns_of_values + row * SLICES + part, best_column)


@triton.jit
def _merge(values, columns_of_values, chosen, SLICES: tl.constexpr, BLOCK_S: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, BLOCK_S)
    value = tl.load(values + row * SLICES + part, mask=part < SLICES, other=float("-inf"))
    column = tl.load(columns_of_values + row * SLICES + part, mask=part < SLICES, other=-1)
    best = tl.max(value, 0)
    first = tl.min(tl.where((value == best) & (column >= 0), column, 0x7FFFFFFF), 0)
    tl.store(chosen + row, tl.where(best > float("-inf"), first, -1).to(tl.int64))


@triton.jit
def _walk(tokens, parents, chosen, size, path, count, bonus, BLOCK: tl.constexpr):
    node = tl.arange(0, BLOCK)
    live = node < tl.load(size)
    token = tl.load(tokens + node, mask=live, other=-1)
    parent = tl.load(parents + node, mask=live, other=-1)
    choice = tl.load(chosen + node, mask=live, other=-1)
    wanted = tl.load(chosen)
    at, kept = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    going = wanted >= 0
    while going:
        tl.store(path + kept, at.to(tl.int64))
        kept += 1
        child = tl.min(tl.where((parent == at) & (token == wanted) & (choice >= 0), node, BLOCK), 0)
        going = child < BLOCK
        wanted = tl.where(going, tl.sum(tl.where(node == child, choice, 0), 0), wanted)
        at = child
    tl.store(count, kept)
    tl.store(bonus, wanted)


# ---- launchers


class Workspace(NamedTuple):
    """Scratch of any content: the best of each slice, float64 and int32."""

    values: Tensor
    columns: Tensor


def slices_for(rows: int, columns: int) -> int:
    """How often each row is cut, so that few rows fill the device too."""
    return max(1, min(ENOUGH_PROGRAMS // rows, triton.cdiv(columns, TILE), MOST_SLICES))


def workspace_for(logits: Tensor) -> Workspace:
    """Scratch for `choose_tokens` of logits of this shape."""
    size = logits.shape[0] * slices_for(*logits.shape)
    return Workspace(
        torch.empty(size, dtype=torch.float64, device=logits.device),
        torch.empty(size, dtype=torch.int32, device=logits.device),
    )


def choose_tokens(
    logits: Tensor,
    positions: Tensor | None = None,
    seed: Tensor | None = None,
    temperature: Tensor | None = None,
    *,
    chosen: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """The target's choice in each row: argmax, or with a seed the draw from softmax(logits / temperature).

    logits: [n, V], dense along V; what is not finite is never chosen. positions: int64 [n], seed: int64 [1] (64 bits),
    temperature: float32 [1], all on the device; a draw needs the three of them. The first column wins a tie.
    Returns `chosen`, int64 [n]: -1 where a row has no finite logit. Capturable; allocates nothing where `chosen` and
    `workspace` (`workspace_for`) are given. The noise is that of csrc/spec/gumbel.hpp: -log(-log(u)) in float64.
    """
    _check(logits, positions, seed, temperature)
    rows, columns = logits.shape
    slices = slices_for(rows, columns)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device) if chosen is None else chosen
    values = firsts = None
    if slices > 1:
        values, firsts = workspace_for(logits) if workspace is None else workspace
    _draw[(slices, rows)](
        logits,
        positions,
        seed,
        temperature,
        values,
        firsts,
        chosen,
        logits.stride(0),
        columns,
        SLICES=slices,
        TILE=TILE,
        SAMPLED=seed is not None,
        LARGEST=LARGEST,
        MOST_NOISE=MOST_NOISE,
        num_warps=4,
    )
    if slices > 1:
        _merge[(rows,)](values, firsts, chosen, SLICES=slices, BLOCK_S=triton.next_power_of_2(slices), num_warps=1)
    return chosen


def walk(
    tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor, path: Tensor, count: Tensor, bonus: Tensor
) -> None:
    """Descend from the root while a child carries the token chosen at its parent and has a choice of its own.

    tokens, parents, chosen: int64 [n], n up to 1024, of which the first `size` (int32 [1]) are nodes; siblings carry
    distinct tokens. Writes path int64 [n], count int32 [1], how many nodes it has, and bonus int64 [1], the choice
    after its last node; a count of 0 and a bonus of -1 where the root's choice is -1. Capturable.
    """
    n = tokens.shape[0]
    if not 1 <= n <= MOST_NODES or not tokens.shape == parents.shape == chosen.shape == path.shape or tokens.dim() != 1:
        raise ValueError(
            f"tokens, parents, chosen, path: int64 [n] each, 1 <= n <= {MOST_NODES}, got {list(tokens.shape)}"
        )
    if any(t.dtype is not torch.int64 or t.stride(0) != 1 for t in (tokens, parents, chosen, path, bonus)):
        raise ValueError("tokens, parents, chosen, path, bonus: dense int64 is needed")
    if not size.dtype is count.dtype is torch.int32:
        raise ValueError(f"size, count: int32 [1] each is needed, got {size.dtype}, {count.dtype}")
    block = triton.next_power_of_2(n)
    _walk[(1,)](tokens, parents, chosen, size, path, count, bonus, BLOCK=block, num_warps=max(1, min(8, block // 32)))


def _check(logits: Tensor, positions: Tensor | None, seed: Tensor | None, temperature: Tensor | None) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if logits.dim() != 2 or logits.dtype not in kinds or logits.stride(1) != 1 or not logits.numel():
        raise ValueError(f"logits: floating [n, V], dense along V, is needed, got {logits.dtype} {list(logits.shape)}")
    if seed is None:
        return
    if positions is None or positions.dtype is not torch.int64 or positions.shape != logits.shape[:1]:
        raise ValueError(f"positions: int64 [{logits.shape[0]}] is needed for a draw")
    if seed.dtype is not torch.int64 or temperature is None or temperature.dtype is not torch.float32:
        raise ValueError("seed, temperature: int64 [1] and float32 [1] are needed for a draw")

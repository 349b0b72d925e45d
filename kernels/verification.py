"""Verification: the target's choice after every node, then the walk down the tree along these choices.

Rows of logits are cut into slices. `_peak` finds the largest logit of each, `_draw`, where a seed is given, the largest
sum of logit / temperature and Gumbel noise. Either keeps the best of each lane, tile after tile, and compares lanes
once, at the end. The noise of a column is a pure function of (seed, position, column), so a tree draws what plain
decoding draws. It is float64, as everywhere else; `_draw` finds it in float32 first, and in float64 for what is best of
its lane, unless a column that its lane passed over comes so near to the best that float32 does not decide: then it goes
over the slice again, in float64. `_merge` takes the best of the slices; `_walk` descends with one search over all nodes
per accepted node. Ties go to the first column, whatever the slices. `_record` leaves what the host reads of a cycle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 3e38  # what +inf counts as once logits are divided by the temperature
# columns that a program reads at a time, and from where on of the wide ones
TILE, WIDE_TILE, WIDE = 1024, 4096, 16384
# of wide rows that get noise or are float32, for which registers would not suffice
LESS_WIDE = 2048
STAGES = 3  # tiles of logits that are on their way
# float32 is nearer to the noise than 1e-4, and to a sum than a millionth of it
NEAR, NEAR_RELATIVE = 1e-3, 2.0**-20
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
MOST_SLICES = 64
MAX_NODES = 1024  # of a walk
NUMBERS = 7  # of a record, before its lists


# ---- meaning


def reference(
    logits: Tensor, positions: Tensor, seed: int | None = None, temperature: float = 1.0
) -> Tensor:
    """Compute `choose_tokens` in plain torch and float64."""
    finite = torch.isfinite(logits)
    scores = logits.double().where(finite, -math.inf)
    if seed is not None:
        scaled = (logits.float() / temperature).clamp(max=LARGEST).double().where(finite, -math.inf)
        uniform = torch.stack(
            [_uniform(seed, position, logits.shape[1]) for position in positions.tolist()]
        )
        scores = scaled - torch.log(-torch.log(uniform)).to(scaled.device)
    return torch.where(finite.any(1), scores.argmax(1), -1)


def _uniform(seed: int, position: int, columns: int) -> Tensor:
    """Return (x + 0.5) / 2**32; x is word i % 4 of Philox4x32-10, counter (i // 4, position, 0), key the seed."""
    low = 0xFFFFFFFF
    fixed = [
        torch.tensor(part, dtype=torch.int64, device="cpu")
        for part in (position & low, position >> 32 & low, 0)
    ]
    counter = [torch.arange(-(-columns // 4), dtype=torch.int64, device="cpu"), *fixed]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):
        products = [_product(counter[0], 0xD2511F53), _product(counter[2], 0xCD9E8D57)]
        (high0, low0), (high1, low1) = products
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    words = torch.stack(torch.broadcast_tensors(*counter), 1).reshape(-1)[:columns]
    return (words.double() + 0.5) / 2.0**32


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits, by halves of the factor: the product itself exceeds int64."""
    upper, lower = word * (factor >> 16), word * (factor & 0xFFFF)
    carried = (upper & 0xFFFF) * 65536 + lower
    return (upper >> 16) + (carried >> 32), carried & 0xFFFFFFFF


def reference_walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> tuple[list[int], int]:
    """Compute `walk`: the path and the bonus token; an empty path if the root's choice is -1."""
    path: list[int] = [0] if int(chosen[0]) >= 0 else []
    for node in range(1, len(tokens)):
        follows = (
            bool(path)
            and int(parents[node]) == path[-1]
            and int(tokens[node]) == int(chosen[path[-1]])
        )
        if follows and int(chosen[node]) >= 0:
            path.append(node)
    return path, int(chosen[path[-1]]) if path else -1


def reference_record(
    verified: Verified, walked: tuple[Tensor, Tensor, Tensor], counts: tuple[int, ...], longest: int
) -> tuple[list[int], list[int], list[int]]:
    """Compute `record_walk`, counts as numbers, with the budget of its rows; the record, ids and tokens of the path."""
    path, live, bonus = walked[0].tolist(), int(walked[1]), int(walked[2])
    path = [*path[:longest], *[0] * (longest - len(path))]
    over, root = [int(verified.tokens[node]) for node in path], max(bonus, 0)
    chosen = [over[place + 1] if place < live - 1 else root for place in range(longest)]
    reals = (part.view(torch.int32) for part in (verified.log_probs, verified.path_log_probs))
    lists = (*verified[:3], *reals)
    size, kept, passes, length, overflow = counts
    numbers = [live, size, kept, passes, length, overflow, bonus]
    record = [*numbers, *chosen, *path, *(n for part in lists for n in part.tolist())]
    return record, [int(verified.nodes[node]) for node in path], over


# ---- kernels


@triton.jit
def _finite(logits, column, columns):
    x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return tl.where((x == x) & (x < float("inf")), x, float("-inf"))


@triton.jit
def _first_of_best(score, column):
    """Return the largest score and its first column; -1 if all are -inf."""
    top = tl.max(score, 0)
    first = tl.min(tl.where((score == top) & (score > float("-inf")), column, 0x7FFFFFFF), 0)
    return top, tl.where(top > float("-inf"), first, -1)


@triton.jit
def _keep(values, columns_of_values, chosen, best, column, WHOLE: tl.constexpr):
    """Store the best column of a slice; as the choice itself if the slice is the whole row."""
    row, part, slices = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    if WHOLE:
        tl.store(chosen + row, column.to(tl.int64))
    else:
        tl.store(values + row * slices + part, best)
        tl.store(columns_of_values + row * slices + part, column)


SCALARS = ("positions", "seed", "temperature", "chosen")  # read or written one by one


@triton.jit(do_not_specialize_on_alignment=["chosen"])
def _peak(
    logits,
    values,
    columns_of_values,
    chosen,
    row_stride,
    columns,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    logits += tl.program_id(1).to(tl.int64) * row_stride
    tiles = tl.cdiv(columns, TILE)
    share = tl.cdiv(tiles, tl.num_programs(0))
    first, lane = tl.program_id(0) * share, tl.arange(0, TILE)
    best, column_of_best = tl.full([TILE], float("-inf"), tl.float32), tl.full([TILE], -1, tl.int32)
    for tile in tl.range(first, tl.minimum(first + share, tiles), num_stages=STAGES):
        column = tile * TILE + lane
        x = _finite(logits, column, columns)
        column_of_best = tl.where(x > best, column, column_of_best)
        best = tl.maximum(best, x)
    top, column = _first_of_best(best, column_of_best)
    _keep(values, columns_of_values, chosen, top.to(tl.float64), column, WHOLE)


@triton.jit
def _bits(key, position, counter):
    """Return 32 bits for each of the four columns of a counter: uint32 [counters, 4]."""
    zeros = tl.zeros_like(counter).to(tl.uint32)
    low, high = (
        (position & 0xFFFFFFFF).to(tl.uint32) + zeros,
        ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zeros,
    )
    r0, r1, r2, r3 = tl.philox(key, counter.to(tl.uint32), low, high, zeros)
    word = tl.arange(0, 4)[None, :]
    left = tl.where(word == 0, r0[:, None], r1[:, None])
    right = tl.where(word == 2, r2[:, None], r3[:, None])
    return tl.where(word < 2, left, right)


@triton.jit
def _noise(bits):
    """Return -log(-log(u)), u = (bits + 0.5) / 2**32."""
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def _near_noise(bits):
    """Return `_noise` in float32; close to 1, where u loses its digits, -log(u) is computed from the distance to 1."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    others = (-1 - bits.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)
    rest = (others.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -tl.log(tl.where(rest < 0.00390625, series, -tl.log(uniform)))


@triton.jit(do_not_specialize_on_alignment=SCALARS)
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
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGEST: tl.constexpr,
    NEAR: tl.constexpr,
    NEAR_RELATIVE: tl.constexpr,
):
    QUADS: tl.constexpr = TILE // 4
    row = tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    tiles = tl.cdiv(columns, TILE)
    share = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, tiles)
    quads, words = tl.arange(0, QUADS), tl.arange(0, 4)
    position, key, divisor = tl.load(positions + row), tl.load(seed), tl.load(temperature)
    nothing = tl.full([QUADS, 4], float("-inf"), tl.float32)
    best, passed_over, x_of_best = nothing, nothing, nothing
    column_of_best = tl.full([QUADS, 4], -1, tl.int32)
    bits_of_best = tl.zeros([QUADS, 4], tl.uint32)
    for tile in tl.range(first, end, num_stages=STAGES):
        counter = tile * QUADS + quads
        column = counter[:, None] * 4 + words[None, :]
        x = _finite(logits, column, columns)
        x = tl.minimum(tl.div_rn(x, tl.zeros_like(x) + divisor), LARGEST)
        bits = _bits(key, position, counter)
        score = x + _near_noise(bits)
        passed_over = tl.maximum(passed_over, tl.minimum(score, best))
        better = score > best
        column_of_best = tl.where(better, column, column_of_best)
        x_of_best = tl.where(better, x, x_of_best)
        bits_of_best = tl.where(better, bits, bits_of_best)
        best = tl.maximum(score, best)
    exact = tl.where(
        column_of_best >= 0, x_of_best.to(tl.float64) + _noise(bits_of_best), float("-inf")
    )
    top, column_of_top = _first_of_best(
        tl.reshape(exact, [TILE]), tl.reshape(column_of_best, [TILE])
    )
    nearest = tl.max(tl.reshape(passed_over, [TILE]), 0).to(tl.float64)
    margin = NEAR + NEAR_RELATIVE * tl.where(top > float("-inf"), tl.abs(top), 0.0)
    if (nearest > float("-inf")) & (nearest + margin >= top):
        for tile in range(first, end):
            counter = tile * QUADS + quads
            column = counter[:, None] * 4 + words[None, :]
            x = _finite(logits, column, columns)
            x = tl.minimum(tl.div_rn(x, tl.zeros_like(x) + divisor), LARGEST)
            exact = x.to(tl.float64) + _noise(_bits(key, position, counter))
            one, column_of_one = _first_of_best(
                tl.reshape(exact, [TILE]), tl.reshape(column, [TILE])
            )
            # of what is equal; -1 is of nothing
            sooner = (one == top) & (column_of_one < column_of_top)
            column_of_top = tl.where(
                (one > top) | (sooner & (column_of_one >= 0)), column_of_one, column_of_top
            )
            top = tl.maximum(one, top)
    _keep(values, columns_of_values, chosen, top, column_of_top, WHOLE)


@triton.jit(do_not_specialize=["slices"], do_not_specialize_on_alignment=["chosen"])
def _merge(values, columns_of_values, chosen, slices, MOST_SLICES: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, MOST_SLICES)
    value = tl.load(values + row * slices + part, mask=part < slices, other=float("-inf"))
    column = tl.load(columns_of_values + row * slices + part, mask=part < slices, other=-1)
    _, first = _first_of_best(value, column)
    tl.store(chosen + row, first.to(tl.int64))


WALKED = ("tokens", "parents", "chosen", "size", "path", "count", "bonus")


@triton.jit(do_not_specialize_on_alignment=WALKED)
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


@triton.jit(
    do_not_specialize=["rows", "longest", "budget"],
    do_not_specialize_on_alignment=[
        "size",
        "kept",
        "passes",
        "length",
        "overflow",
        "live",
        "bonus",
    ],
)
def _record(
    tokens,
    parents,
    depths,
    log_probs,
    path_log_probs,
    nodes,
    path,
    live,
    bonus,
    size,
    kept,
    passes,
    length,
    overflow,
    record,
    ids,
    over,
    root,
    rows,
    longest,
    budget,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.arange(0, BLOCK)
    accepted, last = tl.load(live), tl.load(bonus)
    first = tl.maximum(last, 0)  # a cycle may be under way before the host sees that there is none
    inside, after = entry < longest, entry + 1
    node = tl.load(path + entry, mask=inside & (entry < rows), other=0)
    below = tl.load(path + after, mask=(after < longest) & (after < rows), other=0)
    passed = tl.load(tokens + node, mask=inside, other=0)
    chosen = tl.load(tokens + below, mask=inside, other=0)
    tl.store(ids + entry, tl.load(nodes + node, mask=inside, other=0), mask=inside)
    tl.store(over + entry, passed, mask=inside)
    chosen = tl.where(entry < accepted - 1, chosen, first)
    lists = record + NUMBERS + entry
    tl.store(lists, chosen, mask=inside)
    tl.store(lists + longest, node, mask=inside)
    lists += 2 * longest
    listed, known = entry < budget, (entry < budget) & (entry < rows)
    tl.store(lists, tl.load(tokens + entry, mask=known, other=0), mask=listed)
    tl.store(lists + budget, tl.load(parents + entry, mask=known, other=0), mask=listed)
    tl.store(lists + 2 * budget, tl.load(depths + entry, mask=known, other=0), mask=listed)
    edges = tl.load(log_probs + entry, mask=known, other=0.0).to(tl.int32, bitcast=True)
    tl.store(lists + 3 * budget, edges.to(tl.int64), mask=listed)
    sums = tl.load(path_log_probs + entry, mask=known, other=0.0).to(tl.int32, bitcast=True)
    tl.store(lists + 4 * budget, sums.to(tl.int64), mask=listed)
    tl.store(record, accepted.to(tl.int64))
    tl.store(record + 1, tl.load(size).to(tl.int64))
    tl.store(record + 2, tl.load(kept).to(tl.int64))
    tl.store(record + 3, tl.load(passes).to(tl.int64))
    tl.store(record + 4, tl.load(length).to(tl.int64))
    tl.store(record + 5, tl.load(overflow).to(tl.int64))
    tl.store(record + 6, last)
    tl.store(root, first)


# ---- launchers


class Verified(NamedTuple):
    """A verified tree: tokens, parents, depths int64 [n], log_probs, path_log_probs float32 [n]; nodes: int64 [n], of
    the drafted tree, that it consists of."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    path_log_probs: Tensor
    nodes: Tensor


class Workspace(NamedTuple):
    """Scratch of any content: the best of each slice, float64 and int32."""

    values: Tensor
    columns: Tensor


def tile_for(columns: int, sampled: bool, whole: bool) -> int:
    """Return how many columns a program reads at a time; whole: they are float32."""
    return TILE if columns < WIDE else LESS_WIDE if sampled or whole else WIDE_TILE


def slices_for(rows: int, columns: int) -> int:
    """Return how many slices a row is split into, so that few rows fill the device too."""
    return max(
        1,
        min(
            ENOUGH_PROGRAMS // rows,
            triton.cdiv(columns, tile_for(columns, False, False)),
            MOST_SLICES,
        ),
    )


def workspace_for(logits: Tensor) -> Workspace:
    """Allocate scratch for `choose_tokens` of logits of this shape."""
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
    """Choose the target's token in each row: argmax, or with a seed the draw from softmax(logits / temperature).

    logits: [n, V], dense along V; what is not finite is never chosen. positions: int64 [n], seed: int64 [1] (64 bits),
    temperature: float32 [1], all on the device; a draw needs the three of them. The first column wins a tie.
    Returns `chosen`, int64 [n]: -1 where a row has no finite logit. Capturable; allocates nothing where `chosen` and
    `workspace` (`workspace_for`) are given. The noise is that of csrc/spec/gumbel.hpp: -log(-log(u)) in float64.
    """
    _check(logits, positions, seed, temperature)
    rows, columns = logits.shape
    slices = slices_for(rows, columns)
    chosen = (
        torch.empty(rows, dtype=torch.int64, device=logits.device) if chosen is None else chosen
    )
    values = firsts = None
    if slices > 1:
        values, firsts = workspace_for(logits) if workspace is None else workspace
    found = values, firsts, chosen, logits.stride(0), columns
    tile = tile_for(columns, seed is not None, logits.dtype is torch.float32)
    whole = slices == 1
    cut = {"TILE": tile, "STAGES": STAGES, "WHOLE": whole, "num_warps": 4 if tile == TILE else 8}
    if seed is None:
        _peak[(slices, rows)](logits, *found, **cut)
    else:
        near = {"NEAR": NEAR, "NEAR_RELATIVE": NEAR_RELATIVE}
        _draw[(slices, rows)](
            logits, positions, seed, temperature, *found, LARGEST=LARGEST, **near, **cut
        )
    if not whole:
        _merge[(rows,)](values, firsts, chosen, slices, MOST_SLICES=MOST_SLICES, num_warps=1)
    return chosen


def walk(
    tokens: Tensor,
    parents: Tensor,
    chosen: Tensor,
    size: Tensor,
    path: Tensor,
    count: Tensor,
    bonus: Tensor,
) -> None:
    """Descend from the root while a child carries the token chosen at its parent and has a choice of its own.

    tokens, parents, chosen: int64 [n], n up to 1024, of which the first `size` (int32 [1]) are nodes; siblings carry
    distinct tokens. Writes path int64 [n], count int32 [1], how many nodes it has, and bonus int64 [1], the choice
    after its last node; a count of 0 and a bonus of -1 where the root's choice is -1. Capturable.
    """
    n = tokens.shape[0]
    if (
        not 1 <= n <= MAX_NODES
        or not tokens.shape == parents.shape == chosen.shape == path.shape
        or tokens.dim() != 1
    ):
        raise ValueError(
            f"tokens, parents, chosen, path: int64 [n] each, 1 <= n <= {MAX_NODES}, got {list(tokens.shape)}"
        )
    if any(
        t.dtype is not torch.int64 or t.stride(0) != 1
        for t in (tokens, parents, chosen, path, bonus)
    ):
        raise ValueError("tokens, parents, chosen, path, bonus: dense int64 is needed")
    if not size.dtype is count.dtype is torch.int32:
        raise ValueError(f"size, count: int32 [1] each is needed, got {size.dtype}, {count.dtype}")
    block = triton.next_power_of_2(n)
    _walk[(1,)](
        tokens,
        parents,
        chosen,
        size,
        path,
        count,
        bonus,
        BLOCK=block,
        num_warps=max(1, min(8, block // 32)),
    )


def record_walk(
    verified: Verified,
    walked: tuple[Tensor, Tensor, Tensor],
    counts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    record: Tensor,
    root: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Write what the host reads of a cycle, and the next root; return nodes and tokens of the path, int64 [longest].

    walked: path int64 [n], count, int32 [1], and bonus, int64 [1], as `walk` writes them; counts: int32 [1] each, of
    drafted and of verified nodes, of passes, of tokens committed before, and whether nodes found no room. record: int64
    [7 + 2 * longest + 5 * budget], dense: the path's count, these, the bonus; the token chosen after each node of the
    path, the path; tokens, parents, depths of verified nodes, and the bits of their log-probabilities. What has no
    entry is 0, tokens after the path are the next root: the bonus, 0 where there is none. root: int64 [1]. Capturable.
    """
    rows, budget = len(verified.nodes), (len(record) - NUMBERS - 2 * longest) // 5
    path, live, bonus = walked
    whole = (*verified[:3], verified.nodes, path, bonus, record, root)
    if not 1 <= max(rows, longest, budget) <= MAX_NODES or len(path) != rows:
        raise ValueError(f"path, nodes: [n] each, lists of up to {MAX_NODES}, are needed")
    if any(part.dtype is not torch.int64 or part.stride(0) != 1 for part in whole):
        raise ValueError("tokens, parents, depths, nodes, path, bonus, record, root: dense int64")
    if any(part.dtype is not torch.float32 or part.stride(0) != 1 for part in verified[3:5]):
        raise ValueError("log_probs, path_log_probs: dense float32 is needed")
    if any(number.dtype is not torch.int32 for number in (live, *counts)):
        raise ValueError("the path's count, counts: int32 [1] each is needed")
    if len(record) != NUMBERS + 2 * longest + 5 * budget:
        raise ValueError(f"record: {NUMBERS} numbers, 2 lists of {longest} and 5 are needed")
    ids, over = torch.empty(2, longest, dtype=torch.int64, device=path.device).unbind()
    block = triton.next_power_of_2(max(longest, budget))
    _record[(1,)](
        *verified,
        *walked,
        *counts,
        record,
        ids,
        over,
        root,
        rows,
        longest,
        budget,
        NUMBERS=NUMBERS,
        BLOCK=block,
        num_warps=max(1, min(8, block // 32)),
    )
    return ids, over


def _check(
    logits: Tensor, positions: Tensor | None, seed: Tensor | None, temperature: Tensor | None
) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if (
        logits.dim() != 2
        or logits.dtype not in kinds
        or logits.stride(1) != 1
        or not logits.numel()
    ):
        raise ValueError(
            f"logits: floating [n, V], dense along V, is needed, got {logits.dtype} {list(logits.shape)}"
        )
    if seed is None:
        return
    if (
        positions is None
        or positions.dtype is not torch.int64
        or positions.shape != logits.shape[:1]
    ):
        raise ValueError(f"positions: int64 [{logits.shape[0]}] is needed for a draw")
    if (
        seed.dtype is not torch.int64
        or temperature is None
        or temperature.dtype is not torch.float32
    ):
        raise ValueError("seed, temperature: int64 [1] and float32 [1] are needed for a draw")

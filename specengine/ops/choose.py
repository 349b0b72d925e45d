"""Ops of verification: the target's choice after each node, and the way down the tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._registry import FLOATS, are_counts, attached, describe, op
from specengine.ops.select import defined

MASK64 = (1 << 64) - 1


class Walked(NamedTuple):
    """A path down a tree. nodes: int64 [n], padded; live: int32 [1]; bonus: int64 [1]; 0 and -1 where the root has no
    choice."""

    nodes: Tensor
    live: Tensor
    bonus: Tensor


@op
def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """A draw from softmax(scores) whose noise depends on (seed, position, index) alone: argmax of scores + noise.

    scores: float32 [V], logits divided by the temperature. seed and position are taken modulo 2**64. The noise is
    -log(-log(u)) in float64, u = (x + 0.5) / 2**32, x = word i % 4 of Philox4x32-10 with the seed as its key and
    the counter (i // 4, position, 0). Ties go to the lowest index; NaN counts as -inf, +inf as 3e38. InputError
    (a ValueError) where no score is finite. Source: Salmon et al. 2011 (Philox); Gumbel-max.
    """
    if scores.dtype is not torch.float32 or scores.dim() != 1:
        raise InputError(f"scores: float32 [V] is needed, got {describe(scores)}")
    index = _drawn(scores, seed & MASK64, position & MASK64)
    if index < 0:
        raise InputError("scores: none is finite, nothing can be drawn")
    return index


def _drawn(scores: Tensor, seed: int, position: int) -> int:
    """As keyed_gumbel_argmax, -1 where no score is finite."""
    if run := attached("keyed_gumbel_argmax", scores):
        return run(scores, seed, position)
    values = defined(scores).double()
    if not bool((values > -math.inf).any()):
        return -1
    noise = -torch.log(-torch.log(philox_uniform(seed, position, scores.shape[0]).to(scores.device)))
    return int((values + noise).argmax())


@op
def choose_tokens(
    logits: Tensor, positions: Sequence[int] = (), seed: int | None = None, temperature: float = 1.0
) -> Tensor:
    """The choice in each row: its argmax, or with a seed `keyed_gumbel_argmax` of logits / temperature at its position.

    logits: float32, bfloat16 or float16 [n, V]; positions: n of them, where there is a seed. The division is in
    float32; what is not finite is never chosen, the lowest index wins a tie. Returns int64 [n], -1 for a row without a
    finite logit.
    """
    if logits.dtype not in FLOATS or logits.dim() != 2 or not logits.shape[1]:
        raise InputError(f"logits: float32, bfloat16 or float16 [n, V] is needed, got {describe(logits)}")
    if seed is not None and (len(positions) != logits.shape[0] or not 0 < temperature < math.inf):
        raise InputError(
            f"positions, temperature: got {len(positions)} and {temperature}, accepted {logits.shape[0]}, above 0"
        )
    if run := attached("choose_tokens", logits):
        return run(logits, positions, seed, temperature)
    scores = logits.masked_fill(~torch.isfinite(logits), -math.inf)
    if seed is None:
        best, ids = scores.max(dim=-1)
        return torch.where(best > -math.inf, ids, -1)
    scores = scores.float() / temperature
    rows = zip(scores, positions, strict=True)
    chosen = [_drawn(row, seed & MASK64, position & MASK64) for row, position in rows]
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


@op
def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    """Node ids from the root down while a child carries the token that the target chose at its parent.

    tokens, parents, chosen: int64 [n], n >= 1; siblings carry distinct tokens. The path starts with node 0, and
    chosen[path[-1]] is the bonus token.
    """
    if not tokens.shape == parents.shape == chosen.shape or tokens.dim() != 1 or not tokens.shape[0]:
        raise InputError(f"tokens, parents, chosen: int64 [n] each is needed, got {describe(tokens, parents, chosen)}")
    if not tokens.dtype is parents.dtype is chosen.dtype is torch.int64:
        raise InputError(f"tokens, parents, chosen: int64 [n] each is needed, got {describe(tokens, parents, chosen)}")
    if run := attached("walk", tokens):
        return run(tokens, parents, chosen)
    # One pass is enough, as children come after their parents.
    choice = chosen.tolist()
    path, wanted, last = [0], choice[0], 0
    for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
        if parent == last and token == wanted:
            path.append(node)
            last, wanted = node, choice[node]
    return path


@op
def choose_rows(logits: Tensor, positions: Tensor, seed: Tensor | None, temperature: Tensor) -> Tensor:
    """As `choose_tokens`, with what it draws by on the device.

    logits: floating [n, V]; positions: int64 [n]; seed: int64 [1], 64 bits, or None for the argmax; temperature:
    float32 [1].
    """
    if logits.dtype not in FLOATS or logits.dim() != 2 or positions.shape != logits.shape[:1]:
        raise InputError(f"logits, positions: floating [n, V], int64 [n] are needed, got {describe(logits, positions)}")
    if temperature.dtype is not torch.float32 or (seed is not None and seed.dtype is not torch.int64):
        raise InputError(f"seed, temperature: int64 [1], float32 [1] are needed, got {describe(temperature)}")
    if run := attached("choose_rows", logits):
        return run(logits, positions, seed, temperature)
    if seed is None:
        return choose_tokens(logits)
    finite = torch.isfinite(logits)
    scores = defined(logits.masked_fill(~finite, -math.inf).float() / temperature).double()
    best = (scores - torch.log(-torch.log(_uniform(seed, positions, logits.shape[1])))).argmax(1)
    return best.masked_fill(~finite.any(1), -1)


@op
def walk_down(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    """As `walk`, of the first `size` nodes, with the bonus token; a node without a choice (-1) is not entered.

    tokens, parents, chosen: int64 [n]; siblings carry distinct tokens.
    """
    if not tokens.shape == parents.shape == chosen.shape or tokens.dim() != 1 or not are_counts(size):
        given = describe(tokens, parents, chosen, size)
        raise InputError(f"tokens, parents, chosen, size: int64 [n] x 3, int32 [1] are needed, got {given}")
    if run := attached("walk_down", tokens):
        return run(tokens, parents, chosen, size)
    # A node is on the path if it and all above it were chosen: by pointer doubling. Siblings carry distinct tokens,
    # so there is one path, and its nodes ascend.
    n, node = tokens.shape[0], torch.arange(tokens.shape[0], device=tokens.device)
    above = parents.clamp(min=0)
    agreed = ((tokens == chosen[above]) | (node == 0)) & (chosen >= 0) & (node < size)
    jump = above
    for _ in range((n - 1).bit_length()):
        agreed, jump = agreed & agreed[jump], jump[jump]
    count = agreed.sum(0, keepdim=True)
    path = node.masked_fill(~agreed, n).sort().values
    last = path[(count - 1).clamp(min=0)].clamp(max=n - 1)
    bonus = chosen[last].masked_fill(count == 0, -1)
    return Walked(path.masked_fill(node >= count, 0), count.int(), bonus)


@op
def move_rows(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    """As `compact_kv`, of the first `count` entries of `path`, int64 [n]; `n` slots behind the prefix must exist."""
    if slab.dim() != 5 or path.dtype is not torch.int64 or path.dim() != 1 or not are_counts(count, prefix):
        given = describe(slab, path, count, prefix)
        raise InputError(f"slab, path, count, prefix: a cache, int64 [n], int32 [1] x 2 are needed, got {given}")
    if run := attached("move_rows", slab):
        run(slab, path, count, prefix)
        return
    place = torch.arange(path.shape[0], device=slab.device)
    slots = prefix.long() + place
    moved = slab.index_select(3, torch.where(place < count, prefix.long() + path, slots))
    slab.index_copy_(3, slots, moved)


@op
def gather_rows(states: Tensor, sources: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows of a draft pass read: the states at `sources`, the embeddings of `tokens`.

    states: [rows, H]; table: [vocabulary, E]; sources, tokens: int64 [n]. Returns [n, H] and [n, E].
    """
    if not sources.dtype is tokens.dtype is torch.int64 or sources.shape != tokens.shape or sources.dim() != 1:
        raise InputError(f"sources, tokens: int64 [n] x 2 are needed, got {describe(sources, tokens)}")
    if run := attached("gather_rows", states):
        return run(states, sources, table, tokens)
    return states.index_select(0, sources), table.index_select(0, tokens)


def _uniform(seed: Tensor, positions: Tensor, columns: int) -> Tensor:
    """philox_uniform for many positions, all on the device: float64 [n, columns]."""
    low, position = 0xFFFFFFFF, positions[:, None]
    index = torch.arange(-(-columns // 4), device=positions.device)
    counter = (index, position & low, (position >> 32) & low, torch.zeros_like(position))
    words = philox4x32(counter, (seed & low, (seed >> 32) & low))
    x = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :columns]
    return (x.double() + 0.5) / 2.0**32


def philox_uniform(seed: int, position: int, n: int) -> Tensor:
    """The uniforms behind `keyed_gumbel_argmax`: float64 [n], on the CPU, in the open interval (0, 1)."""
    index = torch.arange(-(-n // 4))
    position &= MASK64
    counter = (index, index.new_tensor(position & 0xFFFFFFFF), index.new_tensor(position >> 32), index.new_tensor(0))
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))), 1)
    return (words.reshape(-1)[:n].double() + 0.5) / 2.0**32


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Any, Any]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four counter words (int64 tensors of values below 2**32); four tensors of the same kind.

    key: two words below 2**32, numbers or tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * factor, both below 2**32; in halves, as the product exceeds a signed 64-bit word."""
    upper = a * (factor >> 16)
    lower = a * (factor & 0xFFFF)
    total = (upper >> 16) + (((upper & 0xFFFF) << 16) + lower >> 32)
    return total, ((upper << 16) + lower) & 0xFFFFFFFF

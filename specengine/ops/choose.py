"""Ops of verification: the target's choice after each node, and the noise of its draws."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.errors import require_input
from specengine.ops._meanings import doubled, refuse_unless, require
from specengine.ops._registry import kernels, native, op
from specengine.ops.select import defined

MASK64, MASK32 = (1 << 64) - 1, (1 << 32) - 1
WHOLE = 1 << 40  # the weight of a row's largest score, as an integer: sums are exact in any order
PART = 31  # bits after the point of a share


class Truncation(NamedTuple):
    """Leaves unlikely tokens out, on the device of the logits: top_k, int64 [1], 1 or more; top_p and min_p, float32
    [1]. They are applied in this order; what keeps all is a `top_k` of the vocabulary or more, a `top_p` of 1, a
    `min_p` of 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@op
def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """Draw from softmax(scores) by noise that depends on (seed, position, index) alone: argmax of scores + noise.

    scores: float32 [V], logits divided by the temperature. seed and position are taken modulo 2**64. The noise is
    -log(-log(u)) in float64, u = (x + 0.5) / 2**32, x = word i % 4 of Philox4x32-10 with the seed as its key and
    the counter (i // 4, position, 0). Ties go to the lowest index; NaN counts as -inf, +inf as 3e38. InputError
    (a ValueError) where no score is finite. Source: Salmon et al. 2011 (Philox); Gumbel-max.
    """
    if run := native.keyed_gumbel_argmax[scores.device]:
        index = run(scores, seed & MASK64, position & MASK64)
    else:
        require("scores: float32 [V]", scores)
        key, place = torch.tensor(
            [[signed(seed)], [signed(position)]], dtype=torch.int64, device=scores.device
        )
        one = torch.ones(1, dtype=torch.float32, device=scores.device)
        index = int(choose_tokens(defined(scores)[None], place, key, one)) if len(scores) else -1
    require_input("scores: none is finite, nothing can be drawn", index >= 0)
    return index


@op
def choose_tokens(
    logits: Tensor,
    positions: Tensor | None = None,
    seed: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Choose in each row: its argmax, or with a seed `keyed_gumbel_argmax` of logits / temperature at its position.

    logits: float32, bfloat16 or float16 [n, V]; with a seed, int64 [1], 64 bits: positions, int64 [n], and temperature,
    float32 [1], above 0. The division is in float32; only finite values are chosen, the lowest index wins a tie.
    Returns int64 [n], -1 for a row without a finite logit.
    """
    require(
        "logits: floating [n, V]; positions: int64 [n]; seed: int64 [1]; temperature: float32 [1]",
        logits,
        positions,
        seed,
        temperature,
    )
    refuse_unless(logits.shape[1] > 0, "logits", "1 column or more", logits)
    for name, value in (("positions", positions), ("temperature", temperature)):
        require_input(
            f"{name}: got None, needed where there is a seed", seed is None or value is not None
        )
    if run := kernels.choose_tokens[logits.device]:
        return run(logits, positions, seed, temperature)
    finite = torch.isfinite(logits)
    scores = logits.masked_fill(~finite, -math.inf)
    if seed is None or positions is None or temperature is None or not logits.shape[0]:
        best = scores.max(dim=-1).indices
    else:
        columns = logits.shape[1]
        index = torch.arange(-(-columns // 4), device=positions.device, dtype=torch.int64)
        noise = _gumbel(_words(seed, positions, index).flatten(1)[:, :columns])
        best = (doubled(defined(scores.float() / temperature)) + noise).argmax(1)
    return best.masked_fill(~finite.any(1), -1)


@op
def truncate(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    """Divide each row by the temperature, and set what the truncation leaves out to -inf.

    logits: float32, bfloat16 or float16 [n, V]; temperature: float32 [1], above 0. Top-k keeps what is not below the
    k-th largest score, top-p of that the fewest likeliest tokens that have a share of `top_p` (of equal ones the first
    columns), min-p of that what is at least `min_p` times as likely as the likeliest; the largest score always stays.
    NaN and infinite logits are left out. A row's result depends on no other row: shares are sums of integers.
    Returns float32 [n, V].
    """
    require(
        "logits: floating [n, V]; temperature: float32 [1]; "
        "top_k: int64 [1]; top_p: float32 [1]; min_p: float32 [1]",
        logits,
        temperature,
        *truncation,
    )
    refuse_unless(logits.shape[1] > 0, "logits", "1 column or more", logits)
    if run := kernels.truncate[logits.device]:
        return run(logits, temperature, truncation)
    top_k, top_p, min_p = truncation
    scores = logits.float().masked_fill(~torch.isfinite(logits), -math.inf)
    ordered, columns = defined(scores / temperature).sort(dim=1, descending=True, stable=True)
    inside = ordered >= ordered.index_select(1, top_k.clamp(1, ordered.shape[1]) - 1)
    # of the likeliest one's; NaN where no score is finite
    chances = (ordered - ordered[:, :1]).exp()
    weights = (chances.masked_fill(~inside, 0.0).nan_to_num(nan=0.0) * WHOLE).long()
    sums, share = weights.cumsum(1), (top_p * (1 << PART)).long()
    total = sums[:, -1:]
    limit = (total >> PART) * share + ((total & ((1 << PART) - 1)) * share >> PART)
    inside &= (sums - weights < limit.clamp(min=1)) | (top_p >= 1)
    inside &= chances >= min_p
    return torch.full_like(ordered, -math.inf).scatter(
        1, columns, ordered.masked_fill(~inside, -math.inf)
    )


@op
def couple(
    logits: Tensor, token_ids: Tensor | None, positions: Tensor, seed: Tensor, scale: Tensor
) -> Tensor:
    """Add to a draft's logits, times `scale`, the noise of the target's draw: that of `choose_tokens`.

    logits: float32, bfloat16 or float16 [n, columns]; token_ids: int64 [columns], the tokens of the columns, None where
    they are that themselves; positions: int64 [n], of the tokens to be drawn; seed: int64 [1], 64 bits; scale: float32
    [1]. Returns float32 [n, columns]; noise to float32's precision, which is all that a draft needs.
    """
    if run := native.couple[logits.device]:
        return run(logits, token_ids, positions, seed, scale)
    require(
        "logits: floating [n, V]; token_ids: int64 [V]; positions: int64 [n]; "
        "seed: int64 [1]; scale: float32 [1]",
        logits,
        token_ids,
        positions,
        seed,
        scale,
    )
    refuse_unless(logits.shape[1] > 0, "logits", "1 column or more", logits)
    if run := kernels.couple[logits.device]:
        return run(logits, token_ids, positions, seed, scale)
    tokens = (
        torch.arange(logits.shape[1], device=logits.device, dtype=torch.int64)
        if token_ids is None
        else token_ids
    )
    words = _words(seed, positions, tokens // 4)  # four tokens share them
    place = (tokens % 4).expand(len(positions), -1)[..., None]
    return logits.float() + scale * _gumbel(words.gather(2, place)[..., 0]).float()


@op
def gather_rows(
    states: Tensor, sources: Tensor, table: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather the inputs of a draft pass: the states at `sources`, the embeddings of `tokens`.

    states: [rows, H]; table: [vocabulary, E]; sources, tokens: int64 [n]. Returns [n, H] and [n, E].
    """
    require("sources: int64 [n]; tokens: int64 [n]", sources, tokens)
    if run := kernels.gather_rows[states.device]:
        return run(states, sources, table, tokens)
    return states.index_select(0, sources), table.index_select(0, tokens)


def signed(value: int) -> int:
    """Return the int64 with the bits of a number modulo 2**64."""
    return ((value + 2**63) & MASK64) - 2**63


def _gumbel(words: Tensor) -> Tensor:
    """Return -log(-log(u)), u = (words + 0.5) / 2**32, in float64; in float32 on a device that has no float64.

    There, where u is so close to 1 that float32 has no digits left, -log(u) is computed from the distance to 1.
    """
    uniform = (doubled(words) + 0.5) / 2.0**32
    if uniform.dtype is torch.float64:
        return -torch.log(-torch.log(uniform))
    rest = (doubled(MASK32 - words) + 0.5) / 2.0**32
    series = rest * (1 + rest * (0.5 + rest / 3))
    return -torch.log(torch.where(rest < 1 / 256, series, -torch.log(uniform)))


def _words(seed: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    """Return the four words of each counter: int64 [n, counters, 4]."""
    low, position = 0xFFFFFFFF, positions[:, None]
    counter = (index, position & low, (position >> 32) & low, torch.zeros_like(position))
    return torch.stack(
        torch.broadcast_tensors(*philox4x32(counter, (seed & low, (seed >> 32) & low))), -1
    )


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Any, Any]) -> tuple[Tensor, ...]:
    """Return Philox4x32-10 of four counter words, int64 tensors of values below 2**32, as four such tensors.

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
    """Return the high and low 32 bits of a * factor, both below 2**32, by halves: the product exceeds int64."""
    upper = a * (factor >> 16)
    lower = a * (factor & 0xFFFF)
    return (
        (upper >> 16) + (((upper & 0xFFFF) << 16) + lower >> 32),
        ((upper << 16) + lower) & 0xFFFFFFFF,
    )

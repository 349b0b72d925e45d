"""Ops of verification: the target's choice after each node, and the way down the tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._backends import FLOATS, describe, implementation
from specengine.reference import MASK64


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """A draw from softmax(scores) whose noise depends on (seed, position, index) alone: argmax of scores + noise.

    scores: float32 [V], logits divided by the temperature. seed and position are taken modulo 2**64. The noise is
    -log(-log(u)) in float64, u = (x + 0.5) / 2**32, x = word i % 4 of Philox4x32-10 with the seed as its key and
    the counter (i // 4, position, 0). Ties go to the lowest index; NaN counts as -inf, +inf as 3e38. InputError
    (a ValueError) where no score is finite. Source: Salmon et al. 2011 (Philox); Gumbel-max.
    """
    if scores.dtype is not torch.float32 or scores.dim() != 1:
        raise InputError(f"scores: float32 [V] is needed, got {describe(scores)}")
    index = implementation("keyed_gumbel_argmax", scores.device.type)(scores, seed & MASK64, position & MASK64)
    if index < 0:
        raise InputError("scores: none is finite, nothing can be drawn")
    return index


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
    return implementation("choose_tokens", logits.device.type)(logits, positions, seed, temperature)


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    """Node ids from the root down while a child carries the token that the target chose at its parent.

    tokens, parents, chosen: int64 [n], n >= 1; siblings carry distinct tokens. The path starts with node 0, and
    chosen[path[-1]] is the bonus token.
    """
    if not tokens.shape == parents.shape == chosen.shape or tokens.dim() != 1 or not tokens.shape[0]:
        raise InputError(f"tokens, parents, chosen: int64 [n] each is needed, got {describe(tokens, parents, chosen)}")
    if not tokens.dtype is parents.dtype is chosen.dtype is torch.int64:
        raise InputError(f"tokens, parents, chosen: int64 [n] each is needed, got {describe(tokens, parents, chosen)}")
    return implementation("walk", tokens.device.type)(tokens, parents, chosen)

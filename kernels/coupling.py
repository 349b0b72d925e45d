"""Logits of a draft and the noise that the target's draw will have, in one launch.

One program per row and `TILE` columns. The noise of a token is that of verification.py, in float32 alone: a pure
function of (seed, position, token), so a draft guesses what the target will draw. Columns may stand for any tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specengine_kernels.verification import _near_noise, _uniform
from torch import Tensor

TILE = 1024


# ---- meaning


def reference(
    logits: Tensor, tokens: Tensor | None, positions: Tensor, seed: int, scale: float
) -> Tensor:
    """Compute `couple` in plain torch, with float64 noise that is rounded once."""
    ids = (
        torch.arange(logits.shape[1], dtype=torch.int64, device="cpu")
        if tokens is None
        else tokens.cpu()
    )
    uniform = torch.stack(
        [_uniform(seed, position, int(ids.max()) + 1)[ids] for position in positions.tolist()]
    )
    noise = -torch.log(-torch.log(uniform)).float()
    return logits.float() + scale * noise.to(logits.device)


# ---- kernel


SCALARS = ("positions", "seed", "scale")  # read one by one


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _couple(
    logits,
    tokens,
    positions,
    seed,
    scale,
    out,
    row_stride,
    columns,
    TILE: tl.constexpr,
    MAPPED: tl.constexpr,
):
    row = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = column < columns
    token = tl.load(tokens + column, mask=live, other=0).to(tl.int32) if MAPPED else column
    x = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=live, other=0.0).to(
        tl.float32
    )
    position, key, factor = tl.load(positions + row), tl.load(seed), tl.load(scale)
    zeros = tl.zeros_like(token).to(tl.uint32)
    low, high = (
        (position & 0xFFFFFFFF).to(tl.uint32) + zeros,
        ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zeros,
    )
    r0, r1, r2, r3 = tl.philox(key, (token // 4).to(tl.uint32), low, high, zeros)
    word = token % 4
    bits = tl.where(word < 2, tl.where(word == 0, r0, r1), tl.where(word == 2, r2, r3))
    tl.store(out + row.to(tl.int64) * columns + column, x + factor * _near_noise(bits), mask=live)


# ---- launcher


def couple(
    logits: Tensor,
    tokens: Tensor | None,
    positions: Tensor,
    seed: Tensor,
    scale: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return logits + scale * noise, float32 [n, columns].

    logits: [n, columns], dense along the columns; tokens: int64 [columns], below 2**31, what the columns stand for,
    None where that is themselves; positions: int64 [n]; seed: int64 [1] (64 bits); scale: float32 [1]; all on the
    device. Capturable; allocates nothing where `out` is given.
    """
    rows, columns = logits.shape
    if logits.stride(1) != 1 or (
        tokens is not None and (tokens.shape != (columns,) or tokens.stride(0) != 1)
    ):
        raise ValueError("logits, tokens: dense [n, columns] and int64 [columns] are needed")
    if (
        positions.shape != (rows,)
        or positions.dtype is not torch.int64
        or seed.dtype is not torch.int64
    ):
        raise ValueError("positions, seed: int64 [n] and [1] are needed")
    out = (
        torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
        if out is None
        else out
    )
    mapped = tokens is not None
    given = logits, tokens if mapped else positions, positions.contiguous(), seed, scale, out
    _couple[(triton.cdiv(columns, TILE), rows)](
        *given, logits.stride(0), columns, TILE=TILE, MAPPED=mapped
    )
    return out

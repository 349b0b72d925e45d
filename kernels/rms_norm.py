"""Residual sum and RMS norm in one launch; the norms of what a draft pass gathers in another.

One program per row, so a row's bits depend on no other row. The arithmetic is that of transformers' modules: the sum is
rounded to the dtype of the states, the norm is computed in float32 and rounded before it is multiplied by its weight.
`_gather_norms` has two programs a row, for its token's embedding and for the state that it continues.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_ROW = 32768  # channels; a row stands in the registers of one program

# ---- meaning


def reference(
    states: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm` in plain torch; float64 stays float64."""
    total = states if residual is None else residual + states
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(total.dtype), total


def reference_of_rows(
    states: Tensor,
    sources: Tensor,
    table: Tensor,
    tokens: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Compute `gather_norms` in plain torch."""
    rows = states[sources]
    first, second = table[tokens], rows
    normed = reference(first, None, weights[0], eps)[0], reference(second, None, weights[1], eps)[0]
    return torch.cat(normed, -1), rows


# ---- kernels


@triton.jit
def _add_rms_norm(
    states,
    residual,
    weight,
    out,
    total,
    states_row,
    residual_row,
    columns,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    some = channel < columns
    x = tl.load(states + row * states_row + channel, mask=some, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual + row * residual_row + channel, mask=some, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + row * columns + channel, rounded, mask=some)
        x = rounded.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    factor = tl.load(weight + channel, mask=some, other=0.0).to(tl.float32)
    found = scaled.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + row * columns + channel, found.to(out.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize_on_alignment=["sources", "tokens"])
def _gather_norms(
    states,
    sources,
    table,
    tokens,
    state_weight,
    table_weight,
    out,
    rows,
    states_row,
    table_row,
    columns,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    some = channel < columns
    place = out + row * 2 * columns + channel
    if tl.program_id(1) == 0:
        token = tl.load(tokens + row)
        x = tl.load(table + token * table_row + channel, mask=some, other=0.0).to(tl.float32)
        factor = tl.load(table_weight + channel, mask=some, other=0.0).to(tl.float32)
    else:
        source = tl.load(sources + row)
        state = tl.load(states + source * states_row + channel, mask=some, other=0.0)
        tl.store(rows + row * columns + channel, state, mask=some)
        x = state.to(tl.float32)
        factor = tl.load(state_weight + channel, mask=some, other=0.0).to(tl.float32)
        place += columns
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    normed = scaled.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(place, normed.to(out.dtype.element_ty), mask=some)


# ---- launchers


def add_rms_norm(
    states: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of residual + states, and that sum; without a residual, of the states, and these.

    states, residual: [n, channels], rows contiguous, n of 1 or more; weight: [channels]; one dtype. Capturable.
    """
    rows, columns = states.shape
    given = (states, weight) if residual is None else (states, weight, residual)
    if (
        len({tensor.dtype for tensor in given}) > 1
        or weight.shape != (columns,)
        or columns > LARGEST_ROW
    ):
        raise ValueError(
            f"states [n, channels], weight [channels] of one dtype, up to {LARGEST_ROW} channels, are needed, got "
            f"{states.dtype} {list(states.shape)}, {weight.dtype} {list(weight.shape)}"
        )
    if residual is not None and residual.shape != states.shape:
        raise ValueError(f"residual: {list(states.shape)} is needed, got {list(residual.shape)}")
    if any(tensor.stride(-1) != 1 for tensor in given):
        raise ValueError("states, residual, weight: the last dimension must be contiguous")
    out = torch.empty((rows, columns), dtype=states.dtype, device=states.device)
    total = states if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(columns)
    _add_rms_norm[(rows,)](
        states,
        residual,
        weight,
        out,
        total,
        states.stride(0),
        0 if residual is None else residual.stride(0),
        columns,
        eps,
        ADDS=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out, total


def gather_norms(
    states: Tensor,
    sources: Tensor,
    table: Tensor,
    tokens: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the RMS norms of the embeddings of `tokens` and of the states at `sources`, next to each other, and these
    states: [n, 2 * channels] and [n, channels].

    states: [rows, channels]; table: [vocabulary, channels], rows contiguous; sources, tokens: int64 [n], dense, n of 1
    or more; weights: [channels] of the embeddings' norm and of the states'; one dtype. Capturable.
    """
    (width,), columns = sources.shape, states.shape[1]
    dense = (states, table, *weights)
    if len({part.dtype for part in dense}) > 1 or columns > LARGEST_ROW:
        raise ValueError(f"states, table, weights: one dtype, up to {LARGEST_ROW} channels")
    if table.shape[1] != columns or any(weight.shape != (columns,) for weight in weights):
        raise ValueError(f"table [vocabulary, {columns}], weights [{columns}] are needed")
    if any(part.stride(-1) != 1 for part in (*dense, sources, tokens)):
        raise ValueError("states, table, weights, sources, tokens: the last dimension: contiguous")
    if tokens.shape != (width,) or not sources.dtype is tokens.dtype is torch.int64:
        raise ValueError(f"sources, tokens: int64 [{width}] is needed")
    out = torch.empty((width, 2 * columns), dtype=states.dtype, device=states.device)
    rows = torch.empty((width, columns), dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(columns)
    _gather_norms[(width, 2)](
        states,
        sources,
        table,
        tokens,
        weights[1],
        weights[0],
        out,
        rows,
        states.stride(0),
        table.stride(0),
        columns,
        eps,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out, rows

"""The gate of an MLP in one launch: silu(gate) * up, each step rounded to the dtype as torch's operations round it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # channels of one program

# ---- meaning


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu_mul` in plain torch; float64 stays float64."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (wide / (1 + (-wide).exp())).to(gate.dtype) * up


# ---- kernel


@triton.jit
def _silu_mul(gate, up, out, gate_row, up_row, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = channel < columns
    x = tl.load(gate + row * gate_row + channel, mask=some, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + channel, mask=some, other=0.0).to(tl.float32)
    opened = tl.div_rn(x, 1.0 + tl.exp(-x)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + channel, (opened * factor).to(out.dtype.element_ty), mask=some)


# ---- launcher


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous. gate, up: [n, channels], rows contiguous, one dtype. Capturable."""
    if gate.shape != up.shape or gate.dtype is not up.dtype:
        raise ValueError(
            f"gate, up: one shape and dtype, got {list(gate.shape)} {gate.dtype}, {list(up.shape)}"
        )
    if not gate.stride(-1) == up.stride(-1) == 1:
        raise ValueError("gate, up: the last dimension must be contiguous")
    rows, columns = gate.shape
    out = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    grid = rows, triton.cdiv(columns, BLOCK)
    _silu_mul[grid](gate, up, out, gate.stride(0), up.stride(0), columns, BLOCK=BLOCK, num_warps=4)
    return out

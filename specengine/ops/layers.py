"""Ops of a decoder layer between its products, in the arithmetic of transformers' modules."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from specengine.errors import InputError
from specengine.ops._meanings import describe, require
from specengine.ops._registry import kernels, op


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension: computed in float32, rounded, and multiplied by its weight."""
    wide = states.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(states.dtype)


@op
def add_rms_norm(states: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of residual + states, and that sum; without a residual, of the states, and these.

    states, residual: [n, channels]; weight: [channels]; one floating dtype, to which the sum is rounded. No row depends
    on another.
    """
    require(
        "states: floating [n, channels]; residual: floating [n, channels]; weight: floating [channels]",
        *(states, residual, weight),
    )
    _require_one_dtype(states, weight, states if residual is None else residual)
    if run := kernels.add_rms_norm[states.device]:
        return run(states, residual, weight, eps)
    total = states if residual is None else residual + states
    return rms_norm(total, weight, eps), total


@op
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, both floating [n, channels] of one dtype, in which each step is rounded."""
    require("gate: floating [n, channels]; up: floating [n, channels]", gate, up)
    _require_one_dtype(gate, up)
    if run := kernels.silu_mul[gate.device]:
        return run(gate, up)
    return silu(gate) * up


def _require_one_dtype(*tensors: Tensor) -> None:
    if any(tensor.dtype is not tensors[0].dtype for tensor in tensors):
        raise InputError(f"one dtype is needed, got {describe(*tensors)}")

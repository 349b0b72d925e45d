"""Refuse what cannot be inflated: shapes too small, norms without room for a constant, other rotary frequencies."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from research.inflate.places import Heads
from research.inflate.shape import Shape
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.eagle import EagleConfig, Rope, Rotation


def refuse_smaller(what: str, small: Shape, large: Shape) -> None:
    for name in ("hidden", "layers", "intermediate", "vocab"):
        if getattr(large, name) < getattr(small, name):
            raise InputError(
                f"shape: {name} {getattr(large, name)} is smaller than the {what}'s {getattr(small, name)}"
            )


def refuse_no_constant(
    small: Shape, shape: Shape, head: EagleConfig | None, dtype: torch.dtype
) -> None:
    if dtype is torch.float16:
        raise InputError(
            "dtype: silent tokens and draft columns need the range of bfloat16 or float32"
        )
    if shape.hidden <= max(small.hidden, 0 if head is None else head.hidden_size):
        raise InputError(
            f"shape: silent tokens and draft columns need a channel more than hidden {shape.hidden}"
        )
    if head is not None and (head.norm_before_residual or head.norm_recurrent):
        raise UnsupportedModelError(
            "head: its recurrent state is normalised, which does not keep the constant channel that silent tokens and "
            "draft columns need"
        )


def refuse_other_rope(what: str, small: Rotation, large: Rotation, heads: Heads) -> None:
    """Raise InputError unless both rotations, [..., head size] at position 1, agree on the small head's channels."""
    channels = heads.queries.places[: small[0].shape[-1]] % large[0].shape[-1]
    for mine, theirs in zip(small, large, strict=True):
        if not torch.allclose(mine, theirs[..., channels], rtol=1e-5, atol=0.0):
            raise InputError(
                f"shape: the {what}'s rotary frequencies depend on the head size in a way that heads of "
                f"{large[0].shape[-1]} channels do not contain; keep its {small[0].shape[-1]}"
            )


def target_rotation(config: LlamaConfig) -> Rotation:
    return LlamaRotaryEmbedding(config)(torch.zeros(1), torch.ones(1, 1, dtype=torch.int64))


def head_rotation(config: EagleConfig) -> Rotation:
    return Rope(config)(torch.ones(1, 1, dtype=torch.int64), torch.float32)

"""Which models the native forward runs, and what it has to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specengine.errors import UnsupportedModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not change with the length


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    frequencies  radians per position, float32 [head_dim / 2]
    rope_scale   on cosines and sines
    """

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    frequencies: Tensor
    rope_scale: float


def shape_of(config: PretrainedConfig) -> Shape:
    """The sizes; UnsupportedModelError with the reason where this is no model that the native forward knows."""
    refuse_config(config)
    frequencies, scale = _rope(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        frequencies=frequencies,
        rope_scale=scale,
    )
    if shape.hidden % 2 or head_dim % 2 or len(frequencies) != head_dim // 2 or shape.heads % shape.kv_heads:
        raise UnsupportedModelError(
            f"native: sizes must be even and key-value heads divide query heads; got hidden size {shape.hidden}, "
            f"{shape.heads} heads of {head_dim}, {shape.kv_heads} key-value heads, {len(frequencies)} frequencies"
        )
    return shape


def refuse_config(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where the config alone says that the native forward would compute something else."""
    reasons: dict[str, Any] = {
        f"model type {config.model_type}, known are {', '.join(FAMILIES)}": config.model_type not in FAMILIES,
        "quantized weights": getattr(config, "quantization_config", None) is not None,
        "code of its own (auto_map)": getattr(config, "auto_map", None) is not None,
        f"activation {getattr(config, 'hidden_act', None)}, known is silu": getattr(config, "hidden_act", "") != "silu",
        "other layers than full or sliding attention": set(getattr(config, "layer_types", None) or ())
        - {"full_attention", "sliding_attention"},
    }
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    reasons[f"{kind} positions, known are {', '.join(ROPE_TYPES)}"] = kind not in ROPE_TYPES
    reasons["positions on part of a head's channels"] = rope.get("partial_rotary_factor", 1.0) != 1.0
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"native: {reason}")


def _rope(config: PretrainedConfig) -> tuple[Tensor, float]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config=config)
    return rotary.inv_freq.to(torch.float32), float(rotary.attention_scaling)

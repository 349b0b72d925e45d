"""Qwen3.5, its text, dense: the gated delta rule in three layers of four, gated attention in the others."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Attention, Family, GatedDelta, Layer, Name

RECURRENT = "linear_attention"
ATTENTION = Layer(
    attention=Attention(
        q_norm=Name("self_attn.q_norm", "attn_q_norm"),
        k_norm=Name("self_attn.k_norm", "attn_k_norm"),
        partial=True,
        gated=True,
    ),
    mlp_norm=Name("post_attention_layernorm", "post_attention_norm"),
)


def layer(config: Any, number: int) -> Layer:
    """Return the blocks of a layer."""
    if config.layer_types[number] != RECURRENT:
        return ATTENTION
    return replace(
        ATTENTION,
        mixer=GatedDelta(
            taps=config.linear_conv_kernel_dim,
            key_heads=config.linear_num_key_heads,
            heads=config.linear_num_value_heads,
            key_size=config.linear_key_head_dim,
            value_size=config.linear_value_head_dim,
        ),
    )


FAMILY = Family(layer=layer, attending=ATTENTION, kinds=(RECURRENT,), one_is_zero=True)

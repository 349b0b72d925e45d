"""Qwen3.5, its text, dense: the gated delta rule in three layers of four, gated attention in the others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import GGUF, Attention, Family, GatedDelta, Layer, Name

RECURRENT = "linear_attention"
ATTENTION = Layer(
    attention=Attention(
        q_norm=Name("self_attn.q_norm", "attn_q_norm"),
        k_norm=Name("self_attn.k_norm", "attn_k_norm"),
        partial=True,
        gates=Name("self_attn.q_proj", "attn_q"),
    ),
    mlp_norm=Name("post_attention_layernorm", "post_attention_norm"),
)


def layer(config: Any, number: int) -> Layer:
    delta = GatedDelta(
        taps=config.linear_conv_kernel_dim,
        key_heads=config.linear_num_key_heads,
        heads=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
    )
    return (
        ATTENTION
        if config.layer_types[number] != RECURRENT
        else replace(ATTENTION, attention=None, mixer=delta)
    )


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Recurrent layers are listed, or all but every n-th."""
    count, every = fields["num_hidden_layers"], value("full_attention_interval") or 4
    listed = value("attention.recurrent_layers") or [
        (number + 1) % every for number in range(count)
    ]
    return {
        "layer_types": [
            RECURRENT if recurrent else "full_attention" for recurrent in listed[:count]
        ],
        "linear_value_head_dim": (value("ssm.inner_size") or 0)
        // (value("ssm.time_step_rank") or 1),
    }


FAMILY = Family(
    layer=layer,
    attending=ATTENTION,
    kinds=(RECURRENT,),
    one_is_zero=True,
    gguf=GGUF(
        "qwen35",
        keys={
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        flags={"attention_bias": "attn_q.bias"},
        ignored=("rope.dimension_sections",),
        finish=finish,
    ),
)

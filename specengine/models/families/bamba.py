"""Bamba: Mamba-2 in most layers, attention in the others, with positions in half of a head."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Attention, Family, GatedMLP, Layer, Name, mamba

RECURRENT = "linear_attention"
ATTENTION = Layer(
    attention=Attention(partial=True),
    mlp_norm=Name("pre_ff_layernorm", "ffn_norm"),
    mlp=GatedMLP(
        Name("feed_forward.gate_proj", "ffn_gate"),
        Name("feed_forward.up_proj", "ffn_up"),
        Name("feed_forward.down_proj", "ffn_down"),
    ),
)


def layer(config: Any, number: int) -> Layer:
    return (
        ATTENTION
        if config.layer_types[number] != RECURRENT
        else replace(ATTENTION, attention=None, mixer=mamba(config))
    )


def alone(config: Any, number: int) -> dict[str, Any]:
    """Return what makes a config of this layer alone: it lists those with attention."""
    return {"attn_layer_indices": [] if config.layer_types[number] == RECURRENT else [0]}


FAMILY = Family(
    layer=layer,
    attending=ATTENTION,
    kinds=(RECURRENT,),
    norm=Name("model.final_layernorm", "output_norm"),
    alone=alone,
)

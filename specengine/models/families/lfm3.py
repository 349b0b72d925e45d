"""LFM3: the blocks of LFM2, with windows in some layers, a gate for each head, and norms of what is added."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Attention, Family, Fields, Layer, Name, ShortConvolution
from specengine.models.families.lfm2 import ATTENTION as LFM2, CONVOLUTION

ATTENTION = replace(
    LFM2,
    attention=Attention(
        q_norm=Name("self_attn.q_norm", "attn_q_norm"),
        k_norm=Name("self_attn.k_norm", "attn_k_norm"),
        windows="by type",
        head_gates=Name("self_attn.g_proj", "attn_gate"),
    ),
    attention_output_norm=Name("post_operator_norm", "post_attention_norm"),
    mlp_output_norm=Name("post_ffn_norm", "post_ffw_norm"),
)


def layer(config: Any, number: int) -> Layer:
    chosen = (
        ATTENTION
        if config.use_sandwich_norm
        else replace(ATTENTION, attention_output_norm=None, mlp_output_norm=None)
    )
    if config.layer_types[number] == CONVOLUTION:
        return replace(chosen, attention=None, mixer=ShortConvolution(config.conv_L_cache))
    return (
        chosen
        if config.use_attention_gate
        else replace(chosen, attention=replace(FAMILY.attention, head_gates=None))
    )


FAMILY = Family(
    layer=layer,
    attending=ATTENTION,
    kinds=(CONVOLUTION,),
    fields=Fields(eps="norm_eps", activation=""),
    norm=Name("model.embedding_norm", "token_embd_norm"),
    stored={".self_attn.gate_proj.": ".self_attn.g_proj."},
)

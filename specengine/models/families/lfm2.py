"""LFM2: short convolutions in most layers, attention with normed queries and keys in the others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import (
    GGUF,
    Attention,
    Family,
    Fields,
    GatedMLP,
    Layer,
    Name,
    ShortConvolution,
)

CONVOLUTION = "conv"
ATTENTION = Layer(
    attention_norm=Name("operator_norm", "attn_norm"),
    attention=Attention(
        o=Name("self_attn.out_proj", "attn_output"),
        q_norm=Name("self_attn.q_layernorm", "attn_q_norm"),
        k_norm=Name("self_attn.k_layernorm", "attn_k_norm"),
    ),
    mlp_norm=Name("ffn_norm", "ffn_norm"),
    mlp=GatedMLP(
        gate=Name("feed_forward.w1", "ffn_gate"),
        up=Name("feed_forward.w3", "ffn_up"),
        down=Name("feed_forward.w2", "ffn_down"),
    ),
)


def layer(config: Any, number: int) -> Layer:
    return (
        ATTENTION
        if config.layer_types[number] != CONVOLUTION
        else replace(ATTENTION, attention=None, mixer=ShortConvolution(config.conv_L_cache))
    )


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Layers without keys have convolutions; the width of the network is what it is."""
    heads = value("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    return {
        "layer_types": ["full_attention" if count else CONVOLUTION for count in heads],
        "block_auto_adjust_ff_dim": False,
    }


def inner(config: Any) -> dict[str, int]:
    """Return the width of the network, which some configs state before it is cut to two thirds."""
    size = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if config.block_ffn_dim_multiplier is not None:
            multiple = config.block_multiple_of
            size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
    return {"inner": size}


FAMILY = Family(
    layer=layer,
    attending=ATTENTION,
    kinds=(CONVOLUTION,),
    fields=Fields(eps="norm_eps", activation=""),
    sizes=inner,
    gguf=GGUF("lfm2", keys={"shortconv.l_cache": "conv_L_cache"}, finish=finish),
    norm=Name("model.embedding_norm", "token_embd_norm"),
)

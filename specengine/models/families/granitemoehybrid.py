"""Granite 4: Mamba-2 in most layers, attention in the others, mostly without positions; with experts or without."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import Attention, Experts, GatedMLP, Layer, Name, granitemoe, mamba

RECURRENT = "linear_attention"
ATTENTION = Layer(
    attention=Attention(turns=lambda config, layer: config.position_embedding_type == "rope")
)


def shared(suffix: str) -> GatedMLP:
    """Return the network that all tokens use; suffix: of its names in GGUF files."""
    both = "shared_mlp.input_linear"
    return GatedMLP(
        Name(both, f"ffn_gate{suffix}"),
        Name(both, f"ffn_up{suffix}"),
        Name("shared_mlp.output_linear", f"ffn_down{suffix}"),
    )


def layer(config: Any, number: int) -> Layer:
    dense = replace(ATTENTION, mlp=shared(""))
    experts = granitemoe.layer(config, number).mlp
    if config.num_local_experts and isinstance(experts, Experts):
        dense = replace(
            dense,
            mlp=replace(
                experts, shared=shared("_shexp"), shared_inner=config.shared_intermediate_size
            ),
        )
    return (
        dense
        if config.layer_types[number] != RECURRENT
        else replace(dense, attention=None, mixer=mamba(config))
    )


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Layers without keys are recurrent; a file without experts says nothing of them."""
    heads = value("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    inner = value("ssm.inner_size") or 0
    return {
        "layer_types": ["full_attention" if count else RECURRENT for count in heads],
        "mamba_d_head": inner // (value("ssm.time_step_rank") or 1),
        "mamba_expand": inner // fields["hidden_size"],
        "num_local_experts": value("expert_count") or 0,
        "num_experts_per_tok": value("expert_used_count") or 0,
        "shared_intermediate_size": value("expert_shared_feed_forward_length")
        or fields["intermediate_size"],
        "position_embedding_type": None if value("rope.scaling.finetuned") is False else "rope",
    }


assert granitemoe.FAMILY.gguf is not None
FAMILY = replace(
    granitemoe.FAMILY,
    layer=layer,
    attending=ATTENTION,
    kinds=(RECURRENT,),
    sizes=lambda config: {"inner": config.shared_intermediate_size},
    gguf=replace(
        granitemoe.FAMILY.gguf,
        architecture="granitehybrid",
        keys={
            **granitemoe.FAMILY.gguf.keys,
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        flags={
            **granitemoe.FAMILY.gguf.flags,
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
        },
        finish=finish,
    ),
)

"""Nemotron-H: layers of one block: Mamba-2, attention without positions, or a network, with experts or without."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import (
    GGUF,
    Attention,
    Experts,
    Family,
    Fields,
    GatedMLP,
    Layer,
    Mamba2,
    Name,
    by_sigmoid,
)

CHOICE = "mixer.gate.e_score_correction_bias"
EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
}
NORM = Name("norm", "attn_norm")
ATTENTION = Layer(
    attention_norm=NORM,
    attention=Attention(
        q=Name("mixer.q_proj", "attn_q"),
        k=Name("mixer.k_proj", "attn_k"),
        v=Name("mixer.v_proj", "attn_v"),
        o=Name("mixer.o_proj", "attn_output"),
        turns=lambda config, layer: False,
    ),
    mlp_norm=None,
    mlp=None,
)
NETWORK = Layer(attention_norm=None, attention=None, mlp_norm=NORM)


def network(module: str, suffix: str) -> GatedMLP:
    """Return a network without gates; suffix: of its names in GGUF files."""
    return GatedMLP(
        None,
        Name(f"{module}.up_proj", f"ffn_up{suffix}"),
        Name(f"{module}.down_proj", f"ffn_down{suffix}"),
    )


def layer(config: Any, number: int) -> Layer:
    kind = config.layer_types[number]
    if kind == "linear_attention":
        return replace(ATTENTION, attention=None, mixer=mixer(config))
    if kind == "mlp":
        return replace(NETWORK, mlp=network("mixer", ""))
    return replace(NETWORK, mlp=experts(config)) if kind == "moe" else ATTENTION


def mixer(config: Any) -> Mamba2:
    """Return the mixer of all layers that have one."""
    return Mamba2(
        taps=config.conv_kernel,
        groups=config.n_groups,
        heads=config.mamba_num_heads,
        size=config.ssm_state_size,
        head_size=config.mamba_head_dim,
        norms=config.n_groups,
        module="mixer",
        limits=tuple(config.time_step_limit),
    )


def experts(config: Any) -> Experts:
    """Return the experts of all layers that have some."""
    return Experts(
        config.n_routed_experts,
        config.moe_intermediate_size,
        by_sigmoid(config),
        router=Name("mixer.gate", "ffn_gate_inp"),
        gate=None,
        up=Name("mixer.experts.up_proj", "ffn_up_exps.weight"),
        down=Name("mixer.experts.down_proj", "ffn_down_exps.weight"),
        choice=Name(CHOICE, "exp_probs_b.bias"),
        shared=network("mixer.shared_experts", "_shexp"),
        shared_inner=config.moe_shared_expert_intermediate_size,
    )


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Layers with keys have attention, others with channels a network, and the rest are recurrent."""
    count, experts = fields["num_hidden_layers"], value("expert_count")
    heads, inner = value("attention.head_count_kv"), value("feed_forward_length")
    heads, inner = (each if isinstance(each, list) else [each] * count for each in (heads, inner))
    network = "moe" if experts else "mlp"
    kinds = [
        "full_attention" if keys else network if channels else "linear_attention"
        for keys, channels in zip(heads, inner, strict=False)
    ]
    unsaid = {"norm_topk_prob": True, "moe_latent_size": None}
    return {
        **{field: unsaid.get(field, 1) for field in EXPERTS.values() if fields[field] is None},
        "layers_block_type": kinds[:count],
        "mamba_head_dim": (value("ssm.inner_size") or 0) // (value("ssm.time_step_rank") or 1),
    }


FAMILY = Family(
    layer=layer,
    attending=ATTENTION,
    kinds=("linear_attention", "mlp", "moe"),
    fields=Fields(eps="layer_norm_epsilon", activation=""),
    embedding=Name("model.embeddings", "token_embd"),
    norm=Name("model.norm_f", "output_norm"),
    activation="relu",
    neutral={"moe_latent_size": None, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"},
    stored={"backbone.": "model."},
    exact=(CHOICE,),
    gguf=GGUF(
        "nemotron_h",
        others=("nemotron_h_moe",),
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
            **EXPERTS,
        },
        flags={
            "attention_bias": "attn_q.bias",
            "mlp_bias": "ffn_up.bias",
            "use_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
        },
        ignored=("rope.dimension_count",),
        pairs=("attn_q", "attn_k"),
        finish=finish,
    ),
)

"""DeepSeek-V3 and R1: latent attention, experts after the first layers, and one for all tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine.models.families import (
    GGUF,
    Experts,
    Family,
    GatedMLP,
    Latent,
    Layer,
    Name,
    by_sigmoid,
    latent_factors,
    latent_of,
    shared_experts,
)

CHOICE = "mlp.gate.e_score_correction_bias"


def experts(config: Any) -> Experts:
    return Experts(
        config.n_routed_experts,
        config.moe_intermediate_size,
        by_sigmoid(config),
        choice=Name(CHOICE, "exp_probs_b.bias"),
        shared=shared_experts("shared_experts"),
        shared_inner=config.moe_intermediate_size * config.n_shared_experts,
    )


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=latent_of(config, neighbours=bool(config.rope_interleave)),
        mlp=GatedMLP() if number < config.first_k_dense_replace else experts(config),
    )


SIGMOID = 2  # of expert_gating_func
STORED = GGUF(
    "deepseek2",
    keys={
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
    },
    read=("expert_gating_func", "rope.scaling.yarn_log_multiplier"),
)


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Return the sizes of heads, which older files state as those of keys and values, and the factor on scores."""
    key, size = (
        value(f"attention.{side}_length_mla") or value(f"attention.{side}_length")
        for side in ("key", "value")
    )
    rope, turned, grown = (
        fields["rope_parameters"],
        fields["qk_rope_head_dim"],
        value("rope.scaling.yarn_log_multiplier"),
    )
    if grown:  # files have a tenth of it
        rope = rope | {"mscale": grown / 0.1, "mscale_all_dim": grown / 0.1}
    return {
        "rope_parameters": rope,
        "num_key_value_heads": fields["num_attention_heads"],
        "qk_nope_head_dim": key - turned,
        "v_head_dim": size,
        "attention_bias": False,
        "n_group": fields["n_group"] or 1,
        "topk_group": value("expert_group_used_count") or 1,
        "norm_topk_prob": bool(value("expert_weights_norm")),
        "routed_scaling_factor": fields["routed_scaling_factor"] or 1.0,
    }


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=Latent()),
    sizes=lambda config: {  # of the one key-value head
        "kv_heads": 1,
        "head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
    },
    alone=lambda config, number: {
        "first_k_dense_replace": int(number < config.first_k_dense_replace)
    },
    factors=latent_factors,
    gguf=replace(STORED, finish=finish, holds=lambda value: value("expert_gating_func") == SIGMOID),
    exact=(CHOICE,),
)

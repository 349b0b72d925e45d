"""ERNIE 4.5 with experts: neighbouring channels turned together, and experts after the first layers."""

from typing import Any

from specengine.models.families import (
    GGUF,
    Attention,
    Experts,
    Family,
    GatedMLP,
    Layer,
    Name,
    Routing,
    shared_experts,
)

ATTENTION = Attention(neighbours=True)
CHOICE = "mlp.gate.moe_statics.e_score_correction_bias"


def is_sparse(config: Any, number: int) -> bool:
    return bool(
        config.moe_layer_start_index <= number <= config.moe_layer_end_index
        and (number + 1) % config.moe_layer_interval == 0
    )


def layer(config: Any, number: int) -> Layer:
    shared = config.moe_num_shared_experts
    experts = Experts(
        config.moe_num_experts,
        config.moe_intermediate_size,
        Routing(config.moe_k, least=config.moe_norm_min),
        choice=Name(CHOICE, "exp_probs_b.bias"),
        shared=shared_experts("shared_experts") if shared else None,
        shared_inner=config.moe_intermediate_size * shared,
    )
    return Layer(attention=ATTENTION, mlp=experts if is_sparse(config, number) else GatedMLP())


def alone(config: Any, number: int) -> dict[str, Any]:
    """Return the fields of a config whose one layer is this one."""
    return {
        "moe_layer_start_index": int(not is_sparse(config, number)),
        "moe_layer_end_index": 0,
        "moe_layer_interval": 1,
    }


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION),
    alone=alone,
    gguf=GGUF(
        "ernie4_5-moe",
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        flags={"use_bias": "attn_q.bias"},
    ),
    renamed={".mlp.moe_statics.": ".mlp.gate.moe_statics."},
    exact=("mlp.gate.weight", CHOICE),
)

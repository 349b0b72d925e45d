"""Qwen2 with experts: its attention, and in most layers a router, and an expert for all tokens with a gate."""

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

ATTENTION = Attention(windows="by type")


def is_sparse(config: Any, number: int) -> bool:
    return (
        config.num_experts > 0
        and (number + 1) % config.decoder_sparse_step == 0
        and number not in config.mlp_only_layers
    )


def routing_of(config: Any) -> Routing:
    return Routing(
        config.num_experts_per_tok, "normalised softmax" if config.norm_topk_prob else "softmax"
    )


def alone(config: Any, number: int) -> dict[str, Any]:
    """Return the fields of a config whose one layer is this one."""
    return {"mlp_only_layers": [] if is_sparse(config, number) else [0], "decoder_sparse_step": 1}


def layer(config: Any, number: int) -> Layer:
    experts = Experts(
        config.num_experts,
        config.moe_intermediate_size,
        routing_of(config),
        shared=shared_experts("shared_expert"),
        shared_inner=config.shared_expert_intermediate_size,
        shared_gate=Name("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    )
    return Layer(attention=ATTENTION, mlp=experts if is_sparse(config, number) else GatedMLP())


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION),
    alone=alone,
    gguf=GGUF(
        "qwen2moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        flags={"qkv_bias": "attn_q.bias"},
        finish=lambda fields, value: {"norm_topk_prob": value("expert_weights_norm") is True},
    ),
)

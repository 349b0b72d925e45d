"""Qwen3 with experts: its attention, and a router in most layers."""

from typing import Any

from specengine.models.families import GGUF, Attention, Experts, Family, Layer, Name, Routing

NORMED = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"), k_norm=Name("self_attn.k_norm", "attn_k_norm"), windows="all"
)


def layer(config: Any, number: int) -> Layer:
    if number in config.mlp_only_layers or not config.num_experts or (number + 1) % config.decoder_sparse_step:
        return Layer(attention=NORMED)
    scores = "normalised softmax" if config.norm_topk_prob else "softmax"
    routing = Routing(config.num_experts_per_tok, scores)
    return Layer(attention=NORMED, mlp=Experts(config.num_experts, config.moe_intermediate_size, routing))


def alone(config: Any, number: int) -> dict[str, Any]:
    """Return the fields of a config whose one layer is this one."""
    sparse = isinstance(layer(config, number).mlp, Experts)
    return {"mlp_only_layers": [] if sparse else [0], "decoder_sparse_step": 1}


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=NORMED),
    alone=alone,
    gguf=GGUF(
        "qwen3moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        flags={"attention_bias": "attn_q.bias"},
        finish=lambda fields, value: {"norm_topk_prob": True},  # as llama.cpp has it
    ),
)

"""Qwen3 with experts: norms of queries and keys, and a router in most layers."""

from typing import Any

from specengine.models.families import GGUF, Attention, Experts, Family, GatedMLP, Layer, Name
from specengine.models.families.qwen2_moe import alone, is_sparse, routing_of

NORMED = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=Name("self_attn.k_norm", "attn_k_norm"),
    windows="all",
)


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=NORMED,
        mlp=Experts(config.num_experts, config.moe_intermediate_size, routing_of(config))
        if is_sparse(config, number)
        else GatedMLP(),
    )


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
        finish=lambda fields, value: {"norm_topk_prob": value("expert_weights_norm") is not False},
    ),
)

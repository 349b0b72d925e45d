"""Qwen3.5 with experts, its text: the layers of Qwen3.5, and a router and an expert for all tokens in each."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Experts, Layer, Name, Routing, qwen3_5_text, shared_experts


def layer(config: Any, number: int) -> Layer:
    return replace(
        qwen3_5_text.layer(config, number),
        mlp=Experts(
            config.num_experts,
            config.moe_intermediate_size,
            Routing(config.num_experts_per_tok, "normalised softmax"),
            shared=shared_experts("shared_expert"),
            shared_inner=config.shared_expert_intermediate_size,
            shared_gate=Name("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ),
    )


assert qwen3_5_text.FAMILY.gguf is not None
FILES = replace(
    qwen3_5_text.FAMILY.gguf,
    architecture="qwen35moe",
    keys={
        **qwen3_5_text.FAMILY.gguf.keys,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
)
FAMILY = replace(qwen3_5_text.FAMILY, layer=layer, gguf=FILES)

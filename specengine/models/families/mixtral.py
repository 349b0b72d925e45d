"""Mixtral: two of eight experts for each token."""

from typing import Any

from specengine.models.families import GGUF, Attention, Experts, Family, Layer, Routing, has_experts

ATTENTION = Attention(windows="all")


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=ATTENTION,
        mlp=Experts(
            config.num_local_experts, config.intermediate_size, Routing(config.num_experts_per_tok)
        ),
    )


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION),
    gguf=GGUF(
        "llama",
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        pairs=("attn_q", "attn_k"),
        holds=has_experts,
    ),
    renamed={".block_sparse_moe.": ".mlp."},
)

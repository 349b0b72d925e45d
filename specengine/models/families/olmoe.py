"""OLMoE: norms of all heads' queries and keys as one, and experts whose weights are mostly not divided by their sum."""

from typing import Any

from specengine.models.families import GGUF, Attention, Experts, Family, Layer, Name
from specengine.models.families.qwen2_moe import routing_of

ATTENTION = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=Name("self_attn.k_norm", "attn_k_norm"),
    whole_norms=True,
)


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=ATTENTION,
        mlp=Experts(config.num_experts, config.intermediate_size, routing_of(config)),
    )


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION),
    gguf=GGUF(
        "olmoe", keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
    ),
    neutral={"clip_qkv": None},
)

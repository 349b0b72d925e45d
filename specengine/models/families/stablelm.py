"""StableLM 2: layer norms with biases, a quarter of a head turned, in some one norm for attention and network."""

from typing import Any

from specengine.models.families import GGUF, Attention, Family, Fields, Layer, Name

ATTENTION = Attention(partial=True)


def layer(config: Any, number: int) -> Layer:
    norm = None if config.use_parallel_residual else Name("post_attention_layernorm", "ffn_norm")
    return Layer(attention=ATTENTION, mlp_norm=norm)


FAMILY = Family(
    layer=layer,
    attending=Layer(attention=ATTENTION),
    fields=Fields(eps="layer_norm_eps"),
    gguf=GGUF(
        "stablelm",
        keys={"use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    ),
    layer_norms=True,
    parallel=lambda config: bool(config.use_parallel_residual),
    neutral={"qk_layernorm": False},
)

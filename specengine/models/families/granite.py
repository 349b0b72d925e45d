"""Granite 3, dense: the blocks of Llama, with factors on scores, embeddings, what is added, and logits."""

from specengine.models.families import GGUF, Factors, Family

FAMILY = Family(
    gguf=GGUF(
        "granite",
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        pairs=("attn_q", "attn_k"),
    ),
    factors=lambda config: Factors(
        config.attention_multiplier,
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_scaling,
    ),
)

"""Seed-OSS: the blocks of Llama, with biases."""

from specengine.models.families import GGUF, Family, Layer, Name

FAMILY = Family(
    layer=Layer(mlp_norm=Name("post_attention_layernorm", "post_attention_norm")),
    gguf=GGUF(
        "seed_oss",
        flags={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"},
    ),
)

"""Qwen3, dense: norms of queries and keys."""

from specengine.models.families import GGUF, Attention, Family, Layer, Name

NORMED = Attention(
    q_norm=Name("self_attn.q_norm", "attn_q_norm"),
    k_norm=Name("self_attn.k_norm", "attn_k_norm"),
    windows="by type",
)
FAMILY = Family(
    layer=Layer(attention=NORMED), gguf=GGUF("qwen3", flags={"attention_bias": "attn_q.bias"})
)

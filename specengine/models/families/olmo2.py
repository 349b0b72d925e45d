"""OLMo 2: norms of what is added alone, and of all heads' queries and keys as one."""

from specengine.models.families import GGUF, Attention, Family, Layer, Name

LAYER = Layer(
    attention_norm=None,
    attention=Attention(
        q_norm=Name("self_attn.q_norm", "attn_q_norm"),
        k_norm=Name("self_attn.k_norm", "attn_k_norm"),
        whole_norms=True,
    ),
    attention_output_norm=Name("post_attention_layernorm", "post_attention_norm"),
    mlp_norm=None,
    mlp_output_norm=Name("post_feedforward_layernorm", "post_ffw_norm"),
)
FAMILY = Family(layer=LAYER, gguf=GGUF("olmo2", flags={"attention_bias": "attn_q.bias"}))

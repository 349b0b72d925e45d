"""GLM-4 of 0414: norms before and after, gate and up in one tensor, half of a head turned."""

from specengine.models.families import GGUF, Attention, Family, GatedMLP, Layer, Name

GATE_UP = Name("mlp.gate_up_proj", "ffn_up")
FAMILY = Family(
    layer=Layer(
        attention=Attention(partial=True, neighbours=True),
        attention_output_norm=Name("post_self_attn_layernorm", "post_attention_norm"),
        mlp=GatedMLP(gate=GATE_UP, up=GATE_UP),
        mlp_output_norm=Name("post_mlp_layernorm", "post_ffw_norm"),
    ),
    gguf=GGUF("glm4", flags={"attention_bias": "attn_q.bias"}),
)

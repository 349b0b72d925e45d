"""Phi-3, Phi-4 and Phi-4-mini. Queries, keys and values are one tensor, gate and up are one."""

from specengine.models.families import GGUF, Attention, Family, GatedMLP, Layer, Name

QKV, GATE_UP = Name("self_attn.qkv_proj", "attn_qkv"), Name("mlp.gate_up_proj", "ffn_up")
FAMILY = Family(
    layer=Layer(
        attention=Attention(q=QKV, k=QKV, v=QKV, windows="all", partial=True),
        mlp=GatedMLP(gate=GATE_UP, up=GATE_UP),
    ),
    gguf=GGUF("phi3", keys={"attention.sliding_window": "sliding_window"}),
)

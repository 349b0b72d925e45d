"""ERNIE 4.5, dense: the blocks of Llama, with neighbouring channels turned together."""

from specengine.models.families import GGUF, Attention, Family, Layer

FAMILY = Family(
    layer=Layer(attention=Attention(neighbours=True)),
    gguf=GGUF("ernie4_5", flags={"use_bias": "attn_q.bias"}),
)

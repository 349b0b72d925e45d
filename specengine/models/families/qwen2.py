"""Qwen2 and Qwen2.5: the blocks of Llama, with biases of queries, keys and values, some with windows."""

from specengine.models.families import GGUF, Attention, Family, Layer

FAMILY = Family(layer=Layer(attention=Attention(windows="by type")), gguf=GGUF("qwen2"))

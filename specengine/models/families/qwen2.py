"""Qwen2 and Qwen2.5: the blocks of Llama, with biases of queries, keys and values."""

from specengine.models.families import GGUF, Family

FAMILY = Family(gguf=GGUF("qwen2"))

"""GGUF files: tensors as packed blocks, configuration and tokenizer in the form of transformers."""

from specengine.checkpoints.gguf.configuration import (
    architecture_of,
    column_order,
    config,
    is_known,
    is_of_latents,
    is_stack,
    require_complete,
    row_order,
    suppressed_ids,
    tensor_names,
    turned,
)
from specengine.checkpoints.gguf.file import KINDS, GGUFFile, GGUFTensor, dequantize, read
from specengine.checkpoints.gguf.vocabulary import end_ids, tokenizer

__all__ = [
    "KINDS",
    "GGUFFile",
    "GGUFTensor",
    "architecture_of",
    "column_order",
    "config",
    "dequantize",
    "end_ids",
    "is_known",
    "is_of_latents",
    "is_stack",
    "read",
    "require_complete",
    "row_order",
    "suppressed_ids",
    "tensor_names",
    "tokenizer",
    "turned",
]

"""Mistral, the blocks of Llama. GGUF files store it as Llama."""

from specengine.models.families import Family

FAMILY = Family()

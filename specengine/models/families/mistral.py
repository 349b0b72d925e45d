"""Mistral, the blocks of Llama, with one window for all layers. GGUF files store it as Llama."""

from specengine.models.families import Attention, Family, Layer

FAMILY = Family(layer=Layer(attention=Attention(windows="all")))

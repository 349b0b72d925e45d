"""GLM-4.7-Flash: the layers of DeepSeek-V3."""

from dataclasses import replace
from typing import Any

from specengine.models.families import GatedMLP, Layer, latent_of
from specengine.models.families import deepseek_v3 as deepseek


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=latent_of(config, neighbours=bool(config.rope_interleave)),
        mlp=GatedMLP() if config.mlp_layer_types[number] == "dense" else deepseek.experts(config),
    )


FAMILY = replace(
    deepseek.FAMILY,
    layer=layer,
    gguf=None,  # files are DeepSeek-V3's
    alone=lambda config, number: {"mlp_layer_types": config.mlp_layer_types[number : number + 1]},
)

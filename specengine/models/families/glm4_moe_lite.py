"""GLM-4.7-Flash: the layers of DeepSeek-V3."""

from dataclasses import replace
from typing import Any

from specengine.models.families import GatedMLP, Layer, deepseek_v3, latent_of


def layer(config: Any, number: int) -> Layer:
    return Layer(
        attention=latent_of(config, neighbours=bool(config.rope_interleave)),
        mlp=GatedMLP()
        if config.mlp_layer_types[number] == "dense"
        else deepseek_v3.experts(config),
    )


FAMILY = replace(
    deepseek_v3.FAMILY,
    layer=layer,
    gguf=None,  # files are DeepSeek-V3's
    alone=lambda config, number: {"mlp_layer_types": config.mlp_layer_types[number : number + 1]},
)

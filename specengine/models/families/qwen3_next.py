"""Qwen3-Next: the layers of Qwen3.5 with experts, whose recurrent ones store their projections by key head."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Experts, GatedDelta, GatedMLP, Layer, qwen3_5_moe_text
from specengine.models.families.qwen2_moe import alone, is_sparse, routing_of


def layer(config: Any, number: int) -> Layer:
    plain_layer = qwen3_5_moe_text.layer(config, number)
    if isinstance(plain_layer.mixer, GatedDelta):
        plain_layer = replace(plain_layer, mixer=replace(plain_layer.mixer, fused=True))
    return (
        replace(plain_layer, mlp=replace(plain_layer.mlp, routing=routing_of(config)))
        if is_sparse(config, number) and isinstance(plain_layer.mlp, Experts)
        else replace(plain_layer, mlp=GatedMLP())
    )


FAMILY = replace(
    qwen3_5_moe_text.FAMILY,
    layer=layer,
    alone=alone,
    gguf=replace(qwen3_5_moe_text.FILES, architecture="qwen3next"),
)

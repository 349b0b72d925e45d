"""Qwen3-Next: the layers of Qwen3.5 with experts, whose recurrent ones store their projections by key head."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Experts, GatedDelta, GatedMLP, Layer
from specengine.models.families import qwen3_5_moe_text as plain
from specengine.models.families.qwen2_moe import alone, is_sparse, routing_of


def layer(config: Any, number: int) -> Layer:
    plain_layer = plain.layer(config, number)
    if isinstance(plain_layer.mixer, GatedDelta):
        plain_layer = replace(plain_layer, mixer=replace(plain_layer.mixer, fused=True))
    if not (is_sparse(config, number) and isinstance(plain_layer.mlp, Experts)):
        return replace(plain_layer, mlp=GatedMLP())
    return replace(plain_layer, mlp=replace(plain_layer.mlp, routing=routing_of(config)))


FAMILY = replace(
    plain.FAMILY, layer=layer, alone=alone, gguf=replace(plain.FILES, architecture="qwen3next")
)

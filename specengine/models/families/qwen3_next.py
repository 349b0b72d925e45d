"""Qwen3-Next: the layers of Qwen3.5 with experts, whose recurrent ones store their projections by key head."""

from dataclasses import replace
from typing import Any

from specengine.models.families import Experts, GatedDelta, GatedMLP, Layer, Routing
from specengine.models.families import qwen3_5_moe_text as plain


def layer(config: Any, number: int) -> Layer:
    """Return the blocks of a layer."""
    plain_layer = plain.layer(config, number)
    if isinstance(plain_layer.mixer, GatedDelta):
        plain_layer = replace(plain_layer, mixer=replace(plain_layer.mixer, fused=True))
    if not (is_sparse(config, number) and isinstance(plain_layer.mlp, Experts)):
        return replace(plain_layer, mlp=GatedMLP())
    scores = "normalised softmax" if config.norm_topk_prob else "softmax"
    return replace(
        plain_layer,
        mlp=replace(plain_layer.mlp, routing=Routing(config.num_experts_per_tok, scores)),
    )


def is_sparse(config: Any, number: int) -> bool:
    """Return whether a layer has experts."""
    every = config.num_experts > 0 and (number + 1) % config.decoder_sparse_step == 0
    return every and number not in config.mlp_only_layers


def alone(config: Any, number: int) -> dict[str, Any]:
    """Return what makes a layer the first one."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [] if is_sparse(config, number) else [0]}


FAMILY = replace(
    plain.FAMILY, layer=layer, alone=alone, gguf=replace(plain.FILES, architecture="qwen3next")
)

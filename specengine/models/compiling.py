"""Compiling: what surrounds attention in each block, through torch.compile.

A block's norms and feed-forward layers take one tensor and give one: compiled, their small kernels become a few. The
attention, the cache and the block itself run as they are. As with packed weights, the model is not touched: a twin
shares its parameters.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from specengine.errors import UnsupportedModelError
from specengine.models.twins import twin


def compiled(model: nn.Module) -> nn.Module:
    """A twin of `model` whose blocks are compiled around their attention; UnsupportedModelError where it has no blocks
    that look like those of a decoder: entries of one list, each with an attention that knows its layer's number."""
    blocks = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
    inner = {id(part): part for block in blocks if _attentions(block) for part in block.children()}
    parts = {key for key, part in inner.items() if not hasattr(part, "layer_idx")}
    if not parts:
        raise UnsupportedModelError(f"compile: {type(model).__name__} has no decoder blocks that could be compiled")

    def replace(module: nn.Module) -> nn.Module | None:
        return cast(nn.Module, torch.compile(module)) if id(module) in parts else None

    return twin(model, replace)


def _attentions(block: nn.Module) -> list[nn.Module]:
    return [part for part in block.children() if hasattr(part, "layer_idx")]

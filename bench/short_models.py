"""Drafts of a model's own first layers: untrained, so that benches and tests have one for any model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from specengine.errors import UnsupportedModelError


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Make a draft of the target's first `count` layers; it shares weights, embeddings, norm and head."""
    base: Any = model.base_model
    found = [
        name for name, child in base.named_children() if isinstance(child, torch.nn.ModuleList)
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: cannot tell which of {found} are its layers"
        )
    layers = getattr(base, found[0])
    if not 1 <= count <= len(layers):
        raise ValueError(f"count: got {count}, accepted 1 to {len(layers)}")
    short_base, short = _shallow(base), _shallow(model)
    setattr(short_base, found[0], layers[:count])
    setattr(short, model.base_model_prefix, short_base)
    short.config = short_base.config = copy.deepcopy(model.config)
    short.config.num_hidden_layers = count
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = short.config.layer_types[:count]
    return short


def _shallow(module: Any) -> Any:
    """Return a copy with its own table of children, so that one can be replaced without touching the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin

"""Synthetic draft heads in the layouts and words of those who publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specengine.models.eagle import EagleConfig
from tests.toy import VOCABULARY

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAT = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "model_type": "llama",
}
THIRD = {"draft_vocab_size": 200}
NESTED: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 200,
    "norm_before_residual": True,
    "transformer_layer_config": {
        **FLAT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
READ: dict[str, Any] = {"rms_norm_eps": 1e-5}  # what all of these say


def official(config: EagleConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the EAGLE repository and SpecForge name them."""
    if config.version == 1:
        return dict(state)
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    return with_t2d(config, tensors)


def with_t2d(config: EagleConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if "d2t" in tensors:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[tensors["d2t"] + torch.arange(config.draft_vocab_size)] = True
        tensors["t2d"] = t2d
    return tensors


def speculators(config: EagleConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as speculators names them."""
    if config.version == 3:
        return with_t2d(config, dict(state))
    return {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
        for name, tensor in state.items()
    }


def write(
    folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )

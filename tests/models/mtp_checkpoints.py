"""Checkpoints of tiny models with a head for multi-token prediction, as DeepSeek, Qwen and Nemotron-H store it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from tests.sweep.small import model_of

# models whose head is one more layer, by type
NEXT_N = "glm4_moe", "glm4_moe_lite", "deepseek_v3"
QWEN = ("qwen3_next", "qwen3_5_text")  # models whose head is stored as mtp.*
NEMOTRON = "nemotron_h"  # has a head of blocks with numbers of their own


class NemotronHead(nn.Module):
    """The head that vLLM has for Nemotron-H (its NemotronHMTP), of transformers' blocks; transformers reads none."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = type(model.config).from_dict(
            model.config.to_dict() | {"layers_block_type": ["full_attention", "moe"]}
        )
        config._attn_implementation = "eager"
        size, eps, self.config = config.hidden_size, config.layer_norm_epsilon, config
        first, last = self.layers = nn.ModuleList(
            [NemotronHBlock(config, number) for number in range(2)]
        )
        first.enorm, first.hnorm, last.final_layernorm = (
            NemotronHRMSNorm(size, eps=eps) for _ in range(3)
        )
        first.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.embeddings = [model.get_input_embeddings()]  # which are not its own

    def forward_layer(
        self, _: int, states: Tensor, places: Tensor, cache: Any, *, input_ids: Tensor
    ) -> Tensor:
        """Return the states of rows that stand behind those of the cache, as transformers' MtpModel does."""
        first, last = self.layers
        given = torch.cat((first.enorm(self.embeddings[0](input_ids)), first.hnorm(states)), dim=-1)
        rows, before = input_ids.shape[1], cache.get_seq_length()
        mask = torch.full((rows, before + rows), -torch.inf).triu(before + 1)[None, None]
        hidden = first(
            first.eh_proj(given), past_key_values=cache, attention_mask=mask, position_ids=places
        )
        return last.final_layernorm(last(hidden))


def checkpoint(name: str, folder: Path, **changes: Any) -> tuple[PreTrainedModel, Any]:
    """Save a tiny model with a random head; return the model and a head of the same weights to compare with.

    changes: of its config.
    """
    model = model_of(name, **changes)
    model.save_pretrained(folder)
    if name in (*QWEN, "glm4_moe_lite"):  # transformers reads these heads of other models only
        model.config.num_mtp_layers = 1
        model.config.mtp_mlp_layer_types = ["sparse"]
    if name in QWEN:
        model.config.mtp_layer_types = ["full_attention"]
    torch.manual_seed(3)
    head = (NemotronHead(model) if name == NEMOTRON else MtpModel(model, 1)).float().eval()
    with torch.no_grad():
        for key, weight in head.layers.named_parameters():
            weight.copy_(
                torch.randn(weight.shape) * 0.2
                + float(key.endswith("norm.weight") and name not in QWEN)
            )
    layers = model.config.num_hidden_layers
    kept = {_stored(name, key, layers): tensor for key, tensor in head.layers.state_dict().items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | _apart(kept), file, metadata={"format": "pt"})
    return model, head


def _stored(name: str, key: str, layers: int) -> str:
    """Return the name in a checkpoint of a tensor of the head's layers."""
    if name == NEMOTRON:
        return f"mtp.layers.{key}"
    key = key.removeprefix("0.")
    if name in QWEN:
        names = {
            "eh_proj": "fc",
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "post_norm": "norm",
        }
        module = key.split(".")[0]
        return "mtp." + (
            key.replace(module, names[module])
            if module in names
            else key.replace("mtp_block", "layers.0")
        )
    key = key.replace("post_norm", "shared_head.norm") if key.startswith("post_norm") else key
    return f"model.layers.{layers}." + key.removeprefix("mtp_block.")


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of all experts taken apart, as the checkpoints of these models hold them."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)", key)
        for number, one in enumerate(tensor if match else ()):
            prefix = f"{match[1]}.{number}" if match else ""
            if match and match[2] != "gate_up_proj":
                found[f"{prefix}.{match[2]}.weight"] = one.clone()
            else:
                gate, up = one.chunk(2)
                found |= {
                    f"{prefix}.gate_proj.weight": gate.clone(),
                    f"{prefix}.up_proj.weight": up.clone(),
                }
        if match is None:
            found[key] = tensor.clone()
    return found


def edited(folder: Path, change: Any) -> None:
    """Apply a function to the tensors of a saved model, by name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def config_edited(folder: Path, **fields: Any) -> None:
    """Change fields of a saved model's config.json."""
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8"
    )

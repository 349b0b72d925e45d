"""The config.json of a model that someone else wrote: read, and checked before anything is made of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from specengine.errors import CheckpointError, UnsupportedModelError, shown
from specengine.files import safetensors_files
from specengine.models.configs import NO_MEMORY, empty_model, unsupported

# At most, so that no config asks for all memory or for hours; a list is one number per layer.
MOST = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 30,
}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
MOST_THETA = 1e15
_ORIGINAL = "original_max_position_embeddings"


def config_of(name: str | Path, **options: Any) -> PretrainedConfig:
    """The config of a folder or Hub id; UnsupportedModelError where there is none or it is nonsense.

    options: as AutoConfig.from_pretrained takes them.
    """
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except NO_MEMORY:
        raise
    except Exception as error:  # a config class may raise anything over fields of another type
        raise unsupported(name, error, "its config.json cannot be read") from error
    refuse_nonsense(name, config)
    return config


def refuse_nonsense(name: str | Path, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError, which names the field, for sizes and numbers that no model has."""
    decoder = config.get_text_config(decoder=True)
    if not isinstance(decoder, PretrainedConfig):
        raise _refused(name, "text_config", decoder, "an object")
    for field, most in MOST.items():
        value = getattr(decoder, field, None)
        for size in value if isinstance(value, list | tuple) else [value]:
            if size is not None and (type(size) is not int or not 1 <= size <= most):
                raise _refused(name, field, size, f"a whole number, 1 to {most}")
    for field in EPSILONS:
        value = getattr(decoder, field, None)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= 1):
            raise _refused(name, field, value, "a number above 0, at most 1")
    if not isinstance(config.dtype, torch.dtype | None):
        raise _refused(name, "dtype", config.dtype, "the name of a torch.dtype")
    window = getattr(decoder, "sliding_window", None)
    if not isinstance(window, int | None):
        raise _refused(name, "sliding_window", window, "a whole number")
    stated = getattr(decoder, "rope_parameters", None) or {}
    for rope in [
        stated,
        *(part for part in stated.values() if isinstance(part, dict)),
    ]:  # one set, or one by layer type
        theta = rope.get("rope_theta", 1)
        if type(theta) not in (int, float) or not 1 <= theta <= MOST_THETA:
            raise _refused(name, "rope_theta", theta, f"a number, 1 to {MOST_THETA:g}")
        if not isinstance(original := rope.get(_ORIGINAL), int | float | None):
            raise _refused(name, _ORIGINAL, original, "a whole number")


def refuse_other_shapes(name: str, config: PretrainedConfig) -> None:
    """Raise CheckpointError where a local folder's safetensors have other shapes than a model of this config.

    Only headers are read, and no memory is taken for weights of sizes that no file has.
    """
    if getattr(config, "quantization_config", None) is not None or getattr(config, "auto_map", None) is not None:
        return
    made = empty_model(copy.deepcopy(config), torch.float32)  # which notes its dtype in the config
    wanted = {key: list(weight.shape) for key, weight in made.named_parameters()}
    differing = []
    for file in safetensors_files(Path(name)):
        try:
            with safe_open(file, framework="pt") as opened:
                shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys() if key in wanted}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"model {name!r}: its weights are damaged, fetch them again ({error})") from error
        differing += [f"{key} {has}, not {wanted[key]}" for key, has in shapes.items() if has != wanted[key]]
    if differing:
        raise CheckpointError(
            f"model {name!r}: its weights do not fit its config.json; of another shape: {', '.join(differing[:4])}"
        )


def _refused(name: str | Path, field: str, value: Any, accepted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model {str(name)!r}: config.json: {field}: got {shown(value)}, accepted {accepted}")

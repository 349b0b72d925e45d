"""Models without weights, made of their configs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specengine.errors import UnsupportedModelError

NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model without memory for its weights; UnsupportedModelError where its class makes none of this config."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except NO_MEMORY:
        raise
    except Exception as error:
        raise unsupported(config._name_or_path, error, "its config.json makes no model") from error


def unsupported(name: str | Path, error: Exception, what: str) -> UnsupportedModelError:
    """The error for what transformers could not do with a model, which says more itself where it refuses on purpose."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError | ValueError):
        return UnsupportedModelError(f"model {str(name)!r}: {text}")
    return UnsupportedModelError(f"model {str(name)!r}: {what} ({type(error).__name__}: {text:.300})")

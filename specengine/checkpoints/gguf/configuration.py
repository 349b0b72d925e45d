"""The configuration of the model in a GGUF file, as transformers has it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from specengine.checkpoints.gguf.file import GGUFFile
from specengine.checkpoints.gguf.tensors import _EMBEDDING, _OUTPUT, _ROPE_FACTORS
from specengine.checkpoints.gguf.tokens import end_ids, special_id
from specengine.errors import CheckpointError, UnsupportedModelError

_CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # keys that would change the forward, and the values that do not
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> str:
    """The model's architecture; UnsupportedModelError for one that is not read, CheckpointError where there is none."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} lacks general.architecture, or it is no text")
    if architecture not in _CONFIGS:
        raise UnsupportedModelError(
            f"{path} has architecture {architecture[:80]!r}, and accepted in GGUF files are {', '.join(_CONFIGS)}; "
            "load the model from its folder or Hub id of safetensors instead, which transformers runs"
        )
    return architecture


class _Fields:
    """The metadata of one architecture, each value checked where it is asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = architecture_of(file.path, file.metadata)

    def value(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = default if self.value(key) is None else self.value(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(key, value, "a positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = default if self.value(key) is None else self.value(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, value, "a positive number")
        return float(value)

    def error(self, key: str, value: object, accepted: str) -> CheckpointError:
        shown = "missing" if value is None else str(value)[:80]
        return CheckpointError(f"{self.file.path}: {self.architecture}.{key} must be {accepted}; it is {shown}")

    def unsupported(self, key: str, reason: str) -> UnsupportedModelError:
        shown = str(self.value(key))[:80]
        return UnsupportedModelError(f"{self.file.path}: {self.architecture}.{key} = {shown} {reason}")


def config(file: GGUFFile) -> transformers.PretrainedConfig:
    """The model's configuration: LlamaConfig (for Mistral too: stored as llama), Qwen2Config or Qwen3Config.

    Raises UnsupportedModelError for another architecture and for what no such configuration can say, CheckpointError
    for values that are missing or contradict the tensors; which tensors there must be, `require_complete` checks.
    """
    fields = _Fields(file)
    for key, values in _WITHOUT_EFFECT.items():
        if fields.value(key) is not None and fields.value(key) not in values:
            raise fields.unsupported(key, "is not supported")
    sizes, epsilon = _sizes(fields), fields.positive("attention.layer_norm_rms_epsilon")
    rope = _rope_parameters(fields, sizes["head_dim"])
    ids = _special_ids(file, sizes["vocab_size"])
    name = _CONFIGS[fields.architecture]
    try:
        return getattr(transformers, name)(
            **sizes,
            **ids,
            **_biases(fields),
            rms_norm_eps=epsilon,
            rope_parameters=rope,
            tie_word_embeddings=_OUTPUT not in file.tensors,
            architectures=[name.replace("Config", "ForCausalLM")],
        )
    except Exception as error:  # transformers' own checks, whose errors have no common base
        raise CheckpointError(f"{file.path} makes no {name}: {error}") from error


def _biases(fields: _Fields) -> dict[str, bool]:
    tensors = fields.file.tensors
    attention = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    mlp = {"mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return {"llama": attention | mlp, "qwen2": {}, "qwen3": attention}[fields.architecture]


def _sizes(fields: _Fields) -> dict[str, int]:
    hidden, layers, heads = (fields.count(key) for key in ("embedding_length", "block_count", "attention.head_count"))
    tensors = fields.file.tensors
    embedding = tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        shown = "there is none" if embedding is None else f"it is {list(embedding.shape)}"
        raise CheckpointError(f"{fields.file.path}: {_EMBEDDING} must be [vocabulary, {hidden}]; {shown}")
    tokens = fields.file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        rows = embedding.shape[0]
        raise CheckpointError(f"{fields.file.path}: {_EMBEDDING} has {rows} rows for {len(tokens)} tokens")
    if layers > len(tensors):
        raise fields.error("block_count", layers, f"at most the number of tensors, {len(tensors)}")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(fields, heads),
        "head_dim": _head_dim(fields, hidden, heads),
        "max_position_embeddings": fields.count("context_length"),
    }


def _key_value_heads(fields: _Fields, heads: int) -> int:
    count = fields.count("attention.head_count_kv", heads)
    if heads % count:
        raise fields.error("attention.head_count_kv", count, f"a divisor of the {heads} heads")
    return count


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    size = fields.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, size) != size:
            raise fields.unsupported(key, f"is not supported: it must be the size of a head, {size}")
    if size % 2:
        raise CheckpointError(f"{fields.file.path}: heads of {size} elements cannot be rotated: the size must be even")
    return size


def _special_ids(file: GGUFFile, vocabulary: int) -> dict[str, Any]:
    return {
        "bos_token_id": special_id(file, "bos_token_id", vocabulary),
        "eos_token_id": end_ids(file, vocabulary),
        "pad_token_id": special_id(file, "padding_token_id", vocabulary),
    }


def _rope_parameters(fields: _Fields, head_dim: int) -> dict[str, Any]:
    theta = fields.positive("rope.freq_base", 10_000.0)
    kind = fields.value("rope.scaling.type")
    factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    if kind == "none" or (kind in (None, "linear") and factor == 1):  # llama.cpp: linear where nothing is said
        plain = {"rope_type": "default", "rope_theta": theta}
        return _llama3_rope(fields, theta, head_dim) if _ROPE_FACTORS in fields.file.tensors else plain
    if kind not in (None, "linear", "yarn") or _ROPE_FACTORS in fields.file.tensors:
        raise fields.unsupported("rope.scaling.type", f"with {_ROPE_FACTORS} or of that kind is not supported")
    if kind != "yarn":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
        "beta_fast": fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_rope(fields: _Fields, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters that the file's factors were made from; all Llama 3 models share them but for the factor."""
    stored = fields.file.numbers(_ROPE_FACTORS)
    low, high, context = 1.0, 4.0, 8192
    factor = float(stored.max())
    turns = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    with np.errstate(all="ignore"):  # a damaged file's numbers
        known = stored.shape == smooth.shape and np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4)
    if not known:
        raise UnsupportedModelError(
            f"{fields.file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3 models "
            f"(low {low}, high {high}, context {context}), so their meaning is unknown"
        )
    frequencies = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": context}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **frequencies}


def suppressed_ids(file: GGUFFile, vocabulary: int) -> list[int] | None:
    """Tokens that the file forbids in answers; those outside of the vocabulary are left out, as by llama.cpp."""
    value = file.metadata.get("tokenizer.ggml.suppress_tokens")
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.suppress_tokens must be a list of token ids")
    return [token for token in value if 0 <= token < vocabulary] or None

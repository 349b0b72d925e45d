"""Names and shapes of a model's tensors in a GGUF file, and the order of their rows."""

import itertools
import re
from collections.abc import Iterator

import numpy as np
import transformers

from specengine.checkpoints.gguf.file import GGUFFile
from specengine.errors import CheckpointError

_MODULES = {  # within a layer: ggml's name -> Hugging Face's
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _NORM, _OUTPUT = "token_embd.weight", "output_norm.weight", "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # no weight of the model: it says what rope_parameters says


def tensor_names(layers: int) -> dict[str, str]:
    """Hugging Face's name for each tensor that a model of so many layers may have, biases and head norms included."""
    names = {_EMBEDDING: "model.embed_tokens.weight", _NORM: "model.norm.weight", _OUTPUT: "lm_head.weight"}
    for layer, (module, name) in itertools.product(range(layers), _MODULES.items()):
        names[f"blk.{layer}.{module}.weight"] = f"model.layers.{layer}.{name}.weight"
        if name.endswith("_proj"):
            names[f"blk.{layer}.{module}.bias"] = f"model.layers.{layer}.{name}.bias"
    return names


def tensor_shapes(config: transformers.PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that the model must have by their names in the file, and their shapes."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocabulary, hidden), _NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_OUTPUT] = (vocabulary, hidden)
    layer = dict(_layer_shapes(config))
    for number in range(config.num_hidden_layers):
        shapes.update({f"blk.{number}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: transformers.PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    biased = _biased_modules(config)
    linear = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for name, (outputs, inputs) in linear.items():
        yield f"{name}.weight", (outputs, inputs)
        if name in biased:
            yield f"{name}.bias", (outputs,)
    yield "attn_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    if config.model_type == "qwen3":
        yield "attn_q_norm.weight", (config.head_dim,)
        yield "attn_k_norm.weight", (config.head_dim,)


def _biased_modules(config: transformers.PretrainedConfig) -> set[str]:
    if config.model_type == "qwen2":
        return {"attn_q", "attn_k", "attn_v"}
    attention = {"attn_q", "attn_k", "attn_v", "attn_output"} if config.attention_bias else set()
    return attention | ({"ffn_gate", "ffn_up", "ffn_down"} if getattr(config, "mlp_bias", False) else set())


def require_complete(file: GGUFFile, config: transformers.PretrainedConfig) -> None:
    """Raises CheckpointError with the tensors that are missing, of another shape, or not used by this model."""
    wanted = tensor_shapes(config)
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    if config.rope_parameters.get("rope_type") == "llama3":
        found.pop(_ROPE_FACTORS, None)
    differ = [
        f"{name} {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    problems = {
        "missing": [name for name in wanted if name not in found],
        "of another shape": differ,
        "not used by this model": [name for name in found if name not in wanted],
    }
    listed = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if listed:
        raise CheckpointError(f"{file.path} does not fit a {config.model_type} of its size; {'; '.join(listed)}")


def _some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:120] for name in names[:most]) + more


def row_order(config: transformers.PretrainedConfig, name: str) -> np.ndarray | None:
    """For each row of Hugging Face's tensor, the row of the file's tensor `name` that holds it: int32 [rows], or None.

    llama.cpp turns neighbouring elements of a head, Hugging Face one of the first half with one of the second, so its
    converter interleaves the halves of q and k for llama (convert_hf_to_gguf.py: LlamaModel.permute).
    """
    module = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    if config.model_type != "llama" or module is None:
        return None
    heads = config.num_attention_heads if module[1] == "q" else config.num_key_value_heads
    rows = np.arange(heads * config.head_dim, dtype=np.int32)
    return rows.reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

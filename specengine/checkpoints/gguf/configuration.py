"""The configuration of the model in a GGUF file, and the names and order of its tensors, as transformers has them."""

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specengine.checkpoints.gguf.file import GGUFFile, read
from specengine.checkpoints.gguf.vocabulary import end_ids, special_id
from specengine.errors import (
    CheckpointError,
    UnsupportedModelError,
    refuse_misfits,
    require_intact,
    require_supported,
    restating,
)
from specengine.models import families

EAGLE, ASSISTANT = "eagle3", "gemma4-assistant"  # architectures of draft heads
_MODULE = re.compile(r"blk\.\d+\.(.+?)(?:\.weight|\.bias)?")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # no weight of the model: it says what rope_parameters says
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # the same of LongRoPE
_WITHOUT_EFFECT: dict[
    str, tuple[Any, ...]
] = {  # keys that would change the forward, and the values that do not
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
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
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> str:
    """Return the model's architecture; UnsupportedModelError for an unknown one, CheckpointError for none."""
    architecture: Any = metadata.get("general.architecture")
    require_intact(
        f"{path}: general.architecture is missing, or not text", isinstance(architecture, str)
    )
    if architecture not in (architectures := _stored()):
        raise UnsupportedModelError(
            f"{path} has architecture {architecture[:80]!r}; accepted in GGUF files: "
            f"{', '.join(sorted(architectures))}; "
            "load the model from its folder or Hub id of safetensors instead, which transformers runs"
        )
    return architecture


def is_known(metadata: Mapping[str, Any]) -> bool:
    """Return whether a family has this architecture."""
    return metadata.get("general.architecture") in _stored()


def _stored() -> dict[str, list[tuple[str, families.Family, families.GGUF]]]:
    """Return the families that GGUF files store by architecture, each with its model type in transformers.

    Those that ask whether a file is one of theirs come first.
    """
    by_architecture: dict[str, list[tuple[str, families.Family, families.GGUF]]] = {}
    for name, family in families.known().items():
        if (form := family.gguf) is not None and name in CONFIG_MAPPING:
            for architecture in (form.architecture, *form.others):
                by_architecture.setdefault(architecture, []).append((name, family, form))
    return {
        name: sorted(stored, key=lambda one: one[2].holds is None)
        for name, stored in by_architecture.items()
    }


class MetadataFields:
    """The metadata of one architecture, by default of a model, each value checked where it is asked for."""

    def __init__(self, file: GGUFFile, architecture: str | None = None) -> None:
        self.file = file
        self.architecture = architecture or architecture_of(file.path, file.metadata)
        self._asked = set[str]()

    def value(self, key: str) -> Any:
        self._asked.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def refuse_unread(self) -> None:
        """Raise UnsupportedModelError for a key that nobody has asked for: it may change the numbers."""
        for architecture, _, key in (name.partition(".") for name in self.file.metadata):
            if architecture == self.architecture:
                self.support(key, "is not known", key in self._asked)

    def count(self, key: str, default: int | None = None) -> int:
        value: Any = default if self.value(key) is None else self.value(key)
        self.require(key, value, "a positive integer", type(value) is int and 0 < value < 1 << 31)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value: Any = default if self.value(key) is None else self.value(key)
        self.require(
            key, value, "a positive number", type(value) in (int, float) and 0 < value < math.inf
        )
        return float(value)

    def require(self, key: str, value: object, accepted: str, holds: bool) -> None:
        shown = "missing" if value is None else str(value)[:80]
        require_intact(
            f"{self.file.path}: {self.architecture}.{key} must be {accepted}; it is {shown}", holds
        )

    def support(self, key: str, reason: str, holds: bool) -> None:
        """Raise UnsupportedModelError, with the value and why it is none, unless `holds`."""
        require_supported(
            f"{self.file.path}: {self.architecture}.{key} = {str(self.value(key))[:80]} {reason}",
            holds,
        )


def config(file: GGUFFile) -> transformers.PretrainedConfig:
    """Return the model's configuration, of the class that its family has in transformers.

    Raises UnsupportedModelError for another architecture and for settings that no such configuration has,
    CheckpointError for values that are missing or contradict the tensors. `require_complete` checks the tensors.
    """
    metadata = MetadataFields(file)
    return _model_config(metadata, metadata.architecture)


def _refuse_effects(metadata: MetadataFields, read: Collection[str] = ()) -> None:
    """Raise UnsupportedModelError for a key that would change the forward; read: those that are taken into account."""
    for key, values in _WITHOUT_EFFECT.items():
        metadata.support(
            key, "is not supported", key in read or metadata.value(key) in (None, *values)
        )


def _model_config(metadata: MetadataFields, architecture: str) -> transformers.PretrainedConfig:
    """Return the configuration of a model of the architecture; raises as `config`."""
    file, stored = metadata.file, _stored()[architecture]
    model_type, family, form = next(
        one for one in stored if one[2].holds is None or one[2].holds(metadata.value)
    )
    longrope = ("rope.scaling.attn_factor",) * (_SHORT in file.tensors)
    _refuse_effects(metadata, (*form.keys, *form.ignored, *form.read, *longrope))
    local = metadata.value("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.support(
            key,
            f"is not supported: it must be the size of a head with a window, {local}",
            local is None or metadata.value(key) in (None, local),
        )
    of_layer_norms = metadata.value("attention.layer_norm_epsilon")
    norms = (
        "attention.layer_norm_epsilon" if family.layer_norms else "attention.layer_norm_rms_epsilon"
    )
    sizes, eps = _sizes(metadata, family, form), metadata.positive(norms, of_layer_norms)
    fields: dict[str, Any] = {
        getattr(family.fields, name): value for name, value in (sizes | {"eps": eps}).items()
    }
    inside = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    fields |= {field: tensor in inside for field, tensor in form.flags.items()}
    keyed = [
        number for number in range(sizes["layers"]) if f"blk.{number}.attn_k.weight" in file.tensors
    ]
    fields |= {
        field: any(f"blk.{number}.{tensor}" not in file.tensors for number in keyed)
        for field, tensor in form.without.items()
    }
    fields |= {field: metadata.value(key) for key, field in form.keys.items()}
    for tensor, field in form.constants.items():
        numbers = [
            number
            for name in file.tensors
            if re.fullmatch(rf"blk\.\d+\.{re.escape(tensor)}", name)
            for number in file.numbers(name).ravel().tolist()
        ]
        require_supported(
            f"{file.path}: {tensor} must hold {'one number above 0' if field else '1'} in all layers",
            len(numbers) == sizes["layers"] * sizes["head_dim"]
            and len(set(numbers)) == 1
            and 0 < numbers[0] < math.inf
            and (bool(field) or numbers[0] == 1),
        )
        fields |= {field: numbers[0]} if field else {}
    fields |= {
        "rope_parameters": _rope_parameters(metadata, sizes["head_dim"], family, form),
        "tie_word_embeddings": _OUTPUT not in file.tensors,
        "eos_token_id": end_ids(file, sizes["vocabulary"]),
        "bos_token_id": special_id(file, "bos_token_id", sizes["vocabulary"]),
        "pad_token_id": special_id(file, "padding_token_id", sizes["vocabulary"]),
    }
    config_class = CONFIG_MAPPING[model_type]
    # transformers' own checks, whose errors have no common base
    with restating(
        Exception,
        lambda error: CheckpointError(
            f"{file.path}: no {config_class.__name__} can be built from its metadata: {error}"
        ),
    ):
        fields |= form.finish(fields, metadata.value)
        return config_class(
            **fields, architectures=[config_class.__name__.replace("Config", "ForCausalLM")]
        )


def head_architecture(path: str | Path) -> str:
    """Return the architecture of the draft head in a GGUF file, damaged or not; empty for a file of anything else."""
    stated: list[Any] = []
    with contextlib.suppress(CheckpointError):
        read(Path(path), lambda _, data: stated.append(data.get("general.architecture"))).close()
    return next((name for name in stated if name in (EAGLE, ASSISTANT)), "")


def eagle_config(file: GGUFFile) -> dict[str, Any]:
    """Return the config.json that an EAGLE-3 head of llama.cpp has in a folder; raises as `config`.

    Layers are counted by their inputs. Sources: llama.cpp's conversion/llama.py, common/speculative.cpp.
    """
    fields = MetadataFields(file, EAGLE)
    _refuse_effects(fields)
    blocks, heads = fields.count("block_count"), fields.count("attention.head_count")
    fields.require("block_count", blocks, "1", blocks == 1)
    hidden, tokens = fields.count("embedding_length"), file.metadata.get("tokenizer.ggml.tokens")
    head_dim = _head_dim(fields, hidden, heads, (), families.Attention())
    vocabulary = fields.count("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    layers = fields.value("target_layers") or fields.value("extract_layers")  # the latter once
    fields.require("target_layers", layers, "a list of layers", isinstance(layers, list))
    raw = {
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "draft_vocab_size": file.tensors["d2t"].shape[0] if "d2t" in file.tensors else vocabulary,
        "rms_norm_eps": fields.positive("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _scaled(fields, head_dim),
        "max_position_embeddings": fields.count("context_length"),
        "eagle_aux_hidden_state_layer_ids": layers,
        "target_hidden_size": fields.count("target_hidden_size"),
        "norm_before_residual": fields.value("norm_before_residual"),
        "norm_before_fc": fields.value("norm_before_fc"),
    }
    fields.refuse_unread()
    return raw


def assistant_config(file: GGUFFile) -> transformers.PretrainedConfig:
    """Return the config that an assistant of Gemma 4 has in transformers; raises as `config`.

    Source: llama.cpp's src/models/gemma4-assistant.cpp.
    """
    fields = MetadataFields(file, ASSISTANT)
    blocks, drafting = fields.count("block_count"), fields.value("nextn_predict_layers")
    fields.require("nextn_predict_layers", drafting, f"block_count, {blocks}", drafting == blocks)
    pattern = fields.value("attention.sliding_window_pattern")
    fields.require(
        "attention.sliding_window_pattern", pattern, "a list by layer", isinstance(pattern, list)
    )
    file.metadata.pop(f"{ASSISTANT}.nextn_predict_layers")  # no layers of its own
    text = _model_config(fields, "gemma4")
    outer = fields.count("embedding_length_out")
    fields.refuse_unread()
    return CONFIG_MAPPING["gemma4_assistant"](
        text_config=text.to_dict() | {"vocab_size_per_layer_input": 0},
        backbone_hidden_size=outer,
        use_ordered_embeddings=False,
        tie_word_embeddings=True,
    )


def _sizes(fields: MetadataFields, family: families.Family, form: families.GGUF) -> dict[str, int]:
    """Return the sizes by their names in families.Fields."""
    hidden, blocks = fields.count("embedding_length"), fields.count("block_count")
    heads = _first_count(fields, "attention.head_count", blocks, form)
    drafting = (
        fields.value("nextn_predict_layers") or 0
    )  # blocks after its own, which nothing reads
    fields.require(
        "nextn_predict_layers", drafting, "0 or more", type(drafting) is int and drafting >= 0
    )
    layers = blocks - drafting
    embedding = fields.file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        shown = "it is missing" if embedding is None else f"it is {list(embedding.shape)}"
        raise CheckpointError(
            f"{fields.file.path}: {_EMBEDDING} must be [vocabulary, {hidden}]; {shown}"
        )
    tokens = fields.file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise CheckpointError(
            f"{fields.file.path}: {_EMBEDDING} has {embedding.shape[0]} rows for {len(tokens)} tokens"
        )
    count = len(fields.file.tensors)
    fields.require(
        "block_count",
        blocks,
        f"at most the number of tensors, {count}",
        0 < layers <= blocks <= count,
    )
    return {
        "vocabulary": embedding.shape[0],
        "hidden": hidden,
        "inner": _inner(fields, layers, form),
        "layers": layers,
        "heads": heads,
        "kv_heads": _key_value_heads(fields, heads, blocks, family, form),
        "head_dim": _head_dim(fields, hidden, heads, form.ignored, family.attention),
        "context": fields.count("context_length"),
    }


def _first_count(
    fields: MetadataFields, key: str, layers: int, form: families.GGUF, default: int | None = None
) -> int:
    """Return a count, or the first of a list of counts by layer: equal ones, unless the family's files have others."""
    listed = fields.value(key)
    if not isinstance(listed, list):
        return fields.count(key, default)
    fields.require(
        key,
        listed,
        f"a positive integer, or one of each of {layers} layers",
        len(listed) == layers and all(type(each) is int and 0 < each < 1 << 31 for each in listed),
    )
    fields.support(
        key,
        "is not supported: layers have different numbers",
        key in form.by_layer or len(set(listed)) == 1,
    )
    return int(listed[0])


def _inner(fields: MetadataFields, layers: int, form: families.GGUF) -> int:
    """Return the width of the networks; of a list by layer the largest, unless the family reads the list itself."""
    key = "feed_forward_length"
    listed = fields.value(key)
    if listed is None and fields.value("expert_count"):
        return fields.count("expert_feed_forward_length")
    if key in form.by_layer or not isinstance(listed, list):
        return _first_count(fields, key, layers, form)
    whole = len(listed) == fields.count("block_count") and all(
        type(each) is int and each >= 0 for each in listed
    )
    fields.require(
        key,
        listed,
        "a positive integer, or one such number or 0 of each layer",
        whole and len(set(listed) - {0}) == 1,
    )
    return int(max(listed))


def _key_value_heads(
    fields: MetadataFields, heads: int, layers: int, family: families.Family, form: families.GGUF
) -> int:
    """Return the number of the layers that have some; a list by layer says which have none."""
    key = "attention.head_count_kv"
    listed = fields.value(key)
    if not (family.kinds and isinstance(listed, list)):
        count = _first_count(fields, key, layers, form, heads)
    else:
        fields.require(
            key,
            listed,
            f"a positive integer, or such a number or 0 of each of {layers} layers",
            len(listed) == layers
            and all(type(each) is int and each >= 0 for each in listed)
            and any(listed),
        )
        count, *others = set(listed) - {0}
        fields.support(key, "is not supported: layers have different numbers of heads", not others)
    fields.require(key, count, f"a divisor of the {heads} heads", heads % count == 0)
    return count


def _head_dim(
    fields: MetadataFields,
    hidden: int,
    heads: int,
    ignored: tuple[str, ...],
    attention: families.Attention,
) -> int:
    if isinstance(attention, families.Latent):  # its other sizes are keys of the family
        return fields.count("rope.dimension_count")
    partial, size = attention.partial, fields.count("attention.key_length", hidden // heads)
    for key in {"attention.value_length", "rope.dimension_count"} - set(ignored):
        count = fields.count(key, size)
        fits = count == size or (partial and key == "rope.dimension_count" and count < size)
        fields.support(key, f"is not supported: it must be the size of a head, {size}", fits)
    require_intact(
        f"{fields.file.path}: heads of {size} elements cannot be rotated: the size must be even",
        not size % 2,
    )
    return size


def _rope_parameters(
    fields: MetadataFields, head_dim: int, family: families.Family, form: families.GGUF
) -> dict[str, Any]:
    # positions that turn the first channels of each half of a head, by factors of one
    if form.proportional and ROPE_FACTORS in fields.file.tensors:
        factors = fields.file.numbers(ROPE_FACTORS)
        count = int((factors == 1).sum())
        require_supported(
            f"{fields.file.path}: the factors in {ROPE_FACTORS} are not those of proportional positions",
            factors.shape == (head_dim // 2,)
            and count > 0
            and bool((factors[:count] == 1).all())
            and not (factors[count:] < 1e20).any(),
        )
        return {
            "rope_type": "proportional",
            "rope_theta": fields.positive("rope.freq_base", 10_000.0),
            "partial_rotary_factor": count / len(factors),
        }
    if not family.attention.partial:
        return _scaled(fields, head_dim)
    turned = fields.count("rope.dimension_count", head_dim)
    return _scaled(fields, turned) | {"partial_rotary_factor": turned / head_dim}


def _scaled(fields: MetadataFields, turned: int) -> dict[str, Any]:
    """Return the parameters of rotations of that many channels of a head."""
    theta = fields.positive("rope.freq_base", 10_000.0)
    if (
        _SHORT in fields.file.tensors
    ):  # two lists of factors, of which transformers makes the attention's
        factors = {_SHORT: "short_factor", _LONG: "long_factor"}
        for name in factors:
            require_intact(
                f"{fields.file.path}: {name} must be [{turned // 2}]",
                name in fields.file.tensors and fields.file.tensors[name].shape == (turned // 2,),
            )
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "original_max_position_embeddings": fields.count(
                "rope.scaling.original_context_length"
            ),
            "attention_factor": fields.positive("rope.scaling.attn_factor", 1.0),
            **{field: fields.file.numbers(name).tolist() for name, field in factors.items()},
        }
    kind = fields.value("rope.scaling.type")
    factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    if kind == "none" or (
        kind in (None, "linear") and factor == 1
    ):  # llama.cpp: linear where nothing is said
        plain = {"rope_type": "default", "rope_theta": theta}
        return _llama3_rope(fields, theta, turned) if ROPE_FACTORS in fields.file.tensors else plain
    fields.support(
        "rope.scaling.type",
        f"is not supported, nor is {ROPE_FACTORS} beside a kind",
        kind in (None, "linear", "yarn") and ROPE_FACTORS not in fields.file.tensors,
    )
    if kind != "yarn":
        trained = fields.value("rope.scaling.original_context_length")
        original = {} if trained is None else {"original_max_position_embeddings": trained}
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor, **original}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
        "beta_fast": fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_rope(fields: MetadataFields, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters that the file's factors were made from; Llama 3 models differ in the factor alone."""
    stored = fields.file.numbers(ROPE_FACTORS)
    low, high, context = 1.0, 4.0, 8192
    factor = float(stored.max())
    turns = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    with np.errstate(all="ignore"):  # a damaged file's numbers
        as_computed = stored.shape == smooth.shape and np.allclose(
            stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4
        )
    require_supported(
        f"{fields.file.path}: the factors in {ROPE_FACTORS} are not those of Llama 3 models "
        f"(low {low}, high {high}, context {context}), so their meaning is unknown",
        as_computed,
    )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def suppressed_ids(file: GGUFFile, vocabulary: int) -> list[int] | None:
    """Return the tokens that the file forbids in answers; those outside of the vocabulary drop, as in llama.cpp."""
    value = file.metadata.get("tokenizer.ggml.suppress_tokens")
    if value is None:
        return None
    require_intact(
        f"{file.path}: tokenizer.ggml.suppress_tokens must be a list of token ids",
        isinstance(value, list) and all(type(token) is int for token in value),
    )
    return [token for token in value if 0 <= token < vocabulary] or None


# ---- tensors


def require_complete(
    file: GGUFFile, config: transformers.PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the names in the file of the model's tensors, by those in transformers.

    shapes: of the tensors that the model has in transformers. CheckpointError, which lists them, where some are
    missing in the file, of another shape, or not used by the model.
    """
    rows: dict[str, int] = {}  # of each module of a file
    for part in families.known()[config.model_type].parts(config):
        rows[part.name.gguf] = rows.get(part.name.gguf, 0) + part.size
    names = tensor_names(config, shapes)
    # of latents, whose matrices older files have as one, as transformers has
    for key, several in names.items():
        whole = several[0].replace("attn_k_b", "attn_kv_b")
        names[key] = (whole,) if whole != several[0] and whole in file.tensors else several
    expected = {
        name: in_file
        for key, shape in shapes.items()
        for name, in_file in _split(config, names[key], turned(config, shape), rows).items()
    }
    form: Any = families.known()[config.model_type].gguf
    drafts = range(config.num_hidden_layers, MetadataFields(file).count("block_count"))
    unread = (
        *(f"{name.gguf}." for name in families.known()[config.model_type].unread(config)),
        *(f"blk.{number}." for number in drafts),
    )
    scales = {  # of NVFP4 matrices, and of inputs, which are not rounded to four bits here
        name.removesuffix("weight") + ending
        for name, tensor in file.tensors.items()
        if tensor.kind == "nvfp4"
        for ending in ("scale", "input_scale")
    }
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {
        parameters.get("rope_type")
        for parameters in (rope, *rope.values())
        if isinstance(parameters, dict)
    }
    positions = (
        *(ROPE_FACTORS,) * bool({"llama3", "proportional"} & kinds),
        *(_SHORT, _LONG) * ("longrope" in kinds),
    )
    stored = {
        # llama.cpp keeps vectors of Mamba-2 by group or by head
        name: (math.prod(tensor.shape),)
        if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight"))
        else tensor.shape
        for name, tensor in file.tensors.items()
        if name not in scales
        and name not in positions
        and not name.startswith(unread)
        and not name.endswith(tuple(form.constants))
    }
    stored |= {
        name: shape
        for name, shape in expected.items()
        if _without_ones(stored.get(name, ())) == _without_ones(shape)
    }
    refuse_misfits(
        f"{file.path} does not fit a {config.model_type} of its size",
        expected,
        stored,
        "not used by this model",
    )
    return names


def turned(config: transformers.PretrainedConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in files of a tensor of transformers, or the other way round: outputs before inputs."""
    if len(shape) == 3 and shape[1] == 1:  # a convolution of single channels
        return (shape[0], shape[2])
    other = len(shape) > 2 and families.known()[config.model_type].alternating
    return (shape[0], shape[2], shape[1]) if other else shape


def _split(
    config: transformers.PretrainedConfig,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    rows: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a file that one of transformers is made of.

    Those of stacks are [experts, rows, inputs] each, those of latents [heads, rank, plain] and [heads, values, rank],
    others [rows, inputs]; rows: of the file's modules
    """
    if len(names) == 1:
        return {names[0]: shape}
    family = families.known()[config.model_type]
    if isinstance(attention := family.attention_of(config), families.Latent) and len(shape) == 2:
        heads, rank = family.shape(config).heads, attention.rank
        return dict(
            zip(
                names, ((heads, rank, attention.plain), (heads, attention.value, rank)), strict=True
            )
        )
    return (
        dict.fromkeys(names, (shape[0], shape[1] // len(names), *shape[2:]))
        if is_stack(names[0])
        else {name: (rows[name.rpartition(".")[0]], *shape[1:]) for name in names}
    )


def is_stack(name: str) -> bool:
    """Return whether a file's tensor has what all experts have of a kind."""
    return "_exps." in name


def is_of_latents(name: str) -> bool:
    """Return whether a file's tensor is of keys or values that are made of latents, by head."""
    return ".attn_k_b." in name or ".attn_v_b." in name


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as llama.cpp compares it: converters have squeezed matrices of one row."""
    return shape[1:] if shape[:1] == (1,) else shape


def tensor_names(
    config: transformers.PretrainedConfig, names: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the names in GGUF files of tensors of transformers, by the latter.

    Mostly one; several where a stack of matrices is stored as several, whose rows alternate in transformers'.
    """
    modules: dict[str, dict[str, None]] = {}
    for part in families.known()[config.model_type].parts(config):
        modules.setdefault(part.name.transformers, {})[part.name.gguf] = None
    return {
        name: tuple(
            modules.get(name)
            or (
                f"{stored.removesuffix('ssm')}{families.STATES[kind]}"  # of a mixer itself
                if stored.endswith(".ssm") and kind in families.STATES
                else f"{stored}.{kind}"
                for stored in modules[module]
            )
        )
        for name in names
        for module, _, kind in (name.rpartition("."),)
    }


def row_order(config: transformers.PretrainedConfig, name: str) -> np.ndarray | None:
    """Return the row of the file's tensor `name` for each row of transformers', int32 [rows]; None where they agree.

    llama.cpp turns neighbouring rows of a head in some architectures, transformers one of the first half with one of
    the second: see families.GGUF.pairs.
    """
    family, module = families.known()[config.model_type], _MODULE.fullmatch(name)
    if family.gguf is None or module is None:
        return None
    mixer = family.mixer(config)
    if mixer is not None and (order := mixer.orders_in_files()[0].get(module[1])) is not None:
        return np.array(order, dtype=np.int32)
    if module[1] not in family.gguf.pairs:
        return None
    shape = family.shape(config)
    size = next(part.size for part in family.attention.parts(shape) if part.name.gguf == module[1])
    pairs = np.arange(size, dtype=np.int32).reshape(-1, shape.head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def column_order(config: transformers.PretrainedConfig, name: str) -> np.ndarray | None:
    """Return the column of the file's tensor `name` for each of transformers', or None for the same."""
    family, module = families.known()[config.model_type], _MODULE.fullmatch(name)
    mixer = family.mixer(config)
    order = None if mixer is None or module is None else mixer.orders_in_files()[1].get(module[1])
    return None if order is None else np.array(order, dtype=np.int32)

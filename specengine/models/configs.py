"""Configs of transformers: the model of one without its weights, and whether and how the native forward runs it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ROPE_INIT_FUNCTIONS,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from specengine.errors import UnsupportedModelError, require_supported, restating
from specengine.models import families
from specengine.models.families import Family, Shape, config_at, scaled_context, stated as stated

STEADY_ROPES = "default", "linear", "llama3", "yarn"  # frequencies do not change with the length
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
SLIDING = families.SLIDING
_BY_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta")  # what configs list by layer
LAYER_TYPES = ("full_attention", SLIDING)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # by their names in transformers
UNMASKED = (
    "moshi",
)  # the cache of transformers drops what masks show: their context ends with the window
OWN_CODE = (
    "it has code of its own (auto_map), which runs only with trust_remote_code=True (on the command line "
    "--trust-remote-code)"
)
NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without memory for its weights; UnsupportedModelError where its config makes none."""
    refused = restating(
        Exception,
        lambda error: unsupported(
            config._name_or_path, error, "no model can be built from its config.json"
        ),
        (UnsupportedModelError, *NO_MEMORY),
    )
    with refused, torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
        model.config.return_dict = True  # results are read by name
        return model


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that makes this model: of causal LMs, else of those that read pictures too.

    UnsupportedModelError where it is neither.
    """
    family = families.known().get(config.model_type)
    if family is not None and family.causal_lm is not None:
        AutoModelForCausalLM.register(type(config), family.causal_lm(), exist_ok=True)
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if (
            kind.__name__ in (getattr(config, "auto_map", None) or ())
            or type(config) in kind._model_mapping  # noqa: SLF001
        ):
            return kind
    raise UnsupportedModelError(
        f"model {config._name_or_path!r}: model type {config.model_type} is no language model of transformers that "
        "goes on with a text"
    )


def unsupported(name: str | Path, error: Exception, what: str) -> UnsupportedModelError:
    """Return the error for a failure of transformers, whose own text says more where it refuses on purpose."""
    text = " ".join(why(error).split())
    if not isinstance(error, OSError | ValueError):
        text = f"{what} ({type(error).__name__}: {text:.300})"
    return UnsupportedModelError(f"model {str(name)!r}: {text}")


def why(error: Exception) -> str:
    """Return the text of a failure of transformers, or in its place that the files have code of their own."""
    return OWN_CODE if "trust_remote_code" in str(error) else str(error)


# ---- the native forward


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model; UnsupportedModelError where there is none of its type."""
    by_type = families.known()
    require_supported(
        f"native: model type {config.model_type}, known are {', '.join(by_type)}",
        config.model_type in by_type,
    )
    return by_type[config.model_type]


def as_model_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Return a head's product, [..., vocabulary], as the logits of a model of a known family: divided and capped."""
    if (family := families.known().get(config.model_type)) is None:
        return logits
    factors = family.factors(config)
    logits = logits if factors.divisor == 1.0 else logits / factors.divisor
    return (logits / factors.cap).tanh() * factors.cap if factors.cap else logits


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model in one that reads pictures too; another config as it is."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    text = copy.deepcopy(text)
    # which the whole model decides
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for field in ("_name_or_path", "auto_map", "quantization_config"):
        if getattr(config, field, None):
            setattr(text, field, getattr(config, field))
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


def shape_of(config: PretrainedConfig) -> Shape:
    """Return the sizes; UnsupportedModelError with the reason where the native forward does not run such a model."""
    refuse_config(config)
    family = family_of(config)
    shape = family.shape(config)
    for one in dict.fromkeys(family.shape_at(config, number) for number in range(shape.layers)):
        require_supported(
            f"native: sizes must be even and key-value heads divide query heads; got hidden size {one.hidden}, "
            f"{one.heads} heads of {one.head_dim}, {one.kv_heads} key-value heads",
            not (one.hidden % 2 or one.head_dim % 2 or one.heads % one.kv_heads),
        )
    return shape


def activation_of(config: PretrainedConfig) -> Any:
    """Return the activation of the feed-forward networks by its name in transformers."""
    field = family_of(config).fields.activation
    return getattr(config, field, None) if field else "silu"


def rope_of(config: PretrainedConfig, key: str = "") -> tuple[Tensor, float]:
    """Return the radians per position, float32 [turned channels / 2], and the factor on cosines and sines.

    key: of the parameters where layers have several, as in families.Place
    """
    parameters = (config.rope_parameters[key] if key else config.rope_parameters) or {}
    config = config_at(config, key) if key else config
    if (kind := parameters.get("rope_type", "default")) != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](
            config, "cpu", **({"layer_type": key} if key else {})
        )
        return frequencies.to(torch.float32), float(scale)
    family = family_of(config)
    size = int(
        family.attention_of(config).turnable(family.shape(config).head_dim)
        * (parameters.get("partial_rotary_factor", 1.0) if family.attention.partial else 1.0)
    )
    return 1.0 / parameters["rope_theta"] ** (
        torch.arange(0, size, 2, dtype=torch.int64, device="cpu").to(torch.float32) / size
    ), 1.0


def window_of(config: Any) -> int | None:
    """Return how many tokens a token sees in the sliding layers, including itself; None without any."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return (
        int(window)
        if window
        and (kinds is None or SLIDING in kinds)
        and getattr(config, "model_type", "") not in UNMASKED
        else None
    )


def refuse_short(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where a text could pass the original context of LongRoPE, where native ones end."""
    rope, context = (
        getattr(config, "rope_parameters", None) or {},
        getattr(config, "max_position_embeddings", None),
    )
    original = (
        rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope"
        else None
    )
    require_supported(
        f"native: LongRoPE beyond {original} tokens, in a context of {context}",
        not original or not context or original >= context,
    )


def refuse_config(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where the config alone says that the native forward would compute something else."""
    family = family_of(config)
    activation = activation_of(config)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [parameters for parameters in rope.values() if isinstance(parameters, dict)] or [rope]
    kind = next(
        (
            kind
            for parameters in ropes
            if (kind := parameters.get("rope_type", "default")) not in ROPE_TYPES
        ),
        "",
    )
    pad, vocabulary = (
        getattr(config, "pad_token_id", None) or 0,
        getattr(config, family.fields.vocabulary, None) or 0,
    )
    other = [
        name
        for name, value in family.neutral.items()
        if getattr(config, name, None) not in (None, value)
    ]
    refused = next(
        (
            block.refused
            for layer in family.layers_of(config)
            for block in layer.firsts
            if block.refused
        ),
        "",
    )
    reasons: dict[str, Any] = {
        "quantized weights": getattr(config, "quantization_config", None) is not None,
        "code of its own (auto_map)": getattr(config, "auto_map", None) is not None,
        f"activation {activation}, known are {', '.join(ACTIVATIONS)}": activation
        not in ACTIVATIONS,
        " or ".join(("other layers than full or sliding attention", *family.kinds)): set(
            getattr(config, "layer_types", None) or ()
        )
        - {*LAYER_TYPES, *family.kinds},
        f"{kind} positions, known are {', '.join(ROPE_TYPES)}": kind,
        "positions on part of a head's channels": not family.attention.partial
        and any(
            parameters.get("partial_rotary_factor", 1.0) != 1.0
            for parameters in ropes
            if parameters.get("rope_type")
            != "proportional"  # which turns channels that are left out by nothing
        ),
        f"pad_token_id {pad}, its vocabulary has {vocabulary}": not -vocabulary <= pad < vocabulary,
        f"{', '.join(other)} in its config": other,
        refused: refused,
    }
    for reason, holds in reasons.items():
        require_supported(f"native: {reason}", not holds)


def context_limit(config: Any) -> int:
    """Return how many tokens the model can hold: its position limit, or what its scaled positions reach.

    LongRoPE models turn all positions by other frequencies once a sequence passes their original context, which is
    the limit here: the cached keys before it would no longer fit. UnsupportedModelError where it leaves no room.
    """
    limit = (
        getattr(config, "max_position_embeddings", None)
        or getattr(config, "n_positions", None)
        or 1 << 20
    )
    # XLNet's positions are relative, and its limit -1
    limit = 1 << 20 if config.model_type == "xlnet" else scaled_context(config, limit)
    if config.model_type in UNMASKED:
        limit = min(limit, config.sliding_window)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    window = window_of(config) or 2
    require_supported(
        f"the sliding window in its config is {window}, 1 or more tokens are needed",
        min(limit, window) >= 1,
    )
    require_supported(
        f"the context in its config is {limit}, 2 or more tokens are needed", limit >= 2
    )
    return int(limit)


def fixed_context(config: Any) -> str:
    """Return why no text can be longer than `context_limit`; empty where only the model's training says so."""
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "its cache forgets what is behind its sliding window": config.model_type in UNMASKED,
        "positions of other kinds begin there (dynamic or LongRoPE)": any(
            parameters.get("rope_type") in ("dynamic", "longrope")
            for parameters in (rope, *rope.values())
            if isinstance(parameters, dict)
        ),
        "its table of positions has no more entries": not rope
        and (
            getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        )
        and not getattr(config, "alibi", False),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# ---- models of few layers, without weights


def layers_for(config: PretrainedConfig, number: int) -> tuple[int, ...]:
    """Return the layers without which a layer cannot run, and itself: one whose keys and values it reads."""
    reads = family_of(config).places(config)[number].reads
    return (number,) if reads is None else (reads, number)


def of_few_layers(
    config: PretrainedConfig, vocabulary: int, numbers: tuple[int, ...]
) -> PretrainedConfig:
    """Return the config of these layers alone, with a vocabulary of `vocabulary` tokens."""
    family, fields = family_of(config), config.to_dict()
    lists = {  # without those that a config makes of other fields
        name: [kinds[number] for number in numbers]
        for name in _BY_LAYER
        if config.attribute_map.get(name, name) in fields and (kinds := getattr(config, name, None))
    }
    sizes: dict[str, Any] = {
        family.fields.layers: len(numbers),
        family.fields.vocabulary: vocabulary,
        **lists,
        **family.alone(config, numbers[-1]),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if (by_layer := fields.get("per_layer_config")) is not None:
        sizes["per_layer_config"] = {
            i: by_layer.get(str(number), {}) for i, number in enumerate(numbers)
        }
    reduced = type(config).from_dict(fields | sizes)
    for name, kinds in lists.items():  # of which some classes make others
        setattr(reduced, name, kinds)
    return reduced


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield what checkpoints hold of a model: parameters, and the buffers that are kept with them."""
    yield from model.named_parameters()
    for above, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield f"{above}.{name}" if above else name, buffer


def with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with what no checkpoint holds made outside the meta device: rotary frequencies, factors."""
    filled_by_decoder = False
    for module in model.modules():
        lacking = {
            key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta
        }
        if not lacking:
            continue
        if hasattr(module, "layer_idx"):  # of a layer
            filled_by_decoder = True
            fresh = {key: torch.empty_like(buffer, device="cpu") for key, buffer in lacking.items()}
        else:
            with torch.device("cpu"):
                factor = getattr(module, "scalar_embed_scale", None)  # of embeddings
                initialised = (
                    type(module)(config=model.config)
                    if factor is None
                    else type(module)(1, 1, None, factor)
                )
            fresh = dict(initialised.named_buffers(recurse=False))
        for key, buffer in fresh.items():
            setattr(module, key, buffer)
    if filled_by_decoder:
        model._init_weights(model.get_decoder())  # noqa: SLF001
    return model


def layer_template(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, those of all layers included; a tied head has none."""
    family, layer_inputs = family_of(config), family_of(config).own_inputs(config)
    kinds, axes = kinds_of_layers(config), {} if layer_inputs is None else layer_inputs.axes
    layers, tied = family.layers.transformers, config.tie_word_embeddings
    shapes: dict[str, tuple[int, ...]] = {}
    for kind in dict.fromkeys(kinds):
        needed = layers_for(config, kinds.index(kind))
        small = of_few_layers(config, getattr(config, family.fields.vocabulary), needed)
        last = f"{layers}.{len(needed) - 1}."
        for name, weight in stored_tensors(empty_model(small, torch.float32)):
            if name.startswith(last):
                shapes |= {
                    f"{layers}.{number}.{name.removeprefix(last)}": tuple(weight.shape)
                    for number, other in enumerate(kinds)
                    if other == kind
                }
            elif not (
                name.startswith(f"{layers}.")
                or (tied and name == f"{family.head.transformers}.weight")
            ):
                shapes[name] = tuple(
                    size // len(needed) * len(kinds) if axis == axes.get(name) else size
                    for axis, size in enumerate(weight.shape)
                )
    return shapes


def kinds_of_layers(config: PretrainedConfig) -> list[Any]:
    """Return values for layers that are equal where these have the same blocks, sizes and places."""
    family = family_of(config)
    return [
        (layer, place, family.shape_at(config, number))
        for number, (layer, place) in enumerate(
            zip(family.layers_of(config), family.places(config), strict=True)
        )
    ]

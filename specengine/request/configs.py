"""Read transformers' generation configs: the call's own, then the model's."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    MinLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
from transformers.generation import logits_process

from specengine.errors import (
    InputError,
    require,
    require_input,
    require_or,
    require_value,
    restating,
    shown,
)
from specengine.registry import plain
from specengine.request.sampling import Processor

Makers = Mapping[str, Callable[..., Processor | None]]

DEFAULT_TOP_K = 50  # of transformers, where do_sample=True asks for sampling
SHAPES_DRAWS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
)

# Outputs that a call may ask for, and that are not given.
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Fields without effect on which tokens come out, by the reason.
_REASONS = {
    "an output, which is refused where a call asks for it": (*_OUTPUTS, "transformers_version"),
    "padding and beginnings, of which a prompt of ids has none": ("bos_token_id", "pad_token_id"),
    "of encoder-decoder models": ("decoder_start_token_id",),
    "read elsewhere": ("max_length",),
    "how transformers computes the same": (
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config",
        "disable_compile", "continuous_batching_config", "low_memory",
    ),
    "how transformers drafts, which changes no token": (
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
        "assistant_lookbehind", "target_lookbehind", "speculation_type", "use_mtp",
    ),
    "of beams, which are refused": ("early_stopping", "length_penalty"),
    "the same order and the same probabilities": ("renormalize_logits",),
    "what is not finite is never chosen here": ("remove_invalid_values",),
}  # fmt: skip
WITHOUT_EFFECT = {name: reason for reason, names in _REASONS.items() for name in names}
# Fields of which transformers makes processors and criteria before it calls `custom_generate`.
PROCESSED = {
    "guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config"
}  # fmt: skip
_SEVERAL = "one answer is written here; generate_many([prompt] * 4, do_sample=True) draws four"
_LOADED = "pass it to Engine.from_pretrained"
# Fields, and arguments of a call, that are accepted where they ask for nothing: at these values, and at any that is
# empty or false. What to write instead in a call.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "num_beams": (1, _SEVERAL),
    "num_return_sequences": (1, _SEVERAL),
    "num_beam_groups": (1, _SEVERAL),
    "encoder_repetition_penalty": (1, "leave it out"),
    "guidance_scale": (1, "leave it out"),
    "attention_mask": (1, "pass a prompt without padding, and several of them to generate_many"),
    "token_type_ids": (0, "leave them out"),
    "tokenizer": (None, f"{_LOADED}, as tokenizer="),
    "assistant_model": (None, f"{_LOADED}, as draft="),
    **dict.fromkeys(_OUTPUTS, (False, "leave it out")),
}
# no value is neutral
_REMEDIES = {"watermarking_config": "leave it out, in the model's generation config too"}
MIN_TOP_P = 1e-30  # of which the likeliest token is left, as of transformers' 0
_NEVER_EMPTY = ("num_beams", "num_return_sequences", "encoder_repetition_penalty", "guidance_scale")
_WITH_EFFECT_IN_CALLS = {"max_length", "cache_implementation"}
_PROMPTS = ("prompt", "input_ids", "inputs", "messages")


def read_call(prompt: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the prompt and our options of a call, which may be one for transformers' `generate`.

    The prompt may be what a tokenizer returns, or an argument of another name. Arguments are left out that change no
    token of one answer; InputError, with what to write instead, for values that would.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt, options = None, {**prompt, **options}
    arguments = {"prompt": prompt, **options}
    prompts = {name: value for name in _PROMPTS if (value := arguments.pop(name, None)) is not None}
    require(
        "prompt",
        " and ".join(prompts) or "none",
        f"one of {', '.join(_PROMPTS)}",
        len(prompts) == 1,
    )
    for name, (neutral, instead) in _NEUTRAL.items():
        value = plain(arguments.pop(name, None))
        fits = value is None or _holds_only(neutral, value)
        require_value(name, value, f"{shown(neutral)}: {instead}", fits)
    ignored = WITHOUT_EFFECT.keys() - _WITH_EFFECT_IN_CALLS
    return prompts.popitem()[1], {
        name: value for name, value in arguments.items() if name not in ignored
    }


def _holds_only(number: Any, value: Any) -> bool:
    """Return whether a value is this number, or lists of it."""
    nested = isinstance(value, list | tuple)
    return all(_holds_only(number, item) for item in value) if nested else value == number


class Configured:
    """The set fields of a call's and a model's generation config, the call's first; InputError for what changes tokens
    in a way that this engine does not know.

    Fields that transformers' GenerationConfig does not define mean nothing there, and here.
    """

    def __init__(
        self, call: GenerationConfig | None = None, model: GenerationConfig | None = None
    ) -> None:
        of_call = {} if call is None else _set_fields(call)
        for name in _OUTPUTS:
            _support(name, of_call.get(name), "leave it out", not of_call.get(name))
        of_model = {} if model is None else _set_fields(model)
        of_model.pop("return_dict_in_generate", None)  # the caller says what comes back
        self.values = {
            name: value
            for name, value in (of_model | of_call).items()
            # above 1, transformers takes a share for all of the tokens
            if not (name in ("top_p", "typical_p") and isinstance(value, int | float) and value > 1)
        }
        if self.values.get("top_p") == 0:
            self.values["top_p"] = MIN_TOP_P

    def refuse_unsupported(self, known: Collection[str]) -> None:
        """Raise InputError for fields that are not supported; known: fields that are read by name."""
        _support(
            "cache_implementation",
            "quantized",
            "its numbers differ, and so do tokens; leave it out",
            self.values.get("cache_implementation") != "quantized",
        )
        for name, value in self.values.items():
            if name in (*known, *WITHOUT_EFFECT, *BEFORE, *BEGINNING, *SHAPES_DRAWS):
                continue
            neutral, _ = _NEUTRAL.get(name, (False, ""))
            without = f"generation_config=GenerationConfig({name}={neutral}) goes without"
            asks_nothing = (not value and name not in _NEVER_EMPTY) or value == neutral
            _support(name, value, _REMEDIES.get(name, without), asks_nothing)

    def take(self, options: Mapping[str, Any]) -> None:
        """Take over the options, by name, that a processor below is made of: they go before the configs' values."""
        names = (*BEFORE, *BEGINNING, *ABOVE_TOP_K, *CUTOFFS)
        self.values |= {name: options[name] for name in names if options.get(name) is not None}

    def check(self, context: Mapping[str, Any], *, samples: bool) -> None:
        """Raise InputError for what transformers' processors refuse."""
        for makers in (BEFORE, BEGINNING, *((ABOVE_TOP_K, CUTOFFS) if samples else ())):
            self.processors(makers, context)

    def processors(self, makers: Makers, context: Mapping[str, Any]) -> list[Processor]:
        """Return the processors of the set fields; makers: one of the tables below. InputError as `check`."""
        processors = []
        for name, make in makers.items():
            if (value := self.values.get(name)) is None:
                continue
            with refusing(f"generation_config.{name}", value):
                processors.append(make(value, **context))
        return [processor for processor in processors if processor is not None]


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    """Return the fields that transformers defines and this config sets, as plain values, without ids below 0."""
    defaults = vars(GenerationConfig())
    values = {
        name: plain(value)
        for name, value in vars(config).items()
        if name in defaults and not name.startswith("_") and value is not None
    }
    if "eos_token_id" in values:
        values["eos_token_id"] = _token_ids(values["eos_token_id"])
    return values


def _token_ids(value: Any) -> Any:
    """Return the ends as whole numbers, without those below 0, which are no tokens."""
    if isinstance(value, list | tuple):
        ids = [_whole(item) for item in value]
        return [item for item in ids if not isinstance(item, int) or item >= 0]
    value = _whole(value)
    return [] if isinstance(value, int) and not isinstance(value, bool) and value < 0 else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refusing(name: str, value: Any) -> AbstractContextManager[None]:
    """Raise InputError, which names an option and its value, for what transformers' processors raise."""
    return restating(
        (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError),
        lambda error: InputError(
            f"{name}: got {shown(value)}, which transformers refuses ({error!s:.300})"
        ),
    )


def _support(name: str, value: Any, remedy: str, holds: bool) -> None:
    require_input(
        f"generation_config.{name}: {shown(value)} is not supported by speculative decoding here; {remedy}",
        holds,
    )


# ---- processors by field, in transformers' order; the context: eos, prompt_length, max_length, device, and all values


def _decay(value: Any, eos: list[int], prompt_length: int, **_: Any) -> Processor | None:
    require_or(ValueError, "it needs eos_token_id, the end of an answer", bool(eos))
    return ExponentialDecayLengthPenalty(tuple(value), eos, prompt_length)


def _begin_suppress(
    value: Any, prompt_length: int, forces_first: bool, device: Any, **_: Any
) -> Processor | None:
    begin = prompt_length + (prompt_length == 1 and forces_first)
    return SuppressTokensAtBeginLogitsProcessor(value, begin, device=device) if value else None


BEFORE: Makers = {  # suppressed tokens
    "min_length": lambda value, eos, device, **_: (
        MinLengthLogitsProcessor(value, eos, device=device) if eos and value > 0 else None
    ),
    "forced_bos_token_id": lambda value, **_: ForcedBOSTokenLogitsProcessor(value),
    "forced_eos_token_id": lambda value, max_length, device, **_: ForcedEOSTokenLogitsProcessor(
        max_length, value, device=device
    ),
    "exponential_decay_length_penalty": _decay,
}
BEGINNING: Makers = {"begin_suppress_tokens": _begin_suppress}
# TopHLogitsWarper is there where GenerationConfig has the field.
ABOVE_TOP_K: Makers = {"top_h": lambda value, **_: logits_process.TopHLogitsWarper(value)}
CUTOFFS: Makers = {  # the last ones of sampling
    "epsilon_cutoff": lambda value, **_: EpsilonLogitsWarper(value) if 0 < value < 1 else None,
    "eta_cutoff": lambda value, device, **_: (
        EtaLogitsWarper(value, device=device) if 0 < value < 1 else None
    ),
}

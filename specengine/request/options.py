"""GenerationOptions: what one generation is asked to do, checked before any work is done."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import MaxTimeCriteria, MinPLogitsWarper, TypicalLogitsWarper

from specengine.errors import InputError, did_you_mean, shown
from specengine.plain import plain
from specengine.request.configs import DEFAULT_TOP_K, SHAPES_DRAWS, Configured
from specengine.request.grammars import Constraint, ConstraintProcessor, compiled
from specengine.request.sampling import PresenceFrequencyPenalty, Processor, Sampler, Stopper, TopP

DEFAULT_MAX_NEW_TOKENS = 256
MOST = 1e30  # of any number: transformers would carry on with an infinite one

LEAST = 1 / MOST  # of a penalty: logits divided by it stay finite
LEAST_TEMPERATURE = 1e-5  # below it a draw is the likeliest token, as in vLLM; logits over it stay finite

_ALL = {"top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1}  # where a truncation keeps all tokens
_OBJECTS = {"logits_processor", "stopping_criteria", "streamer", "generation_config", "policy", "json_schema"}


@dataclass
class GenerationOptions:
    """Options of one generation; what is None is taken from `generation_config`, then from the model's own.

    Numbers and lists may be those of numpy and torch.

    max_new_tokens        tokens to generate at most; default what max_length of a config leaves, else 256
    do_sample             sample instead of taking the most likely token; implied by a temperature above 0 and by
                          a top_k, top_p, min_p or typical_p that truncates. True, here or in a config, draws from
                          the 50 likeliest tokens where no top_k is given, as in transformers; what implies it, from all
    temperature           0 means greedy, and so does less than 1e-5
    top_k, top_p, min_p, typical_p   as in transformers; they matter when sampling
    repetition_penalty, no_repeat_ngram_size, bad_words_ids, sequence_bias, suppress_tokens, min_new_tokens
                          as in transformers
    presence_penalty, frequency_penalty   the OpenAI definition: over generated tokens only
    seed                  of the sampling noise; the same seed gives the same answer, with any draft and policy;
                          by default it is drawn from torch's global generator
    coupled               when sampling: drafts know the noise that the seed gives, so that they guess the draw itself.
                          Never changes the answer; False for trees that do not depend on it, as the papers have them
    eos_token_id          one id, or several; [] to ignore the model's own
    stop_strings          the answer ends with the first of these strings, which it includes; the text of a special
                          token is that token, which ends the answer and writes nothing
    max_time              seconds after which the answer ends
    logits_processor, stopping_criteria, streamer, generation_config, return_dict_in_generate   transformers' own
    raw                   take a string prompt as it is, without the chat template
    allow_special_text    the text of a special token in a prompt or a message is that token, as transformers reads it:
                          a user who writes the template's markers opens a turn of another role. False, for text of
                          people who are not trusted, takes it as text like any other
    json_schema           a JSON schema, as a dict or as JSON text, that the answer meets, written as json.dumps does;
                          refused where the library, llguidance, does not support all of it
    json_object           the answer is a JSON object of any kind
    grammar               a grammar, as Lark or GBNF text, that the answer meets. Once nothing can follow it
                          ends; cut short by max_new_tokens it is the beginning of one that meets it
    prediction            text, or token ids, that much of the answer is expected to be: what follows the same words in
                          it is drafted. Never changes the answer; for the drafts that copy, ngram and any with lookup
    logprobs              the log-probability of each token under the target's own distribution, before temperature and
                          processors, and those of so many of the likeliest tokens at its place; 0 for its own alone
    policy                for this answer alone: a policy's name, NAME/PRESET or a TreePolicy; `plain` decodes without
                          the draft; by default the engine's own. What a named one learns stays for later calls
    policy_options        options of a policy given by name
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: Any = None
    suppress_tokens: list[int] | None = None
    min_new_tokens: int | None = None
    seed: int | None = None
    coupled: bool = True
    eos_token_id: int | list[int] | None = None
    stop_strings: str | list[str] | None = None
    max_time: float | None = None
    logits_processor: Sequence[Processor] | None = None
    stopping_criteria: Sequence[Callable[..., Any]] | None = None
    streamer: Any = None
    generation_config: GenerationConfig | None = None
    return_dict_in_generate: bool | None = None
    raw: bool = False
    allow_special_text: bool = True
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    grammar: str | None = None
    prediction: str | list[int] | None = None
    logprobs: int | None = None
    policy: Any = None
    policy_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._configured = Configured()
        self._max_length = 0  # of prompt and answer, as far as the options go

    @classmethod
    def of(
        cls, options: dict[str, Any], model_config: GenerationConfig | None, prompt_length: int, max_context: int
    ) -> GenerationOptions:
        """Complete and check `options`; InputError names the field and what it accepts."""
        self = cls.check(options)
        asked = self.do_sample
        if self.do_sample is None:
            self._imply_sampling()
        elif not self.do_sample:
            self._refuse_sampling()
        self._configured = configured = Configured(self.generation_config, model_config)
        configured.refuse_unsupported(_IN_CONFIGS)
        self._fill_from(configured.values)
        self._check_kinds()
        self._check()
        if self.samples and self.top_k is None and (configured.values.get("do_sample") if asked is None else asked):
            self.top_k = DEFAULT_TOP_K
        self._check_processors(prompt_length)
        if self.samples and self.seed is None:
            self.seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        if self.max_new_tokens is None:
            self.max_new_tokens = self._up_to(configured.values.get("max_length"), prompt_length)
        if options.get("min_new_tokens") is None:
            self.min_new_tokens = min(self.min_new_tokens or 0, self.max_new_tokens)
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise InputError(f"min_new_tokens: got {shown(self.min_new_tokens)}, accepted up to {self.max_new_tokens}")
        self._max_length = prompt_length + self.max_new_tokens
        self.max_new_tokens = min(self.max_new_tokens, max_context - prompt_length)
        configured.check(self._context(prompt_length, "cpu"), samples=self.samples)
        return self

    @classmethod
    def check(cls, options: dict[str, Any]) -> GenerationOptions:
        """The options as given, each of them checked, before a model is there; InputError as `of` raises it."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                listed = ", ".join(known)
                raise InputError(f"unknown option {shown(name)}, known are {listed}{did_you_mean(name, known)}")
        self = cls(**{name: value if name in _OBJECTS else plain(value) for name, value in options.items()})
        self._check_kinds()
        self._check()
        if self.constrains is not None:
            compiled(*self.constrains)
        return self

    @property
    def samples(self) -> bool:
        return bool(self.do_sample) and (self.temperature is None or self.temperature >= LEAST_TEMPERATURE)

    @property
    def eos_token_ids(self) -> list[int]:
        ids = self.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @property
    def stops(self) -> list[str]:
        return [self.stop_strings] if isinstance(self.stop_strings, str) else list(self.stop_strings or [])

    @property
    def constrains(self) -> tuple[str, Any] | None:
        """The name and value of the option that constrains the answer."""
        named = ("json_schema", "json_object", "grammar")
        return next(((name, value) for name in named if (value := getattr(self, name)) not in (None, False)), None)

    def stopper(self, decode: Callable[[list[int]], str], constraint: Constraint | None = None) -> Stopper:
        assert self.max_new_tokens is not None
        criteria = list(self.stopping_criteria or [])
        if self.max_time is not None:
            criteria.append(MaxTimeCriteria(self.max_time))
        complete = None if constraint is None else constraint.complete
        return Stopper(self.max_new_tokens, self.eos_token_ids, self.stops, criteria, decode, complete)

    def sampler(self, prompt_length: int, device: Any, constraint: Constraint | None = None) -> Sampler:
        """The sampler with all processors: as in transformers penalties and bans, then the user's own, the constraint,
        and truncation."""
        eos = self.eos_token_ids
        chain: list[Processor] = []
        if self.sequence_bias:
            chain.append(SequenceBiasLogitsProcessor(self.sequence_bias))
        if self.repetition_penalty not in (None, 1.0):
            chain.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.presence_penalty or self.frequency_penalty:
            chain.append(PresenceFrequencyPenalty(self.presence_penalty, self.frequency_penalty, prompt_length))
        if self.no_repeat_ngram_size:
            chain.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.bad_words_ids:
            chain.append(NoBadWordsLogitsProcessor(self.bad_words_ids, eos or None))
        if self.min_new_tokens and eos:
            chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, eos, device=device))
        context = self._context(prompt_length, device)
        chain.extend(self._configured.before(context))
        if self.suppress_tokens:
            chain.append(SuppressTokensLogitsProcessor(self.suppress_tokens, device=device))
        chain.extend(self._configured.beginning(context))
        chain.extend(self.logits_processor or [])
        if constraint is not None:
            chain.append(ConstraintProcessor(constraint, prompt_length))
        if not self.samples:
            return Sampler(chain, logprobs=self.logprobs)
        if self.temperature not in (None, 1.0):
            chain.append(TemperatureLogitsWarper(float(self.temperature)))
        chain.extend(self._configured.above_top_k())
        if self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            chain.append(TopP(self.top_p))
        if self.min_p:
            chain.append(MinPLogitsWarper(self.min_p))
        if self.typical_p is not None and self.typical_p < 1:
            chain.append(TypicalLogitsWarper(self.typical_p))
        chain.extend(self._configured.cutoffs(device))
        return Sampler(chain, self.seed, self.logprobs, coupled=self.coupled)

    def _context(self, prompt_length: int, device: Any) -> dict[str, Any]:
        """What processors of a config are made with."""
        return {
            "eos": self.eos_token_ids,
            "prompt_length": prompt_length,
            "max_length": self._max_length,
            "device": device,
            "forces_first": "forced_bos_token_id" in self._configured.values,
        }

    def _imply_sampling(self) -> None:
        """Asking for a temperature or a truncation asks for sampling; a temperature of 0 asks for the greedy answer."""
        if self.temperature is not None and self.temperature < LEAST_TEMPERATURE:
            self.do_sample = False
        elif self.temperature is not None or any(getattr(self, name) not in (None, _ALL[name]) for name in _ALL):
            self.do_sample = True

    def _refuse_sampling(self) -> None:
        """Raise InputError for what would shape a draw, where none was asked for; transformers' neutral values pass."""
        neutral = {"temperature": (0, 1), "top_k": (0, 50), "top_p": (1,), "min_p": (0,), "typical_p": (1,)}
        for name, accepted in neutral.items():
            value = getattr(self, name)
            greedy = name == "temperature" and value is not None and value < LEAST_TEMPERATURE
            if value is not None and value not in accepted and not greedy:
                raise InputError(f"{name}: got {value}, but do_sample=False takes the most likely token; leave one out")

    def _fill_from(self, values: Mapping[str, Any]) -> None:
        """Take over what is still None; what shapes a draw means nothing where none is asked for."""
        if self.do_sample is None:
            self.do_sample = bool(values.get("do_sample"))
        for name in _IN_CONFIGS:
            if getattr(self, name) is None and (self.do_sample or name not in SHAPES_DRAWS):
                setattr(self, name, values.get(name))

    def _up_to(self, max_length: int | None, prompt_length: int) -> int:
        """How many tokens a config's max_length, which counts the prompt, leaves for the answer."""
        if max_length is None:
            return DEFAULT_MAX_NEW_TOKENS
        _whole("generation_config.max_length", max_length, prompt_length + 1)
        return max_length - prompt_length

    def _check_kinds(self) -> None:
        """Refuse what is of another type than its reader expects."""
        for name in ("raw", "allow_special_text", "json_object", "coupled"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: got {shown(getattr(self, name))}, accepted True or False")
        asked = [name for name in ("json_schema", "json_object", "grammar") if getattr(self, name) not in (None, False)]
        if len(asked) > 1:
            raise InputError(f"{', '.join(asked)}: accepted one of them")
        strings = self.stop_strings
        if not isinstance(strings, str | list | tuple | None):
            raise InputError(f"stop_strings: got {shown(strings)}, accepted a string or a list of strings")
        if not isinstance(self.eos_token_id, int | list | tuple | None):
            raise InputError(f"eos_token_id: got {shown(self.eos_token_id)}, accepted a token id or a list of them")
        if not isinstance(self.generation_config, GenerationConfig | None):
            kind = type(self.generation_config).__name__
            raise InputError(f"generation_config: got {kind}, accepted a transformers.GenerationConfig")
        for name in ("put", "end"):
            if self.streamer is not None and not callable(getattr(self.streamer, name, None)):
                raise InputError(f"streamer: got {shown(self.streamer)}, accepted one of transformers' streamers")
        options = self.policy_options
        if not isinstance(options, Mapping | None) or not all(isinstance(name, str) for name in options or ()):
            raise InputError(f"policy_options: got {shown(options)}, accepted a dict of options by name")
        for name in ("logits_processor", "stopping_criteria"):
            if not isinstance(given := getattr(self, name), Iterable | None):
                raise InputError(f"{name}: got {shown(given)}, accepted a list of callables as in transformers")

    def _check_processors(self, prompt_length: int) -> None:
        """Refuse what transformers' processors refuse, by the name of the option."""
        named = ("sequence_bias", "bad_words_ids", "suppress_tokens")
        for name in (name for name in named if getattr(self, name) is not None):
            alone = GenerationOptions(**{name: getattr(self, name)})
            try:
                alone.sampler(prompt_length, "cpu")
            except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
                given = shown(getattr(self, name))
                raise InputError(f"{name}: got {given}, which is not as in transformers ({error!s:.300})") from error
        bias = self.sequence_bias or {}
        values = bias.values() if isinstance(bias, Mapping) else [value for _, value in bias]
        if not all(value <= MOST for value in values):  # nor is NaN
            raise InputError(f"sequence_bias: got {shown(self.sequence_bias)}, accepted biases up to {MOST:g}")

    def _check(self) -> None:
        number, whole = _number, _whole
        whole("max_new_tokens", self.max_new_tokens, 1)
        number("temperature", self.temperature, 0, math.inf, "0 (greedy) or more")
        whole("top_k", self.top_k, 0)
        number("top_p", self.top_p, 0, 1, "above 0, at most 1", open_low=True)
        number("min_p", self.min_p, 0, 1, "0 to 1")
        number("typical_p", self.typical_p, 0, 1, "above 0, at most 1", open_low=True)
        number("repetition_penalty", self.repetition_penalty, LEAST, math.inf, f"above 0, {LEAST:g} to {MOST:g}")
        number("presence_penalty", self.presence_penalty, -math.inf, math.inf, "a finite number")
        number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf, "a finite number")
        number("max_time", self.max_time, 0, math.inf, "above 0", open_low=True)
        whole("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        whole("min_new_tokens", self.min_new_tokens, 0)
        whole("logprobs", self.logprobs, 0)
        whole("seed", self.seed, 0, (1 << 64) - 1)
        for token in self.eos_token_ids:
            whole("eos_token_id", token, 0)
        for string in self.stops:
            if not isinstance(string, str) or not string:
                raise InputError(f"stop_strings: got {shown(string)}, accepted non-empty strings")
        for name in ("logits_processor", "stopping_criteria"):
            for item in getattr(self, name) or []:
                if not callable(item):
                    raise InputError(f"{name}: got {shown(item)}, accepted callables as in transformers")


_IN_CONFIGS = {field.name for field in dataclasses.fields(GenerationOptions)} & set(vars(GenerationConfig()))


def _number(name: str, value: float | None, low: float, high: float, accepted: str, *, open_low: bool = False) -> None:
    if value is None:
        return
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST
    if not real or not math.isfinite(value) or not (low < value if open_low else low <= value) or value > high:
        raise InputError(f"{name}: got {shown(value)}, accepted {accepted}")


def _whole(name: str, value: int | None, low: int, high: float = math.inf) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bound = f"{low} or more" if high == math.inf else f"{low} to {high}"
        raise InputError(f"{name}: got {shown(value)}, accepted a whole number, {bound}")

"""GenerationOptions, the options of one generation, checked before any work, and the Request made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from transformers import (
    GenerationConfig,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from specengine.errors import (
    MAX_NUMBER,
    require,
    require_input,
    require_options,
    shown,
    whole,
)
from specengine.records import Stats
from specengine.registry import plain
from specengine.request import configs
from specengine.request.configs import DEFAULT_TOP_K, SHAPES_DRAWS, Configured
from specengine.request.declared import (
    CONSTRAINTS,
    DEFAULT_MAX_NEW_TOKENS,
    DeclaredOptions,
    check,
    declarations,
)
from specengine.request.grammars import Constraint, ConstraintProcessor, compiled
from specengine.request.prompts import CONTEXT_SOURCES
from specengine.request.sampling import PresenceFrequencyPenalty, Processor, Sampler, Stopper, TopP

# below it a draw is the likeliest token, as in vLLM; logits over it stay finite
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Request:
    """One generation, made once its prompt and options are checked.

    prompt       token ids; the last one is the root of the first tree
    stats        filled on the way
    prediction   token ids that the answer is expected to be like
    reuse_cache  keep the common prefix that both caches hold from the generation before
    constraint   of the sampler's processors, for trees to follow
    memory       texts that drafts copy from and that this one joins, see checkpoints/texts.py; None for none
    """

    prompt: list[int]
    sampler: Sampler
    stopper: Stopper
    stats: Stats = field(default_factory=Stats)
    prediction: Sequence[int] = ()
    reuse_cache: bool = False
    constraint: Constraint | None = None
    memory: Any = None


@dataclass
class GenerationOptions(DeclaredOptions):
    """The declared options of one generation, completed from the configs of the call and the model, and checked."""

    def __post_init__(self) -> None:
        self._configured = Configured()
        self.stops_after = 0  # tokens of the answer that no stop string counts in
        self.cut = ""  # a note for an answer that ends before `max_new_tokens`
        self._max_length = 0  # of prompt and answer, as far as the options go

    @classmethod
    def of(
        cls,
        options: dict[str, Any],
        model_config: GenerationConfig | None,
        prompt_length: int,
        max_context: int,
    ) -> Self:
        """Complete and check `options`; InputError names the field and what it accepts."""
        self = cls.check(options)
        asked = self.do_sample
        self._settle_sampling()
        self._configured = configured = Configured(self.generation_config, model_config)
        configured.refuse_unsupported(IN_CONFIGS)
        self._fill_from(configured.values)
        configured.take(vars(self))
        check(self)
        if (
            self.samples
            and self.top_k is None
            and (configured.values.get("do_sample") if asked is None else asked)
        ):
            self.top_k = DEFAULT_TOP_K
        self._check_processors(prompt_length)
        if self.samples and self.seed is None:
            self.seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        if self.max_new_tokens is None:
            # of a config, which counts the prompt
            most = configured.values.get("max_length", prompt_length + DEFAULT_MAX_NEW_TOKENS)
            whole(prompt_length + 1).check("generation_config.max_length", most)
            self.max_new_tokens = most - prompt_length
        if options.get("min_new_tokens") is None:
            self.min_new_tokens = min(self.min_new_tokens or 0, self.max_new_tokens)
        least, most = self.min_new_tokens or 0, self.max_new_tokens
        require("min_new_tokens", least, f"up to {shown(most)}", least <= most)
        self._max_length = prompt_length + self.max_new_tokens
        if self._max_length > max_context:
            self.cut = (
                f"max_new_tokens: the answer ends with the context, {max_context} tokens of prompt and "
                f"answer; {CONTEXT_SOURCES}"
            )
        self.max_new_tokens = min(self.max_new_tokens, max_context - prompt_length)
        configured.check(self._context(prompt_length, "cpu"), samples=self.samples)
        return self

    @classmethod
    def check(cls, options: dict[str, Any]) -> Self:
        """Return the options as given, each of them checked, before there is a model; InputError as `of` raises it."""
        declared = declarations()
        require_options(options, declared)
        self = cls(
            **{
                name: value if declared[name].as_is else plain(value)
                for name, value in options.items()
            }
        )
        check(self)
        if self.constrains is not None:
            compiled(*self.constrains)
        return self

    @property
    def samples(self) -> bool:
        return bool(self.do_sample) and (
            self.temperature is None or self.temperature >= MIN_TEMPERATURE
        )

    @property
    def eos_token_ids(self) -> list[int]:
        ids = self.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @property
    def stops(self) -> list[str]:
        return (
            [self.stop_strings]
            if isinstance(self.stop_strings, str)
            else list(self.stop_strings or [])
        )

    @property
    def constrains(self) -> tuple[str, Any] | None:
        """Return the name and value of the option that constrains the answer."""
        return next(
            (
                (name, value)
                for name in CONSTRAINTS
                if (value := getattr(self, name)) not in (None, False)
            ),
            None,
        )

    def stopper(
        self, decode: Callable[[list[int]], str], constraint: Constraint | None = None
    ) -> Stopper:
        criteria = list(self.stopping_criteria or [])
        if self.max_time is not None:
            criteria.append(MaxTimeCriteria(self.max_time))
        return Stopper(
            cast(int, self.max_new_tokens),
            self.eos_token_ids,
            self.stops,
            criteria,
            decode,
            None if constraint is None else constraint.complete,
            self.stops_after,
        )

    def sampler(
        self, prompt_length: int, device: Any, constraint: Constraint | None = None
    ) -> Sampler:
        """Return the sampler with all processors, in transformers' order: penalties and bans, then the user's own, the
        constraint, and truncation."""
        chain = list(self._penalties(prompt_length, device))
        chain.extend(self.logits_processor or [])
        if constraint is not None:
            chain.append(ConstraintProcessor(constraint, prompt_length))
        if not self.samples:
            return Sampler(chain, logprobs=self.logprobs)
        chain.extend(self._truncations(device))
        return Sampler(chain, self.seed, self.logprobs, coupled=self.coupled)

    def _penalties(self, prompt_length: int, device: Any) -> Iterator[Processor]:
        of: Any = self  # whose values are none where they do not apply
        eos, context = self.eos_token_ids, self._context(prompt_length, device)
        yield from _applied(
            (of.sequence_bias, lambda: SequenceBiasLogitsProcessor(of.sequence_bias)),
            (
                of.repetition_penalty not in (None, 1.0),
                lambda: RepetitionPenaltyLogitsProcessor(float(of.repetition_penalty)),
            ),
            (
                of.presence_penalty or of.frequency_penalty,
                lambda: PresenceFrequencyPenalty(
                    of.presence_penalty, of.frequency_penalty, prompt_length
                ),
            ),
            (
                of.no_repeat_ngram_size,
                lambda: NoRepeatNGramLogitsProcessor(of.no_repeat_ngram_size),
            ),
            (of.bad_words_ids, lambda: NoBadWordsLogitsProcessor(of.bad_words_ids, eos or None)),
            (
                of.min_new_tokens and eos,
                lambda: MinNewTokensLengthLogitsProcessor(
                    prompt_length, of.min_new_tokens, eos, device=device
                ),
            ),
        )
        yield from self._configured.processors(configs.BEFORE, context)
        yield from _applied(
            (
                of.suppress_tokens,
                lambda: SuppressTokensLogitsProcessor(of.suppress_tokens, device=device),
            )
        )
        yield from self._configured.processors(configs.BEGINNING, context)

    def _truncations(self, device: Any) -> Iterator[Processor]:
        of: Any = self
        yield from _applied(
            (
                of.temperature not in (None, 1.0),
                lambda: TemperatureLogitsWarper(float(of.temperature)),
            )
        )
        yield from self._configured.processors(configs.ABOVE_TOP_K, {})
        yield from _applied(
            (of.top_k, lambda: TopKLogitsWarper(of.top_k)),
            (of.top_p is not None and of.top_p < 1, lambda: TopP(of.top_p)),
            (of.min_p, lambda: MinPLogitsWarper(of.min_p)),
            (
                of.typical_p is not None and of.typical_p < 1,
                lambda: TypicalLogitsWarper(of.typical_p),
            ),
        )
        yield from self._configured.processors(configs.CUTOFFS, {"device": device})

    def _context(self, prompt_length: int, device: Any) -> dict[str, Any]:
        """Return the arguments of a config's processors."""
        return {
            "eos": self.eos_token_ids,
            "prompt_length": prompt_length,
            "max_length": self._max_length,
            "device": device,
            "forces_first": "forced_bos_token_id" in self._configured.values,
        }

    def _settle_sampling(self) -> None:
        """Sample where a temperature or a truncation is given; a temperature of 0 is the greedy answer.

        Raise InputError for an option that shapes draws, where do_sample is False; neutral values pass.
        """
        neutral = {
            name: declared.neutral for name, declared in declarations().items() if declared.neutral
        }
        stated = {name: getattr(self, name) for name in neutral if getattr(self, name) is not None}
        greedy = self.temperature is not None and self.temperature < MIN_TEMPERATURE
        if self.do_sample is not None and not self.do_sample:
            for name, value in stated.items():
                require_input(
                    f"{name}: got {value}, but do_sample=False takes the most likely token; leave one out",
                    value in neutral[name] or (name == "temperature" and greedy),
                )
        elif self.do_sample is None and greedy:
            self.do_sample = False
        elif self.do_sample is None and (
            self.temperature is not None
            or any(value != neutral[name][0] for name, value in stated.items())
        ):
            self.do_sample = True

    def _fill_from(self, values: Mapping[str, Any]) -> None:
        """Take over what is still None; what shapes a draw means nothing where none is asked for."""
        if self.do_sample is None:
            self.do_sample = bool(values.get("do_sample"))
        declared = declarations()
        for name in IN_CONFIGS:
            if getattr(self, name) is None and (self.do_sample or name not in SHAPES_DRAWS):
                setattr(self, name, values.get(name))
                reader = declared[name].reader if name in declared else None
                if reader is not None and values.get(name) is not None:
                    reader.check(f"generation_config.{name}", values[name])

    def _check_processors(self, prompt_length: int) -> None:
        """Refuse what transformers' processors refuse, by the name of the option."""
        named = ("sequence_bias", "bad_words_ids", "suppress_tokens")
        for name in (name for name in named if getattr(self, name) is not None):
            alone = GenerationOptions(**{name: getattr(self, name)})
            with configs.refusing(name, getattr(self, name)):
                alone.sampler(prompt_length, "cpu")
        bias = self.sequence_bias or {}
        values = bias.values() if isinstance(bias, Mapping) else [value for _, value in bias]
        fits = all(value <= MAX_NUMBER for value in values)  # which NaN is not
        require("sequence_bias", self.sequence_bias, f"biases up to {MAX_NUMBER:g}", fits)


def _applied(*processors: tuple[Any, Callable[[], Processor]]) -> Iterator[Processor]:
    """Return the processors that these make, each after whether it applies."""
    return (make() for applies, make in processors if applies)


IN_CONFIGS = declarations().keys() & vars(GenerationConfig()).keys()

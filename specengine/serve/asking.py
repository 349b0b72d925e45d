"""From a request to a generation of the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from specengine.engine import PLAIN, Engine, TextGeneration
from specengine.errors import InputError
from specengine.records import TokenLogprob
from specengine.request.declared import CONSTRAINTS, declarations
from specengine.request.grammars import Constraint
from specengine.request.options import GenerationOptions
from specengine.request.prompts import Room, predicted_ids, texts_in, token_ids
from specengine.request.text import decoder
from specengine.serve import constraints
from specengine.serve.problems import Problem
from specengine.serve.requests import ChatRequest, CompletionRequest, Sampling
from specengine.serve.settings import Settings
from specengine.serve.tools import OneCall, ToolReader, format_of, marks, require_written, schemas_of

QUICK_LETTERS, QUICK_MESSAGES = 1 << 15, 200


class Limits(NamedTuple):
    """Of a loaded model: a tokenizer that the thread which reads may use, and what a prompt can hold.

    longest: characters of the longest token, where they are known already
    """

    tokenizer: Any
    max_context: int
    longest: int | None = None


class Prepared(NamedTuple):
    """A request of which everything has been read.

    shown: special tokens whose text the answer shows
    """

    prompt: list[int]
    options: GenerationOptions
    shown: list[int]
    constraint: Constraint | None

    @property
    def prediction(self) -> list[int]:
        found = self.options.prediction or []
        assert not isinstance(found, str)
        return found


@dataclass(frozen=True)
class Asked:
    """One request, its options checked as far as they can be without the model.

    defaults: options of Engine.generate, for what the request does not say
    """

    request: Sampling
    settings: Settings
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        most, wanted = self.settings.max_tokens, self.request.wanted_tokens
        if most is not None and wanted is not None and wanted > most:
            raise InputError(f"max_new_tokens: got {wanted}, accepted up to {most} on this server")
        object.__setattr__(self, "options", _options(self.request))
        GenerationOptions.check(dict(self.options))

    @property
    def names(self) -> dict[str, str]:
        """The client's names of what the engine names otherwise."""
        prompt = "messages" if isinstance(self.request, ChatRequest) else "prompt"
        return {"prompt": prompt} | constraints.names(self.request)

    @cached_property
    def conversation(self) -> Any:
        """What the prompt is made of: messages as templates read them, a text, or token ids."""
        request = self.request
        if isinstance(request, ChatRequest):
            return [message.for_template() for message in request.messages]
        if isinstance(request, CompletionRequest):
            return request.single
        raise Problem(400, "neither a chat nor a completion")

    @cached_property
    def letters(self) -> int:
        """Characters of all that the prompt is made of."""
        return sum(map(len, texts_in([self.conversation, self._functions, self._template])))

    @property
    def quick(self) -> bool:
        """Whether it takes milliseconds to prepare, so that nobody minds who does it."""
        many = isinstance(self.conversation, list) and len(self.conversation) > QUICK_MESSAGES
        letters = self.letters + len(self.prediction or "")
        return letters <= QUICK_LETTERS and not (many and self.letters) and not self.constrains

    @property
    def constrains(self) -> bool:
        """Whether there is a schema or a grammar to be read."""
        request = self.request
        forced = isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"
        return bool(request.constraints) or forced

    @property
    def prediction(self) -> str | None:
        asked = self.request.prediction if isinstance(self.request, ChatRequest) else None
        return None if asked is None else asked.text or None

    @property
    def echoes(self) -> bool:
        return isinstance(self.request, CompletionRequest) and bool(self.request.echo)

    @property
    def answers(self) -> bool:
        """Whether anything is wanted but the prompt."""
        return self.request.wanted_tokens != 0

    def score(self, engine: Engine, prompt: list[int]) -> Generator[TokenLogprob, None, None]:
        """The log-probabilities of a prompt's tokens, where they are wanted."""
        top = self.request.wanted_logprobs
        if self.echoes and top is not None:
            yield from engine.score(prompt, top)

    def require_possible(self, limits: Limits) -> None:
        """Raise InputError for texts that no model of these limits can hold, before anything is read."""
        room = self._room(limits)
        room.require_possible("prompt", self.letters, limits.tokenizer)
        room.require_possible("prediction", len(self.prediction or ""), limits.tokenizer)

    def prepare(self, engine: Engine, limits: Limits, still_wanted: Callable[[], None] = lambda: None) -> Prepared:
        """Read everything, which may take seconds unless it is quick; InputError or Problem.

        still_wanted: called now and then; what it raises comes out.
        """
        tokenizer = limits.tokenizer
        ids = self._prompt_ids(engine, limits, still_wanted)
        most = self.settings.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise InputError(f"prompt: it has {len(ids)} tokens, accepted at most {most} on this server")
        constrained = constraints.options(self.request, tokenizer)
        defaults = {name: value for name, value in self.defaults.items() if not (constrained and name in CONSTRAINTS)}
        options = defaults | self.options | constrained
        self._require_known_tokens(engine.target.vocab_size)
        options |= self._ends(engine)
        maxima = (self.settings.default_max_tokens, self.settings.max_tokens)
        if self.request.wanted_tokens or "max_new_tokens" not in options:
            options["max_new_tokens"] = self.request.wanted_tokens or min(most for most in maxima if most is not None)
        if self.echoes and options["max_new_tokens"] == 1:
            options["policy"] = PLAIN  # the draft would read the prompt for one token
        if self.prediction is not None:
            self._room(limits, still_wanted).require("prediction", [self.prediction], tokenizer)
            options["prediction"] = predicted_ids(self.prediction, tokenizer, engine.target.vocab_size)
        known = format_of(tokenizer) if self._functions else None
        shown = marks(known, tokenizer) if known is not None else []
        if known is not None and isinstance(self.request, ChatRequest) and self.request.parallel_tool_calls is False:
            schemas = schemas_of(self._functions or [])
            options["stopping_criteria"] = [OneCall(ToolReader(known, schemas), decoder(engine.tokenizer, shown))]
        target = engine.target
        asked = GenerationOptions.of(options, target.generation_config, len(ids), target.max_context)
        still_wanted()
        return Prepared(ids, asked, shown, engine.constraint(asked))

    def start(self, engine: Engine, prepared: Prepared, *, reuse_cache: bool = True) -> TextGeneration:
        """The generation, which continues from what the caches hold of the prompt if it may; InputError."""
        generation = TextGeneration(
            engine,
            prepared.prompt,
            prepared.options,
            reuse_cache=reuse_cache,
            shown=prepared.shown,
            constraint=prepared.constraint,
        )
        generation.origins = bool(self.request.return_cycles)
        return generation

    @property
    def _functions(self) -> list[dict[str, Any]] | None:
        return self.request.template_tools if isinstance(self.request, ChatRequest) else None

    @property
    def _template(self) -> dict[str, Any]:
        return self.request.template_options if isinstance(self.request, ChatRequest) else {}

    def _room(self, limits: Limits, still_wanted: Callable[[], None] = lambda: None) -> Room:
        most = min(limits.max_context, self.settings.max_prompt_tokens or limits.max_context)
        return Room(most, limits.longest, still_wanted)

    def _prompt_ids(self, engine: Engine, limits: Limits, still_wanted: Callable[[], None]) -> list[int]:
        if self._functions:
            format_of(limits.tokenizer)
        if isinstance(self.request, ChatRequest):
            require_written(limits.tokenizer, self.conversation, self._functions)
        live = self.request.allow_special_text
        if live is None:
            live = self.settings.allow_special_text or isinstance(self.request, CompletionRequest)
        return token_ids(
            self.conversation,
            limits.tokenizer,
            raw=True,
            vocab_size=engine.target.vocab_size,
            max_context=engine.target.max_context,
            allow_special_text=live,
            tools=self._functions,
            template=self._template,
            room=self._room(limits, still_wanted),
        )

    def _require_known_tokens(self, known: int) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            outside = next((token for token in getattr(self.request, name) or () if int(token) >= known), None)
            if outside is not None:
                raise InputError(f"{name}: token id {outside} is out of range, accepted 0 to {known - 1}")

    def _ends(self, engine: Engine) -> dict[str, Any]:
        """The tokens that end the answer, where there are others than the model's own."""
        more = self.request.stop_token_ids
        if not more:
            return {}
        config = engine.target.generation_config
        own = None if config is None or self.request.ignore_eos else config.eos_token_id
        return {"eos_token_id": [*([own] if isinstance(own, int) else own or []), *more]}


def _options(request: Sampling) -> dict[str, Any]:
    """Return the options of GenerationOptions that the request gives."""
    plain = [each for each in declarations().values() if each.field is not None and not each.field.written]
    options = {each.name: value for each in plain if (value := getattr(request, each.field_name)) is not None}
    if request.policy is not None:
        options["policy"] = request.policy
    if request.stops:
        options["stop_strings"] = request.stops
    if request.ignore_eos:
        options["eos_token_id"] = []
    if request.wanted_logprobs is not None:
        options["logprobs"] = request.wanted_logprobs
    if request.logit_bias:
        options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in request.logit_bias.items()]
    return options

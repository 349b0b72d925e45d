"""From a request to a generation of the engine."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from specengine.drivers import PLAIN
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.generation.options import GenerationOptions
from specengine.generation.prompts import token_ids
from specengine.generation.text_generation import TextGeneration
from specengine.records import TokenLogprob
from specengine.serve import constraints, tools
from specengine.serve.problems import Problem
from specengine.serve.requests import ChatRequest, CompletionRequest, Sampling
from specengine.serve.settings import Settings

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "policy",
)


@dataclass(frozen=True)
class Asked:
    """One request, its options checked as far as they can be without the model."""

    request: Sampling
    settings: Settings
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

    def start(self, engine: Engine) -> TextGeneration:
        """The generation, which continues from what the caches hold of the prompt; InputError or Problem."""
        ids = self._prompt_ids(engine)
        most = self.settings.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise InputError(f"prompt: it has {len(ids)} tokens, accepted at most {most} on this server")
        known = engine.target.vocab_size
        outside = next((token for token in self.request.logit_bias or () if int(token) >= known), None)
        if outside is not None:
            raise InputError(f"logit_bias: token id {outside} is out of range, accepted 0 to {known - 1}")
        options = dict(self.options)
        limits = (self.settings.default_max_tokens, self.settings.max_tokens)
        options["max_new_tokens"] = self.request.wanted_tokens or min(limit for limit in limits if limit is not None)
        if self.echoes and options["max_new_tokens"] == 1:
            options["policy"] = PLAIN  # the draft would read the prompt for one token
        if self.prediction is not None:
            options["prediction"] = self.prediction
        options |= constraints.options(self.request, engine.tokenizer)
        shown = tools.marks(tools.format_of(engine.tokenizer), engine.tokenizer) if self._functions else ()
        generation = TextGeneration(engine, ids, options, reuse_cache=True, shown=shown)
        generation.origins = bool(self.request.return_cycles)
        return generation

    @property
    def _functions(self) -> list[dict[str, Any]] | None:
        return self.request.template_tools if isinstance(self.request, ChatRequest) else None

    def _prompt_ids(self, engine: Engine) -> list[int]:
        request = self.request
        prompt: Any
        if isinstance(request, ChatRequest):
            prompt = [message.for_template() for message in request.messages]
            if self._functions:
                tools.format_of(engine.tokenizer)
        elif isinstance(request, CompletionRequest):
            prompt = request.single
        else:
            raise Problem(400, "neither a chat nor a completion")
        return token_ids(
            prompt,
            engine.tokenizer,
            raw=True,
            vocab_size=engine.target.vocab_size,
            max_context=engine.target.max_context,
            allow_special_text=self.settings.allow_special_text,
            tools=self._functions,
        )


def _options(request: Sampling) -> dict[str, Any]:
    """Of GenerationOptions: what the request says, under the engine's names."""
    options = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        options["top_k"] = max(request.top_k, 0)
    if request.stops:
        options["stop_strings"] = request.stops
    if request.ignore_eos:
        options["eos_token_id"] = []
    if request.min_tokens:
        options["min_new_tokens"] = request.min_tokens
    if request.wanted_logprobs is not None:
        options["logprobs"] = request.wanted_logprobs
    if request.logit_bias:
        options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in request.logit_bias.items()]
    return options

"""Ways of decoding: this engine under a draft and a policy, and transformers' own ways. Other engines are `peers`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import CompileConfig

from specengine import policies
from specengine.benchmark.summaries import Answer, Figures, counted
from specengine.checking import huggingface_model
from specengine.checkpoints.pretrained import load_model
from specengine.drafters import Drafter
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.engine import Engine, loading
from specengine.errors import InputError, TokenizerMismatchError, require_input
from specengine.options import LoadOptions
from specengine.policies import TreePolicy

PLAIN = "plain"


class WayDecoder(Protocol):
    """Answers prompts. `facts` go into the record of its way."""

    facts: dict[str, Any]

    def __call__(self, prompt: list[int], length: int) -> Answer:
        """Return an answer of at most `length` new tokens to these token ids."""

    def prepare(self, tokens: int) -> None:
        """Expect prompts and answers of up to that many tokens together."""


@dataclass
class Way:
    """A way by its name, and what makes its decoders: one per round, so that none has seen a prompt before.

    start    may raise a SpecEngineError where this way cannot run
    ours     an answer that is neither plain decoding's nor a near-tie is a fault
    facts    for its record
    against  the way whose answers its own are compared with
    """

    name: str
    start: Callable[[], WayDecoder]
    ours: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    against: str = PLAIN


@dataclass(frozen=True)
class Spec:
    """A way of this engine as it is asked for: [DRAFT:]POLICY[/PRESET][,option=value...].

    Draft and policy may be classes in files: d.py:Mine:p.py:Comb,teeth=2.
    """

    text: str
    draft: str | None
    policy: str
    options: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Spec:
        """Parse a text; InputError for another form. `check` looks at the names in it."""
        draft, colon, rest = text.rpartition(":")
        if draft.endswith(".py"):  # the policy's own file
            draft, colon, file = draft.rpartition(":")
            rest = f"{file}:{rest}"
        policy, options = parse(rest)
        require_input(
            f"way: got {text!r}, but {PLAIN} takes neither a draft nor options",
            policy != PLAIN or not (colon or options),
        )
        require_input(
            f"way: {text!r} names no draft; accepted DRAFT:POLICY, or POLICY with the draft of the run",
            not colon or draft not in ("", *loading.PLAIN),
        )
        return cls(text, draft if colon else None, policy, options)

    def make(self) -> TreePolicy | None:
        """Return a new policy, or None for plain decoding; InputError for unknown names, options and values."""
        return None if self.policy == PLAIN else policies.make(self.policy, **self.options)

    def check(self, options: LoadOptions) -> None:
        """Raise what making it would raise as far as that shows without a model."""
        self.make()
        if self.draft is not None:
            loading.check_draft(self.draft, options)


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Return NAME[/PRESET][,option=value...] as a name and options; a value may hold commas."""
    name, *parts = spec.split(",")
    options: dict[str, str] = {}
    for piece in parts:
        key, equals, value = piece.partition("=")
        if equals:
            options[key] = value
        elif options:
            options[list(options)[-1]] += "," + piece
        else:
            raise InputError(f"{spec}: got {piece!r}, accepted option=value")
    return name, options


class Engines:
    """Engines on the target of one, each with its policy and the memory of its draft to itself."""

    def __init__(self, first: Engine, options: LoadOptions) -> None:
        self.first, self._options = first, options
        self._drafts: dict[str, Drafter] = {}

    def make(self, policy: TreePolicy | None, draft: str | None = None) -> Engine:
        """Return an engine with the first engine's draft, or with a named one, which is loaded once."""
        if policy is None:
            return Engine(self.first.target, None, None, self.first.tokenizer)
        drafter = self.first.drafter if draft is None else self._draft(draft)
        if drafter is None:
            raise InputError("draft: a policy needs one, plain decoding takes part anyway")
        return Engine(self.first.target, without_memory(drafter), policy, self.first.tokenizer)

    def way(self, spec: Spec, options: dict[str, Any]) -> Way:
        """Return a way of this engine; options: those of Engine.generate but for the length."""
        return Way(spec.text, lambda: EngineDecoder(self.make(spec.make(), spec.draft), options))

    def _draft(self, name: str) -> Drafter:
        if name not in self._drafts:
            target, tokenizer = self.first.target, self.first.tokenizer
            self._drafts[name] = loading.draft_for(target, tokenizer, name, self._options)
        return self._drafts[name]


def without_memory(drafter: Drafter) -> Drafter:
    """Return the same draft on the same weights, without its memory of earlier answers."""
    if isinstance(drafter, Recycling):
        return dataclasses.replace(drafter)
    if isinstance(drafter, Lookup):
        fresh: Any = None if drafter.recycling is None else without_memory(drafter.recycling)
        return Lookup(without_memory(drafter.inner), fresh)
    return drafter


class EngineDecoder:
    """options: those of Engine.generate but for the length."""

    def __init__(self, engine: Engine, options: dict[str, Any]) -> None:
        self.engine, self._options = engine, options
        policy, drafter = engine.policy, engine.drafter
        self.facts = {"policy": "plain decoding" if policy is None else repr(policy)}
        if drafter is not None:
            self.facts["draft"] = drafter.name

    def __call__(self, prompt: list[int], length: int) -> Answer:
        began = time.perf_counter()
        generation = self.engine.stream(prompt, max_new_tokens=length, **self._options)
        first, cycles = None, list[Figures]()
        for piece in generation:
            first = first or time.perf_counter() - began
            cycles.append(Figures.of(piece.cycle))
        seconds = time.perf_counter() - began
        assert generation.result is not None
        return Answer(generation.result.token_ids, len(prompt), seconds, counted(cycles), first)

    def prepare(self, tokens: int) -> None:
        if self.engine.drivers.own.captured is not None:
            self.engine.warmup(min(tokens, self.engine.target.max_context))


GENERATE, COMPILED, LOOKUP, ASSISTED = "generate", "generate-compiled", "prompt-lookup", "assisted"
LOOKUP_TOKENS = 10


class Generate:
    """transformers' `generate` on a model it has loaded; `more` are keywords of it. Sampling has noise of its own."""

    def __init__(self, model: Any, options: dict[str, Any], ends: list[int], **more: Any) -> None:
        self._model, self._seed, self._more = model, options.get("seed"), more
        shown = {name: value for name, value in more.items() if isinstance(value, int)}
        self.facts = {"policy": "transformers generate" + (f", {shown}" if shown else "")}
        self._options: dict[str, Any] = {"do_sample": options["temperature"] > 0}
        if self._options["do_sample"]:
            self._options |= {name: options[name] for name in ("temperature", "top_k", "top_p")}
        if ends:
            self._options |= {"eos_token_id": ends, "pad_token_id": ends[0]}

    def __call__(self, prompt: list[int], length: int) -> Answer:
        ids = torch.tensor([prompt], device=self._model.device, dtype=torch.int64)
        if self._options["do_sample"]:
            torch.manual_seed(self._seed or 0)
        began = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            **self._options,
            **self._more,
        )
        tokens = out[0, len(prompt) :].tolist()
        return Answer(tokens, len(prompt), time.perf_counter() - began)

    def prepare(self, tokens: int) -> None:
        """Do nothing: the cache grows as needed."""


def baseline(
    name: str,
    plain: Engine,
    options: dict[str, Any],
    ends: list[int],
    assistant: str,
    load_options: LoadOptions,
) -> Way:
    """Return a baseline on the target of `plain`; assistant: a smaller model with the same tokenizer, by id or path."""

    @functools.cache
    def more() -> dict[str, Any]:
        if name == COMPILED:  # which transformers does on a GPU by itself
            config = CompileConfig()
            config._compile_all_devices = True  # noqa: SLF001  on a CPU as well, for which there is no public field
            return {"cache_implementation": "static", "compile_config": config}
        if name == LOOKUP:
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        return (
            {"assistant_model": _assistant(assistant, plain, load_options)}
            if name == ASSISTED
            else {}
        )

    facts = {"draft": Path(assistant).name} if name == ASSISTED else {}
    return Way(
        name,
        lambda: Generate(huggingface_model(plain.target), options, ends, **more()),
        ours=False,
        facts=facts,
    )


def _assistant(assistant: str, plain: Engine, load_options: LoadOptions) -> Any:
    model, tokenizer, *_ = load_model(
        assistant,
        dataclasses.replace(
            load_options,
            device=plain.target.device,
            backend="huggingface",
            quantize=None,
            numerics="auto",
        ),
    )
    if (
        tokenizer is not None
        and plain.tokenizer is not None
        and tokenizer.get_vocab() != plain.tokenizer.get_vocab()
    ):
        raise TokenizerMismatchError(
            "assistant: its tokenizer differs from the target's, whose tokens it has to propose"
        )
    return model


def refuse_assistant(assistant: str | None, is_used: bool) -> None:
    """Raise InputError where an assistant is missing, idle, or a path that leads nowhere."""
    if is_used and assistant is None:
        raise InputError(
            f"assistant: way {ASSISTED} needs a smaller model with the target's tokenizer, name it"
        )
    require_input(f"assistant: no way uses it; add way {ASSISTED}", assistant is None or is_used)
    require_input(
        f"assistant: {assistant} does not exist",
        assistant is None or not assistant.startswith(("/", ".", "~")) or Path(assistant).exists(),
    )

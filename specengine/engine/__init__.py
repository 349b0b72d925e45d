"""The engine: draft, verify, commit, cycle after cycle, on one model and one sequence at a time."""

import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Self, overload

import torch
from transformers import PreTrainedModel

from specengine.drafters import Drafter, innermost
from specengine.drafters._wrappers import Origins
from specengine.engine import loading
from specengine.engine.generation import (
    SCORED_ROWS,
    Session,
    TextGeneration,
    WarmUp,
    cycles,
    prepare,
    score,
    warm_up,
)
from specengine.engine.parts import CLOSED, Drivers, EngineState, Pool, parallel_of
from specengine.engine.scheduler import (
    AsyncTextGeneration,
    Client,
    GivenUpError,
    SteppedAnswer,
    Streams,
    Ticket,
)
from specengine.errors import EngineBusyError, require, require_value, restating
from specengine.models import Target, common_prefix
from specengine.models.native import NativeTarget, progress_bar
from specengine.options import LoadOptions
from specengine.policies import TreePolicy
from specengine.records import Cycle, GenerationResult, SpeculativeOutput, TokenLogprob
from specengine.request.custom_generate import CustomGenerate
from specengine.request.options import GenerationOptions, Request
from specengine.request.prompts import Prompt
from specengine.request.sampling import Sampler
from specengine.request.text import Decoder

__all__ = [
    "SCORED_ROWS",
    "AsyncTextGeneration",
    "Client",
    "Engine",
    "GivenUpError",
    "Pool",
    "Session",
    "TextGeneration",
    "Ticket",
    "WarmUp",
    "parallel_of",
]


class Engine(EngineState, AbstractContextManager["Engine"]):
    """A target with a draft and a policy, and the caches of one sequence.

    An engine serves one generation at a time; a second caller, from whatever thread, gets EngineBusyError. Engines
    may share a loaded model. After an error or an interrupt the caches are cleared and the engine can be used again.
    """

    def __init__(
        self,
        target: Target = None,  # type: ignore[assignment]
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(target, drafter, policy, tokenizer)
        self._making = threading.Lock()
        self._streams: tuple[tuple[Any, ...], Streams] | None = None  # what answers `astream`

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End open answers and let go of models, caches and threads; what is asked for later raises EngineClosedError.

        `with Engine.from_pretrained() as engine:` does it at its end. A model that was brought along stays as it is.
        EngineBusyError while another thread runs a cycle.
        """
        engines = [self, *([] if self._streams is None else self._streams[1].engines)]
        # of a generator that is executing
        with restating(
            ValueError,
            lambda _: EngineBusyError(
                "this engine is generating in another thread; close it after that answer"
            ),
        ):
            for answer in [answer for engine in engines for answer in engine.answers]:
                answer.close()
        for engine in engines:
            engine.let_go()
        self._streams = None

    def __repr__(self) -> str:
        if self.target is CLOSED:
            return "Engine(closed)"
        drafter = None if self.drafter is None else self.drafter.name
        model = self.target.name or type(self.target).__name__
        return f"Engine({model}, {self.target.backend}, draft={drafter}, policy={self.policy!r})"

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel | None = None,
        draft: str | os.PathLike[str] | PreTrainedModel | Drafter | None = None,
        policy: str | TreePolicy | None = None,
        **options: Any,
    ) -> Self:
        """Load a target with its draft and policy.

        model   a Hugging Face id, a local path or a loaded model; None is the embedded default model
        draft   `ngram`, `recycling`, `mtp`, `none`, `default-head`, the id or path of a smaller model or an EAGLE
                head, a loaded model or a Drafter; None is the head that ships for the default model, the MTP head
                of a checkpoint that has one, and `recycling` with lookup for any other
        policy  a policy's name (see specengine.policies.names()), `plain` for no draft, or a TreePolicy; None is
                the draft's default
        options dtype, device, tokenizer, draft_options, policy_options, graphs, lookup, strict,
                pack, offline, trust_remote_code, memory, progress: see options.LoadOptions

        Raises InputError for unknown names and options, UnsupportedModelError, TokenizerMismatchError.
        """
        chosen = LoadOptions.of(options)
        model, draft = (
            os.fspath(given) if isinstance(given, os.PathLike) else given
            for given in (model, draft)
        )
        recipe = loading.Recipe(model, draft, policy, chosen)
        parts = recipe.load()
        self = cls(parts.target, parts.drafter, parts.policy, parts.tokenizer)
        self.watch = loading.ModelWatch(parts.models, recipe)
        self.notes = parts.notes
        if chosen.memory is not None or chosen.memory_from is not None:
            self.memory  # noqa: B018  # raises what is wrong with it now
        self.ring = getattr(
            None if parts.drafter is None else innermost(parts.drafter), "learnt", None
        )
        return self

    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        return_dict_in_generate: Literal[True],
        **options: Any,
    ) -> SpeculativeOutput: ...

    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        return_dict_in_generate: Literal[False],
        **options: Any,
    ) -> torch.Tensor: ...

    @overload
    def generate(self, prompt: Prompt | None = None, **options: Any) -> GenerationResult: ...

    def generate(self, prompt: Prompt | None = None, **options: Any) -> Any:
        """Answer `prompt` (a string, chat messages or token ids) with exactly what plain decoding would give.

        options: the fields of GenerationOptions; a call may also be one for transformers' `generate`, with the prompt
        as `**tokenizer(text)`, `input_ids`, `inputs` or `messages`, and arguments that change no token. Returns a
        GenerationResult; with `return_dict_in_generate` True a SpeculativeOutput, with False the LongTensor
        [1, prompt + new] that transformers returns. `engine(prompt)` does the same.
        """
        return TextGeneration(self, prompt, options).run()

    __call__ = generate

    def stream(self, prompt: Prompt | None = None, **options: Any) -> TextGeneration:
        """Generate as an iterator of StreamPiece; `.result` holds the GenerationResult at the end."""
        return TextGeneration(self, prompt, options)

    def generate_many(
        self, prompts: Iterable[Prompt], parallel: int = 8, **options: Any
    ) -> list[GenerationResult]:
        """Answer all prompts, up to `parallel` at once; options as in `generate`. Returns results in their order.

        On the native forward the rows of all texts are run together; elsewhere one prompt follows the other. An answer
        is the one that `generate` gives. Each text takes caches of its own. The first error ends all and is raised.
        """
        require("parallel", parallel, "1 or more", type(parallel) is int and parallel >= 1)
        require_value(
            "prompts",
            prompts,
            "a list of prompts; generate answers one; of what a tokenizer returns for several texts pass input_ids "
            "without padding",
            isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping),
        )
        asked = list(prompts)
        joined = parallel > 1 and type(self.target) is NativeTarget
        return (
            Pool(self, max(1, min(parallel, len(asked)))).generate(asked, **options)
            if joined
            else [self.generate(one, **options) for one in progress_bar(asked, "Answers")]
        )

    def astream(
        self, prompt: Prompt | None = None, *, parallel: int = 8, **options: Any
    ) -> AsyncTextGeneration:
        """Generate as an asynchronous iterator of StreamPiece: `async for piece in engine.astream(prompt)`.

        Up to `parallel` of them are answered at once on the native forward, as by `generate_many`; those beyond wait.
        Elsewhere they are answered one by one. Answers are those of `generate`. Takes caches beside those of `stream`
        on the native forward. To be called from a running event loop.
        """
        require("parallel", parallel, "1 or more", type(parallel) is int and parallel >= 1)
        with self._making:
            key = parallel, self.target, self.drafter, self.policy
            if self._streams is None or any(
                new is not old for new, old in zip(key, self._streams[0], strict=True)
            ):
                pool = Pool(self, parallel) if type(self.target) is NativeTarget else None
                streams = Streams([self]) if pool is None else Streams(pool.engines, pool.scheduler)
                self._streams = key, streams
        return AsyncTextGeneration(
            self._streams[1], functools.partial(TextGeneration, prompt=prompt, options=options)
        )

    def holds(self, tokens: list[int]) -> int:
        """Return how many of the first `tokens` the target's cache holds. May be called from any thread."""
        return common_prefix(self.target.tokens, tokens)

    def score(self, prompt: Prompt, top: int = 0) -> Generator[TokenLogprob, None, None]:
        """Yield the log-probability of each token of a text, from the second on.

        prompt: a string, without the chat template, or token ids; top: how many of the likeliest tokens come with each.
        Closing the iterator frees the engine. InputError, EngineBusyError, NumericalError, and UnsupportedModelError
        of a target that has no way to do it.
        """
        return score(self, prompt, top)

    def session(self, messages: list[dict[str, str]] | None = None) -> Session:
        """Return a conversation whose turns reuse the caches of target and draft."""
        return Session(self, messages)

    def as_custom_generate(
        self, streamer: Any = None, seed: int | None = None
    ) -> Callable[..., Any]:
        """Return a function for transformers' `model.generate(custom_generate=...)`.

        transformers passes on its generation config, logits processors and stopping criteria, but no streamer:
        bind one here. The last call's figures are its attribute `stats`.
        """
        return CustomGenerate(self, streamer, seed)

    def cycles(
        self,
        request: Request,
        drivers: Drivers | None = None,
        origins: Origins | None = None,
        ticket: Ticket | None = None,
    ) -> Generator[Cycle, None, None] | SteppedAnswer:
        """Return the cycles of one generation, which can be closed; everything else reads from these.

        drivers: those of a policy; None: the engine's own. origins: notes the sources of nodes if they are wanted, see
        Cycle. ticket: says until when the answer waits for room among others; None: as long as it takes. There are no
        cycles where it is given up before the prompt is taken in.
        """
        return cycles(self, request, drivers, origins, ticket)

    def answer(
        self, prompt: list[int], sampler: Sampler | None = None, **options: Any
    ) -> Generator[Cycle, None, None] | SteppedAnswer:
        """Yield the cycles of an answer without its text, for training and measuring; stop strings are ignored.

        prompt: checked token ids; options: the fields of GenerationOptions; sampler: instead of the one that they make.
        """
        self.follow()
        checked = GenerationOptions.of(
            options, self.target.generation_config, len(prompt), self.target.max_context
        )
        return prepare(self, prompt, checked, Decoder(None), sampler=sampler).cycles

    @torch.inference_mode()
    def warmup(
        self,
        tokens: int | None = None,
        policy: str | TreePolicy | None = None,
        policy_options: Mapping[str, Any] | None = None,
    ) -> WarmUp:
        """Capture all graphs now instead of on first use, for up to `tokens` tokens of prompt and answer.

        tokens: 2048 by default, or the model's context where that is shorter; a longer text means captures again.
        policy, policy_options: as in `generate`; each policy has graphs of its own, and one whose trees need larger
        caches means captures again for those before it. InputError where the engine was loaded without graphs. Where
        the model cannot be captured and graphs were not asked for, nothing is, and statistics have the reason.
        """
        return warm_up(self, tokens, self.drivers.asked(policy, policy_options))

    @torch.inference_mode()
    def refresh(self) -> None:
        """Take in all changes to models that were handed over loaded.

        Every answer begins with that by itself, which reads the weights once. Weights are packed again, caches
        that belong to what was are forgotten, and where more than numbers was changed (adapters, sizes, dtypes,
        modules, settings) target and draft are made anew, as for a new engine. UnsupportedModelError where the model
        has become one that cannot be run, or a Drafter was brought along for what it was; EngineBusyError.
        """
        with self.hold("this engine is generating; refresh it after that stream has ended"):
            self._follow()
            self.watch.refresh()

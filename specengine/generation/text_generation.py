"""An answer as text, as it grows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import torch

from specengine.errors import InputError
from specengine.models import Target
from specengine.records import Cycle, GenerationResult, SpeculativeOutput, Stats, StreamPiece, TokenLogprob
from specengine.request.grammars import Constraint
from specengine.request.options import GenerationOptions
from specengine.request.prompts import Prompt, token_ids
from specengine.request.sampling import Stopper, cut_after_stop
from specengine.request.text import TextStream, decoder


class Answering(NamedTuple):
    """An answer about to begin.

    cycles   its cycles
    stopper  says when it ends and why
    policy   a TreePolicy, what shapes its trees; None where it decodes plainly
    origins  a drafters._origins.Origins, whose `wanted` may be set before the first cycle
    """

    cycles: Generator[Cycle, None, None]
    stopper: Stopper
    policy: Any
    origins: Any


class Starts(Protocol):
    """Of a specengine.Engine, what an answer is made from."""

    target: Target
    tokenizer: Any

    def follow(self) -> None: ...

    def start(
        self,
        prompt: list[int],
        asked: GenerationOptions,
        stats: Stats,
        decode: Callable[[list[int]], str],
        *,
        reuse_cache: bool = False,
        constraint: Constraint | None = None,
    ) -> Answering: ...


class TextGeneration:
    """One generation as an iterator of StreamPiece; closing it, or letting it go, frees the engine.

    Options and prompt are checked at construction; `policy` is what shapes its trees, None where it decodes plainly.
    `result` is there once the iterator has ended.
    """

    # Nothing it holds may hold it in turn: only then does letting it go free the engine at once.

    def __init__(
        self,
        engine: Starts,
        prompt: Prompt,
        options: Mapping[str, Any] | GenerationOptions,
        *,
        reuse_cache: bool = False,
        shown: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """options: of GenerationOptions.of, where they are checked already, with their constraint; shown: special
        tokens whose text the answer shows."""
        engine.follow()
        target = engine.target
        given = vars(options) if isinstance(options, GenerationOptions) else options
        self.prompt = token_ids(
            prompt,
            engine.tokenizer,
            raw=bool(given.get("raw", False)),
            vocab_size=target.vocab_size,
            max_context=target.max_context,
            allow_special_text=bool(given.get("allow_special_text", True)),
        )
        self.options = (
            options
            if isinstance(options, GenerationOptions)
            else GenerationOptions.of(dict(options), target.generation_config, len(self.prompt), target.max_context)
        )
        if self.options.stops and engine.tokenizer is None:
            raise InputError("stop_strings: they need a tokenizer, pass tokenizer= when loading the engine")
        self.stats = Stats()
        self.result: GenerationResult | None = None
        self._decode = decoder(engine.tokenizer, shown)
        self._texts = TextStream(self._decode)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent = 0
        self._started = False
        self._streams = False  # whether a streamer waits for the end
        self._cycles, self._stopper, self.policy, self._origins = engine.start(
            self.prompt,
            self.options,
            self.stats,
            self._decode,
            reuse_cache=reuse_cache,
            constraint=constraint,
        )

    @property
    def origins(self) -> bool:
        """Whether cycles say where their nodes come from, which takes time; to be set before the first piece."""
        return bool(self._origins.wanted)

    @origins.setter
    def origins(self, wanted: bool) -> None:
        self._origins.wanted = wanted

    def __iter__(self) -> Iterator[StreamPiece]:
        return self

    def __next__(self) -> StreamPiece:
        try:
            return self._advance()
        except StopIteration:
            raise
        except BaseException:  # also from a streamer or a tokenizer: a traceback may keep this object for long
            self._cycles.close()
            with contextlib.suppress(Exception):  # the error that is under way says more
                self._end_streamer()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> StreamPiece:
        streamer = self.options.streamer
        if streamer is not None and not self._started:
            self._streams = True
            streamer.put(torch.tensor([self.prompt], dtype=torch.int64, device="cpu"))
        self._started = True
        cycle = next(self._cycles)
        self._tokens += cycle.tokens
        self._logprobs += cycle.logprobs or ()
        text = self._texts.push(cycle.tokens)
        if streamer is not None:
            streamer.put(torch.tensor(cycle.tokens, dtype=torch.int64, device="cpu"))
        if self._stopper.last_reason is not None:
            text = self._finish(self._stopper.last_reason)[self._sent :]
            next(self._cycles, None)  # runs the generator to its end, which frees the engine
            self._end_streamer()
        self._sent += len(text)
        return StreamPiece(text, cycle)

    def run(self) -> Any:
        """Generate to the end; the result in the form that `return_dict_in_generate` asks for."""
        for _ in self:
            pass
        assert self.result is not None
        wanted = self.options.return_dict_in_generate
        if wanted is None:
            return self.result
        sequences = torch.tensor([[*self.prompt, *self._tokens]], dtype=torch.int64, device="cpu")
        if not wanted:
            return sequences
        names = ("text", "token_ids", "finish_reason", "stats", "logprobs")
        return SpeculativeOutput(sequences=sequences, **{name: getattr(self.result, name) for name in names})

    def close(self) -> None:
        """Stop generating and free the engine; what was streamed stays valid, and a streamer is told the end."""
        self._cycles.close()
        self._end_streamer()

    def _end_streamer(self) -> None:
        if self._streams:
            self._streams = False
            self.options.streamer.end()

    def _finish(self, reason: str) -> str:
        text = cut_after_stop(self._decode(self._tokens), self.options.stops)
        text = text[: len(text) - self._stopper.overhang]
        logprobs = None if self.options.logprobs is None else self._logprobs
        self.result = GenerationResult(text, self._tokens, reason, self.stats, self.options.seed, logprobs)
        return text

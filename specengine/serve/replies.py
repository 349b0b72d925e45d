"""Answers in OpenAI's shapes: chat and text completions, whole or as chunks of a stream."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import specengine
from specengine.records import TokenLogprob
from specengine.serve.answers import Answer
from specengine.serve.logprobs import ChatLogprobs, TextLogprobs, TokenTexts
from specengine.serve.requests import ChatRequest, CompletionRequest, Sampling
from specengine.serve.text import StopText
from specengine.serve.tool_formats import ToolCall
from specengine.serve.tools import ToolReader, format_of, schemas_of
from specengine.serve.worker import Piece

Choice = dict[str, Any]


@dataclass
class Reply:
    """What one request is told; a subclass says how a choice looks.

    Pieces go through `deltas` in the order of their coming, and `last_deltas` gives what was held back.
    """

    request: Sampling
    model: str
    tokenizer: Any = None
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = ""
    kind = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._stop = StopText(self.request.stops)

    # ---- whole answers

    def whole(self, choice: Choice, answer: Answer) -> dict[str, Any]:
        return self._envelope(self.kind) | {"choices": [choice], **_figures(answer), "metrics": answer.metrics}

    # ---- streams

    def chunk(self, choices: list[Choice], answer: Answer | None = None) -> dict[str, Any]:
        """answer: where usage is wanted with every chunk."""
        options = self.request.stream_options
        continuous = options is not None and options.continuous_usage_stats and answer is not None
        return self._envelope(self.chunk_kind) | {"choices": choices} | ({"usage": answer.usage} if continuous else {})  # type: ignore[union-attr]

    def usage_chunk(self, answer: Answer) -> dict[str, Any] | None:
        """The last one, where it was asked for."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self.chunk([]) | _figures(answer) | {"metrics": answer.metrics}

    @property
    def chunk_kind(self) -> str:
        return self.kind

    def begin(self, prompt: str, answer: Answer) -> list[Choice]:
        """Choices before the first piece; prompt: its text, where it is echoed."""
        raise NotImplementedError

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        raise NotImplementedError

    def last_deltas(self, answer: Answer) -> Iterator[Choice]:
        """What was held back, then the choice that says why the answer ended."""
        raise NotImplementedError

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specengine-{specengine.__version__}",
        }

    def _of_tokens(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> Choice:
        """What a choice says of its tokens one by one, where that was asked for."""
        ids: Choice = {"token_ids": tokens} if self.request.return_token_ids else {}
        return ids | ({} if self.request.wanted_logprobs is None else {"logprobs": self._rated(logprobs or [])})

    def _rated(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


@dataclass
class ChatReply(Reply):
    """One message of the assistant, in which calls of tools are told from text."""

    prefix = "chatcmpl"
    kind = "chat.completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.request, ChatRequest)
        offered = self.request.template_tools
        most = 1 if self.request.parallel_tool_calls is False else sys.maxsize
        self._tools = ToolReader(format_of(self.tokenizer), schemas_of(offered), most) if offered else None
        self._logprobs = ChatLogprobs(TokenTexts(self.tokenizer))

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def begin(self, prompt: str, answer: Answer) -> list[Choice]:
        return [_chat_choice({"role": "assistant", "content": ""})]

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        told = self._of_tokens(piece.tokens, piece.logprobs)
        yield from self._deltas(self._read(self._stop.push(piece.text)), told)

    def last_deltas(self, answer: Answer) -> Iterator[Choice]:
        parts = self._read(self._stop.end())
        yield from self._deltas(parts + (self._tools.end() if self._tools else []), {})
        yield _chat_choice({}) | {"finish_reason": self.reason(answer)}

    def reason(self, answer: Answer) -> str:
        called = self._tools is not None and self._tools.found and answer.reason == "stop"
        return "tool_calls" if called else str(answer.reason)

    def message(self, answer: Answer) -> Choice:
        parts = self._read(self._stop.push(answer.text))
        parts += self._read(self._stop.end()) + (self._tools.end() if self._tools else [])
        calls = [part for part in parts if isinstance(part, ToolCall)]
        text = "".join(part for part in parts if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text.strip() else text}
        if calls:
            message["tool_calls"] = [call.to_dict() for call in calls]
        told = self._of_tokens(answer.token_ids, answer.logprobs)
        return {"index": 0, "message": message, "finish_reason": self.reason(answer), "logprobs": None} | told

    def _rated(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return self._logprobs.of(logprobs)

    def _read(self, text: str) -> list[str | ToolCall]:
        if self._tools is None:
            return [text] if text else []
        return self._tools.push(text)

    def _deltas(self, parts: list[str | ToolCall], told: Choice) -> Iterator[Choice]:
        """told: of the tokens, with the first of them."""
        calls = self._tools.found if self._tools else 0
        first = calls - sum(isinstance(part, ToolCall) for part in parts)
        if not parts and told:
            parts = [""]
        for part in parts:
            if isinstance(part, ToolCall):
                delta: dict[str, Any] = {"tool_calls": [{"index": first} | part.to_dict()]}
                first += 1
            else:
                delta = {"content": part}
            yield _chat_choice(delta) | told
            told = {}


@dataclass
class TextReply(Reply):
    """A text that goes on from the prompt."""

    prefix = "cmpl"
    kind = "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._logprobs = TextLogprobs(TokenTexts(self.tokenizer))

    def begin(self, prompt: str, answer: Answer) -> list[Choice]:
        told: Choice = {}
        if echoed(self.request) and self.request.wanted_logprobs is not None:
            told = {"logprobs": self._logprobs.of(answer.prompt_logprobs, answer.prompt_ids[0])}
        return [_text_choice(prompt) | told] if prompt or told else []

    def _rated(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return self._logprobs.of(logprobs)

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        text = self._stop.push(piece.text)
        told = self._of_tokens(piece.tokens, piece.logprobs)
        if text or told:
            yield _text_choice(text) | told

    def last_deltas(self, answer: Answer) -> Iterator[Choice]:
        yield _text_choice(self._stop.end(), answer.reason)

    def message(self, answer: Answer, prompt: str) -> Choice:
        opening = next(iter(self.begin(prompt, answer)), _text_choice(""))
        text = prompt + self._stop.push(answer.text) + self._stop.end()
        told = self._of_tokens(answer.token_ids, answer.logprobs)
        if opening["logprobs"] is not None:
            told["logprobs"] = {name: opening["logprobs"][name] + rated for name, rated in told["logprobs"].items()}
        return _text_choice(text, answer.reason) | told


def make(request: Sampling, model: str, tokenizer: Any = None) -> ChatReply | TextReply:
    kind = ChatReply if isinstance(request, ChatRequest) else TextReply
    return kind(request, model, tokenizer)


def echoed(request: Sampling) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo)


def _chat_choice(delta: dict[str, Any]) -> Choice:
    return {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}


def _text_choice(text: str, reason: str | None = None) -> Choice:
    return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}


def _figures(answer: Answer) -> dict[str, Any]:
    return {"usage": answer.usage, "timings": answer.timings}

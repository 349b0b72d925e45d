"""Answers in OpenAI's shapes: chat and text completions, whole or as chunks of a stream."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

import specengine
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.requests import ChatRequest, CompletionRequest, Sampling
from specengine.protocol.tool_formats import ToolCall
from specengine.protocol.tools import StopText, ToolReader, format_of, schemas_of
from specengine.records import TokenLogprob
from specengine.request.text import Decoder, TextStream, decoder

MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON has not; as other servers do
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SINGLE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Return the text of each token, partial characters included; special tokens by their names."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decoded = Decoder(tokenizer, special=True, clean_up_tokenization_spaces=False)
        self._known: dict[int, bytes] = {}

    def written(self, token: int) -> bytes:
        """Return a token's text; it is empty where the tokenizer has none."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes:
        once, twice = self._decoded([token]), self._decoded([token, token])
        text = twice[len(once) :] if twice.startswith(once) else once  # a first token may lose its blank
        if REPLACEMENT not in text:
            return text.encode(errors="replace")
        piece = self._decoded.name(token)
        if not isinstance(piece, str):
            return text.encode(errors="replace")
        if single := _SINGLE.fullmatch(piece):
            return bytes.fromhex(single[1])
        if all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return text.encode(errors="replace")


class ChatLogprobs:
    """`choices[].logprobs` of chat."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def of(self, rated: Iterable[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._one(given.token, given.logprob) | {"top_logprobs": [self._one(*likely) for likely in given.top]}
            for given in rated
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        written = self._texts.written(token)
        return {"token": written.decode(errors="replace"), "logprob": bounded(logprob), "bytes": list(written)}


class TextLogprobs:
    """`choices[].logprobs` of completions, whose offsets count on from one part of an answer to the next.

    An offset is the place in the text that the answer shows: special tokens, and ids without text, take none.
    A token that is no whole characters is written as OpenAI does, `bytes:` and its bytes.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._stream = TextStream(decoder(texts.tokenizer))
        self._offset = 0

    def of(self, rated: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the shape of these tokens; first: a token before them, without a log-probability."""
        tokens = [*([] if first is None else [first]), *(given.token for given in rated)]
        unknown = [None] * (len(tokens) - len(rated))
        places = [self._place(token) for token in tokens]
        if first is not None:  # a prompt; the answer is a text of its own
            self._offset += len(self._stream.rest)
            self._stream = TextStream(decoder(self._texts.tokenizer))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [*unknown, *(bounded(given.logprob) for given in rated)],
            "top_logprobs": [*unknown, *(self._top(given) for given in rated)],
            "text_offset": places,
        }

    def _top(self, given: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*given.top, (given.token, given.logprob)):
            top.setdefault(self._name(token), bounded(logprob))
        return top

    def _name(self, token: int) -> str:
        written = self._texts.written(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _place(self, token: int) -> int:
        place = self._offset + len(self._stream.rest.rstrip(REPLACEMENT))  # what may become a character later
        self._offset += len(self._stream.push([token]))
        return place


def bounded(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


Choice = dict[str, Any]


@dataclass
class Reply:
    """The answer to one request; a subclass shapes a choice.

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

    def whole(self, choice: Choice, answer: Completion) -> dict[str, Any]:
        return self._envelope(self.kind) | {"choices": [choice], **_figures(answer), "metrics": answer.metrics}

    # ---- streams

    def chunk(self, choices: list[Choice], answer: Completion | None = None) -> dict[str, Any]:
        """Return a chunk of a stream; answer: for the usage, where every chunk has it."""
        options = self.request.stream_options
        continuous = options is not None and options.continuous_usage_stats and answer is not None
        return self._envelope(self.chunk_kind) | {"choices": choices} | ({"usage": answer.usage} if continuous else {})  # type: ignore[union-attr]

    def usage_chunk(self, answer: Completion) -> dict[str, Any] | None:
        """Return the last chunk, with the usage, if the request asks for it."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self.chunk([]) | _figures(answer) | {"metrics": answer.metrics}

    @property
    def chunk_kind(self) -> str:
        return self.kind

    def begin(self, prompt: str, answer: Completion) -> list[Choice]:
        """Return the choices before the first piece; prompt: its text, where it is echoed."""
        raise NotImplementedError

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        raise NotImplementedError

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        """Yield the text that was held back, then the choice that says why the answer ended."""
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
        """Return the fields of a choice that describe its tokens, if the request asks for them."""
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

    def begin(self, prompt: str, answer: Completion) -> list[Choice]:
        return [_chat_choice({"role": "assistant", "content": ""})]

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        told = self._of_tokens(piece.tokens, piece.logprobs)
        yield from self._deltas(self._read(self._stop.push(piece.text)), told)

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        parts = self._read(self._stop.end())
        yield from self._deltas(parts + (self._tools.end() if self._tools else []), {})
        yield _chat_choice({}) | {"finish_reason": self.reason(answer)}

    def reason(self, answer: Completion) -> str:
        called = self._tools is not None and self._tools.found and answer.reason == "stop"
        return "tool_calls" if called else str(answer.reason)

    def message(self, answer: Completion) -> Choice:
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
        """Yield a choice per part; told: fields about the tokens, which the first choice carries."""
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

    def begin(self, prompt: str, answer: Completion) -> list[Choice]:
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

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        yield _text_choice(self._stop.end(), answer.reason)

    def message(self, answer: Completion, prompt: str) -> Choice:
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


def _figures(answer: Completion) -> dict[str, Any]:
    return {"usage": answer.usage, "timings": answer.timings}

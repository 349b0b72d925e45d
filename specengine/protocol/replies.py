"""Answers in the shapes of a protocol, whole or as a stream; here those of OpenAI's chat and text completions."""

import functools
import json
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

import specengine
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.messages import without_empty
from specengine.protocol.parts import (
    AnswerParts,
    Part,
    Thought,
    calls_of,
    text_of_parts,
    thought_tokens,
    thoughts_of,
)
from specengine.protocol.problems import RequestError
from specengine.protocol.requests import ChatRequest, CompletionRequest, Sampling
from specengine.protocol.tools import ToolCall
from specengine.records import TokenLogprob
from specengine.request.text import Decoder, TextStream

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


def sse(body: dict[str, Any], event: str = "") -> bytes:
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + line(body) + b"\n"


def line(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


# ---- log-probabilities

MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON has not; as other servers do
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SINGLE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Return the text of each token, partial characters included; special tokens by their names."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decoded = Decoder(tokenizer, special=True, clean_up_tokenization_spaces=False)
        self.written = functools.cache(self._read)

    def _read(self, token: int) -> bytes:
        """Return a token's text; it is empty where the tokenizer has none."""
        once, twice = self._decoded([token]), self._decoded([token, token])
        # a first token may lose its blank
        text = twice[len(once) :] if twice.startswith(once) else once
        piece = self._decoded.name(token) if REPLACEMENT in text else None
        if isinstance(piece, str):
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
        return {
            "content": [
                self._one(each.token, each.logprob)
                | {"top_logprobs": [self._one(*likely) for likely in each.top]}
                for each in rated
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        written = self._texts.written(token)
        return {
            "token": written.decode(errors="replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(written),
        }


class TextLogprobs:
    """`choices[].logprobs` of completions, whose offsets count on from one part of an answer to the next.

    An offset is the place in the text that the answer shows: special tokens, and ids without text, take none.
    A token that is no whole characters is written as OpenAI does, `bytes:` and its bytes.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._stream = TextStream(Decoder(texts.tokenizer))
        self._offset = 0

    def of(self, rated: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the shape of these tokens; first: a token before them, without a log-probability."""
        tokens = [*([] if first is None else [first]), *(each.token for each in rated)]
        unknown = [None] * (len(tokens) - len(rated))
        places = [self._place(token) for token in tokens]
        if first is not None:  # a prompt; the answer is a text of its own
            self._offset += len(self._stream.rest)
            self._stream = TextStream(Decoder(self._texts.tokenizer))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [*unknown, *(max(each.logprob, MIN_LOGPROB) for each in rated)],
            "top_logprobs": [*unknown, *(self._top(each) for each in rated)],
            "text_offset": places,
        }

    def _top(self, rated: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*rated.top, (rated.token, rated.logprob)):
            top.setdefault(self._name(token), max(logprob, MIN_LOGPROB))
        return top

    def _name(self, token: int) -> str:
        written = self._texts.written(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _place(self, token: int) -> int:
        # what may become a character later
        place = self._offset + len(self._stream.rest.rstrip(REPLACEMENT))
        self._offset += len(self._stream.push([token]))
        return place


# ---- replies


class Reply:
    """The answers to one request, as a protocol tells them: whole, or as a stream.

    Most requests have one answer; those that ask for several (`n`, several prompts) have them by their place.
    """

    media_type = EVENTS
    ping = b": ping\n\n"
    path = "/v1/"  # of the protocol, whose errors are told

    def __init__(self, body: Any, request: Sampling, model: str, tokenizer: Any) -> None:
        self.body = body
        self.request = request
        self.model = model
        self.tokenizer = tokenizer
        self.notes = {"notes": body.notes} if getattr(body, "notes", None) else {}

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        """Yield what comes before the first piece of an answer."""
        raise NotImplementedError

    def progress(self, figures: dict[str, Any]) -> bytes:
        """Return what tells how much of the prompt has been read."""
        raise NotImplementedError

    def piece(self, place: int, piece: Piece) -> Iterator[bytes]:
        raise NotImplementedError

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        """Yield what was held back of an answer, and why it ended."""
        raise NotImplementedError

    def finish(self, answers: Sequence[Completion]) -> Iterator[bytes]:
        """Yield what comes after all answers."""
        yield from ()

    def failed(self, problem: RequestError) -> bytes:
        """Return the end of a stream that goes no further."""
        return last_words(problem, self.media_type, self.path)


class OneReply(Reply):
    """The one answer to a request, told part by part. A subclass shapes the parts, and what stands around them."""

    def __init__(self, body: Any, request: Sampling, model: str, tokenizer: Any) -> None:
        super().__init__(body, request, model, tokenizer)
        self.parts = AnswerParts(request, tokenizer)
        self._logprobs = ChatLogprobs(TokenTexts(tokenizer))

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        self.parts.begin(answer.prompt_ids)
        yield from ()

    def piece(self, place: int, piece: Piece) -> Iterator[bytes]:
        yield from self.told(
            self.parts.push(piece.text, piece.answer.passed), self.rated(piece.logprobs or ())
        )

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        yield from self.told(self.parts.end(answer.reason), [])

    def told(self, parts: Sequence[Part], rated: list[Any]) -> Iterator[bytes]:
        """Yield these parts; rated: the tokens of theirs, with log-probabilities."""
        raise NotImplementedError

    def rated(self, logprobs: Sequence[TokenLogprob]) -> list[Any]:
        """Return tokens with their log-probabilities, if the request asks for them."""
        return (
            []
            if self.request.wanted_logprobs is None
            else list(self._logprobs.of(logprobs)["content"])
        )


def last_words(problem: RequestError, media_type: str, path: str) -> bytes:
    """Return the end of a stream that goes no further, in the protocol that has this path; of no stream nothing."""
    body = problem.body_for(path)
    if media_type == LINES:
        return line(body)
    return (
        sse(body, "error" if body.get("type") == "error" else "") if media_type == EVENTS else b""
    )


Choice = dict[str, Any]


class ChatChoice:
    """One of `choices`: a message of the assistant, in which thoughts and calls of tools are told from text."""

    _rating: type[Any] = ChatLogprobs

    def __init__(self, index: int, request: Sampling, tokenizer: Any) -> None:
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.parts = AnswerParts(request, tokenizer)
        self._logprobs = self._rating(TokenTexts(tokenizer))
        self._calls = 0

    def begin(self, answer: Completion) -> list[Choice]:
        """Return the choices before the first piece."""
        self.parts.begin(answer.prompt_ids)
        return [self._choice({"role": "assistant", "content": ""})]

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        """Yield a choice per part of a piece; the first of them describes the tokens."""
        token_fields = self._of_tokens(piece.tokens, piece.logprobs)
        for part in self.parts.push(piece.text, piece.answer.passed) or [""] * bool(token_fields):
            yield self._choice(self._delta(part)) | token_fields
            token_fields = {}

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        """Yield the text that was held back, then the choice that says why the answer ended."""
        for part in self.parts.end(answer.reason):
            yield self._choice(self._delta(part))
        yield self._choice({}, self.parts.reason(answer))

    def message(self, answer: Completion) -> Choice:
        """Return the choice of a whole answer."""
        parts = self.parts.of(answer)
        calls, text, thoughts = calls_of(parts), text_of_parts(parts), thoughts_of(parts)
        more = {"reasoning_content": thoughts, "tool_calls": [call.to_dict() for call in calls]}
        content = None if calls and not text.strip() else text
        message = {"role": "assistant", "content": content, **without_empty(more)}
        ended = {"finish_reason": self.parts.reason(answer), "logprobs": None}
        return {"index": self.index, "message": message, **ended} | self._of_tokens(
            answer.token_ids, answer.logprobs
        )

    def _of_tokens(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> Choice:
        """Return the fields of a choice that describe its tokens, if the request asks for them."""
        ids: Choice = {"token_ids": tokens} if self.request.return_token_ids else {}
        return ids | (
            {}
            if self.request.wanted_logprobs is None
            else {"logprobs": self._logprobs.of(logprobs or [])}
        )

    def _delta(self, part: Part) -> Any:
        if not isinstance(part, ToolCall):
            return (
                {"reasoning_content": part.text} if isinstance(part, Thought) else {"content": part}
            )
        self._calls += 1
        return {"tool_calls": [{"index": self._calls - 1} | part.to_dict()]}

    def _choice(self, delta: Any, reason: str | None = None) -> Choice:
        return {"index": self.index, "delta": delta, "finish_reason": reason, "logprobs": None}


class TextChoice(ChatChoice):
    """One of `choices`: a text that goes on from the prompt."""

    _rating = TextLogprobs

    def begin(self, answer: Completion) -> list[Choice]:
        token_fields: Choice = {}
        prompt = self._echo(answer)
        if self.request.echoes and self.request.wanted_logprobs is not None:
            token_fields = {
                "logprobs": self._logprobs.of(answer.prompt_logprobs, answer.prompt_ids[0])
            }
        return [self._choice(prompt) | token_fields] if prompt or token_fields else []

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        yield self._choice(text_of_parts(self.parts.end(answer.reason)), answer.reason)

    def message(self, answer: Completion) -> Choice:
        opening = next(iter(self.begin(answer)), self._choice(""))
        token_fields = self._of_tokens(answer.token_ids, answer.logprobs)
        if opening["logprobs"] is not None:
            token_fields["logprobs"] = {
                name: opening["logprobs"][name] + rated
                for name, rated in token_fields["logprobs"].items()
            }
        return (
            self._choice(opening["text"] + text_of_parts(self.parts.of(answer)), answer.reason)
            | token_fields
        )

    def _echo(self, answer: Completion) -> str:
        if not self.request.echoes:
            return ""
        assert isinstance(self.request, CompletionRequest)
        prompt = self.request.single
        return prompt if isinstance(prompt, str) else Decoder(self.tokenizer)(answer.prompt_ids)

    def _delta(self, part: Part) -> Any:
        return part

    def _choice(self, delta: Any, reason: str | None = None) -> Choice:
        return {"index": self.index, "text": delta, "finish_reason": reason, "logprobs": None}


class OpenAIReply(Reply):
    """OpenAI's shapes. Figures next to the usage (`timings`, `metrics`) are those of one answer, where it is the only
    one.
    """

    def __init__(self, body: Any, request: Sampling, model: str, tokenizer: Any) -> None:
        super().__init__(body, request, model, tokenizer)
        chat = isinstance(request, ChatRequest)
        self._created = int(time.time())
        self._kind = "chat.completion" if chat else "text_completion"
        self._chunk_kind = "chat.completion.chunk" if chat else "text_completion"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._choices = [
            (ChatChoice if chat else TextChoice)(place, each, tokenizer)
            for place, each in enumerate(request.each())
        ]

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            choice.message(answer) for choice, answer in zip(self._choices, answers, strict=True)
        ]
        body = (
            self._envelope(self._kind)
            | self.notes
            | {"choices": choices, "usage": self._usage(answers)}
        )
        if self.request.return_token_ids:
            for place, answer in zip(
                [body] if len(answers) == 1 else choices, answers, strict=True
            ):
                place["prompt_token_ids"] = answer.prompt_ids
        return body | self._figures(answers)

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        for choice in self._choices[place].begin(answer):
            chunk = self._chunk([choice], answer) | self.notes
            if self.request.return_token_ids:
                (choice if len(self._choices) > 1 else chunk)["prompt_token_ids"] = (
                    answer.prompt_ids
                )
            yield sse(chunk)

    def progress(self, figures: dict[str, Any]) -> bytes:
        return sse(self._chunk([]) | {"prompt_progress": figures})

    def piece(self, place: int, piece: Piece) -> Iterator[bytes]:
        extra = piece.extra
        for choice in self._choices[place].deltas(piece):
            yield sse(self._chunk([choice], piece.answer) | extra)
            extra = {}
        if extra:
            yield sse(self._chunk([], piece.answer) | extra)

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        choices = list(self._choices[place].last_deltas(answer))
        for choice in choices[:-1]:
            yield sse(self._chunk([choice], answer))
        yield sse(
            self._chunk(choices[-1:], answer)
            | ({"timings": answer.timings} if len(self._choices) == 1 else {})
        )

    def finish(self, answers: Sequence[Completion]) -> Iterator[bytes]:
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield sse(self._chunk([]) | {"usage": self._usage(answers)} | self._figures(answers))
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[Choice], answer: Completion | None = None) -> dict[str, Any]:
        """Return a chunk of a stream; answer: for the usage, where every chunk has it."""
        options = self.request.stream_options
        body = self._envelope(self._chunk_kind) | {"choices": choices}
        if options is not None and options.continuous_usage_stats and answer is not None:
            body["usage"] = answer.usage
        return body

    def _usage(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """Return OpenAI's usage of all answers; a prompt with several answers counts once."""
        usages = [answer.usage for answer in answers]
        prompts = usages[:: self.request.n or 1]
        read = sum(usage["prompt_tokens"] for usage in prompts)
        written = sum(usage["completion_tokens"] for usage in usages)
        details = {
            name: sum(usage["completion_tokens_details"][name] for usage in usages)
            for name in usages[0]["completion_tokens_details"]
        }
        thoughts = [
            thought_tokens(answer.token_ids, self.tokenizer)
            for answer in answers
            if isinstance(self.request, ChatRequest)
        ]
        if any(thoughts):
            details["reasoning_tokens"] = sum(thoughts)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {
                "cached_tokens": sum(
                    usage["prompt_tokens_details"]["cached_tokens"] for usage in prompts
                )
            },
            "completion_tokens_details": details,
        }

    def _figures(self, answers: Sequence[Completion]) -> dict[str, Any]:
        return (
            {"timings": answers[0].timings, "metrics": answers[0].metrics}
            if len(answers) == 1
            else {}
        )

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": f"specengine-{specengine.__version__}",
        }

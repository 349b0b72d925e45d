"""Answers in the shapes of a protocol, whole or as a stream; here those of OpenAI's chat and text completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import specengine
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.logprobs import ChatLogprobs, TextLogprobs, TokenTexts
from specengine.protocol.parts import Part, Parts, calls_of, text_of_parts, thoughts_of
from specengine.protocol.problems import RequestError
from specengine.protocol.requests import ChatRequest, CompletionRequest, Sampling
from specengine.protocol.thoughts import Thought, thought_tokens
from specengine.protocol.tool_formats import ToolCall
from specengine.protocol.tools import StopText
from specengine.records import TokenLogprob
from specengine.request.text import decoder

EVENTS = "text/event-stream"


def sse(body: dict[str, Any], event: str = "") -> bytes:
    """Return one server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class Reply:
    """The answers to one request, as a protocol tells them: whole, or as a stream.

    Most requests have one answer; those that ask for several (`n`, several prompts) have them by their place.
    """

    media_type = EVENTS
    ping = b": ping\n\n"

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        """Yield what comes before the first piece of an answer."""
        raise NotImplementedError

    def piece(self, place: int, piece: Piece) -> Iterator[bytes]:
        raise NotImplementedError

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        """Yield what was held back of an answer, and why it ended."""
        raise NotImplementedError

    def finish(self, answers: Sequence[Completion]) -> Iterator[bytes]:
        """Yield what comes behind all answers."""
        yield from ()

    def failed(self, problem: RequestError) -> bytes:
        """Return the end of a stream that goes no further."""
        return sse(problem.body)


Choice = dict[str, Any]


class ChoiceReply:
    """One of `choices`, which a subclass shapes. Pieces go through `deltas` in the order of their coming."""

    def __init__(self, index: int, request: Sampling, tokenizer: Any) -> None:
        self.index, self.request, self.tokenizer = index, request, tokenizer

    def begin(self, answer: Completion) -> list[Choice]:
        """Return the choices before the first piece."""
        raise NotImplementedError

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        raise NotImplementedError

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        """Yield the text that was held back, then the choice that says why the answer ended."""
        raise NotImplementedError

    def message(self, answer: Completion) -> Choice:
        """Return the choice of a whole answer."""
        raise NotImplementedError

    def _of_tokens(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> Choice:
        """Return the fields of a choice that describe its tokens, if the request asks for them."""
        ids: Choice = {"token_ids": tokens} if self.request.return_token_ids else {}
        return ids | ({} if self.request.wanted_logprobs is None else {"logprobs": self._rated(logprobs or [])})

    def _rated(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class ChatChoice(ChoiceReply):
    """One message of the assistant, in which thoughts and calls of tools are told from text."""

    def __init__(self, index: int, request: Sampling, tokenizer: Any) -> None:
        super().__init__(index, request, tokenizer)
        self._parts = Parts(request, tokenizer)
        self._logprobs = ChatLogprobs(TokenTexts(tokenizer))
        self._calls = 0

    def begin(self, answer: Completion) -> list[Choice]:
        self._parts.begin(answer.prompt_ids)
        return [self._choice({"role": "assistant", "content": ""})]

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        yield from self._deltas(
            self._parts.push(piece.text, piece.answer.passed), self._of_tokens(piece.tokens, piece.logprobs)
        )

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        yield from self._deltas(self._parts.end(), {})
        yield self._choice({}) | {"finish_reason": self._parts.reason(answer)}

    def message(self, answer: Completion) -> Choice:
        parts = self._parts.of(answer)
        calls, text, thoughts = calls_of(parts), text_of_parts(parts), thoughts_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text.strip() else text}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [call.to_dict() for call in calls]
        ended = {"finish_reason": self._parts.reason(answer), "logprobs": None}
        return {"index": self.index, "message": message, **ended} | self._of_tokens(answer.token_ids, answer.logprobs)

    def _rated(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return self._logprobs.of(logprobs)

    def _deltas(self, parts: list[Part], told: Choice) -> Iterator[Choice]:
        """Yield a choice per part; told: fields about the tokens, which the first choice carries."""
        if not parts and told:
            parts = [""]
        for part in parts:
            if isinstance(part, ToolCall):
                delta: dict[str, Any] = {"tool_calls": [{"index": self._calls} | part.to_dict()]}
                self._calls += 1
            else:
                delta = {"reasoning_content": part.text} if isinstance(part, Thought) else {"content": part}
            yield self._choice(delta) | told
            told = {}

    def _choice(self, delta: dict[str, Any]) -> Choice:
        return {"index": self.index, "delta": delta, "finish_reason": None, "logprobs": None}


class TextChoice(ChoiceReply):
    """A text that goes on from the prompt."""

    def __init__(self, index: int, request: Sampling, tokenizer: Any) -> None:
        super().__init__(index, request, tokenizer)
        self._stop = StopText(request.stops)
        self._logprobs = TextLogprobs(TokenTexts(tokenizer))

    def begin(self, answer: Completion) -> list[Choice]:
        told: Choice = {}
        prompt = self._echo(answer)
        if self.request.echoes and self.request.wanted_logprobs is not None:
            told = {"logprobs": self._logprobs.of(answer.prompt_logprobs, answer.prompt_ids[0])}
        return [self._choice(prompt) | told] if prompt or told else []

    def deltas(self, piece: Piece) -> Iterator[Choice]:
        text = self._stop.push(piece.text, piece.answer.passed)
        told = self._of_tokens(piece.tokens, piece.logprobs)
        if text or told:
            yield self._choice(text) | told

    def last_deltas(self, answer: Completion) -> Iterator[Choice]:
        yield self._choice(self._stop.end(), answer.reason)

    def message(self, answer: Completion) -> Choice:
        opening = next(iter(self.begin(answer)), self._choice(""))
        text = self._echo(answer) + self._stop.push(answer.text, answer.passed) + self._stop.end()
        told = self._of_tokens(answer.token_ids, answer.logprobs)
        if opening["logprobs"] is not None:
            told["logprobs"] = {name: opening["logprobs"][name] + rated for name, rated in told["logprobs"].items()}
        return self._choice(text, answer.reason) | told

    def _echo(self, answer: Completion) -> str:
        if not self.request.echoes:
            return ""
        assert isinstance(self.request, CompletionRequest)
        prompt = self.request.single
        return prompt if isinstance(prompt, str) else decoder(self.tokenizer)(answer.prompt_ids)

    def _rated(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return self._logprobs.of(logprobs)

    def _choice(self, text: str, reason: str | None = None) -> Choice:
        return {"index": self.index, "text": text, "finish_reason": reason, "logprobs": None}


class OpenAIReply(Reply):
    """OpenAI's shapes. Figures beside the usage (`timings`, `metrics`) are those of one answer, where it is the only
    one.
    """

    def __init__(self, request: Sampling, model: str, tokenizer: Any = None) -> None:
        chat = isinstance(request, ChatRequest)
        self.request, self.model, self.created = request, model, int(time.time())
        self.kind, self._chunk_kind = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion",) * 2
        self.prefix = "chatcmpl" if chat else "cmpl"
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._tokenizer = tokenizer
        notes = getattr(request, "notes", [])
        self._noted = {"notes": notes} if notes else {}
        made = ChatChoice if chat else TextChoice
        self._choices: list[ChoiceReply] = [made(place, each, tokenizer) for place, each in enumerate(request.each())]

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for shaper, answer in zip(self._choices, answers, strict=True):
            choice = shaper.message(answer)
            if self.request.return_token_ids and len(answers) > 1:
                choice["prompt_token_ids"] = answer.prompt_ids
            choices.append(choice)
        body = self._envelope(self.kind) | self._noted | {"choices": choices, "usage": self._usage(answers)}
        if len(answers) > 1:
            return body
        if self.request.return_token_ids:
            body["prompt_token_ids"] = answers[0].prompt_ids
        return body | {"timings": answers[0].timings, "metrics": answers[0].metrics}

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        for choice in self._choices[place].begin(answer):
            chunk = self._chunk([choice], answer) | self._noted
            if self.request.return_token_ids:
                (choice if len(self._choices) > 1 else chunk)["prompt_token_ids"] = answer.prompt_ids
            yield sse(chunk)

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
        timings = {"timings": answer.timings} if len(self._choices) == 1 else {}
        yield sse(self._chunk(choices[-1:], answer) | timings)

    def finish(self, answers: Sequence[Completion]) -> Iterator[bytes]:
        options = self.request.stream_options
        if options is not None and options.include_usage:
            figures: dict[str, Any] = {"usage": self._usage(answers)}
            if len(answers) == 1:
                figures |= {"timings": answers[0].timings, "metrics": answers[0].metrics}
            yield sse(self._chunk([]) | figures)
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[Choice], answer: Completion | None = None) -> dict[str, Any]:
        """Return a chunk of a stream; answer: for the usage, where every chunk has it."""
        options = self.request.stream_options
        body = self._envelope(self._chunk_kind) | {"choices": choices}
        if options is not None and options.continuous_usage_stats and answer is not None:
            body["usage"] = answer.usage
        return body

    def _usage(self, answers: Sequence[Completion]) -> dict[str, Any]:
        return usage_of(answers, self.request, self._tokenizer)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specengine-{specengine.__version__}",
        }


def usage_of(answers: Sequence[Completion], request: Sampling, tokenizer: Any) -> dict[str, Any]:
    """Return OpenAI's usage of all answers; a prompt with several answers counts once."""
    prompts, usages = [answer.usage for answer in answers[:: request.n or 1]], [answer.usage for answer in answers]
    read = sum(usage["prompt_tokens"] for usage in prompts)
    written = sum(usage["completion_tokens"] for usage in usages)
    details = {
        name: sum(usage["completion_tokens_details"][name] for usage in usages)
        for name in usages[0]["completion_tokens_details"]
    }
    thoughts = [thought_tokens(answer.token_ids, tokenizer) for answer in answers if isinstance(request, ChatRequest)]
    if any(thoughts):
        details["reasoning_tokens"] = sum(thoughts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in prompts)
        },
        "completion_tokens_details": details,
    }

"""Ollama's chat and generate: lines of JSON, streamed unless a request says otherwise."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specengine.protocol.completion import Completion
from specengine.protocol.messages import Body, without_empty
from specengine.protocol.parts import Part, calls_of, text_of_parts, thoughts_of
from specengine.protocol.problems import require_request
from specengine.protocol.replies import LINES, OneReply, line
from specengine.protocol.requests import (
    MAX_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Sampling,
    Tool,
    WithTools,
    base_of,
)

VERSION = "0.12.6"  # of Ollama, whose requests these are; clients ask for a least one


# Options of how a model is run, which have no effect, and of samplers that are accepted where they are off.
Unread: Any = base_of(
    "Unread",
    {
        "num_ctx": (int, None),
        "num_keep": (int, None),
        "num_batch": (int, None),
        "num_gpu": (int, None),
        "num_thread": (int, None),
        "main_gpu": (int, None),
        "numa": (bool, None),
        "low_vram": (bool, None),
        "f16_kv": (bool, None),
        "logits_all": (bool, None),
        "vocab_only": (bool, None),
        "use_mmap": (bool, None),
        "use_mlock": (bool, None),
        "embedding_only": (bool, None),
        "repeat_last_n": (int, None),
        "penalize_newline": (bool, None),
        "mirostat": (Annotated[int, Field(ge=0, le=0)], None),
        "mirostat_tau": (float, None),
        "mirostat_eta": (float, None),
        "tfs_z": (Annotated[float, Field(ge=1, le=1)], None),
    },
)


_SAMPLED = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "typical_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
Sampled: Any = base_of("Sampled", {name: (kind, None) for name, kind in _SAMPLED.items()})


class Options(Unread, Sampled):
    """Ollama's options of sampling; those of how a model is run (`num_ctx`, `num_gpu` and others) have no effect."""

    num_predict: int | None = Field(None, description="0, -1 and -2: no limit but the server's")
    repeat_penalty: float | None = None
    stop: str | list[str] | None = None


UnreadHere: Any = base_of(
    "UnreadHere",
    {
        "keep_alive": (str | int | float, "no effect: the model stays"),
        "truncate": (bool, None),
        "shift": (bool, None),
    },
)


class _Asked(UnreadHere):
    """Fields of both endpoints."""

    model: str | None = None
    format: str | dict[str, Any] | None = Field(None, description="json, or a JSON schema")
    options: Options | None = None
    stream: bool | None = None
    think: bool | str | None = Field(None, description="false: without thoughts, if the model can")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class Turn(Body, extra="allow"):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(None, max_length=0)
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(WithTools, _Asked):
    """POST /api/chat."""

    messages: list[Turn] = Field(default_factory=list, fail_fast=True)
    tools: list[Tool] | None = Field(None, max_length=128, fail_fast=True)


class GenerateBody(_Asked):
    """POST /api/generate; `raw`: the prompt without the chat template."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = Field(None, max_length=0)
    context: list[int] | None = Field(None, description="no effect: nothing is kept")
    template: Literal[""] | None = None


NAMES = {
    "max_new_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "json_schema": "format",
    **{name: f"options.{name}" for name in (*_SAMPLED, "stop")},
}


def chat_of(body: ChatBody) -> ChatRequest:
    return ChatRequest.model_validate(
        _chat_fields(body)
        | {
            "messages": [_message(turn) for turn in body.messages],
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
        }
    )


def generation_of(body: GenerateBody) -> Sampling:
    """Return a chat of one message, or a completion: of a raw prompt, or before a suffix."""
    if body.raw or body.suffix:
        suffix = {"suffix": body.suffix} if body.suffix else {}
        rated = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        return CompletionRequest.model_validate(
            _fields(body) | {"prompt": body.prompt or "", **rated, **suffix}
        )
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatRequest.model_validate(
        _chat_fields(body) | {"messages": [*system, {"role": "user", "content": body.prompt}]}
    )


def is_empty(body: _Asked) -> bool:
    """Return whether a request asks for nothing but that the model be there."""
    return not (
        body.messages
        if isinstance(body, ChatBody)
        else isinstance(body, GenerateBody) and body.prompt
    )


def loaded(body: _Asked, model: str) -> dict[str, Any]:
    """Return the answer to a request that asks for nothing."""
    nothing: Mapping[str, Any] = (
        {"message": {"role": "assistant", "content": ""}}
        if isinstance(body, ChatBody)
        else {"response": ""}
    )
    return {"model": model, "created_at": now(), **nothing, "done": True, "done_reason": "load"}


def _message(turn: Turn) -> dict[str, Any]:
    calls = [
        {name: call[name] for name in ("function", "id") if isinstance(call.get(name), dict | str)}
        for call in turn.tool_calls or ()
    ]
    more = {
        "reasoning_content": turn.thinking,
        "tool_calls": calls,
        "name": turn.tool_name,
        "tool_call_id": turn.tool_call_id,
    }
    return {"role": turn.role, "content": turn.content or ""} | without_empty(more)


def _fields(body: _Asked) -> dict[str, Any]:
    options = body.options or Options.model_validate({})
    most = options.num_predict
    require_request(
        "format",
        f"got {body.format!r:.60}, accepted 'json' or a JSON schema",
        not isinstance(body.format, str) or body.format in ("", "json"),
    )
    schema = (
        {"type": "json_schema", "schema": body.format}
        if isinstance(body.format, dict)
        else {"type": "json_object" if body.format else "text"}
    )
    return {name: getattr(options, name) for name in _SAMPLED} | {
        "model": body.model,
        "response_format": schema,
        "max_tokens": None if most is None or most < 1 else most,
        "repetition_penalty": options.repeat_penalty,
        "stop": options.stop,
        "stream": body.stream is not False,
    }


def _chat_fields(body: _Asked) -> dict[str, Any]:
    rated = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    thinks = (
        {}
        if body.think is None
        else {"chat_template_kwargs": {"enable_thinking": bool(body.think)}}
    )
    return (
        _fields(body)
        | rated
        | thinks
        | ({"reasoning_effort": body.think} if body.think and isinstance(body.think, str) else {})
    )


# ---- answers


class OllamaReply(OneReply):
    """Answers of both endpoints: `message` of a chat, `response` else."""

    media_type = LINES
    ping = b""  # clients read every line as JSON
    path = "/api/"

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        answer = answers[0]
        return self._said(self.parts.of(answer), self.rated(answer.logprobs)) | self._ended(answer)

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        yield from super().end(place, answer)
        yield line(self._said([], []) | self._ended(answer))

    def told(self, parts: Sequence[Part], rated: list[Any]) -> Iterator[bytes]:
        for part in parts or [""] * bool(rated):
            yield line(self._said([part], rated) | {"done": False})
            rated = []

    def _said(self, parts: Sequence[Part], rated: list[Any]) -> dict[str, Any]:
        text, thoughts = text_of_parts(parts), thoughts_of(parts)
        called = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.values}}
            for call in calls_of(parts)
            if call.whole  # clients run what they get
        ]
        extra = without_empty({"thinking": thoughts, "tool_calls": called})
        content: Mapping[str, Any] = (
            {"message": {"role": "assistant", "content": text, **extra}}
            if isinstance(self.body, ChatBody)
            else {"response": text, **extra}
        )
        return {"model": self.model, "created_at": now(), **content} | without_empty(
            {"logprobs": rated}
        )

    def _ended(self, answer: Completion) -> dict[str, Any]:
        timings, usage = answer.timings, answer.usage
        read, wrote = int(timings["prompt_ms"] * 1e6), int(timings["predicted_ms"] * 1e6)
        return {
            "done": True,
            "done_reason": answer.reason,
            "total_duration": read + wrote,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": read,
            "eval_count": usage["completion_tokens"],
            "eval_duration": wrote,
            **self.notes,
        }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")

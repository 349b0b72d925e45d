"""Schemas of the answers in /openapi.json; answers may have further fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from specengine.protocol.dialects import CHAT, RESPONSES, TEXT


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class Health(BaseModel):
    status: Literal["ok"]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Usage(BaseModel):
    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    timings: dict[str, Any] | None = Field(None, description="of the one answer")
    metrics: dict[str, Any] | None = Field(None, description="of the one answer")


class ChatAnswer(_Answer):
    """The whole answer; a stream has the same as OpenAI's `chat.completion.chunk` events."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1)


class TextAnswer(_Answer):
    """The whole answer; a stream has the same as `text_completion` events."""

    object: Literal["text_completion"]
    choices: list[TextChoice] = Field(min_length=1)


class Response(BaseModel):
    """OpenAI's response; a stream has the same in `response.*` events."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


def answers(model: type[BaseModel], *others: str) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` of an endpoint; others: media types of text that may replace JSON."""
    content = {kind: {"schema": {"type": "string"}} for kind in others}
    return {200: {"model": model, "content": content}}


_EVENTS = "text/event-stream"
ANSWERS = {
    CHAT: answers(ChatAnswer, _EVENTS),
    TEXT: answers(TextAnswer, _EVENTS),
    RESPONSES: answers(Response, _EVENTS),
}

"""Schemas of the answers in /openapi.json; answers may have further fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from specengine.protocol.dialects import CHAT, MESSAGES, RESPONSES, TEXT
from specengine.protocol.ollama import LINES


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class AnthropicDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """Anthropic's shape of an error."""

    type: Literal["error"]
    error: AnthropicDetail


class OllamaError(BaseModel):
    """Ollama's shape of an error."""

    error: str


class Health(BaseModel):
    status: Literal["ok"]
    parallel: int | None = None  # answers at once; not of several replicas


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


class Message(BaseModel):
    """Anthropic's message; a stream has the same in its events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    model: str
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, Any]


class OllamaAnswer(BaseModel):
    """Ollama's answer; a stream has lines of the same."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(BaseModel):
    """OpenAI's embeddings, in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, int]


class OllamaEmbeddings(BaseModel):
    """Ollama's embeddings, in the order of the texts."""

    model: str
    embeddings: list[list[float]]


class OldOllamaEmbedding(BaseModel):
    """Ollama's embedding of one text."""

    embedding: list[float]


class InfillAnswer(BaseModel):
    """llama.cpp's answer, or the fields that the request names."""

    content: str | None = None


def errors(path: str) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` of an endpoint's errors, where their shape is not OpenAI's."""
    model = AnthropicError if path.startswith("/v1/messages") else OllamaError if path.startswith("/api/") else None
    return {} if model is None else {"default": {"model": model, "description": "refused or failed"}}


def answers(model: type[BaseModel], *others: str) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` of an endpoint; others: media types of text that may replace JSON."""
    content: dict[str, Any] = {kind: {"schema": {}} for kind in others}
    return {200: {"model": model, "content": content}}


_EVENTS = "text/event-stream"
ANSWERS = {
    CHAT: answers(ChatAnswer, _EVENTS),
    TEXT: answers(TextAnswer, _EVENTS),
    RESPONSES: answers(Response, _EVENTS),
    MESSAGES: answers(Message, _EVENTS),
    "/api/chat": answers(OllamaAnswer, LINES),
    "/api/generate": answers(OllamaAnswer, LINES),
    "/infill": answers(InfillAnswer, _EVENTS),
    "/v1/embeddings": answers(EmbeddingsAnswer),
    "/api/embed": answers(OllamaEmbeddings),
    "/api/embeddings": answers(OldOllamaEmbedding),
}

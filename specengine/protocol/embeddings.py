"""Embeddings of texts, as OpenAI's clients and Ollama's ask for them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specengine.protocol.completion import Completion
from specengine.protocol.replies import Reply
from specengine.protocol.requests import CompletionRequest

_STRICT = ConfigDict(extra="forbid", strict=True)
NAMES = {"prompt": "input"}


class EmbeddingsBody(BaseModel):
    """POST /v1/embeddings."""

    model_config = _STRICT
    input: str | list[int] | list[str] | list[list[int]] = Field(description="a text or token ids, or a list of them")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: of float32, low byte first")
    user: str | None = None


class EmbedBody(BaseModel):
    """POST /api/embed."""

    model_config = _STRICT
    input: str | list[str]
    model: str | None = None
    truncate: Literal[False] | None = Field(None, description="texts that fit no context are refused")
    options: dict[str, Any] | None = Field(None, description="no effect")
    keep_alive: str | int | float | None = Field(None, description="no effect: the model stays")


class OldEmbedBody(BaseModel):
    """POST /api/embeddings."""

    model_config = _STRICT
    prompt: str
    model: str | None = None
    options: dict[str, Any] | None = Field(None, description="no effect")
    keep_alive: str | int | float | None = Field(None, description="no effect: the model stays")


Body = EmbeddingsBody | EmbedBody | OldEmbedBody


class EmbeddingRequest(CompletionRequest):
    """A request whose texts are read, and not answered."""

    @property
    def embeds(self) -> bool:
        return True


def request_of(body: Body) -> EmbeddingRequest:
    given = body.prompt if isinstance(body, OldEmbedBody) else body.input
    user = getattr(body, "user", None)
    return EmbeddingRequest.model_validate(
        {"prompt": given, "model": body.model, "user": user, "max_tokens": 0, "echo": True, "allow_special_text": False}
    )


class EmbeddingsReply(Reply):
    def __init__(self, body: Body, asked: Any, model: str, tokenizer: Any) -> None:
        self._body, self._model = body, model

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        read = sum(len(answer.prompt_ids) for answer in answers)
        rows = [answer.embedding or [] for answer in answers]
        if isinstance(self._body, OldEmbedBody):
            return {"embedding": rows[0]}
        if isinstance(self._body, EmbedBody):
            took = sum(int(answer.scored_s * 1e9) for answer in answers)
            said = {"model": self._model, "embeddings": rows, "total_duration": took, "load_duration": 0}
            return said | {"prompt_eval_count": read}
        written = [_base64(row) for row in rows] if self._body.encoding_format == "base64" else rows
        data = [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(written)]
        usage = {"prompt_tokens": read, "total_tokens": read}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}


def _base64(row: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode("ascii")

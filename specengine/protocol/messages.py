"""The messages of a conversation, as clients send them and send them back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Fields that clients keep beside a message, and that say nothing to the model.
_NOTES = {
    "additional_kwargs", "annotations", "cache_control", "created", "created_at", "finish_reason", "id", "index",
    "logprobs", "metadata", "model", "phase", "provider_metadata", "provider_options", "provider_specific_fields",
    "refusal", "response_metadata", "status", "stop_reason", "timestamp", "timings", "token_ids", "type", "usage",
}  # fmt: skip
# Read by the templates of models that think: str or None.
_THOUGHTS = ("reasoning_content", "reasoning")
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)


class FunctionCall(BaseModel):
    """`arguments`: the text of a JSON object, or the object; what else a model has written stays as it stands."""

    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    arguments: Any = None

    @property
    def parsed(self) -> Any:
        """Return the arguments as templates read them."""
        given = self.arguments
        if given is None or (isinstance(given, str) and not given.strip()):
            return {}
        if not isinstance(given, str):
            return given
        try:
            read = json.loads(given)
        except (ValueError, RecursionError):
            return given
        return read if isinstance(read, dict) else given


class ToolCallGiven(BaseModel):
    """A call that the model made earlier in the conversation; what a client has noted beside it is not read."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        known = {} if self.id is None else {"id": self.id}
        return {
            **known,
            "type": "function",
            "function": {"name": self.function.name, "arguments": self.function.parsed},
        }


class Message(BaseModel):
    """Fields beyond these may be there if they are notes of a client, or empty."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCallGiven] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None

    @field_validator("content")
    @classmethod
    def _is_text(cls, content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
        if isinstance(content, list):
            require_text_parts(content)
        return content

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            if name in _THOUGHTS and isinstance(value, str):
                continue
            if name not in _NOTES and not any(value is nothing or value == nothing for nothing in _NOTHING):
                raise ValueError(f"{name:.60}: not supported by this server")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("content: needed")
        return self

    @property
    def text(self) -> str:
        """Return the content, or the refusal in its place."""
        if isinstance(self.content, str):
            return self.content
        if self.content is not None:
            return text_of(self.content)
        refusal = (self.model_extra or {}).get("refusal")
        return refusal if isinstance(refusal, str) else ""

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it: text, parsed arguments of calls, `system` for developers."""
        role = "system" if self.role == "developer" else self.role
        made: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        for name in _THOUGHTS:
            if isinstance(value := (self.model_extra or {}).get(name), str):
                made["reasoning_content"] = value
        return made


def text_of(parts: list[dict[str, Any]]) -> str:
    """Return the text of content parts that `require_text_parts` accepts."""
    return "".join(part[_TEXT_PARTS[part["type"]]] for part in parts)


def require_text_parts(parts: list[dict[str, Any]]) -> None:
    """Raise ValueError, with the place, for a part that is no text."""
    for place, part in enumerate(parts):
        kind = part.get("type")
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise ValueError(f"[{place}].type: got {kind!r:.60}, accepted parts of type 'text'")
        if not isinstance(part.get(field), str):
            raise ValueError(f"[{place}].{field}: accepted a string")


def is_empty(schema: Mapping[str, Any] | None) -> bool:
    """Return whether a function has no parameters: they are left out, or an object without properties."""
    known = {"type", "properties", "required", "title", "description", "$schema", "additionalProperties"}
    if not schema:
        return True
    named = schema.keys() <= known and schema.get("properties") == {} and not schema.get("required")
    return named and schema.get("additionalProperties") in (None, False)

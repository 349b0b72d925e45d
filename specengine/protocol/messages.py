"""The messages of a conversation, as clients send them and send them back."""

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from specengine.protocol.problems import RequestError, require_request

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Fields that clients keep with a message, and that say nothing to the model.
_NOTES = {
    "additional_kwargs", "annotations", "cache_control", "created", "created_at", "finish_reason", "id", "index",
    "logprobs", "metadata", "model", "phase", "provider_metadata", "provider_options", "provider_specific_fields",
    "refusal", "response_metadata", "status", "stop_reason", "timestamp", "timings", "token_ids", "type", "usage",
}  # fmt: skip
# Read by the templates of models that think: str or None.
_THOUGHTS = ("reasoning_content", "reasoning")
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)


class Body(BaseModel):
    """A JSON object whose values are taken as they are: without conversions, and without further fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


def refuse(problems: Mapping[str, object]) -> None:
    """Raise ValueError with the first of these messages whose condition holds."""
    for message, holds in problems.items():
        if holds:
            raise ValueError(message)


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that hold something: those that are None, empty or False are left out."""
    return {name: value for name, value in fields.items() if value}


def _of_text(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content; ValueError, with the place, for a part that is no text."""
    try:
        text_at("", content, TEXT_PARTS, "parts of type 'text'")
    except RequestError as error:
        raise ValueError(str(error)) from error
    return content


Content = Annotated[str | list[dict[str, Any]], AfterValidator(_of_text)]


def text_at(
    place: str, content: Any, fields: Mapping[str, str], accepted: str, noun: str = "parts"
) -> str:
    """Return the text of a string, or of a list of parts; RequestError names the place of what is none.

    fields: where each type of part has its text; accepted: what parts may be
    """
    if isinstance(content, str):
        return content
    require_request(place, f"accepted a string or a list of {noun}", isinstance(content, list))
    return "".join(
        text_of_part(f"{place}[{at}]", part, fields, accepted) for at, part in enumerate(content)
    )


def text_of_part(place: str, part: Any, fields: Mapping[str, str], accepted: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    name = fields.get(kind) if isinstance(kind, str) else None
    require_request(f"{place}.type", f"got {kind!r:.60}, accepted {accepted}", name is not None)
    text: str = part.get(name)
    require_request(f"{place}.{name}", "accepted a string", isinstance(text, str))
    return text


class FunctionCall(Body, extra="ignore"):
    """`arguments`: the text of a JSON object, or the object; what else a model has written stays as it stands."""

    name: str
    arguments: Any = None

    @property
    def parsed(self) -> Any:
        """Return the arguments as templates read them."""
        read: Any = {} if self.arguments is None else self.arguments
        if isinstance(read, str):
            with contextlib.suppress(ValueError, RecursionError):
                read = json.loads(read.strip() or "{}")
        return read if isinstance(read, dict) else self.arguments


class ToolCallGiven(Body, extra="ignore"):
    """A call that the model made earlier in the conversation; what a client has noted with it is not read."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {
            **({} if self.id is None else {"id": self.id}),
            "type": "function",
            "function": {"name": self.function.name, "arguments": self.function.parsed},
        }


class Message(Body, extra="allow"):
    """Fields beyond these may be there if they are notes of a client, or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCallGiven] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _THOUGHTS and isinstance(value, str):
                continue
            if name not in _NOTES and not any(
                value is nothing or value == nothing for nothing in _NOTHING
            ):
                raise ValueError(f"{name:.60}: not supported by this server")
        refuse({"content: needed": self.content is None and self.role not in ("assistant", "tool")})
        return self

    @property
    def text(self) -> str:
        """Return the content, or the refusal in its place."""
        if self.content is not None:
            return text_at("content", self.content, TEXT_PARTS, "text")
        refusal = (self.model_extra or {}).get("refusal")
        return refusal if isinstance(refusal, str) else ""

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it: text, parsed arguments of calls, `system` for developers."""
        role = "system" if self.role == "developer" else self.role
        extra = self.model_extra or {}
        thoughts = [extra[name] for name in _THOUGHTS if isinstance(extra.get(name), str)]
        more = {
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thoughts[-1] if thoughts else None,
        }
        return {"role": role, "content": self.text} | {
            name: value for name, value in more.items() if value is not None
        }


def is_empty(schema: Mapping[str, Any] | None) -> bool:
    """Return whether a function has no parameters: they are left out, or an object without properties."""
    keywords = {
        "type",
        "properties",
        "required",
        "title",
        "description",
        "$schema",
        "additionalProperties",
    }
    if not schema:
        return True
    named = (
        schema.keys() <= keywords and schema.get("properties") == {} and not schema.get("required")
    )
    return named and schema.get("additionalProperties") in (None, False)

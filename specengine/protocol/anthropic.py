"""Anthropic's Messages: blocks of content in, blocks of content out."""

import uuid
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import Field

from specengine.protocol.completion import Completion
from specengine.protocol.messages import Body, text_at, text_of_part, without_empty
from specengine.protocol.parts import Part, Thought
from specengine.protocol.problems import require_request
from specengine.protocol.replies import OneReply, sse
from specengine.protocol.requests import MAX_TOKENS, ChatRequest, WithTools, base_of
from specengine.protocol.tools import ToolCall

Blocks = str | list[dict[str, Any]]


class ClaudeMessage(Body, extra="allow"):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolOffered(Body, extra="allow"):
    """A tool of the client's; `input_schema` is what its input meets if it is strict."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"\S")
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


Unread: Any = base_of(
    "Unread",
    {
        "metadata": (dict[str, Any], None),
        "service_tier": (str, None),
        "inference_geo": (str, None),
        "container": (NoneType, None),
        "cache_control": (dict[str, Any], "no effect: prefixes are always reused"),
        "context_management": (dict[str, Any], "no effect: what is too long is refused"),
        "mcp_servers": (Annotated[list[Any], Field(max_length=0)], None),
    },
)


class _Asked(WithTools, Unread):
    """Fields of both endpoints."""

    functions_are = ("custom",)
    model: str | None = None
    messages: list[ClaudeMessage] = Field(min_length=1, fail_fast=True)
    system: Blocks | None = None
    tools: list[ToolOffered] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = Field(
        None, description="type disabled: without thoughts, if the model can"
    )
    output_config: dict[str, Any] | None = Field(
        None, description="`format`: a JSON schema that the answer meets"
    )
    output_format: dict[str, Any] | None = Field(
        None, description="the same, as it was called before"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    policy: Literal["plain"] | None = None


class CountRequest(_Asked):
    """POST /v1/messages/count_tokens: what says how to answer has no effect."""

    max_tokens: int | None = None


class MessagesRequest(_Asked):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=0, le=MAX_TOKENS, description="0: take the prompt into the cache")


NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "prompt": "messages",
    "response_format": "output_config",
}
_TEXT = {"text": "text"}
_ACCEPTED = "text, tool_use of the assistant, tool_result of the user"


def chat_of(body: _Asked) -> ChatRequest:
    """Return the request as a chat; RequestError names a block that is not supported."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text("system", body.system)})
    for place, turn in enumerate(body.messages):
        messages += _messages(f"messages[{place}]", turn)
    choice = body.tool_choice or ToolChoice(type="auto")
    thinking = (body.thinking or {}).get("type")
    thinks = {} if thinking is None else {"enable_thinking": thinking != "disabled"}
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools or ()
        ]
        or None,
        "tool_choice": _choice(choice) if body.tools or choice.type in ("any", "tool") else None,
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
        "response_format": _format(body),
        "chat_template_kwargs": (thinks | (body.chat_template_kwargs or {})) or None,
    }
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True  # the beginning of the answer
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens or None,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "policy": body.policy,
        }
    return ChatRequest.model_validate(fields).model_copy(update={"max_tokens": body.max_tokens})


def _messages(place: str, turn: ClaudeMessage) -> list[dict[str, Any]]:
    """Return the messages of a turn: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts, thoughts = "", ""
    for at, block in enumerate(turn.content):
        where, kind = f"{place}.content[{at}]", block.get("type")
        if kind == "tool_result" and turn.role == "user":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _text(f"{where}.content", block.get("content") or ""),
                }
            )
        elif kind == "tool_use" and turn.role == "assistant":
            calls.append(
                {
                    "id": block.get("id"),
                    "function": {"name": block.get("name"), "arguments": block.get("input")},
                }
            )
        elif kind in ("thinking", "redacted_thinking"):
            thoughts += str(block.get("thinking") or "")
        else:
            texts += text_of_part(where, block, _TEXT, _ACCEPTED)
    message = {
        "role": turn.role,
        "content": texts,
        **without_empty({"tool_calls": calls, "reasoning_content": thoughts}),
    }
    return [*messages, message] if texts or calls or thoughts or not messages else messages


def _text(place: str, content: Any) -> str:
    return text_at(place, content, _TEXT, _ACCEPTED, "blocks")


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _format(body: _Asked) -> dict[str, Any] | None:
    stated = body.output_format or (body.output_config or {}).get("format")
    if not stated:
        return None
    require_request(
        "output_config.format",
        "accepted type 'json_schema'",
        isinstance(stated, dict) and stated.get("type") == "json_schema",
    )
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": stated.get("schema")},
    }


# ---- answers

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(OneReply):
    """One message, whose blocks are thoughts, text and calls of tools."""

    ping = sse({"type": "ping"}, "ping")
    path = "/v1/messages"

    _open: type | None = None  # kind of the block that grows
    _count = 0  # of blocks

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        answer = answers[0]
        blocks = [_block(part) for part in self.parts.of(answer)]
        return (
            self._message(blocks)
            | self._ended(answer)
            | {"usage": _usage(answer)}
            | {"timings": answer.timings, "metrics": answer.metrics}
        )

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        yield from super().begin(place, answer)
        yield _event(
            "message_start",
            message=self._message([])
            | {
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(answer) | {"output_tokens": 0},
            },
        )

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        yield from super().end(place, answer)
        yield from self._close()
        yield _event("message_delta", delta=self._ended(answer), usage=_usage(answer))
        yield _event("message_stop")

    def told(self, parts: Sequence[Part], rated: list[Any]) -> Iterator[bytes]:
        for part in parts:
            if self._open is not type(part) or isinstance(part, ToolCall):
                yield from self._close()
                yield _event(
                    "content_block_start", index=self._count, content_block=_block(part, begun=True)
                )
                self._open = type(part)
            delta = {"type": "text_delta", "text": part}
            if isinstance(part, ToolCall):
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
            elif isinstance(part, Thought):
                delta = {"type": "thinking_delta", "thinking": part.text}
            yield _event("content_block_delta", index=self._count, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._count)
            self._open, self._count = None, self._count + 1

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            **self.notes,
        }

    def _ended(self, answer: Completion) -> dict[str, Any]:
        stopped, reason = self.parts.stop.found, _REASONS[self.parts.reason(answer)]
        if stopped is not None and reason == "end_turn":
            reason = "stop_sequence"
        return {
            "stop_reason": reason,
            "stop_sequence": stopped if reason == "stop_sequence" else None,
        }


def _block(part: Part, begun: bool = False) -> dict[str, Any]:
    """Return a block of content; begun: without what its deltas say."""
    if isinstance(part, ToolCall):
        return {
            "type": "tool_use",
            "id": part.id,
            "name": part.name,
            "input": {} if begun else part.values,
        }
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": "" if begun else part.text, "signature": ""}
    return {"type": "text", "text": "" if begun else part}


def _usage(answer: Completion) -> dict[str, Any]:
    """Return Anthropic's usage, whose input tokens are those that were not cached."""
    return {
        "input_tokens": answer.stats.num_prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.stats.num_generated_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind} | fields, kind)

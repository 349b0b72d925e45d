"""OpenAI's Responses: items of a conversation in, items of an answer out. Nothing is kept between requests."""

import time
import uuid
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specengine.protocol.completion import Completion
from specengine.protocol.messages import TEXT_PARTS, Body, text_at
from specengine.protocol.parts import Part, Thought, thought_tokens
from specengine.protocol.problems import RequestError, require_request
from specengine.protocol.replies import OneReply, sse
from specengine.protocol.requests import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    ChatRequest,
    CommonFields,
    Declared,
    FunctionTool,
    Sampling,
    StreamOptions,
    WithTools,
    base_of,
    declared_values,
    only,
)
from specengine.protocol.tools import ToolCall

_LOGPROBS = "message.output_text.logprobs"


class FunctionOffered(FunctionTool):
    type: Literal["function"]


class ToolNamed(Body):
    """`allowed_tools`: those of `tools`, as `mode` says."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(Body, extra="ignore"):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    given: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(Body, extra="ignore"):
    format: TextFormat | None = None


KEPT_NOWHERE = only(
    Any, None, "this server keeps no responses; send the whole conversation as input"
)
Unread: Any = base_of(
    "Unread",
    {
        "max_tool_calls": (int, "no effect: it counts calls of OpenAI's own tools"),
        "context_management": (Annotated[list[Any], Field(max_length=0)], None),
        "prompt": (NoneType, None),
        "truncation": (Literal["auto", "disabled"], "no effect: what is too long is refused"),
        "background": (
            only(bool, False, "this server keeps no responses; ask for a stream"),
            "accepted: false",
        ),
        "previous_response_id": (KEPT_NOWHERE, None),
        "conversation": (KEPT_NOWHERE, None),
    },
)


class ResponsesRequest(WithTools, Declared, CommonFields, Unread):
    """POST /v1/responses. Fields of sampling that OpenAI has not are those of /v1/chat/completions."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: list[FunctionOffered] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | ToolNamed | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: dict[str, Any] | None = Field(
        None, description="`effort` none switches thinking off, in models that can"
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    policy: Literal["plain"] | None = None


NAMES = {
    "messages": "input",
    "max_new_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "response_format": "text",
}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the request as a chat; RequestError names an item that is not supported."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items: Any = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    _Conversation(messages).add_all(items)
    tools: list[Any] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    choice: Any = body.tool_choice
    if isinstance(choice, ToolNamed) and choice.type == "allowed_tools":
        tools = [
            tool
            for tool in tools
            if tool["function"]["name"] in [tool.get("name") for tool in choice.tools or ()]
        ]
        choice = choice.mode
    elif isinstance(choice, ToolNamed):
        choice = {"type": "function", "function": {"name": choice.name}}
    logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    fields = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text),
        "stop": body.stop,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs if logprobs else None,
        "stream": body.stream,
        "reasoning_effort": (body.reasoning or {}).get("effort") or body.reasoning_effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "policy": body.policy,
    }
    return ChatRequest.model_validate(declared_values(body) | fields)


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    if text.format.type != "json_schema":
        return {"type": text.format.type}
    return {
        "type": "json_schema",
        "json_schema": {
            "name": text.format.name or "answer",
            "schema": text.format.given or {},
            "strict": text.format.strict,
        },
    }


class _Conversation:
    """Makes messages of items: calls and thoughts of the model belong to one message of it."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        # the assistant's message that further items belong to
        self._open: dict[str, Any] | None = None

    def add_all(self, items: Sequence[dict[str, Any]]) -> None:
        reads = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._result,
            "reasoning": self._reasoning,
        }
        for at, item in enumerate(items):
            place = f"input[{at}]"
            kind = item.get("type", "message")
            reason = "; this server keeps no items" if kind == "item_reference" else ""
            message = f"got {kind!r:.60}, accepted {', '.join(reads)}{reason}"
            require_request(f"{place}.type", message, kind in [*reads])
            reads[kind](place, item)

    def _message(self, place: str, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        require_request(
            f"{place}.role",
            f"got {role!r:.60}, accepted system, developer, user, assistant",
            role in ("system", "developer", "user", "assistant"),
        )
        text = text_at(f"{place}.content", content, TEXT_PARTS, "parts of text")
        if (
            role == "assistant"
            and self._open is not None
            and not self._open["content"]
            and "tool_calls" not in self._open
        ):
            self._open["content"] = text
            return
        self._messages.append({"role": role, "content": text})
        self._open = self._messages[-1] if role == "assistant" else None

    def _call(self, place: str, item: dict[str, Any]) -> None:
        name, arguments = item.get("name"), item.get("arguments", "")
        require_request(
            f"{place}.name",
            "accepted a name, and the text of a JSON object as arguments",
            isinstance(name, str) and isinstance(arguments, str | dict),
        )
        self._own().setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}
        )

    def _result(self, place: str, item: dict[str, Any]) -> None:
        self._open = None
        self._messages.append(
            {
                "role": "tool",
                "content": text_at(
                    f"{place}.output", item.get("output"), TEXT_PARTS, "parts of text"
                ),
            }
            | {"tool_call_id": item.get("call_id")}
        )

    def _reasoning(self, place: str, item: dict[str, Any]) -> None:
        parts = item.get("content") or ()
        text = "".join(
            part["text"]
            for part in parts
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
        if text:
            self._open = None
            self._own()["reasoning_content"] = text

    def _own(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            self._messages.append(self._open)
        return self._open


# ---- answers


_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_TOLD = {
    "message": "output_text",
    "function_call": "function_call_arguments",
    "reasoning": "reasoning_text",
}


class _Item:
    """One item of an answer, which grows."""

    def __init__(self, place: int, kind: str, call: ToolCall | None = None) -> None:
        self.place, self.kind, self.told = place, kind, _TOLD[kind]
        self.id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self.text = ""
        self.rated: list[Any] = []
        self.call = call
        self.status = "completed"
        self.part = {
            "message": self._text_part,
            "reasoning": lambda text: {"type": "reasoning_text", "text": text},
        }.get(kind)

    def add(self, part: Part) -> str:
        """Take a part; return the text by which this has grown."""
        delta = (
            part
            if isinstance(part, str)
            else part.text
            if isinstance(part, Thought)
            else part.arguments
        )
        self.text += delta
        return delta

    @property
    def where(self) -> dict[str, Any]:
        index = {} if self.part is None else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.place} | index

    @property
    def done(self) -> dict[str, Any]:
        return self.shape(self.status, self.text)

    def _text_part(self, text: str) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.rated if text else [],
        }

    def shape(self, status: str, text: str | None = None) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            call = self.call
            return (
                item
                | ({} if call is None else {"call_id": call.id, "name": call.name})
                | {"arguments": text or ""}
            )
        assert self.part is not None
        content: dict[str, Any] = {"content": [] if text is None else [self.part(text)]}
        role: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | content | role


class ResponsesReply(OneReply):
    """One response, whose items are thoughts, a message, and calls of functions."""

    def __init__(
        self, body: ResponsesRequest, request: Sampling, model: str, tokenizer: Any
    ) -> None:
        super().__init__(body, request, model, tokenizer)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._count = 0

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        answer = answers[0]
        for part in self.parts.of(answer) or [""]:
            self._item_for(part)[0].add(part)
        for item in self._items:
            item.rated = self.rated(answer.logprobs) if item.kind == "message" else []
        self._items[-1].status = self._status(answer)
        return self._response(self._status(answer), answer)

    def begin(self, place: int, answer: Completion) -> Iterator[bytes]:
        yield from super().begin(place, answer)
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", None))

    def end(self, place: int, answer: Completion) -> Iterator[bytes]:
        parts = self.parts.end(answer.reason)
        yield from self.told(parts if parts or self._items else [""], [])
        status = self._status(answer)
        if self._items:
            self._items[-1].status = status
            yield from self._close(self._items[-1])
        yield self._event(f"response.{status}", response=self._response(status, answer))

    def failed(self, problem: RequestError) -> bytes:
        response = self._response("failed", None)
        kind = "server_error" if problem.status >= 500 else "invalid_prompt"
        code = problem.code if problem.code == "context_length_exceeded" else kind
        response["error"] = {"code": code, "message": str(problem)}
        return self._event("response.failed", response=response)

    def told(self, parts: Sequence[Part], rated: list[Any]) -> Iterator[bytes]:
        for part in parts:
            item, new = self._item_for(part)
            if new:
                if len(self._items) > 1:
                    yield from self._close(self._items[-2])
                yield self._event(
                    "response.output_item.added",
                    output_index=item.place,
                    item=item.shape("in_progress"),
                )
                if item.part is not None:
                    yield self._event(
                        "response.content_part.added", **item.where, part=item.part("")
                    )
            delta = item.add(part)
            logprobs = {}
            if item.kind == "message":
                logprobs = {"logprobs": rated}
                item.rated, rated = item.rated + rated, []
            yield self._event(f"response.{item.told}.delta", **item.where, delta=delta, **logprobs)

    def _close(self, item: _Item) -> Iterator[bytes]:
        if item.part is None:
            yield self._event(
                f"response.{item.told}.done",
                **item.where,
                name=item.done["name"],
                arguments=item.text,
            )
        else:
            logprobs = {"logprobs": item.rated} if item.kind == "message" else {}
            yield self._event(
                f"response.{item.told}.done", **item.where, text=item.text, **logprobs
            )
            yield self._event("response.content_part.done", **item.where, part=item.part(item.text))
        yield self._event("response.output_item.done", output_index=item.place, item=item.done)

    def _item_for(self, part: Part) -> tuple[_Item, bool]:
        """Return the item that a part belongs to, and whether it is a new one."""
        kind = {ToolCall: "function_call", Thought: "reasoning"}.get(type(part), "message")
        if self._items and kind == self._items[-1].kind != "function_call":
            return self._items[-1], False
        self._items.append(
            _Item(len(self._items), kind, part if isinstance(part, ToolCall) else None)
        )
        return self._items[-1], True

    def _status(self, answer: Completion) -> str:
        return "incomplete" if answer.reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._count} | fields
        self._count += 1
        return sse(body, kind)

    def _response(self, status: str, answer: Completion | None) -> dict[str, Any]:
        body, usage = self.body, None
        if answer is not None:
            read, written = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
            usage = {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens": written,
                "output_tokens_details": {
                    "reasoning_tokens": thought_tokens(answer.token_ids, self.tokenizer)
                },
                "total_tokens": read + written,
            }
        ended = {} if answer is None else {"timings": answer.timings, "metrics": answer.metrics}
        text = body.text or TextConfig()
        return {
            **self.notes,
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [item.done for item in self._items] if answer is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {
                "format": text.format.model_dump(by_alias=True, exclude_none=True)
                if text.format
                else {"type": "text"}
            },
            "tool_choice": _dumped(body.tool_choice or "auto"),
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
            **ended,
        }


def _dumped(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value

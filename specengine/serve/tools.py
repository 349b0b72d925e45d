"""Tool calls as Hermes and Qwen models write them: `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from specengine.serve.problems import Problem
from specengine.serve.text import held_back

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_CALLS = re.compile(f"{OPENING}(.*?){CLOSING}", re.DOTALL)
_PROBE = {"name": "probe", "arguments": {"of": "calls"}}


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @classmethod
    def parse(cls, text: str) -> ToolCall | None:
        """What stands between the tags; None where it is no call."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        return cls(call["name"], json.dumps(arguments, ensure_ascii=False))


def require_support(tokenizer: Any) -> None:
    """Raise Problem where the chat template does not take tools, or writes calls in another way than is read here."""
    if not getattr(tokenizer, "chat_template", None):
        raise Problem(400, "tools: this model has no chat template", "tools", "unsupported_field")
    user = {"role": "user", "content": "Hello"}
    function = {"name": "probe", "description": "A probe", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    call = {"id": "call_0", "type": "function", "function": _PROBE}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        without = tokenizer.apply_chat_template([user], tokenize=False)
        with_tools = tokenizer.apply_chat_template([user], tools=[tool], tokenize=False)
        called = tokenizer.apply_chat_template([user, said], tokenize=False)
    except Exception as error:  # a template raises what it likes
        text = " ".join(str(error).split())
        raise Problem(400, f"tools: the chat template does not take them ({text:.200})", "tools") from error
    if without == with_tools:
        raise Problem(400, "tools: this model's chat template does not take them", "tools", "unsupported_field")
    if not any((found := ToolCall.parse(text)) and found.name == "probe" for text in _CALLS.findall(called)):
        message = f"tools: this model's calls are written otherwise than {OPENING}JSON{CLOSING}, which is what is read"
        raise Problem(400, message, "tools", "unsupported_field")


class ToolReader:
    """Splits a growing answer into text and calls. What only looks like a call stays text."""

    def __init__(self) -> None:
        self._rest = ""
        self.found = 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._rest += text
        parts: list[str | ToolCall] = []
        while True:
            start = self._rest.find(OPENING)
            if start < 0:
                keep = held_back(self._rest, [OPENING])
                self._text(parts, self._rest[: len(self._rest) - keep])
                self._rest = self._rest[len(self._rest) - keep :]
                return parts
            self._text(parts, self._rest[:start])
            self._rest = self._rest[start:]
            end = self._rest.find(CLOSING)
            if end < 0:
                return parts
            whole, self._rest = self._rest[: end + len(CLOSING)], self._rest[end + len(CLOSING) :]
            call = ToolCall.parse(whole[len(OPENING) : -len(CLOSING)])
            if call is None:
                self._text(parts, whole)
            else:
                self.found += 1
                parts.append(call)

    def end(self) -> list[str | ToolCall]:
        """What was held back: a call that was begun and not ended is text."""
        parts: list[str | ToolCall] = []
        self._text(parts, self._rest)
        self._rest = ""
        return parts

    def _text(self, parts: list[str | ToolCall], text: str) -> None:
        if self.found:
            text = text if text.strip() else ""  # line breaks between calls
        if text:
            parts.append(text)

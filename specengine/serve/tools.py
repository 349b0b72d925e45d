"""Tool calls in the answers of models, each kind of which writes them in its own way."""

from __future__ import annotations

from typing import Any

from specengine.serve.problems import Problem
from specengine.serve.text import held_back
from specengine.serve.tool_formats import FORMATS, Format, Llama, Schemas, ToolCall

_PROBE = {"name": "probe", "arguments": {"of": "calls"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe",
        "parameters": {"type": "object", "properties": {"of": {"type": "string", "description": "What"}}},
    },
}
_USER = {"role": "user", "content": "Hello"}
_SAID = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callprobe", "type": "function", "function": _PROBE}],
}


def format_of(tokenizer: Any) -> Format:
    """How the chat template writes calls: the one way that reads back the call of a conversation that it writes.

    Problem where it does not take tools, or writes calls in a way that is not read here.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise Problem(400, "tools: this model has no chat template", "tools", "unsupported_field")

    def written(messages: list[dict[str, Any]], tools: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    try:
        without, with_tools = written([_USER], None), written([_USER], [_TOOL])
        called = written([_USER, _SAID], [_TOOL])
    except Exception as error:  # a template raises what it likes
        text = " ".join(str(error).split())
        raise Problem(400, f"tools: the chat template does not take them ({text:.200})", "tools") from error
    if without == with_tools:
        raise Problem(400, "tools: this model's chat template does not take them", "tools", "unsupported_field")
    same = next((at for at, (a, b) in enumerate(zip(called, with_tools, strict=False)) if a != b), len(with_tools))
    for known in FORMATS:
        if _reads(known, called[same:], str(tokenizer.get_chat_template(tools=[_TOOL]))):
            return known
    titles = ", ".join(known.title for known in FORMATS)
    message = f"tools: this model's calls are written in another way than those that are read here: {titles}"
    raise Problem(400, message, "tools", "unsupported_field")


def _reads(known: Format, text: str, template: str) -> bool:
    if isinstance(known, Llama):
        if "ipython" not in template:
            return False  # without a mark of its own it would be found in many others
        text = text[max(text.find("{"), 0) :]
    reader = ToolReader(known, {"probe": _TOOL["function"]})
    parts = reader.push(text) + reader.end()
    return [part.name for part in parts if isinstance(part, ToolCall)] == ["probe"]


def marks(known: Format, tokenizer: Any) -> list[int]:
    """Special tokens that calls are marked with, whose text an answer must therefore show."""
    special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return [token for token, name in special if str(name) in known.marks]


class ToolReader:
    """Splits a growing answer into text and calls. What only looks like a call stays text."""

    def __init__(self, known: Format, schemas: Schemas) -> None:
        self.format, self.schemas = known, schemas
        self._rest = ""
        self._spoke = False  # before a call
        self.found = 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._rest += text
        parts: list[str | ToolCall] = []
        while self._rest:
            start, opening = self._opening()
            self._text(parts, start)
            if not opening:
                return parts
            try:
                read = self.format.read(self._rest, self.schemas)
            except ValueError:
                self._text(parts, len(opening))
                continue
            if read is None:
                return parts
            if not (read.calls or self.found):
                self._text(parts, len(opening))
                continue
            self._rest = self._rest[read.length :]
            self.found += len(read.calls)
            parts += read.calls
        return parts

    def end(self) -> list[str | ToolCall]:
        """What was held back: a call that was begun and not ended is text."""
        parts: list[str | ToolCall] = []
        self._text(parts, len(self._rest))
        return parts

    def _opening(self) -> tuple[int, str]:
        """Where a call may begin and with what; where what may become one begins, and nothing."""
        if self.format.bare and not self._spoke:
            begun = self._rest.lstrip("; \n" if self.found else " \n")
            if not begun:
                return 0, ""
            if begun[0] == "{":
                return 0, self._rest[: len(self._rest) - len(begun) + 1]
        found = [(self._rest.find(mark), mark) for mark in self.format.openings if mark in self._rest]
        if found:
            return min(found)
        return len(self._rest) - held_back(self._rest, self.format.openings), ""

    def _text(self, parts: list[str | ToolCall], length: int) -> None:
        text, self._rest = self._rest[:length], self._rest[length:]
        self._spoke = self._spoke or bool(text.strip())
        if self.found:
            text = text if text.strip() else ""  # line breaks between calls
        if text:
            parts.append(text)

"""Formats in which models write tool calls: one class per format, which reads them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# For requests with tools, of a model of ChatML's turns whose own chat template takes none; calls are Hermes' format.
TEMPLATE = (
    "{% set system = 'You are a helpful assistant.' %}{% set turns = messages %}"
    "{% if messages and messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set turns = messages[1:] %}{% endif %}"
    "<|im_start|>system\n{{ system }}"
    "{% if tools %}{{ '\n\n' }}You can call these tools. Each line describes one, in JSON:\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}\n"
    "To call a tool, answer with its name and its arguments, and nothing else:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {"NAME": VALUE}}\n</tool_call>{% endif %}<|im_end|>\n'
    "{% for turn in turns %}{% if turn.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ turn.content }}\n</tool_response>"
    "{% else %}<|im_start|>{{ turn.role }}\n{{ turn.content or '' }}"
    "{% for call in turn.tool_calls or [] %}{{ '\n' if turn.content or not loop.first else '' }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Schemas = Mapping[str, Any]  # of the parameters, by the names of the tools that were offered


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Read(NamedTuple):
    """Calls, and how many characters they took."""

    calls: list[ToolCall]
    length: int


class Format:
    """One way of writing calls; this one has none, so that everything is text.

    title     for people
    openings  where a call may begin; what they stand in but is none is text
    inner     what else marks calls
    bare      a call may also begin an answer without any of them
    """

    title: str
    openings: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare = False

    @property
    def marks(self) -> tuple[str, ...]:
        return self.openings + self.inner

    def read(self, text: str, schemas: Schemas) -> Read | None:
        """Return the calls at the start of `text`, which begins with an opening; None while more text is needed.

        ValueError where it begins with none.
        """
        raise NotImplementedError


class Hermes(Format):
    """Hermes, Qwen2.5, Qwen3: `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`."""

    title = "<tool_call>JSON</tool_call>"
    openings = (OPENING,)

    def read(self, text: str, schemas: Schemas) -> Read | None:
        end = json_end(text, len(OPENING))
        rest = "" if end is None else text[end:].lstrip()
        if end is None or (len(rest) < len(CLOSING) and CLOSING.startswith(rest)):
            return None
        if not rest.startswith(CLOSING):
            raise ValueError("something follows the call")
        return Read(
            [call_of(loaded(text[len(OPENING) : end]))], len(text) - len(rest) + len(CLOSING)
        )


class Coder(Format):
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>` value `</parameter></function></tool_call>`.

    Whether a value is a string or JSON is the schema's to say. Answers may leave the outer tags out.
    """

    title = "<tool_call><function=NAME><parameter=KEY>"
    openings = (OPENING, "<function=", CLOSING)
    _FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>\s*", re.DOTALL)

    def read(self, text: str, schemas: Schemas) -> Read | None:
        if text.startswith(CLOSING):
            return Read([], len(CLOSING))  # of a call whose opening was left out
        wrapped = text.startswith(OPENING)
        if wrapped:
            inner = text[len(OPENING) :].lstrip()
            if not (inner.startswith("<function=") or "<function=".startswith(inner)):
                raise ValueError("no function follows")
        closing = CLOSING if wrapped else "</function>"
        end = text.find(closing)
        if end < 0:
            return None
        whole = self._FUNCTION.fullmatch(text[:end] if wrapped else text[: end + len(closing)])
        if whole is None:
            raise ValueError("no call")
        return Read([self._call(whole[1], whole[2], schemas)], end + len(closing))

    def _call(self, name: str, text: str, schemas: Schemas) -> ToolCall:
        schema = schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        arguments, at = {}, 0
        while text[at:].strip():
            found = self._PARAMETER.match(text, at)
            if found is None:
                raise ValueError("something stands between parameters")
            value = found[2].removeprefix("\n").removesuffix("\n")
            arguments[found[1]] = typed(
                value, properties.get(found[1]) if isinstance(properties, Mapping) else None
            )
            at = found.end()
        return call_of({"name": name, "arguments": arguments})


class Mistral(Format):
    """`[TOOL_CALLS]` and a JSON list of calls, or a name and a JSON object with `[ARGS]` or nothing between them."""

    title = "[TOOL_CALLS]"
    openings = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    _NAME = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")
    _MAX_NAME = 256

    def read(self, text: str, schemas: Schemas) -> Read | None:
        body = text[len(self.openings[0]) :]
        begun = len(text) - len(body.lstrip())
        if begun == len(text):
            return None
        if text[begun] == "[":
            end = json_end(text, begun)
            if end is None:
                return None
            return Read([self._named(call_of(entry)) for entry in loaded(text[begun:end])], end)
        name = self._NAME.match(body)
        if name is None:
            if "{" not in body and len(body) < self._MAX_NAME:
                return None
            raise ValueError("no name follows")
        start = len(text) - len(body) + name.end()
        end = json_end(text, start)
        if end is None:
            return None
        return Read(
            [self._named(call_of({"name": name[1], "arguments": loaded(text[start:end])}))], end
        )

    def _named(self, call: ToolCall) -> ToolCall:
        return ToolCall(
            call.name, call.arguments, uuid.uuid4().hex[:9]
        )  # what its templates take back


class Llama(Format):
    """Llama 3.x: {"name": ..., "parameters": {...}} as the whole answer, perhaps after `<|python_tag|>`."""

    title = '{"name": ..., "parameters": ...} (Llama 3)'
    openings = ("<|python_tag|>",)
    bare = True

    def read(self, text: str, schemas: Schemas) -> Read | None:
        tagged = text.startswith(self.openings[0])
        start = len(self.openings[0]) if tagged else len(text) - len(text.lstrip("; \n"))
        end = json_end(text, start)
        if end is None:
            return None
        loaded_call = loaded(text[start:end])
        call = call_of(
            loaded_call,
            "parameters"
            if isinstance(loaded_call, dict) and "parameters" in loaded_call
            else "arguments",
        )
        if not tagged and call.name not in schemas:
            raise ValueError("no tool has this name")
        return Read([call], end)


FORMATS: tuple[Format, ...] = (Hermes(), Coder(), Mistral(), Llama())

_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^"{}\[\]]+', re.DOTALL)
_BETWEEN = re.compile(r"[-+.,:\s0-9a-zA-Z]*")


def json_end(text: str, start: int) -> int | None:
    """Return the end of the JSON object or list that begins at `start` or after blanks; None where it is not complete.

    ValueError where what stands there is none.
    """
    depth, at = 0, start + len(text[start:]) - len(text[start:].lstrip())
    if at < len(text) and text[at] not in "{[":
        raise ValueError("no object")
    while at < len(text):
        match = _STRUCTURE.match(text, at)
        if match is None:
            return None  # a string that goes on
        piece, at = match[0], match.end()
        if piece in ("{", "["):
            depth += 1
        elif piece in ("}", "]"):
            depth -= 1
            if not depth:
                return at
        elif piece[0] != '"' and not _BETWEEN.fullmatch(piece):
            raise ValueError("no JSON")
    return None


def loaded(text: str) -> Any:
    """Return the value of a JSON text; ValueError for other text, or for text too deep or too large."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error


def call_of(value: Any, arguments: str = "arguments") -> ToolCall:
    """Return the call that a parsed object describes; ValueError where it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("no name")
    values = value.get(arguments, {})
    if not isinstance(values, dict):
        raise ValueError("no arguments")
    try:
        return ToolCall(value["name"], json.dumps(values, ensure_ascii=False, allow_nan=False))
    except RecursionError as error:
        raise ValueError("too deep") from error


def typed(text: str, schema: Any) -> Any:
    """Return the value of a parameter that was written without quotes."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    if kind == "boolean" and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if text.strip() == "None":
        return None
    try:
        return loaded(text)
    except ValueError:
        return text

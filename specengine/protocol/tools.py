"""Tool calls in the answers of models, each kind of which writes them in its own way."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from specengine.errors import InputError
from specengine.protocol.problems import RequestError
from specengine.protocol.tool_formats import FORMATS, Format, Llama, Schemas, ToolCall
from specengine.request.templates import filled
from specengine.request.text import TextStream


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `marks`."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    ends = (
        count
        for count in range(longest, 0, -1)
        if any(mark.startswith(text[-count:]) for mark in marks)
    )
    return next(ends, 0)


class StopText:
    """Takes stop strings out of a growing answer that ends with the first of them, as OpenAI's clients expect."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = list(stops)
        self._rest = ""
        self._sent = 0  # characters before the rest
        self.found: str | None = None

    def push(self, text: str, passed: int = 0) -> str:
        """Return the text that can be sent; passed: characters of the answer in which no stop string counts."""
        if self.found is not None:
            return ""
        self._rest += text
        matches = [
            (self._rest.find(stop, max(passed - self._sent - len(stop) + 1, 0)), stop)
            for stop in self.stops
        ]
        if places := [(place, stop) for place, stop in matches if place >= 0]:
            end, self.found = min(places)
            sent, self._rest = self._rest[:end], ""
            return sent
        keep = held_back(self._rest, self.stops)
        sent, self._rest = (
            self._rest[: len(self._rest) - keep],
            self._rest[len(self._rest) - keep :],
        )
        self._sent += len(sent)
        return sent

    def end(self) -> str:
        """Return the text that was held back from an answer that ended differently."""
        rest, self._rest = self._rest, ""
        return rest


_PROBE = {"name": "probe", "arguments": {"of": "calls"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "string", "description": "What"}},
        },
    },
}
_USER = {"role": "user", "content": "Hello"}
_SAID = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callprobe", "type": "function", "function": _PROBE}],
}


def format_of(tokenizer: Any) -> Format:
    """Return the format of the template's calls: the one that reads back a call which the template has written.

    RequestError where it does not take tools, or writes calls in a way that is not read here.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            400, "tools: this model has no chat template", "tools", "unsupported_field"
        )

    try:
        without, with_tools = (
            filled(tokenizer, [_USER]),
            filled(tokenizer, [_USER], [_TOOL], "tools"),
        )
        called = filled(tokenizer, [_USER, _SAID], [_TOOL], "tools")
    except InputError as error:
        raise RequestError(400, str(error), "tools") from error
    if without == with_tools:
        raise RequestError(
            400,
            "tools: this model's chat template does not take them",
            "tools",
            "unsupported_field",
        )
    same = next(
        (at for at, (a, b) in enumerate(zip(called, with_tools, strict=False)) if a != b),
        len(with_tools),
    )
    for candidate in FORMATS:
        if _reads(candidate, called[same:], str(tokenizer.get_chat_template(tools=[_TOOL]))):
            return candidate
    message = "tools: the format of this model's calls is not supported; supported: " + ", ".join(
        candidate.title for candidate in FORMATS
    )
    raise RequestError(400, message, "tools", "unsupported_field")


def _reads(tool_format: Format, text: str, template: str) -> bool:
    if isinstance(tool_format, Llama):
        if "ipython" not in template:
            return False  # without a mark of its own it would be found in many others
        text = text[max(text.find("{"), 0) : text.rfind("}") + 1]
    reader = ToolReader(tool_format, {"probe": _TOOL["function"]})
    return [
        part.name for part in (reader.push(text) + reader.end()) if isinstance(part, ToolCall)
    ] == ["probe"]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameters of the offered tools, by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}


def tools_for(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any) -> Any:
    """Return the tools to fill the template with: `tools`, or [] for a conversation whose calls it else leaves out.

    [] selects a template for tools that stands next to the plain one: clients leave `tools` out after a tool's answer.
    RequestError for calls of tools, and their results, that no template of the tokenizer writes.
    """
    called = next(
        (place for place, message in enumerate(messages) if message.get("tool_calls")), None
    )
    result = next(
        (place for place, message in enumerate(messages) if message["role"] == "tool"), None
    )
    template = getattr(tokenizer, "chat_template", None)
    if (called is None and result is None) or not template:
        return tools

    def same(offered: Any, *conversations: list[dict[str, Any]]) -> bool:
        try:
            texts = [filled(tokenizer, each, offered) for each in conversations]
        except InputError:  # what the template says of the messages themselves comes later
            return False
        return texts[0] == texts[1]

    for given in (tools, []) if tools is None and isinstance(template, dict) else (tools,):
        answer = {"role": "tool", "tool_call_id": "callprobe", "name": "probe"}
        if called is not None and same(
            given, [_USER, _SAID], [_USER, {"role": "assistant", "content": ""}]
        ):
            place, kind = f"messages[{called}].tool_calls", "calls"
        elif result is not None and same(
            given,
            [_USER, _SAID, answer | {"content": "one"}],
            [_USER, _SAID, answer | {"content": "two"}],
        ):
            place, kind = f"messages[{result}].role", "results"
        else:
            return given
    raise RequestError(
        400, f"{place}: this model's chat template does not write {kind} of tools", place
    )


def special_tokens(tokenizer: Any, marks: Sequence[str]) -> list[int]:
    """Return the marks that are special tokens, so that an answer must show their text."""
    return [
        token
        for token, name in zip(
            getattr(tokenizer, "all_special_ids", ()),
            getattr(tokenizer, "all_special_tokens", ()),
            strict=False,
        )
        if str(name) in marks
    ]


class ToolReader:
    """Splits a growing answer into text and calls. What only looks like a call stays text.

    most    calls that are told; those after them are left out
    forced  whether there is nothing but calls, so that what stands at the end is the beginning of one
    """

    def __init__(
        self,
        tool_format: Format,
        schemas: Schemas,
        most: int = sys.maxsize,
        *,
        forced: bool = False,
    ) -> None:
        self.format, self.schemas, self.most, self.forced = tool_format, schemas, most, forced
        self._rest = ""
        self._spoke = False  # before a call
        self._fences = 0  # in the text, of which every second one ends a block of code
        self.found = 0

    def push(self, text: str, reason: str | None = None) -> list[str | ToolCall]:
        """Return the parts that are certain; reason: why the answer ends here, None while it goes on."""
        self._rest += text
        parts: list[str | ToolCall] = []
        while self._rest:
            start, opening = self._opening()
            self._text(parts, start)
            if not opening:
                return parts
            try:
                if self._fences % 2 and opening.startswith("```"):
                    raise ValueError("the end of a block of code")
                read = self.format.read(self._rest, self.schemas, reason)
            except ValueError:
                self._text(parts, len(opening))
                continue
            if read is None:
                return parts
            if not (read.calls or self.found or reason):
                self._text(parts, len(opening))
                continue
            self._rest = self._rest[read.length :]
            calls = read.calls[: self.most - self.found]
            self.found += len(calls)
            parts += calls
        return parts

    def end(self, reason: str | None = "stop") -> list[str | ToolCall]:
        """Return what was held back of an answer that ended for this reason."""
        parts = self.push("", reason)
        if not self.forced:
            self._text(parts, len(self._rest))
        return parts

    def _opening(self) -> tuple[int, str]:
        """Return the place and mark of a call's beginning; with an empty mark, the place of a possible one."""
        if self.format.bare and not self._spoke:
            begun = self._rest.lstrip("; \n" if self.found else " \n")
            if not begun:
                return 0, ""
            if begun[0] in "{[" and not any(
                mark.startswith(begun) or begun.startswith(mark) for mark in self.format.openings
            ):
                return 0, self._rest[: len(self._rest) - len(begun) + 1]
        places = [
            (self._rest.find(mark), mark) for mark in self.format.openings if mark in self._rest
        ]
        if places:
            return min(places)
        return len(self._rest) - held_back(self._rest, self.format.openings), ""

    def _text(self, parts: list[str | ToolCall], length: int) -> None:
        text, self._rest = self._rest[:length], self._rest[length:]
        self._spoke = self._spoke or bool(text.strip())
        self._fences += text.count("```")
        if text.strip() or (text and not self.found):  # without line breaks between calls
            parts.append(text)


class OneCall:
    """Ends an answer after its first call of a tool; one of transformers' stopping criteria, asked once a token."""

    def __init__(self, reader: ToolReader, decode: Callable[[list[int]], str]) -> None:
        self._reader, self._texts = reader, TextStream(decode)

    def __call__(self, ids: Tensor, scores: Any, **options: Any) -> bool:
        self._reader.push(self._texts.push([int(ids[0, -1])]))
        ahead = copy.copy(self._reader)
        ahead.push(self._texts.rest)
        return ahead.found > 0

"""Tool calls in the answers of models: one class per format in which models write them, and their reader."""

import contextlib
import copy
import json
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json
from torch import Tensor

from specengine.errors import InputError
from specengine.protocol.problems import RequestError, require_request
from specengine.request.prompts import filled
from specengine.request.text import TextStream

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
    """`arguments` is the text of a JSON object; of a call that was cut (not `whole`) its beginning, without an end."""

    name: str
    arguments: str
    # as long as Mistral's templates take
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])
    whole: bool = True

    @property
    def values(self) -> Any:
        """Return the arguments as an object, of a call that was cut those that are complete."""
        return parsed(self.arguments, not self.whole)

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
    bare      a call may also begin an answer without any of them
    """

    title: str
    openings: tuple[str, ...] = ()
    bare = False

    def read(self, text: str, schemas: Schemas, reason: str | None = None) -> Read | None:
        """Return the calls at the start of `text`, which begins with an opening; None while more text is needed.

        reason: why the answer ends with this text (stop or length), None while it goes on. One that ends by its length
        may end within a call: with a name it is read as not whole, without one it is left out.
        ValueError for a text that is no call of a tool in `schemas`.
        """
        raise NotImplementedError


class Marked(Format):
    """JSON after a mark: the object of a call, or several, which may be a list.

    closings  what ends the calls of each opening; empty: they end by themselves, and bare ones with the answer
    strict    whether objects may have no other keys than those of calls
    """

    closings: Mapping[str, str]
    strict = True
    _BEGUN = re.compile(r"[;\s]*(\[?)\s*")
    _BETWEEN = re.compile(r"\s*[;,]\s*|\s*\n\s*")

    def read(self, text: str, schemas: Schemas, reason: str | None = None) -> Read | None:
        opening = next((each for each in self.openings if text.startswith(each)), "")
        closing = self.closings[opening]
        begun = self._BEGUN.match(text, len(opening))
        listed = begun is not None and bool(begun[1])
        calls: list[ToolCall] = []
        while begun is not None:
            end = json_end(text, start := begun.end())
            if end is None:
                calls += begun_call(text[start:], schemas, self.strict)
                begins = calls or opening.startswith(("<", "[")) or '"name"' in text[start:]
                return Read(calls, len(text)) if reason == "length" and begins else None
            calls.append(call_of(parsed(text[start:end]), schemas, self.strict))
            rest = text[end:].lstrip()
            if listed and rest.startswith("]"):
                listed = False
                rest = rest[1:].lstrip()
            if (closing or (opening and not listed)) and rest.startswith(closing):
                return Read(calls, len(text) - len(rest) + len(closing))
            if closing.startswith(rest):
                return None if reason is None else Read(calls, len(text))
            begun = self._BETWEEN.match(text, end)
        raise ValueError("something follows the call")


class Hermes(Marked):
    """Hermes, Qwen2.5, Qwen3: `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`."""

    title = "<tool_call>JSON</tool_call>"
    openings = (OPENING,)
    closings: Mapping[str, str] = {OPENING: CLOSING}
    strict = False


class Coder(Format):
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>` value `</parameter></function></tool_call>`.

    Whether a value is a string or JSON is the schema's to say. Answers may leave the outer tags out, and may have a
    JSON object in the place of the parameters.
    """

    title = "<tool_call><function=NAME><parameter=KEY>"
    openings = (OPENING, "<function=", CLOSING)
    _BEGUN = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>\s*")
    _END = "</function>"
    _PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>\s*", re.DOTALL)

    def read(self, text: str, schemas: Schemas, reason: str | None = None) -> Read | None:
        if text.startswith(CLOSING):
            return Read([], len(CLOSING))  # of a call whose opening was left out
        inner = text.removeprefix(OPENING).lstrip()
        if not (inner.startswith("<function=") or "<function=".startswith(inner)):
            raise ValueError("no function follows")
        begun = self._BEGUN.match(text)
        if begun is not None and begun[1] not in schemas:
            raise ValueError("no tool has this name")
        wrapped = text.startswith(OPENING) and (reason is None or CLOSING in text)
        closing = CLOSING if wrapped else self._END
        end = text.find(closing)
        if end < 0:
            if reason != "length":
                return None
            return Read(
                [] if begun is None else [self._call(text, begun, schemas, cut=True)], len(text)
            )
        end += len(closing)
        whole = text[:end].removesuffix(CLOSING).rstrip()
        if begun is None or not whole.endswith(self._END):
            raise ValueError("no call")
        return Read([self._call(whole.removesuffix(self._END), begun, schemas)], end)

    def _call(
        self, text: str, begun: re.Match[str], schemas: Schemas, cut: bool = False
    ) -> ToolCall:
        name, at = begun[1], begun.end()
        if text.startswith("{", at):
            call, end = call_before(name, text, at, schemas)
            if not cut and (end is None or text[end:].strip()):
                raise ValueError("no JSON")
            return call
        schema = schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        arguments = {}
        while text[at:].strip():
            parameter = self._PARAMETER.match(text, at)
            if parameter is None and cut:
                break
            if parameter is None:
                raise ValueError("something stands between parameters")
            value = parameter[2].removeprefix("\n").removesuffix("\n")
            arguments[parameter[1]] = typed(
                value, properties.get(parameter[1]) if isinstance(properties, Mapping) else None
            )
            at = parameter.end()
        return call_of({"name": name, "arguments": arguments}, schemas, whole=not cut)


class Mistral(Marked):
    """`[TOOL_CALLS]` and a JSON list of calls, or a name and a JSON object with `[ARGS]` or nothing between them."""

    title = "[TOOL_CALLS]"
    openings = ("[TOOL_CALLS]",)
    closings: Mapping[str, str] = {"[TOOL_CALLS]": ""}
    _NAME = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")
    _MAX_NAME = 256

    def read(self, text: str, schemas: Schemas, reason: str | None = None) -> Read | None:
        body = text.removeprefix(self.openings[0]).lstrip()
        named = body and body[0] not in "[{"
        return (self._named if named else super().read)(text, schemas, reason)

    def _named(self, text: str, schemas: Schemas, reason: str | None) -> Read | None:
        name = self._NAME.match(text, len(self.openings[0]))
        if name is None:
            if "{" in text or len(text) > self._MAX_NAME:
                raise ValueError("no name follows")
            return Read([], len(text)) if reason == "length" else None
        call, end = call_before(name[1], text, name.end(), schemas)
        if end is None and reason != "length":
            return None
        return Read([call], len(text) if end is None else end)


class Llama(Marked):
    """Llama 3.x: {"name": ..., "parameters": {...}} as the whole answer, perhaps after `<|python_tag|>`."""

    title = '{"name": ..., "parameters": ...} (Llama 3)'
    openings = ("<|python_tag|>",)
    closings: Mapping[str, str] = {"<|python_tag|>": "", "": ""}
    bare = True


class Fenced(Marked):
    """JSON in a fence or in other tags, as models write it whose template says `<tool_call>` (Qwen2.5-Coder)."""

    title = "```json"
    closings: Mapping[str, str] = {
        "```json": "```",
        "```tool_call": "```",
        "```\n": "```",
        "<tools>": "</tools>",
        "<function>": "</function>",
    }
    openings = tuple(closings)


FORMATS: tuple[Format, ...] = (Hermes(), Coder(), Mistral(), Llama(), Fenced())
OPENINGS = tuple(dict.fromkeys(mark for each in FORMATS for mark in each.openings))
MARKS = (*OPENINGS, "[ARGS]", "[CALL_ID]")


class Every(Format):
    """All formats, of which models write others than that of their template."""

    openings = OPENINGS
    bare = True

    def read(self, text: str, schemas: Schemas, reason: str | None = None) -> Read | None:
        reads = []
        for each in FORMATS:
            if each.bare or text.startswith(each.openings):
                with contextlib.suppress(ValueError):
                    reads.append(each.read(text, schemas, reason))
        if not reads:
            raise ValueError("no call")
        return next((read for read in reads if read is not None), None)


_DECODER = json.JSONDecoder()
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)("?)')


def json_end(text: str, start: int) -> int | None:
    """Return the end of the JSON value at `start`; None where there is none, or it is not complete."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def parsed(text: str, partial: Literal["trailing-strings"] | bool = False) -> Any:
    """Return the value of a JSON text; ValueError for other text, or for text too deep or too large.

    partial: the text may end too early; what is not complete is left out, but for strings with "trailing-strings"
    """
    return from_json(
        text.encode(errors="surrogatepass"), allow_inf_nan=False, allow_partial=partial
    )


def call_of(value: Any, schemas: Schemas, strict: bool = False, *, whole: bool = True) -> ToolCall:
    """Return the call that a parsed object describes; ValueError where it describes none of a tool that was offered.

    strict: refuse other keys than those of calls, such as definitions of tools have
    """
    if not isinstance(value, dict) or (strict and value.keys() - _KEYS):
        raise ValueError("no call")
    name = value.get("name")
    if not isinstance(name, str) or name not in schemas:
        raise ValueError("no tool has this name")
    values = value.get("arguments", value.get("parameters"))
    if isinstance(values, str):
        values = parsed(values or "{}")
    if not isinstance(values, dict | None):
        raise ValueError("no arguments")
    arguments = json.dumps(values or {}, ensure_ascii=False, allow_nan=False)
    return ToolCall(name, arguments if whole else arguments[:-1], whole=whole)


def call_before(name: str, text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int | None]:
    """Return the call of this name whose arguments stand at `start`, and their end; None for what is not complete.

    ValueError for arguments of other kinds, and names that were not offered.
    """
    end = json_end(text, start)
    return call_of(
        {"name": name, "arguments": parsed(text[start:end], end is None)},
        schemas,
        whole=end is not None,
    ), end


def begun_call(text: str, schemas: Schemas, strict: bool) -> list[ToolCall]:
    """Return the call that an object will be which is not complete, none before its name; ValueError as `call_of`."""
    first = _FIRST_KEY.match(text) if strict else None
    if first is not None and not any(
        key == first[1] if first[2] else key.startswith(first[1]) for key in _KEYS
    ):
        raise ValueError("no key of a call")
    longest = parsed(text or "{", "trailing-strings")
    name = longest.get("name", "") if isinstance(longest, dict) else None
    if not isinstance(name, str) or not any(each.startswith(name) for each in schemas):
        raise ValueError("no tool has this name")
    value = parsed(text or "{", True)
    return [call_of(value, schemas, strict, whole=False)] if "name" in value else []


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
        return parsed(text)
    except ValueError:
        return text


# ---- reading


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
    has_template = bool(getattr(tokenizer, "chat_template", None))
    require_request("tools", "this model has no chat template", has_template, "unsupported_field")
    try:
        without, with_tools = (
            filled(tokenizer, [_USER]),
            filled(tokenizer, [_USER], [_TOOL], "tools"),
        )
        called = filled(tokenizer, [_USER, _SAID], [_TOOL], "tools")
    except InputError as error:
        raise RequestError(400, str(error), "tools") from error
    require_request(
        "tools",
        "this model's chat template does not take them",
        without != with_tools,
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

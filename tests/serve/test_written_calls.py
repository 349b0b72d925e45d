"""Calls of tools in the forms that models write besides their template's, and calls that an answer's length cuts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from specengine.protocol.completion import Completion, Piece
from specengine.protocol.dialects import DIALECTS
from specengine.protocol.parts import AnswerParts, Part, calls_of, joined, text_of_parts
from specengine.protocol.requests import ChatRequest
from specengine.records import Stats
from tests.serve.saying import TEMPLATE, saying
from tests.toy import byte_tokenizer

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
NAMES = ("look_up", "look", "now")
FUNCTIONS = [{"name": name, "description": "Find", "parameters": SCHEMA} for name in NAMES]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
USER = {"role": "user", "content": "Hello"}

CALL = '{"name": "look_up", "arguments": {"text": "a {river}"}}'
OTHER = CALL.replace("look_up", "search")
READ = [("look_up", {"text": "a {river}"})]
FENCE = f"```json\n{CALL}\n```"
FORMS = {
    "fence": FENCE,
    "fence, indented": f"```json\n{json.dumps(json.loads(CALL), indent=2)}\n```\n",
    "fence without a language": f"```\n{CALL}\n```",
    "fence of calls": f"```tool_call\n{CALL}\n```",
    "fence without an end": f"```json\n{CALL}\n",
    "tools": f"<tools>\n{CALL}\n</tools>",
    "function": f"<function>{CALL}</function>",
    "function with its name, in tags": (
        '<tool_call>\n<function=look_up>\n{"text": "a {river}"}\n</function>\n</tool_call>'
    ),
    "function with its name": '<function=look_up>{"text": "a {river}"}</function>',
    "function with parameters": "<function=look_up>\n<parameter=text>\na {river}\n</parameter>\n</function>",
    "tool_call": f"<tool_call>\n{CALL}\n</tool_call>",
    "tool_call without an end": f"<tool_call>\n{CALL}",
    "python_tag": f"<|python_tag|>{CALL}",
    "Mistral's": f"[TOOL_CALLS] [{CALL}]",
    "bare": CALL,
    "bare, with blanks": f"\n {CALL}\n",
    "a list of one": f"[{CALL}]",
    "parameters": CALL.replace("arguments", "parameters"),
    "the name last": '{"parameters": {"text": "a {river}"}, "type": "function", "name": "look_up"}',
    "a string": json.dumps({"name": "look_up", "arguments": json.dumps({"text": "a {river}"})}),
}
SEVERAL = {
    "a list": f"[{CALL}, {CALL}]",
    "a list in a fence": f"```json\n[\n  {CALL},\n  {CALL}\n]\n```",
    "lines": f"{CALL}\n{CALL}",
    "lines in a fence": f"```json\n{CALL}\n{CALL}\n```",
    "lines in tags": f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>",
    "fences": f"{FENCE}\n\n{FENCE}",
    "forms": f"{FENCE}\n<tool_call>{CALL}</tool_call>",
}
DEFINITION = json.dumps(FUNCTIONS[0])
TEXTS = {
    "another name": OTHER,
    "another name in a fence": f"```json\n{OTHER}\n```",
    "another name in tags": f"<tools>{OTHER}</tools>",
    "another name in the template's tags": f"<tool_call>\n{OTHER}\n</tool_call>",
    "another function": '<function=search>{"text": "a"}</function>',
    "the beginning of a name": '{"name": "loo", "arguments": {}}',
    "one of another name": f"[{CALL}, {OTHER}]",
    "prose before": f"An object: {CALL}",
    "prose after": f"{CALL}\nThis would look it up.",
    "prose on a line before": f"This would look it up:\n{CALL}",
    "prose in the fence": f"```json\n{CALL}\nor so\n```",
    "another language": f"```python\ncall = {CALL}\n```",
    "a block before": f"```python\nlook_up()\n```\n{CALL}\n",
    "inline": f"Write `{CALL}`.",
    "JSON": '{"river": "Po", "name": "look_up"}',
    "a list": '["look_up", {"text": "a"}]',
    "a definition": f"```json\n{DEFINITION}\n```",
    "definitions as prompts have them": f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>",
    "arguments of another kind": '{"name": "look_up", "arguments": 3}',
    "arguments that are no JSON": '{"name": "look_up", "arguments": "a river"}',
    "no JSON": '{"name": "look_up", "arguments": {text: a}}',
    "no end": '```json\n{"name": "look_up", "arguments": {"text": "a',
    "tags": "A <tools> element holds <function> and ``` of <tool_call>.",
}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], "tools": TOOLS} | fields)


def parts_of(text: str, size: int, reason: str = "stop", **fields: Any) -> list[Part]:
    """Return the parts of an answer that comes in pieces of `size` characters."""
    parts = AnswerParts(request(**fields), byte_tokenizer(TEMPLATE))
    parts.begin([])
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    read = [part for piece in pieces for part in parts.push(piece)] + parts.end(reason)
    ended = parts.reason(Completion(Stats(), [], reason=reason))
    assert ended == ("tool_calls" if calls_of(read) and reason == "stop" else reason)
    return list(joined(read))


def values(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls_of(parts)]


SIZES = pytest.mark.parametrize("size", [1, 3, 8, 1000])


@SIZES
@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_any_form_is_read(form: str, size: int) -> None:
    parts = parts_of(FORMS[form], size)
    assert values(parts) == READ
    assert not text_of_parts(parts).strip()


@SIZES
@pytest.mark.parametrize("form", SEVERAL)
def test_several_calls_are_read(form: str, size: int) -> None:
    parts = parts_of(SEVERAL[form], size)
    assert values(parts) == READ * 2
    assert not text_of_parts(parts).strip()
    assert values(parts_of(SEVERAL[form], size, parallel_tool_calls=False)) == READ


@SIZES
@pytest.mark.parametrize("form", ["fence", "tools", "function", "tool_call"])
def test_words_around_a_form_with_marks_are_text(form: str, size: int) -> None:
    parts = parts_of(f"Let me look.\n{FORMS[form]}\nThere.", size)
    assert values(parts) == READ
    assert text_of_parts(parts).split() == ["Let", "me", "look.", "There."]


@SIZES
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_stays_text(text: str, size: int) -> None:
    assert parts_of(TEXTS[text], size) == [TEXTS[text]]


@SIZES
@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}], ids=str)
def test_without_an_offer_everything_is_text(fields: dict[str, Any], size: int) -> None:
    for text in (*FORMS.values(), *SEVERAL.values()):
        assert parts_of(text, size, **fields) == [text]


def test_text_is_held_back_only_as_long_as_it_may_become_a_call() -> None:
    """The text up to here is held back, and comes with the next character."""
    for held, next_one in (
        ("{", "x"),
        ('{"na', "t"),
        ('{"name": "lo', "a"),
        ('{"name": "look_up", "arguments": ', "3 "),
        ('[{"name": "look_up"}, ', "3"),
        ("```json\n{", "}"),
        ("```js", "x"),
        ("<tools>", "x"),
        ("<function=look_u", "b>"),
        (CALL, " is one"),
        (f"{CALL}\n", "So"),
        ("\n", "A"),
    ):
        parts = AnswerParts(request(), byte_tokenizer(TEMPLATE))
        parts.begin([])
        assert not [part for letter in held for part in parts.push(letter)], held
        assert text_of_parts(parts.push(next_one)) == held + next_one
        assert parts.push("y") == ["y"]


# ---- calls that are cut

CUTS = [
    *("tool_call", "fence", "tools", "function", "function with its name"),
    *("function with parameters", "python_tag", "Mistral's", "bare", "a list of one", "parameters"),
]


@pytest.mark.parametrize("form", CUTS)
def test_a_call_that_is_cut_is_told_as_far_as_it_came(form: str) -> None:
    """Its name once that is whole, and the beginning of its arguments, which no JSON parser takes for whole ones."""
    text = FORMS[form]
    named = text.index("look_up") + len("look_up") + 1
    for end in range(named, len(text)):
        for size in (1, 1000):
            parts = parts_of(text[:end], size, "length")
            assert not text_of_parts(parts), text[:end]
            call = calls_of(parts)[0]
            assert call.name == "look_up"
            assert call.values in ({}, {"text": "a {river}"})
            if not call.whole:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(call.arguments)


@pytest.mark.parametrize("form", ["fence", "tools", "tool_call", "bare", "function with its name"])
def test_a_call_that_is_cut_before_its_name_is_left_out(form: str) -> None:
    text = FORMS[form]
    for end in range(text.index("look_up"), text.index("look_up") + len("look_up")):
        assert parts_of(text[:end], 1, "length") == []


@pytest.mark.sliced(9)
@pytest.mark.parametrize("text", TEXTS)
def test_of_text_that_is_cut_nothing_is_lost(text: str) -> None:
    """Up to where a call of an offered tool has begun."""
    whole = TEXTS[text]
    for end in range(1, len(whole) + 1):
        for size in (1, 1000):
            parts = parts_of(whole[:end], size, "length")
            told = text_of_parts(parts)
            assert whole.startswith(told)
            rest = whole[len(told) : end].lstrip()
            assert not rest or '"name"' in rest or rest.startswith("<")


def test_calls_before_the_one_that_is_cut_are_told() -> None:
    text = f"[{CALL}, {CALL[:-9]}"
    parts = parts_of(text, 1, "length")
    assert [call.whole for call in calls_of(parts)] == [True, False]
    assert not text_of_parts(parts)


def test_a_forced_call_leaves_no_text_however_short() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        for end in range(1, len(FORMS["tool_call"])):
            parts = parts_of(FORMS["tool_call"][:end], 1, "length", tool_choice=choice)
            assert not text_of_parts(parts)


# ---- protocols


class Told(NamedTuple):
    """calls: names, and arguments as the client has them"""

    text: str
    calls: list[tuple[str, Any]]
    reason: str


class Chat:
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    reasons: Mapping[str, str] = {"stop": "stop", "length": "length", "call": "tool_calls"}
    choices: Mapping[str, Any] = {name: name for name in ("auto", "required", "none")}
    tools: Sequence[Any] = TOOLS

    def body(self, choice: str, limit: int, stream: bool) -> dict[str, Any]:
        fields = {"tools": self.tools, "tool_choice": self.choices[choice], "stream": stream}
        return {"messages": [USER], "max_tokens": limit, **fields}

    def whole(self, body: Any) -> Told:
        choice = body["choices"][0]
        return self._told([choice["message"]], choice["finish_reason"])

    def streamed(self, events: list[Any]) -> Told:
        choices = [event["choices"][0] for event in events]
        return self._told([each["delta"] for each in choices], choices[-1]["finish_reason"])

    def _told(self, messages: list[Any], reason: str) -> Told:
        calls = [call["function"] for each in messages for call in each.get("tool_calls", ())]
        text = "".join(each.get("content") or "" for each in messages)
        return Told(text, [(call["name"], call["arguments"]) for call in calls], reason)


class Responses(Chat):
    path = "/v1/responses"
    reasons: Mapping[str, str] = {"stop": "completed", "length": "incomplete", "call": "completed"}
    tools: Sequence[Any] = [{"type": "function", **function} for function in FUNCTIONS]

    def body(self, choice: str, limit: int, stream: bool) -> dict[str, Any]:
        body = super().body(choice, limit, stream)
        return {"input": body.pop("messages"), "max_output_tokens": body.pop("max_tokens"), **body}

    def whole(self, body: Any) -> Told:
        items = body["output"]
        parts = [part["text"] for item in items for part in item.get("content", ())]
        calls = [item for item in items if item["type"] == "function_call"]
        return Told(
            "".join(parts), [(call["name"], call["arguments"]) for call in calls], body["status"]
        )

    def streamed(self, events: list[Any]) -> Told:
        told = self.whole(events[-1]["response"])
        deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
        assert "".join(deltas) == told.text
        return told


class Messages(Chat):
    path = "/v1/messages"
    reasons: Mapping[str, str] = {"stop": "end_turn", "length": "max_tokens", "call": "tool_use"}
    choices: Mapping[str, Any] = {
        "auto": {"type": "auto"},
        "required": {"type": "any"},
        "none": {"type": "none"},
    }
    tools: Sequence[Any] = [
        {"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS
    ]

    def whole(self, body: Any) -> Told:
        blocks = body["content"]
        text = "".join(block.get("text", "") for block in blocks)
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return Told(text, calls, body["stop_reason"])

    def streamed(self, events: list[Any]) -> Told:
        blocks = [
            event["content_block"] for event in events if event["type"] == "content_block_start"
        ]
        texts = ["" for _ in blocks]
        for event in events:
            if event["type"] == "content_block_delta":
                delta = event["delta"]
                texts[event["index"]] += delta.get("text") or delta.get("partial_json", "")
        calls = [
            (block["name"], text)
            for block, text in zip(blocks, texts, strict=True)
            if block["type"] == "tool_use"
        ]
        said = [text for block, text in zip(blocks, texts, strict=True) if block["type"] == "text"]
        ends = [event["delta"] for event in events if event["type"] == "message_delta"]
        return Told("".join(said), calls, ends[0]["stop_reason"])


class Ollama(Chat):
    """It has no field for a choice of tools."""

    path = "/api/chat"
    reasons: Mapping[str, str] = {"stop": "stop", "length": "length", "call": "stop"}

    def body(self, choice: str, limit: int, stream: bool) -> dict[str, Any]:
        tools = {} if choice == "none" else {"tools": self.tools}
        return {"messages": [USER], "stream": stream, "options": {"num_predict": limit}, **tools}

    def whole(self, body: Any) -> Told:
        return self._told([body["message"]], body["done_reason"])

    def streamed(self, events: list[Any]) -> Told:
        return self._told([event["message"] for event in events], events[-1]["done_reason"])


PROTOCOLS = [Chat(), Responses(), Messages(), Ollama()]
EACH = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: type(each).__name__)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def asked(
    protocol: Chat, said: str, stream: bool, choice: str = "auto", reason: str = "stop"
) -> Told:
    """Return what a client is told of an answer, which comes in pieces of three characters."""
    dialect = DIALECTS[protocol.path]
    body = dialect.given.model_validate(protocol.body(choice, 999, stream))
    reply = dialect.reply(body, dialect.translated(body), "tiny", byte_tokenizer(TEMPLATE))
    answer = Completion(Stats(), [], text=said, reason=reason)
    if not stream:
        return protocol.whole(reply.whole([answer]))
    pieces = [Piece(said[at : at + 3], [], answer, {}) for at in range(0, len(said), 3)]
    told = [*reply.begin(0, answer), *(each for piece in pieces for each in reply.piece(0, piece))]
    told += [*reply.end(0, answer), *reply.finish([answer])]
    return protocol.streamed(events(b"".join(told).decode()))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def object_of(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


@EACH
@STREAMS
@pytest.mark.parametrize("form", ["fence", "tools", "function with its name", "bare", "a list"])
def test_protocols_tell_calls_of_any_form(protocol: Chat, form: str, stream: bool) -> None:
    told = asked(protocol, (FORMS | SEVERAL)[form], stream)
    calls = [(name, object_of(arguments)) for name, arguments in told.calls]
    assert calls == READ * (2 if form == "a list" else 1)
    assert (told.text.strip(), told.reason) == ("", protocol.reasons["call"])


@EACH
@STREAMS
@pytest.mark.parametrize("text", ["another name", "another name in a fence", "prose after"])
def test_protocols_tell_text_as_it_stands(protocol: Chat, text: str, stream: bool) -> None:
    said = TEXTS[text]
    assert asked(protocol, said, stream) == Told(said, [], protocol.reasons["stop"])
    if not isinstance(protocol, Ollama):
        told = asked(protocol, FENCE, stream, choice="none")
        assert told == Told(FENCE, [], protocol.reasons["stop"])


@EACH
@STREAMS
@pytest.mark.parametrize("form", ["tool_call", "fence", "bare"])
def test_protocols_tell_calls_that_are_cut(protocol: Chat, form: str, stream: bool) -> None:
    said = FORMS[form]
    for cut in ('": "look', '", "arg', "riv"):
        told = asked(protocol, said[: said.index(cut) + len(cut)], stream, reason="length")
        assert (told.text, told.reason) == ("", protocol.reasons["length"])
        if isinstance(protocol, Ollama) or cut == '": "look':
            assert told.calls == []
            continue
        name, arguments = told.calls[0]
        assert name == "look_up"
        if isinstance(arguments, dict):
            assert arguments == {}
        else:
            assert arguments == "{"


@pytest.mark.parametrize("protocol", PROTOCOLS[:3], ids=lambda each: type(each).__name__)
@STREAMS
def test_protocols_tell_no_text_of_a_forced_call(protocol: Chat, stream: bool) -> None:
    said = FORMS["tool_call"]
    for end in (1, 7, 11, 20, 40, 60):
        told = asked(protocol, said[:end], stream, "required", "length")
        assert (told.text, told.reason) == ("", protocol.reasons["length"])
        assert len(told.calls) == (end >= 40)


def test_a_server_cuts_a_forced_call() -> None:
    """Within the constraint, in which the model itself says what it says."""
    with saying() as own:
        for limit, calls in ((7, 0), (40, 1)):
            for stream in (False, True):
                answer = own.server.post(Chat().body("required", limit, stream))
                assert answer.status_code == 200, answer.text
                chat = Chat()
                told = chat.streamed(events(answer.text)) if stream else chat.whole(answer.json())
                assert (told.text, told.reason, len(told.calls)) == ("", "length", calls)

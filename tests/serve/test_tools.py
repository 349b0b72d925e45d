"""Calls of tools, read back from answers as each kind of model writes them, in any pieces, whatever else is there."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specengine.protocol import preparing
from specengine.protocol.completion import Completion
from specengine.protocol.parts import AnswerParts
from specengine.protocol.problems import RequestError
from specengine.protocol.requests import ChatRequest
from specengine.protocol.tools import (
    MARKS,
    Coder,
    Format,
    Hermes,
    Llama,
    Mistral,
    ToolCall,
    ToolReader,
    format_of,
    special_tokens,
)
from specengine.records import Stats
from tests import toy
from tests.engine.engines import forced
from tests.examples import examples
from tests.serve.served import CHAT, served, tiny_engine
from tests.serve.test_answers import chunks
from tests.toy import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
}
SCHEMAS = {"look_up": SCHEMA, "f": SCHEMA}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look", "parameters": SCHEMA},
}

# The parts of the templates of these models that write tools and calls.
_TURNS = "{% for m in messages %}<|user|>{{ m.content }}"
_CALLS = "{% for call in m.tool_calls %}{% set f = call.function %}"
_END = "{% endfor %}{% endif %}{% endfor %}"
TEMPLATES: dict[type[Format], str] = {
    Hermes: "{% if tools %}{{ tools[0].function.name }} <tool_call>{name: <name>}</tool_call>{% endif %}"
    + _TURNS
    + "{% if m.tool_calls %}"
    + _CALLS
    + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    + _END,
    Coder: "{% if tools %}{{ tools[0].function.name }} <tool_call><function=example></function></tool_call>{% endif %}"
    + _TURNS
    + "{% if m.tool_calls %}"
    + _CALLS
    + "\n<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments | items %}<parameter={{ key }}>\n"
    "{{ value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}"
    "\n</parameter>\n{% endfor %}</function>\n</tool_call>" + _END,
    Mistral: "{% if tools %}[AVAILABLE_TOOLS]{{ tools[0].function.name }}[/AVAILABLE_TOOLS]{% endif %}"
    + _TURNS
    + "{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids are 9 characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{% endfor %}",
    Llama: "{% if tools %}Environment: ipython {{ tools[0].function.name }}{% endif %}"
    + _TURNS
    + "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endif %}{% endfor %}',
}
FORMATS = [Hermes(), Coder(), Mistral(), Llama()]


def by_title(known: Format) -> str:
    return type(known).__name__


def read(known: Format, text: str, cuts: list[int] | None = None) -> tuple[str, list[ToolCall]]:
    """Text and calls of an answer that comes in pieces."""
    places = [0, *sorted(cuts or ()), len(text)]
    reader = ToolReader(known, SCHEMAS)
    pieces = (text[a:b] for a, b in itertools.pairwise(places))
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.end()
    assert reader.found == sum(isinstance(part, ToolCall) for part in parts)
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [part for part in parts if isinstance(part, ToolCall)]


def written(known: Format, calls: list[dict[str, Any]]) -> str:
    """Return calls as the model's template writes them."""
    listed = [{"id": "123456789", "type": "function", "function": call} for call in calls]
    messages = [{"role": "assistant", "content": "", "tool_calls": listed}]
    tokenizer = byte_tokenizer(TEMPLATES[type(known)])
    return str(tokenizer.apply_chat_template(messages, tokenize=False)).removeprefix("<|user|>")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"}',
        "[TOOL_CALLS]",
        "}",
        '"',
        "\\",
        "<b>&amp;</b>",
        "12",
        "true",
        " a\n",
    ]
)
VALUES: dict[str, Any] = {
    "text": TEXTS,
    "count": st.integers(-(10**12), 10**12),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(),
    "list": st.lists(TEXTS, max_size=3),
    "map": st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=3),
}
CALLS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["look_up", "f"]),
        "arguments": st.fixed_dictionaries({}, optional=VALUES),
    }
)


def can_be_written(known: Format, calls: list[dict[str, Any]]) -> bool:
    """Qwen3-Coder's way has no escapes for its tags."""
    if not isinstance(known, Coder):
        return True
    values = [
        json.dumps(value, ensure_ascii=False)
        for call in calls
        for value in call["arguments"].values()
    ]
    return not any("</tool_call>" in value for value in values)


LOOK_UP = {"name": "look_up", "arguments": {"text": "a"}}


@pytest.mark.parametrize("known", [Hermes(), Coder(), Mistral()], ids=by_title)
@pytest.mark.parametrize("most", [1, 2])
def test_calls_after_the_most_that_are_wanted_are_left_out(known: Format, most: int) -> None:
    """However many have been read before: two at once, and a third one in a piece of its own."""
    reader, answer = ToolReader(known, SCHEMAS, most), [[LOOK_UP, LOOK_UP], [LOOK_UP]]
    parts = [part for calls in answer for part in reader.push(written(known, calls))]
    assert len([part for part in parts if isinstance(part, ToolCall)]) == reader.found == most


@pytest.mark.parametrize(("reason", "told"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_is_cut_after_a_call_ends_by_its_length(reason: str, told: str) -> None:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}
    )
    parts = AnswerParts(asked, byte_tokenizer(TEMPLATES[Hermes]))
    parts.begin([])
    found = parts.push(written(Hermes(), [LOOK_UP])) + parts.end()
    assert [part.name for part in found if isinstance(part, ToolCall)] == ["look_up"]
    assert parts.reason(Completion(Stats(), [], reason=reason)) == told


@pytest.mark.parametrize("known", FORMATS, ids=by_title)
@examples(150)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    lead=st.booleans(),
)
def test_a_call_that_is_written_is_read_back(
    known: Format, calls: list[dict[str, Any]], cuts: list[int], lead: bool
) -> None:
    if isinstance(known, Llama):
        calls, lead = calls[:1], False
    if not can_be_written(known, calls):
        return
    text = ("Let me see. " if lead else "") + written(known, calls)
    said, found = read(known, text, [min(cut, len(text)) for cut in cuts])
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in found] == calls
    assert said.strip() == ("Let me see." if lead else "")
    assert len({call.id for call in found}) == len(calls)


MARKUP = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<function=",
                "f>",
                "</function>",
                "<parameter=",
                "text>",
                "</parameter>",
            ),
            *(
                "[TOOL_CALLS]",
                "[ARGS]",
                "[CALL_ID]",
                "[",
                "]",
                "{",
                "}",
                '{"name": "f", "arguments": {}}',
                '"',
                "\\",
            ),
            *(
                '{"name": "f", "parameters": {}}',
                "<|python_tag|>",
                ";",
                ",",
                "\n",
                " ",
                "f",
                "NaN",
                "1e999",
                "é",
                "[" * 2000,
            ),
            *(
                '{"name": "f", "arguments": {"x": NaN}}',
                '{"name": 3}',
                '{"name": "f", "arguments": []}',
                "\ud800",
            ),
        ]
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("known", FORMATS, ids=by_title)
@examples(300)
@given(text=MARKUP, cuts=st.lists(st.integers(0, 120), max_size=12))
def test_hostile_answers_are_text_or_calls_that_clients_can_read(
    known: Format, text: str, cuts: list[int]
) -> None:
    said, found = read(known, text, [min(cut, len(text)) for cut in cuts])
    assert (said, [(call.name, call.arguments) for call in found]) == (
        (whole := read(known, text))[0],
        [(call.name, call.arguments) for call in whole[1]],
    )
    for call in found:
        assert isinstance(
            json.loads(call.arguments, parse_constant=lambda name: pytest.fail(name)), dict
        )
    if not found:
        assert said == text


CALL = '{"name": "f", "arguments": {"text": "x"}}'
LLAMA = '{"name": "f", "parameters": {"text": "x"}}'
CODED = "<function=f>\n<parameter=text>\nx\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("known", "text", "count", "said"),
    [
        (Hermes(), f"a<tool_call>no<tool_call>{CALL}</tool_call>", 1, "a<tool_call>no"),
        (Hermes(), f"<tool_call>{CALL}", 1, ""),
        (
            Hermes(),
            f"<tool_call>{CALL}{CALL}</tool_call>",
            0,
            f"<tool_call>{CALL}{CALL}</tool_call>",
        ),
        (Hermes(), '<tool_call>{"name": "f", "arguments": 3}</tool_call>', 0, None),
        (Hermes(), f"<tool_call>{'[' * 100_000}", 0, None),
        (
            Hermes(),
            '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
            0,
            None,
        ),
        (Mistral(), f"[TOOL_CALLS][{CALL}, {CALL}]", 2, ""),
        (Mistral(), '[TOOL_CALLS]f[ARGS]{"text": "x"}[TOOL_CALLS]f{"text": "x"}', 2, ""),
        (Mistral(), '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"text": "x"}', 1, ""),
        (Mistral(), f"[TOOL_CALLS] [{CALL}, 3]", 0, None),
        (Mistral(), "[TOOL_CALLS] of which there are none", 0, None),
        (Llama(), f"<|python_tag|>{LLAMA}", 1, ""),
        (Llama(), f" {LLAMA}; {LLAMA}", 2, ""),
        (Llama(), f"An object: {LLAMA}", 0, None),
        (Llama(), LLAMA.replace('"f"', '"unknown"'), 0, None),
        (Llama(), '{"some": "JSON"}', 0, None),
        (Llama(), "<|python_tag|>print(1)", 0, None),
        (Coder(), CODED, 1, ""),
        (Coder(), f"Yes: {CODED}\n</tool_call>\n<tool_call>{CODED}</tool_call>", 2, "Yes: "),
        (Coder(), "<tool_call>{}</tool_call>", 0, None),
        (Coder(), "<tool_call><function=f>x</function></tool_call>", 0, None),
        (Coder(), "<function=f><parameter=text>x</parameter>", 0, None),
    ],
)
def test_of_answers_that_models_give(
    known: Format, text: str, count: int, said: str | None
) -> None:
    for size in (1, 7, len(text)):
        if len(text) > 1000 and size < len(text):
            continue
        found_text, found = read(known, text, list(range(0, len(text), size)))
        assert [(call.name, call.arguments) for call in found] == [("f", '{"text": "x"}')] * count
        assert found_text == (text if said is None else said)


def test_values_of_qwen_coder_follow_the_schema() -> None:
    def value(key: str, text: str) -> Any:
        _, found = read(Coder(), f"<function=f><parameter={key}>\n{text}\n</parameter></function>")
        return json.loads(found[0].arguments)[key]

    assert value("text", "12") == "12"
    assert value("text", "  two\nlines ") == "  two\nlines "
    assert value("count", "12") == 12
    assert value("sure", "True") is True
    assert value("sure", "maybe") == "maybe"
    assert value("list", '["a", 1]') == ["a", 1]
    assert value("other", '{"a": 1}') == {"a": 1}
    assert value("other", "words") == "words"
    assert value("count", "None") is None


@pytest.mark.parametrize("known", FORMATS, ids=by_title)
def test_a_template_says_how_calls_are_written(known: Format) -> None:
    assert type(format_of(byte_tokenizer(TEMPLATES[type(known)]))) is type(known)


@pytest.mark.parametrize(
    "template",
    [
        None,
        _TURNS + "{% endfor %}",
        "{% if tools %}{{ tools[0].function.name }}{% endif %}" + _TURNS + "{% endfor %}",
        TEMPLATES[Hermes].replace("<tool_call>\n", "<other>\n"),
        TEMPLATES[Llama].replace("ipython", "python"),
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + _TURNS + "{% endfor %}",
    ],
)
def test_templates_of_other_ways_refuse_tools(template: str | None) -> None:
    with pytest.raises(RequestError, match="tools: ") as refused:
        format_of(byte_tokenizer(template))
    assert refused.value.param == "tools"


def test_marks_that_are_special_tokens_are_shown() -> None:
    tokenizer = byte_tokenizer(TEMPLATES[Mistral], extra=["[TOOL_CALLS]", "[ARGS]"])
    assert [tokenizer.decode([token]) for token in special_tokens(tokenizer, MARKS)] == [
        "[TOOL_CALLS]",
        "[ARGS]",
    ]
    assert special_tokens(tokenizer, ["<tool_call>"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("known", FORMATS, ids=by_title)
def test_a_server_tells_calls_streamed_or_not(
    known: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = written(known, [{"name": "look_up", "arguments": {"text": "rivers", "count": 2}}])
    special = isinstance(known, Mistral)
    if special:
        monkeypatch.setattr(toy, "SPECIAL", [*toy.SPECIAL[:-1], "[TOOL_CALLS]"])
    tokenizer = byte_tokenizer(TEMPLATES[type(known)])
    engine = tiny_engine()
    engine.tokenizer = tokenizer
    wanted = tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert not special or len(wanted) < len(answer)
    options = {"logits_processor": [forced(wanted)]}
    start = preparing._options
    monkeypatch.setattr(preparing, "_options", lambda request: start(request) | options)
    asked = CHAT | {"tools": [TOOL], "max_tokens": len(wanted)}
    with served(lambda: engine) as server:
        first = server.post(asked)
        assert first.status_code == 200, first.text
        whole = first.json()["choices"][0]
        streamed = chunks(server.post(asked | {"stream": True}).text)
        plain = server.post(
            {name: value for name, value in asked.items() if name != "tools"}
        ).json()
    call = whole["message"]["tool_calls"][0]
    assert whole["message"]["content"] is None
    assert call["function"]["name"] == "look_up"
    assert json.loads(call["function"]["arguments"]) == {"text": "rivers", "count": 2}
    deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
    told = [given for delta in deltas for given in delta.get("tool_calls", [])]
    assert [given["function"] for given in told] == [call["function"]]
    assert not "".join(delta.get("content") or "" for delta in deltas).strip()
    assert "tool_calls" not in plain["choices"][0]["message"]

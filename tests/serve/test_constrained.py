"""Answers that clients constrain: by response_format, by a grammar, by tools that must be called."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict
from transformers import AddedToken

pytest.importorskip("llguidance")

from specengine import Engine
from specengine.protocol.preparing import calls_grammar, constraint_options
from specengine.protocol.requests import ChatRequest
from specengine.request.grammars import Vocabularies, compiled
from tests.engine.engines import engine_of
from tests.serve.served import CHAT, NAME, TEXT, Served, served, tiny_engine
from tests.serve.test_answers import chunks
from tests.toy import byte_tokenizer

TEMPLATE = (
    "{% if tools %}T{{ tools | length }}{% endif %}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Alan"]
    born: Literal[1815, 1912]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo"]


SCHEMA = Person.model_json_schema()
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}
FUNCTION = {"name": "weather", "parameters": Weather.model_json_schema()}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
OTHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "time", "parameters": Person.model_json_schema()},
}
NAMED = {"type": "function", "function": {"name": "weather"}}


def with_tools() -> Engine:
    return engine_of("llama", "ngram", "chain", byte_tokenizer(TEMPLATE))


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    with served(with_tools) as running:
        yield running


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="any")


def texts(server: Served, asked: dict[str, Any], path: str) -> list[str]:
    """The answer whole and streamed."""
    choice = server.post(asked, path).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    streamed = [
        chunk["choices"][0] for chunk in chunks(server.post(asked | {"stream": True}, path).text)
    ]
    if "message" in choice:
        return [
            choice["message"]["content"],
            "".join(part["delta"].get("content", "") for part in streamed),
        ]
    return [choice["text"], "".join(part["text"] for part in streamed)]


def test_the_clients_structured_outputs(server: Served) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": CHAT["messages"], "response_format": Person}
    client = client_of(server)
    whole = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(whole, Person)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"response_format": FORMAT}, {"json_schema": SCHEMA}),
        (
            {"response_format": FORMAT, "temperature": 1.0, "seed": 3},
            {"json_schema": SCHEMA, "temperature": 1.0, "seed": 3},
        ),
        ({"grammar": 'start: "yes" | "no"'}, {"grammar": 'start: "yes" | "no"'}),
        ({"grammar": 'root ::= "ja" | "nein"'}, {"grammar": 'root ::= "ja" | "nein"'}),
    ],
)
def test_answers_are_the_engines_at_both_endpoints(
    server: Served, given: dict[str, Any], options: Any
) -> None:
    chat = tiny_engine().generate(CHAT["messages"], max_new_tokens=99, **options).text
    text = tiny_engine().generate(TEXT["prompt"], raw=True, max_new_tokens=99, **options).text
    limit = {"max_tokens": 99}
    assert texts(server, CHAT | given | limit, "/v1/chat/completions") == [chat, chat]
    assert texts(server, TEXT | given | limit, "/v1/completions") == [text, text]


def test_any_object_and_plain_text(server: Served) -> None:
    message = server.post(CHAT | {"response_format": {"type": "json_object"}}).json()["choices"][0][
        "message"
    ]
    assert message["content"].startswith("{")
    free = server.post(CHAT | {"response_format": {"type": "text"}}).json()["choices"][0]["message"]
    assert free == server.post(CHAT).json()["choices"][0]["message"]


def test_the_vocabulary_is_read_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        monkeypatch.delattr("llguidance.hf.from_tokenizer")
        assert server.post(CHAT | {"response_format": FORMAT, "max_tokens": 5}).status_code == 200


def test_an_answer_cut_short_ends_with_length(server: Served) -> None:
    choice = server.post(CHAT | {"response_format": FORMAT, "max_tokens": 5}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"nam', "length")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_meets_its_schema(caller: Served, choice: Any) -> None:
    asked = CHAT | {"tools": [OTHER, TOOL], "tool_choice": choice, "max_tokens": 99}
    for stream in (False, True):
        answer = caller.post(asked | {"stream": stream})
        if stream:
            found = [
                part
                for chunk in chunks(answer.text)
                for part in chunk["choices"][0]["delta"].get("tool_calls", [])
            ]
        else:
            found = answer.json()["choices"][0]["message"]["tool_calls"]
        model = Weather if choice == NAMED or found[0]["function"]["name"] == "weather" else Person
        assert len(found) >= 1
        assert found[0]["function"]["name"] in (
            ["weather"] if choice == NAMED else ["weather", "time"]
        )
        model.model_validate_json(found[0]["function"]["arguments"])


def test_the_clients_strict_tools(caller: Served) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    choice: Any = {"type": "function", "function": {"name": "Weather"}}
    completion = client_of(caller).chat.completions.parse(
        model=NAME, messages=CHAT["messages"], tools=tools, tool_choice=choice
    )
    calls = completion.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Weather)


STRICT = TOOL | {"function": FUNCTION | {"strict": True}}


def test_a_strict_tool_changes_nothing_where_none_is_called(caller: Served) -> None:
    free, told = (
        caller.post(CHAT | {"tools": [tool], "tool_choice": "none"}).json()["choices"][0][
            "message"
        ]["content"]
        for tool in (TOOL, STRICT)
    )
    assert told == free


@pytest.mark.parametrize("added", [[], ["<tool_call>", "</tool_call>", "<think>"]])
def test_a_strict_tool_constrains_calls_and_no_other_text(added: list[str]) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    # as Qwen's has them
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    grammar = calls_grammar(ChatRequest.model_validate(CHAT | {"tools": [STRICT]}), tokenizer)
    constraint = Vocabularies(tokenizer, len(tokenizer)).constraint(
        "grammar", compiled("grammar", grammar), [259]
    )

    def goes_on(text: str) -> set[str]:
        allowed = constraint.allowed(tokenizer(text, add_special_tokens=False)["input_ids"])
        return {tokenizer.decode([token]) for token in allowed.nonzero()[0]}

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    opening = {"<tool_call>", "<think>"} & {*added} or {"<"}
    assert {"a", "<", "<|end|>"} | opening <= goes_on("It is <3")
    assert goes_on("I ask.<tool_call>") == {"\n"}
    assert goes_on(call[: call.index("Bern")]) == {"B", "O"}
    assert {"\n", "<|end|>"} | opening <= goes_on(call)
    assert goes_on(call + call[:30]) == {call[30]}
    if added:
        assert ">" not in goes_on("I ask.<tool_call")  # the tag's token alone opens a call


@pytest.mark.parametrize("tool", [TOOL, STRICT])
@pytest.mark.parametrize("asked", [FORMAT, {"type": "json_object"}])
def test_a_format_beside_tools_is_for_answers_that_call_none(
    caller: Served, tool: dict[str, Any], asked: dict[str, Any]
) -> None:
    both = CHAT | {"tools": [tool], "response_format": asked}
    choice = caller.post(both | {"tool_choice": "required", "max_tokens": 99}).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] in (
        '{"city": "Bern"}',
        '{"city": "Oslo"}',
    )
    tokenizer = byte_tokenizer(TEMPLATE)
    names = Vocabularies(tokenizer, len(tokenizer))

    def goes_on(text: str, **fields: Any) -> str:
        grammar = constraint_options(ChatRequest.model_validate(both | fields), tokenizer)[
            "grammar"
        ]
        allowed = names.constraint("grammar", compiled("grammar", grammar), [259]).allowed(
            tokenizer(text)["input_ids"]
        )
        return "".join(tokenizer.decode([token]) for token in allowed.nonzero()[0])

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert goes_on("") == "<{"
    assert goes_on('<tool_call>\n{"name": "weather", "arguments": {"city": "') == "BO"
    assert goes_on(call) == "\n<|end|>"
    assert goes_on(call, parallel_tool_calls=False) == "<|end|>"
    if asked is FORMAT:
        assert goes_on('{"name": "A') == "dl"
        assert goes_on('{"name": "Ada", "born": 1815}') == "<|end|>"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": FORMAT["json_schema"]}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "#"}},
                }
            },
            "response_format",
        ),
        ({"response_format": FORMAT, "grammar": 'start: "a"'}, "grammar"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": ["a"], "grammar": 'start: "a"'}, "grammar"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required", "grammar": 'start: "a"'}, "grammar"),
        (
            {"tools": [TOOL], "response_format": {"type": "json_schema", "schema": {"not": {}}}},
            "response_format",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "none"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
                    }
                ]
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(
    caller: Served, change: dict[str, Any], field: str
) -> None:
    for stream in (False, True):
        answer = caller.post(CHAT | change | {"stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (
            400,
            field,
            "invalid_request_error",
        )

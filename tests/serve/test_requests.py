"""Tests of what clients send beside a question: hints, other servers' names, and kept histories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.protocol.messages import FunctionCall, is_empty
from specengine.protocol.requests import ChatRequest, CompletionRequest
from tests.backend import target_of
from tests.engine.engines import engine_of, forced
from tests.serve.served import CHAT, NAME, TEXT, Served, served, tiny_engine
from tests.serve.test_answers import chunks
from tests.toy import byte_tokenizer, policy_for, tiny

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if thinking is defined and not thinking %}N{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "Do it"}}


def with_tools() -> Engine:
    target = target_of(tiny(max_position_embeddings=2048))
    return Engine(
        target, NGram(longest=3, shortest=1), policy_for("chain"), byte_tokenizer(TEMPLATE)
    )


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    with served(with_tools) as running:
        yield running


def prompt_of(server: Served, asked: dict[str, Any], path: str = "/v1/chat/completions") -> str:
    answer = server.post(asked | {"max_tokens": 1, "return_token_ids": True}, path)
    assert answer.status_code == 200, answer.text
    return str(byte_tokenizer(TEMPLATE).decode(answer.json()["prompt_token_ids"]))


def refused(server: Served, asked: dict[str, Any], path: str = "/v1/chat/completions") -> str:
    answer = server.post(asked, path)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


# ---- hints


@pytest.mark.sliced(9)
@pytest.mark.parametrize(
    "hint",
    [
        {"metadata": {"a": "b"}},
        {"store": True},
        {"reasoning_effort": "low"},
        {"verbosity": "high"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"safety_identifier": "s", "user": "u"},
        {"service_tier": "flex"},
        {"tool_choice": "auto"},
        {"tool_choice": "none", "tools": []},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True, "tools": []},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"seed": -1},
        {"stop": ""},
        {"stop": []},
        {"stop": [""]},
        {"n": 1, "best_of": 1, "use_beam_search": False, "skip_special_tokens": True},
        {"cache_prompt": True, "id_slot": -1, "timings_per_token": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"functions": None, "function_call": "auto", "audio": None, "web_search_options": None},
        {"top_k": -1, "typical_p": 1.0, "no_repeat_ngram_size": 0},
        {"response_format": {"type": "text"}, "structured_outputs": {}},
    ],
)
def test_a_hint_changes_nothing(server: Served, hint: dict[str, Any]) -> None:
    free = server.post(CHAT).json()["choices"]
    assert server.post(CHAT | hint).json().get("choices") == free


def test_minus_one_token_is_no_limit() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        assert ChatRequest.model_validate({"messages": [USER], field: -1}).wanted_tokens is None
    assert CompletionRequest.model_validate({"prompt": "a", "max_tokens": -1}).wanted_tokens is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 10**4000}, "max_tokens"),
        ({"seed": -2}, "seed"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"mirostat": 2}, "mirostat"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"stream_options": {"include_usage": True, "often": True}, "stream": True},
            "stream_options.often",
        ),
    ],
)
def test_what_changes_the_answer_and_cannot_be_honoured_is_refused(
    server: Served, change: dict[str, Any], field: str
) -> None:
    assert refused(server, CHAT | change) == field


# ---- several answers


def test_several_answers_are_those_of_seeds_that_follow(server: Served) -> None:
    asked = CHAT | {"n": 3, "temperature": 1.5, "seed": 7, "return_token_ids": True}
    answer = server.post(asked).json()
    alone = [server.post(asked | {"n": 1, "seed": 7 + more}).json() for more in range(3)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [each["choices"][0]["message"]["content"] for each in alone]
    assert len(set(texts)) == 3
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == sum(
        each["usage"]["completion_tokens"] for each in alone
    )
    assert {"timings", "metrics"}.isdisjoint(answer)
    streamed = chunks(
        server.post(asked | {"stream": True, "stream_options": {"include_usage": True}}).text
    )
    assert streamed[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    for index, text in enumerate(texts):
        own = [
            choice for chunk in streamed for choice in chunk["choices"] if choice["index"] == index
        ]
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert own[-1]["finish_reason"]


def test_several_prompts_each_with_several_answers(server: Served) -> None:
    asked = TEXT | {"prompt": ["one", "two", "three"], "n": 2, "echo": True}
    answer = server.post(asked, "/v1/completions").json()
    alone = [
        server.post(asked | {"prompt": text, "n": 1}, "/v1/completions").json()
        for text in asked["prompt"]
    ]
    expected = [each["choices"][0]["text"] for each in alone for _ in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == len("onetwothree")
    ids = server.post(TEXT | {"prompt": [[1, 2], [3]]}, "/v1/completions").json()
    assert (len(ids["choices"]), ids["usage"]["prompt_tokens"]) == (2, 3)


def test_more_answers_than_may_ever_wait_are_refused(server: Served) -> None:
    assert "accepted up to 17" in server.post(CHAT | {"n": 18}).json()["error"]["message"]


# ---- other servers' names


def test_names_of_other_servers_constrain_as_ours_do(server: Served) -> None:
    schema = {"enum": ["yes", "no"]}

    def said(change: dict[str, Any]) -> str:
        answer = server.post(CHAT | change)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    pytest.importorskip("llguidance")
    ours = said(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    )
    assert ours in ('"yes"', '"no"')
    for same in (
        {"response_format": {"type": "json_object", "schema": schema}},
        {"response_format": {"type": "json_schema", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
    ):
        assert said(same) == ours
    word = said({"grammar": 'start: "yes" | "no"'})
    assert (
        said({"guided_choice": ["yes", "no"]})
        == said({"structured_outputs": {"choice": ["yes", "no"]}})
        == word
    )
    assert (
        said({"guided_regex": "yes|no"})
        == said({"structured_outputs": {"regex": "(yes)|(no)"}})
        == word
    )
    assert said({"guided_regex": r"a/b\/c"}) == "a/b/c"
    assert said({"guided_grammar": 'start: "yes" | "no"'}) == word


def test_a_stop_token_ends_the_answer_beside_the_models_own(server: Served) -> None:
    tokens = server.post(CHAT | {"return_token_ids": True}).json()["choices"][0]["token_ids"]
    choice = server.post(CHAT | {"return_token_ids": True, "stop_token_ids": [tokens[3]]}).json()[
        "choices"
    ][0]
    first = tokens.index(tokens[3])
    assert (choice["token_ids"], choice["finish_reason"]) == (tokens[: first + 1], "stop")


def test_the_template_is_given_what_the_client_says(caller: Served) -> None:
    assert prompt_of(caller, CHAT) == "<|user|>Hello there<|end|><|assistant|>"
    assert prompt_of(caller, CHAT | {"chat_template_kwargs": {"thinking": False}}).startswith(
        "N<|user|>"
    )
    assert not prompt_of(caller, CHAT | {"chat_template_kwargs": {"thinking": True}}).startswith(
        "N"
    )
    assert (
        prompt_of(caller, CHAT | {"add_generation_prompt": False}) == "<|user|>Hello there<|end|>"
    )
    begun = [USER, {"role": "assistant", "content": "It is"}]
    going_on = {"messages": begun, "model": NAME, "continue_final_message": True}
    assert prompt_of(caller, going_on) == "<|user|>hi<|end|><|assistant|>It is"
    spoken = [
        {"role": "user", "content": "<|end|>"},
        {"role": "assistant", "content": "It <|end|> is"},
    ]
    assert prompt_of(caller, going_on | {"messages": spoken}).endswith("<|assistant|>It <|end|> is")


def test_special_tokens_are_tokens_in_completions_and_text_in_chat(server: Served) -> None:
    special = byte_tokenizer().convert_tokens_to_ids("<|user|>")

    def ids(asked: dict[str, Any], path: str) -> list[int]:
        answer = server.post(asked | {"max_tokens": 1, "return_token_ids": True}, path).json()
        return list(answer["prompt_token_ids"])

    text, chat = (
        TEXT | {"prompt": "<|user|>Hi"},
        CHAT | {"messages": [{"role": "user", "content": "<|user|>Hi"}]},
    )
    assert ids(text, "/v1/completions").count(special) == 1
    assert ids(text | {"prompt": ["<|user|>Hi<|user|>"]}, "/v1/completions").count(special) == 2
    assert ids(text | {"allow_special_text": False}, "/v1/completions").count(special) == 0
    assert ids(chat, "/v1/chat/completions").count(special) == 1
    assert ids(chat | {"allow_special_text": True}, "/v1/chat/completions").count(special) == 2
    with served(lambda: tiny_engine(draft="none"), allow_special_text=True) as opened:
        answer = opened.post(chat | {"max_tokens": 1, "return_token_ids": True}).json()
        assert answer["prompt_token_ids"].count(special) == 2


# ---- histories


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call | more]}


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("{}", "{}"),
        ("", "{}"),
        (" \n", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": 1', '"{\\"a\\": 1"'),
        ("null", '"null"'),
        ("[1]", '"[1]"'),
        ("no JSON", '"no JSON"'),
        ("[" * 5000, json.dumps("[" * 5000)),
        ("9" * 5000, json.dumps("9" * 5000)),
        ([1], "[1]"),
        (3, "3"),
    ],
)
def test_calls_come_back_as_the_model_wrote_them(
    caller: Served, arguments: Any, written: str
) -> None:
    if len(written) > 1000:
        assert FunctionCall(name="f", arguments=arguments).parsed == arguments
        return
    prompt = prompt_of(caller, CHAT | {"messages": [USER, called(arguments), RESULT]})
    assert f'{{"name": "f", "arguments": {written}}}' in prompt


@pytest.mark.parametrize(
    "message",
    [
        called("{}", index=0),
        called("{}", index=0, provider_specific_fields={"a": 1}, id=None),
        called(
            "{}", function={"name": "f", "arguments": "{}", "parsed_arguments": {}, "thought": "x"}
        ),
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": []},
        {
            "role": "assistant",
            "content": "a",
            "id": "m",
            "refusal": None,
            "annotations": [],
            "audio": None,
        },
        {
            "role": "assistant",
            "content": "a",
            "function_call": None,
            "reasoning_content": "b",
            "name": "n",
        },
        {
            "role": "assistant",
            "content": "a",
            "annotations": [{"type": "url"}],
            "metadata": {"a": 1},
            "index": 3,
        },
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "id": 3}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}],
            "images": [],
            "status": "completed",
        },
        {"role": "tool", "content": None, "tool_call_id": "1", "name": "f"},
    ],
)
def test_messages_come_back_with_what_clients_keep_beside_them(
    caller: Served, message: dict[str, Any]
) -> None:
    assert (
        caller.post(CHAT | {"messages": [USER, message, USER], "max_tokens": 2}).status_code == 200
    )


def test_thoughts_and_refusals_are_shown_to_the_template(caller: Served) -> None:
    thought = {"role": "assistant", "content": "a", "reasoning_content": "because "}
    assert "<|assistant|>because a<|end|>" in prompt_of(
        caller, CHAT | {"messages": [USER, thought, USER]}
    )
    no = {"role": "assistant", "content": None, "refusal": "No."}
    assert "<|assistant|>No.<|end|>" in prompt_of(caller, CHAT | {"messages": [USER, no, USER]})


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]},
            "messages[1].content[1].text",
        ),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": "a", "images": ["x"]}, "messages[1].images"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[1].audio"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            "messages[1].function_call",
        ),
        ({"role": "wizard", "content": "a"}, "messages[1].role"),
        (called("{}", type="custom"), "messages[1].tool_calls[0].type"),
        (called("{}", function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
        (called("{}", id=3), "messages[1].tool_calls[0].id"),
    ],
)
def test_what_is_at_fault_is_named_by_its_place(
    caller: Served, message: dict[str, Any], place: str
) -> None:
    assert refused(caller, CHAT | {"messages": [USER, message]}) == place


def test_calls_that_the_template_leaves_out_are_not_dropped_in_silence(server: Served) -> None:
    assert (
        refused(server, CHAT | {"messages": [USER, called("{}"), USER]}) == "messages[1].tool_calls"
    )
    quiet = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with served(lambda: engine_of("llama", "ngram", "chain", quiet)) as dropping:
        assert refused(dropping, CHAT | {"messages": [USER, USER, RESULT]}) == "messages[2].role"
        assert dropping.post(CHAT).status_code == 200


# ---- tools


@pytest.mark.parametrize(
    ("parameters", "empty"),
    [
        (None, True),
        ({}, True),
        ({"type": "object", "properties": {}}, True),
        ({"type": "object", "properties": {}, "required": [], "additionalProperties": False}, True),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, False),
        ({"type": "object", "properties": {"a": {}}}, False),
        ({"$ref": "#/$defs/a"}, False),
    ],
)
def test_a_function_without_parameters_is_known(parameters: Any, empty: bool) -> None:
    assert is_empty(parameters) == empty


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_function_without_parameters_is_called_with_none(
    caller: Served, parameters: Any, choice: Any
) -> None:
    pytest.importorskip("llguidance")
    function = (
        TOOL["function"] if parameters is None else TOOL["function"] | {"parameters": parameters}
    )
    asked = CHAT | {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "max_tokens": 99,
    }
    choices = caller.post(asked).json()["choices"]
    assert [call["function"] for call in choices[0]["message"]["tool_calls"]] == [
        {"name": "f", "arguments": "{}"}
    ]
    assert choices[0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("function", "place"),
    [
        ({"name": ""}, "tools[0].function.name"),
        ({"name": " "}, "tools[0].function.name"),
        ({"name": "f", "parameters": {"type": "array"}}, "tools[0].function.parameters.type"),
        (
            {"name": "f", "parameters": {"type": ["string", "null"]}},
            "tools[0].function.parameters.type",
        ),
        ({"name": "f", "parameters": {"type": 3}}, "tools[0].function.parameters.type"),
        ({"name": "f", "parameters": []}, "tools[0].function.parameters"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(caller: Served, function: Any, place: str) -> None:
    assert refused(caller, CHAT | {"tools": [{"type": "function", "function": function}]}) == place


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, None])
def test_without_parallel_calls_an_answer_ends_behind_the_first(
    stream: bool, parallel: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that calls twice, left free to."""
    from specengine.protocol import preparing

    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = with_tools()
    wanted = engine.tokenizer(f"Well{call}\n{call}", add_special_tokens=False)["input_ids"]
    start = preparing._options
    monkeypatch.setattr(
        preparing,
        "_options",
        lambda request: start(request) | {"logits_processor": [forced(wanted)]},
    )
    asked = CHAT | {
        "tools": [TOOL],
        "max_tokens": len(wanted),
        "stream": stream,
        "return_token_ids": True,
    }
    if parallel is not None:
        asked["parallel_tool_calls"] = parallel
    with served(lambda: engine) as server:
        answer = server.post(asked)
    if stream:
        choices = [choice for chunk in chunks(answer.text) for choice in chunk["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        tokens = [token for choice in choices for token in choice.get("token_ids", [])]
        reason = choices[-1]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        calls, tokens, reason = (
            choice["message"]["tool_calls"],
            choice["token_ids"],
            choice["finish_reason"],
        )
    assert [call["function"]["name"] for call in calls] == ["f"] * (2 if parallel is None else 1)
    assert tokens == (wanted if parallel is None else wanted[: len(f"Well{call}")])
    assert reason == ("length" if parallel is None else "tool_calls")


def test_several_calls_are_forced_where_the_client_says_so() -> None:
    from specengine.protocol.preparing import calls_grammar

    asked: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}
    tokenizer = byte_tokenizer(TEMPLATE)
    several = calls_grammar(
        ChatRequest.model_validate(asked | {"parallel_tool_calls": True}), tokenizer
    )
    assert several is not None
    assert ")*" in several
    for one in ({}, {"parallel_tool_calls": False}, {"parallel_tool_calls": None}):
        grammar = calls_grammar(ChatRequest.model_validate(asked | one), tokenizer)
        assert grammar is not None
        assert ")*" not in grammar


def test_fields_beside_a_tools_own_go_to_the_template(caller: Served) -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "returns": "a number"}, "extra": 1}
    prompt = prompt_of(caller, CHAT | {"tools": [tool]})
    assert '"returns": "a number"' in prompt


def test_the_same_hints_are_taken_by_both_requests() -> None:
    ours = set(ChatRequest.model_fields) & set(CompletionRequest.model_fields)
    assert {
        "metadata",
        "user",
        "store",
        "guided_json",
        "stop_token_ids",
        "prompt_cache_key",
    } <= ours

"""Anthropic's Messages: blocks, streams, counts and errors in the shapes that its clients read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.saying import CALL, Saying, saying
from tests.serve.served import served

PATH = "/v1/messages"
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Look",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
HELLO: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Hello"}],
}


@pytest.fixture(scope="module")
def own() -> Iterator[Saying]:
    with saying() as made:
        yield made


def said(own: Saying, asked: dict[str, Any], text: str | None) -> dict[str, Any]:
    own.said = text
    answer = own.server.post(asked, PATH)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(own: Saying, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a stream, each under the name that its body has."""
    events = []
    for event in own.server.post(asked | {"stream": True}, PATH).text.strip().split("\n\n"):
        name, body = event.split("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_text_and_why_it_ended(own: Saying) -> None:
    whole = said(
        own,
        HELLO | {"system": [{"type": "text", "text": "Be short"}], "metadata": {"user_id": "a"}},
        "Yes.",
    )
    assert own.prompt == "<|system|>Be short<|end|><|user|>Hello<|end|><|assistant|>"
    assert (whole["type"], whole["role"], whole["content"]) == (
        "message",
        "assistant",
        [{"type": "text", "text": "Yes."}],
    )
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("Be shortHello") + 5
    assert usage["output_tokens"] == 5
    stopped = said(own, HELLO | {"stop_sequences": ["zz", " And"]}, "Yes. And more")
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " And")
    assert stopped["content"][0]["text"] == "Yes."
    assert said(own, HELLO | {"max_tokens": 2}, "Yes.")["stop_reason"] == "max_tokens"


def test_a_stream_has_the_blocks_of_the_whole_answer(own: Saying) -> None:
    asked = HELLO | {"tools": [TOOL]}
    whole = said(own, asked, f"<think>Hm.</think>I look.{CALL}")
    kinds = [block["type"] for block in whole["content"]]
    assert (kinds, whole["stop_reason"]) == (["thinking", "text", "tool_use"], "tool_use")
    assert whole["content"][2]["input"] == {"text": "rivers"}
    events = streamed(own, asked)
    assert events[0]["message"]["content"] == []
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in begun] == [0, 1, 2]
    assert [event["content_block"]["type"] for event in begun] == kinds
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    for index, (name, text) in enumerate(
        (("thinking", "Hm."), ("text", "I look."), ("partial_json", '{"text": "rivers"}'))
    ):
        assert "".join(event["delta"][name] for event in deltas if event["index"] == index) == text


def test_results_of_tools_and_prefilled_answers(own: Saying) -> None:
    turns = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "look_up", "input": {"text": "rivers"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "wet"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    said(own, HELLO | {"messages": turns}, "Yes.")
    call = f"<|assistant|>[Hm.]{CALL}<|end|>"
    assert (
        own.prompt == f"<|user|>Hello<|end|>{call}<|user|>wet<|end|><|user|>So?<|end|><|assistant|>"
    )
    said(
        own,
        HELLO | {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Well"}]},
        "Yes.",
    )
    assert own.prompt == "<|user|>Hello<|end|><|assistant|>Well"
    said(own, HELLO | {"thinking": {"type": "disabled"}}, "Yes.")
    assert own.prompt.startswith("N")


def test_choices_of_tools_and_schemas(own: Saying) -> None:
    asked = HELLO | {"tools": [TOOL]}
    both = said(own, asked, CALL + CALL)["content"]
    one = said(
        own,
        asked | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        CALL + CALL,
    )["content"]
    assert (len(both), len(one)) == (2, 1)
    none = said(own, asked | {"tool_choice": {"type": "none"}}, CALL)
    assert (none["content"][0]["type"], none["stop_reason"]) == ("text", "end_turn")
    pytest.importorskip("llguidance")
    nothing = TOOL | {"input_schema": {"type": "object", "properties": {}}}
    for choice in ({"type": "any"}, {"type": "tool", "name": "look_up"}):
        called = said(own, HELLO | {"tools": [nothing], "tool_choice": choice}, None)["content"]
        assert [(block["name"], block["input"]) for block in called] == [("look_up", {})]
    format = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    assert said(own, HELLO | {"output_config": format}, None)["content"][0]["text"] in (
        '"yes"',
        '"no"',
    )


def test_tokens_are_counted_as_they_are_read(own: Saying) -> None:
    asked = HELLO | {"system": "Be short", "tools": [TOOL]}
    read = said(own, asked, "Yes.")["usage"]
    counted = own.server.post(
        {name: asked[name] for name in ("model", "messages", "system", "tools")},
        f"{PATH}/count_tokens",
    )
    assert counted.json() == {
        "input_tokens": read["input_tokens"] + read["cache_read_input_tokens"]
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_errors_have_anthropics_shape(own: Saying, change: dict[str, Any], named: str) -> None:
    answer = own.server.post(HELLO | change, PATH)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(named)


def test_its_header_is_a_key() -> None:
    with served(api_keys=("right",)) as server:
        refused = server.post(HELLO, PATH, headers={"X-Api-Key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        asked = HELLO | {"max_tokens": 4}
        assert server.post(asked, PATH, headers={"X-Api-Key": "right"}).status_code == 200

"""OpenAI's Responses: read by OpenAI's own client, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.saying import CALL, Saying, saying
from tests.serve.served import NAME

PATH = "/v1/responses"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    "strict": None,
}
HELLO: dict[str, Any] = {"model": NAME, "input": "Hello there"}


@pytest.fixture(scope="module")
def own() -> Iterator[Saying]:
    with saying() as made:
        yield made


@pytest.fixture
def client(own: Saying) -> Any:
    own.said = None
    return openai.OpenAI(base_url=f"{own.server.address}/v1", api_key="any", max_retries=0)


def streamed(client: Any, asked: dict[str, Any]) -> list[Any]:
    """Events of a stream, whose numbers follow on each other."""
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_text_whole_and_streamed(own: Saying, client: Any) -> None:
    own.said = "A river."
    whole = client.responses.create(
        **HELLO, instructions="Be short", max_output_tokens=50, store=True
    )
    assert own.prompt == "<|system|>Be short<|end|><|user|>Hello there<|end|><|assistant|>"
    assert (whole.output_text, whole.status, whole.store) == ("A river.", "completed", False)
    assert whole.usage is not None
    assert whole.usage.output_tokens == len("A river.") + 1
    events = streamed(client, HELLO)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == "A river."
    assert events[-1].response.output_text == "A river."
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_collector(own: Saying, client: Any) -> None:
    own.said = f"I look.{CALL}"
    with client.responses.stream(model=NAME, input="Hello", tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.output_text.delta"} <= kinds
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == '{"text": "rivers"}'


def test_calls_and_their_results_go_round(own: Saying, client: Any) -> None:
    own.said = CALL + CALL
    first = client.responses.create(**HELLO, tools=[TOOL])
    assert [item.type for item in first.output] == ["function_call"] * 2
    call = first.output[0]
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"text": "rivers"})
    done = [
        event
        for event in streamed(client, HELLO | {"tools": [TOOL]})
        if event.type.endswith("arguments.done")
    ]
    assert [(event.name, event.arguments) for event in done] == [
        ("look_up", '{"text": "rivers"}')
    ] * 2
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
        for item in first.output
    ]
    turn: list[Any] = [{"role": "user", "content": "Hello there"}, *first.output, *results]
    own.said = "Wet."
    assert client.responses.create(model=NAME, input=turn, tools=[TOOL]).output_text == "Wet."
    assert own.prompt.endswith(
        f"<|assistant|>{CALL}{CALL}<|end|><|user|>wet<|end|><|user|>wet<|end|><|assistant|>"
    )
    own.said = CALL + CALL
    one = client.responses.create(**HELLO, tools=[TOOL], parallel_tool_calls=False)
    assert len(one.output) == 1


def test_thoughts_are_items_of_their_own(own: Saying, client: Any) -> None:
    own.said = "<think>\nHm, rivers.\n</think>\n\nThe Nile."
    whole = client.responses.create(**HELLO)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("Hm, rivers.", "The Nile.")
    events = streamed(client, HELLO)
    told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert told == "Hm, rivers."
    assert events[-1].response.output_text == "The Nile."
    client.responses.create(model=NAME, input=[*whole.output, {"role": "user", "content": "Why?"}])
    assert own.prompt.startswith("<|assistant|>[Hm, rivers.]The Nile.<|end|><|user|>Why?")
    client.responses.create(**HELLO, reasoning={"effort": "none"})
    assert own.prompt.startswith("N")


def test_limits_logprobs_and_schemas(own: Saying, client: Any) -> None:
    short = client.responses.create(**HELLO, max_output_tokens=3, top_logprobs=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [len(rated.top_logprobs) for rated in short.output[0].content[0].logprobs] == [2, 2, 2]
    assert streamed(client, HELLO | {"max_output_tokens": 3})[-1].type == "response.incomplete"
    pytest.importorskip("llguidance")
    format: Any = {
        "type": "json_schema",
        "name": "x",
        "schema": {"enum": ["yes", "no"]},
        "strict": True,
    }
    assert client.responses.create(**HELLO, text={"format": format}).output_text in (
        '"yes"',
        '"no"',
    )


@pytest.mark.sliced(4)
@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "conv_1"}, "conversation", "keeps no responses"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "keeps no items"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "text",
        ),
        ({"input": []}, "input", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"max_output_tokens": 9}, "max_output_tokens", "on this server"),
        ({"background": True}, "background", ""),
        ({"temperature": -1}, "temperature", ""),
        ({"nonsense": 1}, "nonsense", "unknown"),
        ({"tool_choice": "required"}, "tool_choice", "only with tools"),
    ],
)
def test_refusals_name_the_clients_field(change: dict[str, Any], field: str, said: str) -> None:
    with saying(max_tokens=8, default_max_tokens=4) as own:
        answer = own.server.post(HELLO | change, PATH)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert said in error["message"]

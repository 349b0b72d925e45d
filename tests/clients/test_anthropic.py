"""Anthropic's own client."""

from typing import Any

import pytest

from tests.clients.conftest import KEY

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Look a river up",
    "input_schema": {
        "type": "object",
        "properties": {"river": {"enum": ["Nile", "Po"]}},
        "required": ["river"],
    },
}


@pytest.fixture(scope="module")
def calling(calling_server: str) -> Any:
    return anthropic.Anthropic(base_url=calling_server, api_key="any", max_retries=0)


def test_a_message_whole_and_streamed(calling: Any) -> None:
    asked = {"model": "claude", "max_tokens": 12, "messages": HELLO, "system": "Be short"}
    whole = calling.messages.create(**asked)
    assert (whole.type, whole.role, whole.content[0].type) == ("message", "assistant", "text")
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert 1 <= whole.usage.output_tokens <= 12
    with calling.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_tools_there_and_back(calling: Any) -> None:
    asked = {"model": "claude", "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}
    whole = calling.messages.create(messages=HELLO, **asked)
    (call,) = whole.content
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "look_up")
    assert call.input["river"] in ("Nile", "Po")
    with calling.messages.stream(messages=HELLO, **asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].input) == ("tool_use", call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "wet"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answer = calling.messages.create(messages=turns, model="claude", max_tokens=4, tools=[TOOL])
    assert answer.usage.output_tokens <= 4


def test_tokens_are_counted(calling: Any) -> None:
    counted = calling.messages.count_tokens(
        model="claude", messages=HELLO, tools=[TOOL]
    ).input_tokens
    assert counted > calling.messages.count_tokens(model="claude", messages=HELLO).input_tokens > 0


def test_errors_are_the_clients_own(calling: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        calling.messages.create(
            model="claude", max_tokens=12, messages=HELLO, extra_body={"top_p": 7}
        )
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "top_p" in refused.value.body["error"]["message"]


@pytest.mark.model
def test_keys(default_server: str) -> None:
    asked = {"model": "claude", "max_tokens": 4, "messages": HELLO}
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=default_server, api_key="wrong").messages.create(**asked)
    assert (
        anthropic.Anthropic(base_url=default_server, api_key=KEY).messages.create(**asked).content
    )

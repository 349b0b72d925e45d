"""Mistral's client, over chat completions."""

from typing import Any

import pytest

mistralai = pytest.importorskip("mistralai.client")

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def test_whole_streamed_and_with_a_tool(scripted_server: str) -> None:
    client = mistralai.Mistral(api_key="any", server_url=scripted_server)
    whole = client.chat.complete(model="any", messages=HELLO)
    assert whole.choices[0].message.content == "You said: Hello"
    with client.chat.stream(model="any", messages=HELLO) as events:
        parts = [
            event.data.choices[0].delta.content or "" for event in events if event.data.choices
        ]
    assert "".join(parts) == "You said: Hello"
    parameters = {"type": "object", "properties": {"river": {"type": "string"}}}
    tools: list[Any] = [
        {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    ]
    called = client.chat.complete(model="any", messages=HELLO, tools=tools)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "look_up"

"""smolagents: an agent that calls tools, which ends with a tool of its own."""

from typing import Any

import pytest

smolagents = pytest.importorskip("smolagents")


@smolagents.tool
def look_up(river: str) -> str:
    """Look up a river.

    Args:
        river: Its name.
    """
    return "wet"


def test_an_answer_and_a_call(scripted_server: str) -> None:
    model: Any = smolagents.OpenAIModel(
        model_id="any", api_base=f"{scripted_server}/v1", api_key="any"
    )
    asked = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert model.generate(asked).content == "You said: Hello"
    assert "".join(part.content or "" for part in model.generate_stream(asked)) == "You said: Hello"
    called = model.generate(asked, tools_to_call_from=[look_up])
    assert called.tool_calls is not None
    assert called.tool_calls[0].function.name == "look_up"

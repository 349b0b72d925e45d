"""Haystack's generators and its agent."""

import os
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
pytest.importorskip("haystack")
from haystack.components.agents import Agent
from haystack.components.generators import chat
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

pytestmark = pytest.mark.slow

RIVER = {"type": "object", "properties": {"river": {"enum": ["Nile", "Po"]}}, "required": ["river"]}
HELLO = ChatMessage.from_user("Hello")


@pytest.fixture(params=["OpenAIChatGenerator", "OpenAIResponsesChatGenerator"])
def generator(request: pytest.FixtureRequest, scripted_server: str) -> Any:
    limit = "max_tokens" if request.param == "OpenAIChatGenerator" else "max_output_tokens"
    token, kind = Secret.from_token("any"), getattr(chat, request.param)
    return kind(
        api_key=token,
        model="any",
        api_base_url=f"{scripted_server}/v1",
        generation_kwargs={limit: 200},
    )


def test_an_answer_whole_and_streamed(generator: Any) -> None:
    (whole,) = generator.run([HELLO])["replies"]
    assert whole.text == "You said: Hello"
    usage = whole.meta["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == len(whole.text) + 1
    chunks: list[Any] = []
    (streamed,) = generator.run([HELLO], streaming_callback=chunks.append)["replies"]
    assert streamed.text == "".join(chunk.content for chunk in chunks) == whole.text
    assert len(chunks) > 1


@pytest.mark.parametrize("callback", [None, lambda chunk: None], ids=["whole", "streamed"])
def test_a_loop_with_tools(generator: Any, callback: Any) -> None:
    seen: list[str] = []

    def look_up(river: str) -> str:
        seen.append(river)
        return "wet"

    tool = Tool(name="look_up", description="Look a river up", parameters=RIVER, function=look_up)
    agent = Agent(chat_generator=generator, tools=[tool], max_agent_steps=3)
    messages = agent.run([HELLO], streaming_callback=callback)["messages"]
    assert seen == ["Po"]
    assert messages[-1].text == "It is wet."
    history = [message for message in messages[:-1] if str(message.role) != "system"]
    assert generator.run(history)["replies"][0].text == "It is wet."  # without the tools

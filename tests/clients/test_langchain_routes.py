"""LangChain's packages for Ollama and Anthropic, and its agents' loop of tools, against the same server."""

from typing import Any

import pytest

langchain_ollama = pytest.importorskip("langchain_ollama")
langchain_anthropic = pytest.importorskip("langchain_anthropic")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")


@tools.tool
def look_up(river: str) -> str:
    """Look up a river."""
    return "wet"


@pytest.fixture(params=["ollama", "anthropic"])
def model(request: pytest.FixtureRequest, scripted_server: str) -> Any:
    if request.param == "ollama":
        return langchain_ollama.ChatOllama(model="any", base_url=scripted_server)
    return langchain_anthropic.ChatAnthropic(
        model="claude", base_url=scripted_server, api_key="any", max_retries=0
    )


def test_whole_and_streamed(model: Any) -> None:
    answer = model.invoke("Hello")
    assert answer.content == "You said: Hello"
    assert answer.usage_metadata["output_tokens"] == len("You said: Hello") + 1
    assert "".join(chunk.text for chunk in model.stream("Hello")) == "You said: Hello"


def test_a_loop_with_a_tool(model: Any) -> None:
    offered = model.bind_tools([look_up])
    asked: list[Any] = [messages.HumanMessage("How is the Po?")]
    called = offered.invoke(asked)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("look_up", {"river": "Po"})
    result = messages.ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"])
    assert offered.invoke([*asked, called, result]).text == "It is wet."

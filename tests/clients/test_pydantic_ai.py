"""Pydantic AI, over chat completions and over Responses."""

import asyncio
from typing import Any, Literal

import pytest

pytest.importorskip("pydantic_ai")
import pydantic_ai
from pydantic import BaseModel
from pydantic_ai.models import openai as models
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.slow


class River(BaseModel):
    river: Literal["Nile", "Po"]


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, scripted_server: str) -> Any:
    provider = OpenAIProvider(base_url=f"{scripted_server}/v1", api_key="any")
    return getattr(models, request.param)("any", provider=provider, settings={"max_tokens": 200})


def streamed(agent: Any, text: str = "Hello") -> tuple[Any, list[Any]]:
    """Return the output of a stream, and its parts."""

    async def run() -> tuple[Any, list[Any]]:
        async with agent.run_stream(text) as result:
            parts = [part async for part in result.stream_output(debounce_by=None)]
            return await result.get_output(), parts

    return asyncio.run(run())


def test_an_answer_whole_and_streamed(model: Any) -> None:
    agent = pydantic_ai.Agent(model)
    whole = agent.run_sync("Hello")
    assert whole.output == "You said: Hello"
    assert whole.usage.output_tokens == len(whole.output) + 1
    assert whole.usage.input_tokens == len("Hello") + 3
    assert whole.response.finish_reason == "stop"
    output, parts = streamed(agent)
    assert output == whole.output
    assert len(parts) > 1
    assert all(output.startswith(part) for part in parts)


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_structured_output(model: Any, kind: str) -> None:
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, kind)(River))
    assert agent.run_sync("Hello").output.river in ("Nile", "Po")
    assert streamed(agent)[0].river in ("Nile", "Po")


@pytest.mark.parametrize("output", [str, pydantic_ai.NativeOutput(River)])
def test_a_loop_with_tools(model: Any, output: Any) -> None:
    agent, seen = pydantic_ai.Agent(model, output_type=output), []

    @agent.tool_plain
    def look_up(river: Literal["Nile", "Po"]) -> str:
        """Look a river up."""
        seen.append(river)
        return "wet"

    expected = "It is wet." if output is str else River(river="Po")
    whole = agent.run_sync("Hello")
    assert (whole.output, whole.usage.requests) == (expected, 2)
    assert streamed(agent)[0] == expected
    assert seen == ["Po", "Po"]

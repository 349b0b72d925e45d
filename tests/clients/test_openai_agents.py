"""OpenAI's Agents, over Responses (its default) and over chat completions."""

import asyncio
from typing import Any, Literal

import pytest

pytest.importorskip("agents")
import agents
import openai
from pydantic import BaseModel

pytestmark = pytest.mark.slow


class River(BaseModel):
    river: Literal["Nile", "Po"]


@pytest.fixture(params=["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def model(request: pytest.FixtureRequest, scripted_server: str) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{scripted_server}/v1", api_key="any", max_retries=0)
    return getattr(agents, request.param)(model="any", openai_client=client)


def ran(agent: Any, streamed: bool, text: str = "Hello") -> tuple[Any, str]:
    """Return the result, and the text that was streamed before it."""

    async def run() -> tuple[Any, str]:
        if not streamed:
            return await agents.Runner.run(agent, text, max_turns=3), ""
        result, told = agents.Runner.run_streamed(agent, text, max_turns=3), ""
        async for event in result.stream_events():
            if (
                event.type == "raw_response_event"
                and event.data.type == "response.output_text.delta"
            ):
                told += event.data.delta
        return result, told

    return asyncio.run(run())


SETTINGS: dict[str, Any] = {"max_tokens": 200, "include_usage": True}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer(model: Any, streamed: bool) -> None:
    agent = agents.Agent(name="a", model=model, model_settings=agents.ModelSettings(**SETTINGS))
    result, told = ran(agent, streamed)
    assert result.final_output == "You said: Hello"
    assert told == (result.final_output if streamed else "")
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.output_tokens) == (1, len("You said: Hello") + 1)
    assert usage.input_tokens == len("Hello") + 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("output", [None, River])
def test_a_loop_with_tools(model: Any, streamed: bool, output: Any) -> None:
    seen = []

    @agents.function_tool
    def look_up(river: Literal["Nile", "Po"]) -> str:
        """Look a river up."""
        seen.append(river)
        return "wet"

    settings = agents.ModelSettings(**SETTINGS)
    agent = agents.Agent(
        name="a", model=model, tools=[look_up], output_type=output, model_settings=settings
    )
    result, _ = ran(agent, streamed)
    assert seen == ["Po"]
    assert result.final_output == (River(river="Po") if output else "It is wet.")
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert result.context_wrapper.usage.requests == 2


def test_a_tool_that_must_be_called(model: Any) -> None:
    @agents.function_tool
    def look_up(river: Literal["Nile", "Po"]) -> str:
        """Look a river up."""
        return f"{river} is wet"

    settings = agents.ModelSettings(**SETTINGS, tool_choice="required")
    stop: Any = "stop_on_first_tool"
    agent = agents.Agent(
        name="a", model=model, tools=[look_up], tool_use_behavior=stop, model_settings=settings
    )
    assert ran(agent, False)[0].final_output in ("Nile is wet", "Po is wet")

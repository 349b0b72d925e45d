"""LlamaIndex's OpenAILike."""

import asyncio
from typing import Any, Literal

import pytest

pytest.importorskip("llama_index.llms.openai_like")
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

pytestmark = pytest.mark.slow

HELLO = [ChatMessage(role="user", content="Hello")]
BASE: dict[str, Any] = {
    "api_key": "any",
    "model": "local",
    "context_window": 8192,
    "max_tokens": 200,
    "max_retries": 0,
}


class River(BaseModel):
    river: Literal["Nile", "Po"]


@pytest.fixture
def scripted(scripted_server: str) -> Any:
    return OpenAILike(
        api_base=f"{scripted_server}/v1", is_chat_model=True, is_function_calling_model=True, **BASE
    )


def test_an_answer_whole_and_streamed(scripted: Any) -> None:
    whole = scripted.chat(HELLO)
    assert whole.message.content == scripted.complete("Hello").text == "You said: Hello"
    assert whole.raw.usage.completion_tokens == len("You said: Hello") + 1
    deltas = [part.delta for part in scripted.stream_chat(HELLO)]
    assert "".join(delta or "" for delta in deltas) == "You said: Hello"
    assert len(deltas) > 1


def test_texts(tiny_server: str) -> None:
    text = OpenAILike(
        api_base=f"{tiny_server}/v1",
        is_chat_model=False,
        temperature=0,
        **BASE | {"model": "tiny", "max_tokens": 8},
    )
    whole = text.complete("Once")
    assert whole.raw.usage.completion_tokens <= 8
    assert "".join(part.delta or "" for part in text.stream_complete("Once")) == whole.text


def test_tools_and_structured_output(scripted: Any) -> None:
    seen = []

    def look_up(river: Literal["Nile", "Po"]) -> str:
        """Look a river up."""
        seen.append(river)
        return "wet"

    tool = FunctionTool.from_defaults(look_up)
    whole = scripted.chat_with_tools([tool], user_msg="Hello")
    *_, streamed = scripted.stream_chat_with_tools([tool], user_msg="Hello")
    for answer in (whole, streamed):
        (call,) = scripted.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("look_up", {"river": "Po"})
    forced = scripted.chat_with_tools([tool], user_msg="Hello", tool_required=True)
    assert scripted.get_tool_calls_from_response(forced)[0].tool_kwargs["river"] in ("Nile", "Po")
    assert scripted.as_structured_llm(River).chat(HELLO).raw.river in ("Nile", "Po")

    async def loop() -> str:
        return str(await FunctionAgent(tools=[tool], llm=scripted).run("Hello"))

    assert asyncio.run(loop()) == "It is wet."
    assert seen == ["Po"]

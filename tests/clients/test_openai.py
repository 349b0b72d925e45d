"""OpenAI's own client."""

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import KEY

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CAPITAL: list[Any] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]


@pytest.fixture(scope="module")
def tiny(tiny_server: str) -> Any:
    return openai.OpenAI(base_url=f"{tiny_server}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def smol(default_server: str) -> Any:
    return openai.OpenAI(base_url=f"{default_server}/v1", api_key=KEY, max_retries=0)


def test_models(tiny: Any) -> None:
    assert [model.id for model in tiny.models.list()] == ["tiny"]
    assert tiny.models.retrieve("tiny").owned_by == "specengine"
    with pytest.raises(openai.NotFoundError) as refused:
        tiny.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


def test_a_whole_answer(tiny: Any) -> None:
    answer = tiny.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, temperature=0.7, seed=1
    )
    again = tiny.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=12, temperature=0.7, seed=1
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == again.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 12


def test_a_stream_and_its_usage(tiny: Any) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "stream": True}
    chunks = list(tiny.chat.completions.create(**asked, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 12
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in tiny.chat.completions.create(**asked))


def test_many_at_once(tiny_server: str) -> None:
    async def one(client: Any, seed: int) -> str:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, temperature=1.0, seed=seed
        )
        return answer.choices[0].message.content

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server}/v1", api_key="any") as client:
            return await asyncio.gather(*(one(client, index % 4) for index in range(16)))

    answers = asyncio.run(crowd())
    assert answers == answers[:4] * 4
    assert len(set(answers)) == 4


def test_text_completions(tiny: Any) -> None:
    asked = {"model": "tiny", "max_tokens": 6}
    text = tiny.completions.create(prompt="once", **asked).choices[0].text
    ids = list(b"once")  # the ids of bytes are another order, but ids they are
    assert tiny.completions.create(prompt=ids, **asked).usage.prompt_tokens == 4
    assert (
        tiny.completions.create(prompt="once", echo=True, **asked).choices[0].text == f"once{text}"
    )
    assert (
        list(tiny.completions.create(prompt="once", stream=True, **asked))[-1]
        .choices[0]
        .finish_reason
    )


def test_errors_are_the_clients_own(tiny: Any) -> None:
    for options, param in (
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 999}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            tiny.chat.completions.create(model="tiny", messages=HELLO, **options)
        assert (refused.value.status_code, refused.value.param) == (400, param)
        assert refused.value.type == "invalid_request_error"


RIVER: dict[str, Any] = {
    "type": "object",
    "properties": {"river": {"enum": ["Nile", "Po"]}},
    "required": ["river"],
    "additionalProperties": False,
}


def test_responses_with_tools(calling_server: str) -> None:
    client = openai.OpenAI(base_url=f"{calling_server}/v1", api_key="any", max_retries=0)
    tool: Any = {"type": "function", "name": "look_up", "parameters": RIVER, "strict": True}
    asked: dict[str, Any] = {
        "model": "gpt",
        "input": "Hello",
        "tools": [tool],
        "max_output_tokens": 200,
    }
    whole = client.responses.create(**asked, tool_choice="required")
    (call,) = whole.output
    assert (whole.status, call.type, call.name) == ("completed", "function_call", "look_up")
    with client.responses.stream(**asked, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    turn: list[Any] = [{"role": "user", "content": "Hello"}, call, result]
    text = client.responses.create(model="gpt", input=turn, max_output_tokens=8)
    assert text.output[0].type == "message"
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model="gpt", input="Hello", previous_response_id=text.id)


def test_responses_streamed_as_text(tiny: Any) -> None:
    asked = {"model": "tiny", "input": "Hello", "instructions": "Be short", "max_output_tokens": 12}
    whole = tiny.responses.create(**asked)
    with tiny.responses.stream(**asked) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert text == whole.output_text


def test_several_answers(tiny: Any) -> None:
    answer = tiny.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, temperature=1.0, seed=1, n=3
    )
    assert len({choice.message.content for choice in answer.choices}) == 3


@pytest.mark.model
def test_a_wrong_key(default_server: str) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=f"{default_server}/v1", api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"


@pytest.mark.model
def test_an_answer_that_means_something_streamed_or_not(smol: Any) -> None:
    asked = {"model": "smol", "messages": CAPITAL, "max_tokens": 40}
    text = smol.chat.completions.create(**asked).choices[0].message.content
    assert "Paris" in text
    chunks = list(smol.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    stop = smol.chat.completions.create(**asked, stop=["Paris"]).choices[0]
    assert (stop.message.content, stop.finish_reason) == (text[: text.index("Paris")], "stop")


@pytest.mark.model
def test_the_clients_own_collector_of_streams(smol: Any) -> None:
    with smol.chat.completions.stream(model="smol", messages=CAPITAL, max_tokens=100) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in final.choices[0].message.content

"""LangChain's ChatOpenAI."""

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import KEY

langchain_openai = pytest.importorskip("langchain_openai")

CAPITALS = [
    f"What is the capital of {country}? Answer in one sentence." for country in ("France", "Italy")
]


@pytest.fixture
def tiny(tiny_server: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{tiny_server}/v1", api_key="any", max_tokens=12, max_retries=0
    )


@pytest.fixture
def smol(default_server: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="smol", base_url=f"{default_server}/v1", api_key=KEY, max_tokens=40
    )


def test_invoke_and_stream_count_tokens(tiny: Any) -> None:
    answer = tiny.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] <= 12
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    whole = None
    for chunk in tiny.stream("Hello", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


def test_batches(tiny: Any) -> None:
    prompts = ["One", "Two", "One", "Two"]
    answers = [answer.content for answer in tiny.batch(prompts)]
    assert answers[:2] == answers[2:]
    assert [answer.content for answer in asyncio.run(tiny.abatch(prompts))] == answers


@pytest.mark.model
def test_answers_that_mean_something(smol: Any) -> None:
    first, second = [answer.content for answer in smol.batch(CAPITALS)]
    assert "Paris" in first
    assert "Rome" in second
    assert "".join(chunk.content for chunk in smol.stream(CAPITALS[0])) == first

"""LiteLLM, as the providers of OpenAI, vLLM, Ollama and Anthropic."""

import asyncio
import os
from typing import Any

import pytest

from tests.clients.conftest import KEY

# else importing it asks the network for prices
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm")

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(
    params=[{"model": "openai/tiny", "api_key": "any"}, {"model": "hosted_vllm/tiny"}],
    ids=["openai", "vllm"],
)
def asked(request: pytest.FixtureRequest, tiny_server: str) -> dict[str, Any]:
    return request.param | {
        "api_base": f"{tiny_server}/v1",
        "messages": HELLO,
        "max_tokens": 12,
        "num_retries": 0,
    }


def test_whole_and_streamed(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 12
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens


def test_asynchronous(asked: dict[str, Any]) -> None:
    async def crowd() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(**asked, temperature=1.0, seed=3) for _ in range(4))
        )

    assert len({answer.choices[0].message.content for answer in asyncio.run(crowd())}) == 1


def test_errors_are_the_clients_own(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, temperature=-1)
    with pytest.raises(litellm.NotFoundError, match="this server has"):
        litellm.completion(**asked | {"model": asked["model"] + "-2"})


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat", "anthropic"])
def test_other_protocols(scripted_server: str, provider: str) -> None:
    """Those of Ollama post JSON without saying so."""
    asked = {
        "model": f"{provider}/claude",
        "api_base": scripted_server,
        "api_key": "any",
        "messages": HELLO,
    }
    whole = litellm.completion(**asked, max_tokens=40)
    assert "Hello" in whole.choices[0].message.content
    chunks = litellm.completion(**asked, max_tokens=40, stream=True)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == whole.choices[0].message.content
    )


@pytest.mark.parametrize("model", ["openai/tiny", "hosted_vllm/tiny", "anthropic/tiny"])
def test_a_prompt_that_is_too_long_is_known_as_such(tiny_server: str, model: str) -> None:
    base = tiny_server if model.startswith("anthropic") else f"{tiny_server}/v1"
    long: list[Any] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model=model, api_base=base, api_key="any", messages=long, max_tokens=4, num_retries=0
        )


@pytest.mark.model
def test_an_answer_that_means_something(default_server: str) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    base = {"api_base": f"{default_server}/v1", "messages": question, "max_tokens": 40}
    answer = litellm.completion(model="hosted_vllm/smol", api_key=KEY, **base)
    assert "Paris" in answer.choices[0].message.content
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model="openai/smol", api_key="wrong", **base)

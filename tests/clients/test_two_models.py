"""Two models in one server that keeps one of them loaded, asked for in turn and at once by the clients of others."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.clients.conftest import saved, serving

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
MODELS = "tiny", "other"
Ask = Callable[[str], str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    second = saved(folder / "second", "--other")
    options = ["--model", f"other={second}", "--max-models", "1"]
    with serving([str(saved(folder / "tiny")), "--draft", "none", *options]) as address:
        yield address


def by_openai(server: str) -> Ask:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server}/v1", api_key="any")
    ask = client.chat.completions.create
    return lambda model: (
        ask(model=model, messages=HELLO, max_tokens=8, temperature=0).choices[0].message.content
    )


def by_a_stream_of_openai(server: str) -> Ask:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server}/v1", api_key="any")
    ask = client.chat.completions.create
    return lambda model: "".join(
        chunk.choices[0].delta.content or ""
        for chunk in ask(model=model, messages=HELLO, max_tokens=8, temperature=0, stream=True)
    )


def by_anthropic(server: str) -> Ask:
    client = pytest.importorskip("anthropic").Anthropic(base_url=server, api_key="any")
    ask, asked = client.messages.create, {"messages": HELLO, "extra_body": {"temperature": 0}}
    return lambda model: ask(model=model, max_tokens=8, **asked).content[0].text


def by_ollama(server: str) -> Ask:
    client = pytest.importorskip("ollama").Client(host=server)
    options = {"num_predict": 8, "temperature": 0}
    return lambda model: client.chat(model, HELLO, options=options).message.content


CLIENTS = by_openai, by_a_stream_of_openai, by_anthropic, by_ollama


def loaded(server: str) -> list[str]:
    models = httpx.get(f"{server}/v1/models").json()["data"]
    return [model["id"] for model in models if model["status"]["value"] == "loaded"]


@pytest.mark.parametrize("client", CLIENTS)
def test_each_is_loaded_when_it_is_asked_for(client: Callable[[str], Ask], server: str) -> None:
    ask = client(server)
    answers = {}
    for model in MODELS * 2:
        assert ask(model) == answers.setdefault(model, ask(model))
        assert loaded(server) == [model]
    assert answers["tiny"] != answers["other"]


@pytest.mark.parametrize("client", CLIENTS)
def test_who_asks_for_the_one_that_is_not_loaded_waits(
    client: Callable[[str], Ask], server: str
) -> None:
    ask = client(server)
    alone = {model: ask(model) for model in MODELS}
    asked = MODELS * 6
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    assert answers == [alone[model] for model in asked]
    assert len(loaded(server)) == 1

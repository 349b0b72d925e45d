"""Ollama's API: lines of JSON, its options, and what it says of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.saying import CALL, Saying, saying

HELLO: dict[str, Any] = {"model": "llama3", "messages": [{"role": "user", "content": "Hello"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "description": "Look"}}


@pytest.fixture(scope="module")
def own() -> Iterator[Saying]:
    with saying() as made:
        yield made


def lines(
    own: Saying, path: str, asked: dict[str, Any], text: str | None = "Yes."
) -> list[dict[str, Any]]:
    own.said = text
    answer = own.server.post(asked, path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(
        "application/x-ndjson" if asked.get("stream", True) else "application/json"
    )
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_streamed_unless_it_says_otherwise(own: Saying) -> None:
    asked = HELLO | {"tools": [TOOL], "think": True, "keep_alive": "5m"}
    (whole,) = lines(
        own, "/api/chat", asked | {"stream": False}, f"<think>Hm.</think>I look.{CALL}"
    )
    message = whole["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "look_up", "arguments": {"text": "rivers"}}
    ]
    parts = lines(own, "/api/chat", asked, f"<think>Hm.</think>I look.{CALL}")
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    for name, text in (("thinking", "Hm."), ("content", "I look.")):
        assert "".join(part["message"].get(name, "") for part in parts) == text
    (called,) = [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]]
    assert called[0]["function"] == message["tool_calls"][0]["function"]
    for ended in (whole, parts[-1]):
        assert (ended["done_reason"], ended["eval_count"]) == ("stop", whole["eval_count"])
        assert ended["total_duration"] >= ended["eval_duration"] > 0


def test_options_and_histories(own: Saying) -> None:
    history = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look_up", "arguments": {"text": "rivers"}}}],
        },
        {"role": "tool", "content": "wet", "tool_name": "look_up"},
    ]
    options = {
        "num_predict": 2,
        "temperature": 0,
        "seed": -1,
        "num_ctx": 4096,
        "repeat_penalty": 1.0,
        "stop": ["x"],
    }
    ended = lines(own, "/api/chat", {"messages": history, "options": options, "think": False})[-1]
    assert (
        own.prompt
        == f"N<|user|>Hello<|end|><|assistant|>{CALL}<|end|><|user|>wet<|end|><|assistant|>"
    )
    assert (ended["done_reason"], ended["eval_count"]) == ("length", 2)
    assert (
        lines(own, "/api/chat", HELLO | {"options": {"stop": ["e"]}, "stream": False})[0][
            "message"
        ]["content"]
        == "Y"
    )
    pytest.importorskip("llguidance")
    schema = HELLO | {"format": {"enum": ["yes", "no"]}, "stream": False}
    assert lines(own, "/api/chat", schema, None)[0]["message"]["content"] in ('"yes"', '"no"')


def test_generate_with_and_without_the_template(own: Saying) -> None:
    (whole,) = lines(
        own, "/api/generate", {"prompt": "Hello", "system": "Be short", "stream": False}
    )
    assert whole["response"] == "Yes."
    assert own.prompt == "<|system|>Be short<|end|><|user|>Hello<|end|><|assistant|>"
    raw = lines(own, "/api/generate", {"prompt": "Hello", "raw": True})
    assert ("".join(line["response"] for line in raw), own.prompt) == ("Yes.", "Hello")
    empty: list[tuple[str, dict[str, Any]]] = [
        ("/api/generate", {}),
        ("/api/chat", {"messages": []}),
    ]
    for path, asked in empty:
        loaded = own.server.post(asked, path).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_what_it_says_of_the_model(own: Saying) -> None:
    client = own.server.client
    (model,) = client.get("/api/tags").json()["models"]
    assert (model["name"], model["details"]["family"]) == ("tiny", "llama")
    assert model["size"] > 0
    (running,) = client.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("tiny", 2048)
    shown = own.server.post({"model": "any"}, "/api/show").json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["llama.context_length"] == 2048
    assert client.get("/api/version").json()["version"]
    assert client.head("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"options": {"nonsense": 2}}, "options.nonsense"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"format": "xml"}, "format"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["b"]}]},
            "messages[0].images",
        ),
        ("/api/generate", {"messages": None, "prompt": "a", "template": "x"}, "template"),
        ("/api/embed", {"input": "a"}, "embeddings are not offered: serve"),
        ("/api/pull", {}, "POST /api/pull is not here"),
    ],
)
def test_errors_are_a_text(own: Saying, path: str, change: dict[str, Any], said: str) -> None:
    answer = own.server.post(HELLO | change, path)
    assert answer.status_code >= 400
    assert answer.json().keys() == {"error"}
    assert answer.json()["error"].startswith(said)

"""Endpoints of llama.cpp and vLLM that generate nothing, and answers between two texts."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.protocol.preparing import fim_prompt
from specengine.protocol.problems import RequestError
from specengine.protocol.requests import Infill
from tests.serve.saying import Saying, saying
from tests.serve.served import TEXT, Served
from tests.toy import byte_tokenizer

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


@pytest.fixture
def infilling() -> Any:
    return byte_tokenizer(extra=FIM)


def test_tokens_and_back(server: Served) -> None:
    llama = server.post({"content": "hi<|end|>"}, "/tokenize").json()
    assert (llama["count"], llama["max_model_len"]) == (3, server.worker.engine.target.max_context)  # type: ignore[union-attr]
    assert server.post({"tokens": llama["tokens"]}, "/detokenize").json() == dict.fromkeys(
        ("content", "prompt"), "hi<|end|>"
    )
    plain = server.post(
        {"content": "hi<|end|>", "parse_special": False, "with_pieces": True}, "/tokenize"
    ).json()
    assert "".join(token["piece"] for token in plain["tokens"]) == "hi<|end|>"
    assert plain["count"] == len("hi<|end|>")
    assert server.post({"prompt": "hi", "return_token_strs": True}, "/tokenize").json()[
        "token_strs"
    ] == ["h", "i"]
    for body, path in (
        ({}, "/tokenize"),
        ({"content": "a" * 1_000_000}, "/tokenize"),
        ({"tokens": [99999]}, "/detokenize"),
        ({"tokens": [-1]}, "/detokenize"),
        ({"tokens": [1] * 100_000}, "/detokenize"),
    ):
        assert server.post(body, path).status_code == 400


def test_templates_and_properties() -> None:
    with saying() as own:
        asked = {
            "messages": [{"role": "user", "content": "hi"}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert own.server.post(asked, "/apply-template").json() == {
            "prompt": "N<|user|>hi<|end|><|assistant|>"
        }
        props = own.server.client.get("/props").json()
        assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (2048, 1)
        long = {"messages": [{"role": "user", "content": "a" * 1_000_000}]}
        assert own.server.post(long, "/apply-template").status_code == 400
        assert own.server.post(long, "/v1/messages/count_tokens").status_code == 400
        assert props["chat_template"].startswith("{% if tools %}")


def test_a_prompt_between_two_texts(infilling: Any) -> None:
    made = fim_prompt(Infill("a<|end|>", "b"), infilling)
    assert infilling.decode(made) == "<|fim_prefix|>a<|end|><|fim_suffix|>b<|fim_middle|>"
    assert infilling.convert_tokens_to_ids("<|end|>") not in made
    with pytest.raises(RequestError, match="fill in the middle"):
        fim_prompt(Infill("a", "b"), byte_tokenizer())


def test_a_server_answers_between_two_texts() -> None:
    with saying(FIM[:3]) as own:
        _answers_between(own)


def _answers_between(own: Saying) -> None:
    own.said = None
    prompt = {"prompt": "one", "suffix": "two", "max_tokens": 4}
    text = own.server.post(prompt, "/v1/completions")
    assert text.status_code == 200, text.text
    assert own.prompt == "<|fim_prefix|>one<|fim_suffix|>two<|fim_middle|>"
    infill = {"input_prefix": "o", "prompt": "ne", "input_suffix": "two", "n_predict": 4}
    whole = own.server.post(infill, "/infill").json()
    assert whole["content"] == text.json()["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"]) == (True, "limit")
    assert own.server.post(infill | {"response_fields": ["content"]}, "/infill").json() == {
        "content": whole["content"]
    }
    stream = own.server.post(infill | {"stream": True}, "/infill").text
    assert stream.count("data: ") >= 2
    ollama = {"prompt": "one", "suffix": "two", "stream": False, "options": {"num_predict": 4}}
    assert own.server.post(ollama, "/api/generate").json()["response"] == whole["content"]
    own.server.post(infill | {"input_suffix": ""}, "/infill")
    assert own.prompt == "<|fim_prefix|>one<|fim_suffix|><|fim_middle|>"


def test_a_model_without_the_tokens_says_so(server: Served) -> None:
    answer = server.post(TEXT | {"suffix": "b"}, "/v1/completions")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "suffix"
    assert server.post(TEXT | {"suffix": ""}, "/v1/completions").status_code == 200
    assert server.post(TEXT | {"suffix": "b", "echo": True}, "/v1/completions").status_code == 400


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings"])
def test_embeddings_are_refused_with_what_to_use_instead(server: Served, path: str) -> None:
    for body in ({"model": "m", "input": ["a", "b"]}, {"prompt": "a"}, []):
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (
            ("serve a model that was trained for them" in error)
            if path.startswith("/api")
            else error["code"]
        )
        assert "embeddings are not offered" in answer.text
    paths = server.client.get("/openapi.json").json()["paths"]
    assert path not in paths

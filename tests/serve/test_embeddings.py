"""Embeddings: means of the last hidden states, in the shapes of OpenAI and Ollama."""

from __future__ import annotations

import base64
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from specengine import Engine
from tests.models.native_engines import native_lm, needs_extension
from tests.serve.served import CHAT, Served, served, tiny_engine
from tests.toy import byte_tokenizer, tiny

TEXTS = ["The river runs to the sea.", "A lighthouse", "é 😀"]


def embedded(server: Served, given: Any, **fields: Any) -> list[list[float]]:
    answer = server.post({"model": "m", "input": given, **fields}, "/v1/embeddings")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert [each["index"] for each in told["data"]] == list(range(len(told["data"])))
    return [each["embedding"] for each in told["data"]]


@torch.no_grad()
def expected(engine: Engine, text: str) -> list[float]:
    """What transformers gives."""
    model: Any = engine.target.model  # type: ignore[attr-defined]
    ids = torch.tensor([engine.tokenizer(text)["input_ids"]])
    mean = model(ids, output_hidden_states=True).hidden_states[-1][0].float().mean(0)
    return (mean / mean.norm()).tolist()


def test_they_are_means_of_the_models_last_states(server: Served) -> None:
    engine = server.worker.engine
    assert engine is not None
    before = server.post(CHAT | {"temperature": 0}).json()["choices"]
    rows = embedded(server, TEXTS)
    for text, row in zip(TEXTS, rows, strict=True):
        assert row == pytest.approx(expected(engine, text), abs=1e-4)
        assert math.hypot(*row) == pytest.approx(1, abs=1e-5)
        assert embedded(server, text) == [pytest.approx(row, abs=1e-6)]
    ids = engine.tokenizer(TEXTS[0])["input_ids"]
    assert embedded(server, ids) == [pytest.approx(rows[0], abs=1e-6)]
    assert embedded(server, [ids, ids]) == [pytest.approx(rows[0], abs=1e-6)] * 2
    assert server.post(CHAT | {"temperature": 0}).json()["choices"] == before


def test_they_come_as_numbers_or_as_bytes(server: Served) -> None:
    (row,) = embedded(server, "one", encoding_format="float")
    (told,) = embedded(server, "one", encoding_format="base64")
    assert list(struct.unpack(f"<{len(row)}f", base64.b64decode(told))) == pytest.approx(row, abs=1e-6)  # type: ignore[arg-type]
    told = server.post({"input": ["one", "two"]}, "/v1/embeddings").json()
    assert told["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


def test_ollamas_shapes(server: Served) -> None:
    rows = embedded(server, TEXTS)
    told = server.post({"model": "m", "input": TEXTS}, "/api/embed").json()
    assert told["embeddings"] == [pytest.approx(row, abs=1e-6) for row in rows]
    assert told["prompt_eval_count"] == sum(len(text.encode()) for text in TEXTS)
    told = server.post({"model": "m", "prompt": TEXTS[1]}, "/api/embeddings").json()
    assert told["embedding"] == pytest.approx(rows[1], abs=1e-6)


def test_what_is_refused(server: Served) -> None:
    for body, named in (
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", "b" * 5000]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ):
        answer = server.post(body, "/v1/embeddings")
        assert answer.status_code == 400, (body, answer.text)
        assert named in answer.json()["error"]["message"], answer.text


@needs_extension
def test_several_at_once_beside_answers() -> None:
    from specengine.models.native import NativeTarget

    def engine() -> Engine:
        return Engine(NativeTarget(native_lm(tiny())), None, None, byte_tokenizer())

    many = [f"text number {number}" for number in range(9)]
    with served(engine, parallel=2, queue=4) as server, ThreadPoolExecutor(3) as threads:
        answer = threads.submit(server.post, CHAT | {"temperature": 0})
        told = list(threads.map(lambda text: embedded(server, text)[0], many[:2]))
        rows = embedded(server, many)
        assert rows[:2] == [pytest.approx(row, abs=1e-5) for row in told]
        assert answer.result().json()["choices"] == server.post(CHAT | {"temperature": 0}).json()["choices"]
        own = server.worker.engine
        assert own is not None
        assert rows[8] == pytest.approx(expected(own, many[8]), abs=1e-4)


def test_a_target_without_hidden_states_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(draft="none")
    monkeypatch.setattr(type(engine.target.lm), "layers", None)  # type: ignore[attr-defined]
    with served(lambda: engine) as server:
        answer = server.post({"input": "a"}, "/v1/embeddings")
        assert answer.status_code == 501
        assert "gives no hidden states" in answer.text

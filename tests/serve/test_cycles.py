"""A stream's cycles are what a trace of the same request holds."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import policies
from specengine.costs import PassCosts
from specengine.engine import parts
from specengine.models.native import NativeTarget, lm
from specengine.serve import answering
from specengine.serve.models import ServedModel
from specengine.trace import TraceWriter, read_trace
from specengine.trace.records import TracedCycle
from tests.models.native_engines import needs_extension
from tests.serve.served import CHAT, Gate, Served, served, tiny_engine, until
from tests.serve.test_answers import chunks
from tests.serve.test_parallel import Steps, native_engine
from tests.trace.runs import records

ASKED = CHAT | {"stream": True, "return_cycles": True}


def untimed(cycles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in cycle.items() if name != "seconds"} for cycle in cycles]


def cycles_of(streamed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cycle for chunk in streamed for cycle in chunk.get("cycles", [])]


@pytest.mark.sliced(3)
@pytest.mark.parametrize("draft", ["small_model", "ngram", "recycling", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "seed": 3}, {"stop": ["\ufffd", "e"], "return_token_ids": True}],
)
def test_cycles_are_those_of_a_trace(draft: str, options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    engine = tiny_engine(draft=draft)
    named = {
        {"stop": "stop_strings"}.get(name, name): value
        for name, value in options.items()
        if name != "return_token_ids"
    }
    with TraceWriter(file, engine) as trace:
        for _ in trace.follow(engine.stream(CHAT["messages"], max_new_tokens=24, **named)):
            pass
    expected = [record for record in records(file) if record["record"] == "cycle"]
    with served(lambda: tiny_engine(draft=draft)) as server:
        streamed = chunks(server.post(ASKED | options).text)
    found = cycles_of(streamed)
    assert untimed(found) == untimed(expected)
    assert all(cycle["seconds"].keys() == expected[0]["seconds"].keys() for cycle in found)
    traced = [
        TracedCycle(**{name: value for name, value in cycle.items() if name != "record"})
        for cycle in found
    ]
    assert [cycle.states for cycle in traced] == [
        cycle.states for cycle in read_trace(file).queries[0].cycles
    ]
    assert all(chunk["plain_cycle_seconds"] is None for chunk in streamed if "cycles" in chunk)


def test_only_who_asks_gets_them(server: Served) -> None:
    assert not cycles_of(chunks(server.post(CHAT | {"stream": True}).text))
    refused = server.post(CHAT | {"return_cycles": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_cycles")


def test_auto_says_what_a_plain_cycle_takes() -> None:
    engine = tiny_engine(draft="ngram")
    engine.policy = policies.make(
        "auto", costs=PassCosts("here", {1: 0.02}, {1: 0.001}, measured=True)
    )
    with served(lambda: engine) as server:
        asked = ASKED | {"max_tokens": 8}
        auto, plain = (
            chunks(server.post(asked | policy).text) for policy in ({}, {"policy": "plain"})
        )
    assert {chunk["plain_cycle_seconds"] for chunk in auto if "cycles" in chunk} == {
        float(torch.tensor(0.02))
    }
    assert {chunk["plain_cycle_seconds"] for chunk in plain if "cycles" in chunk} == {None}


def test_plain_decoding_on_request(server: Served) -> None:
    asked = ASKED | {"temperature": 0.9, "seed": 3}
    own, plain = (chunks(server.post(asked | policy).text) for policy in ({}, {"policy": "plain"}))
    assert {len(cycle["tokens"]) for cycle in cycles_of(plain)} == {1}
    committed = [
        [token for cycle in cycles_of(streamed) for token in cycle["committed"]]
        for streamed in (own, plain)
    ]
    assert committed[0] == committed[1]
    assert len(cycles_of(own)) < len(cycles_of(plain)) == 24
    refused = server.post(CHAT | {"policy": "eagle"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "policy")


def test_who_asks_is_told_the_place_in_the_queue() -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server, ThreadPoolExecutor(2) as many:
        first = many.submit(server.post, CHAT)
        until(lambda: gate.passed > 0)
        second = many.submit(server.post, CHAT)
        until(lambda: server.metric("num_requests_waiting") == 1)
        with server.client.stream("POST", "/v1/chat/completions", json=ASKED) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": 2 before"
            gate.open.set()
            rest = [line for line in lines if line]
        assert {line for line in rest if line.startswith(":")} <= {
            ": 2 before",
            ": 1 before",
            ": ping",
        }
        assert cycles_of(chunks("\n\n".join(line for line in rest if line.startswith("data: "))))
        assert {first.result().status_code, second.result().status_code} == {200}


def test_who_asks_is_told_that_the_model_is_loaded() -> None:
    gate = threading.Event()

    def load() -> Any:
        assert gate.wait(30)
        return tiny_engine(draft="ngram")

    with served(tiny_engine, ServedModel("other", load)) as server:
        asked = ASKED | {"model": "other"}
        with server.client.stream("POST", "/v1/chat/completions", json=asked) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": loading"
            gate.set()
            assert any("cycles" in line for line in lines)


PIECE = 32  # tokens of a prompt that are run at a time here
LONG = "a" * 200
READING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/completion": {"prompt": LONG, "max_tokens": 4},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(parts, "PREFILL_ROWS", PIECE)
    monkeypatch.setattr(answering, "PLACE_SECONDS", 0.01)
    return Steps(monkeypatch)


@needs_extension
@pytest.mark.parametrize("path", READING)
def test_who_asks_is_told_how_much_of_a_prompt_is_read(path: str, steps: Steps) -> None:
    asked = READING[path] | {"max_tokens": 4, "stream": True, "return_progress": True}
    with served(native_engine, parallel=2) as server:
        with server.client.stream("POST", path, json=asked) as stream:
            told = progress(stream.iter_lines())
            seen = [next(told)]
            while seen[-1]["processed"] + PIECE < seen[-1]["total"]:
                steps.allow(1)
                seen.append(next(one for one in told if one["processed"] > seen[-1]["processed"]))
            steps.allow(1000)
            rest = list(told)
        assert [one["processed"] for one in seen] == [PIECE * number for number in range(len(seen))]
        assert len(seen) > 6
        assert {(one["total"], one["cache"]) for one in seen} == {(seen[0]["total"], 0)}
        assert seen[0]["total"] >= len(LONG)
        times = [one["time_ms"] for one in [*seen, *rest]]
        assert times == sorted(times)
        with server.client.stream("POST", path, json=asked) as stream:
            again = list(progress(stream.iter_lines()))
        assert all(one["processed"] >= one["total"] - 1 for one in again), "it is in the cache"
        alone = asked | {"stream": False}
        refused = server.post(alone, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_progress")


@needs_extension
def test_an_engine_that_answers_alone_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm, "PREFILL_ROWS", PIECE)
    monkeypatch.setattr(answering, "PLACE_SECONDS", 0.01)
    run = lm.NativeLM.run

    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return run(*arguments, **more)

    asked = {"prompt": LONG, "max_tokens": 1, "stream": True, "return_progress": True}
    with served(native_engine, parallel=1) as server:
        monkeypatch.setattr(lm.NativeLM, "run", slow)
        with server.client.stream("POST", "/v1/completions", json=asked) as stream:
            seen = [one["processed"] for one in progress(stream.iter_lines())]
    assert len(set(seen)) > 3
    assert seen == sorted(seen)
    assert max(seen) <= len(LONG)


def progress(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if "prompt_progress" in line:
            yield json.loads(line.removeprefix("data: "))["prompt_progress"]


@needs_extension
def test_a_prompt_that_is_partly_cached_says_so(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = NativeTarget.cached

    def slow(*arguments: Any) -> int:  # figures are read meanwhile
        time.sleep(0.2)
        return cached(*arguments)

    monkeypatch.setattr(NativeTarget, "cached", slow)
    asked = {"prompt": LONG, "max_tokens": 4, "stream": True, "return_progress": True}
    with served(native_engine, parallel=2) as server:
        steps.allow(1000)
        assert server.post(asked, "/v1/completions").status_code == 200
        steps.forbid()
        longer = asked | {"prompt": LONG + "b" * 100}
        with server.client.stream("POST", "/v1/completions", json=longer) as stream:
            told = progress(stream.iter_lines())
            first = next(told)
            steps.allow(1000)
            rest = list(told)
    assert first["processed"] == first["cache"] >= len(LONG)
    assert first["total"] > first["cache"] + 90
    assert {one["cache"] for one in rest} <= {first["cache"]}

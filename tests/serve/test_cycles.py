"""A stream's cycles are what a trace of the same request holds."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import policies
from specengine.costs import PassCosts
from specengine.trace import TraceWriter, read_trace
from specengine.trace.records import TracedCycle
from tests.serve.served import CHAT, Gate, Served, served, tiny_engine, until
from tests.serve.test_answers import chunks
from tests.trace.runs import records

ASKED = CHAT | {"stream": True, "return_cycles": True}


def untimed(cycles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in cycle.items() if name != "seconds"} for cycle in cycles]


def cycles_of(streamed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cycle for chunk in streamed for cycle in chunk.get("cycles", [])]


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

"""Crowds of badly behaved clients: none is lost, and what the counters say adds up."""

import asyncio
from pathlib import Path

import pytest

from specengine import Engine
from tests.serve.processes import free_port, running
from tests.serve.served import served, tiny_engine
from tests.serve.storm import KEY, MAX_BODY, OPTIONS, Crowd, expected_of, settled
from tests.serve.tiny_model import save

TOKENS = 8


@pytest.mark.slow
def test_two_hundred_clients_are_answered_refused_or_gone() -> None:
    expected = expected_of(tiny_engine(draft="none"), TOKENS)
    with served(
        lambda: tiny_engine(draft="none"), queue=32, api_keys=(KEY,), max_body_bytes=MAX_BODY
    ) as server:
        crowd = Crowd(server.address, expected, TOKENS)
        asyncio.run(crowd.come(200))
        assert crowd.outcomes["lost"] == 0, crowd.outcomes
        assert min(crowd.outcomes[outcome] for outcome in ("right", "refused", "error", "left")) > 0
        assert sum(crowd.outcomes.values()) - crowd.outcomes["refused"] == 200
        counted = settled(server.address)
        assert counted["request_success"] >= crowd.outcomes["right"]
        after = Crowd(server.address, expected, TOKENS)
        asyncio.run(after.come(10, rude=False))
        assert after.outcomes["right"] == 10


@pytest.mark.slow
def test_counters_are_the_sums_of_what_answers_said() -> None:
    def engine() -> Engine:
        return tiny_engine(draft="recycling", policy="chain")

    expected = expected_of(engine(), TOKENS)
    with served(engine, queue=64, api_keys=(KEY,)) as server:
        before = settled(server.address)
        crowd = Crowd(server.address, expected, TOKENS)
        asyncio.run(crowd.come(50, rude=False))
        counted = settled(server.address) - before
        assert crowd.outcomes["right"] == 50
        assert {name: counted[name] for name in crowd.figures} == crowd.figures
        assert crowd.figures["spec_decode_num_draft_tokens"] > 0


@pytest.mark.slow
def test_answers_at_once_take_no_memory_with_them(tmp_path: Path) -> None:
    """Half of the clients leave at any time; what the others get is right, and memory stays where it was."""
    folder, port = save(tmp_path / "tiny"), free_port()
    expected = expected_of(Engine.from_pretrained(str(folder)), TOKENS)
    with running([str(folder), *OPTIONS, "--parallel", "16"], port=port) as process:
        crowd = Crowd(f"http://127.0.0.1:{port}", expected, TOKENS)
        asyncio.run(crowd.come(100))
        assert crowd.outcomes["lost"] == 0, crowd.outcomes
        early, late = asyncio.run(crowd.keep_coming(600, 32, process.pid, every=300))
        assert min(crowd.outcomes[outcome] for outcome in ("right", "left")) > 100
        settled(crowd.address)
    assert late["resident_mb"] - early["resident_mb"] < 4

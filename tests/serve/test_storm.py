"""Crowds of badly behaved clients: none is lost, and what the counters say adds up."""

import asyncio

import pytest

from specengine import Engine
from tests.serve.served import served, tiny_engine
from tests.serve.storm import KEY, MAX_BODY, Crowd, expected_of, settled

TOKENS = 8


@pytest.mark.slow
def test_two_hundred_clients_are_answered_refused_or_gone() -> None:
    expected = expected_of(tiny_engine(draft="none"), TOKENS)
    with served(lambda: tiny_engine(draft="none"), queue=32, api_keys=(KEY,), max_body_bytes=MAX_BODY) as server:
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

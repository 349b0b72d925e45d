"""A server that answers several requests at once gives each the answer that it gives alone."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specengine import Engine
from specengine.drafters.recycling import Recycling
from specengine.errors import InputError
from specengine.models.native import NativeTarget
from specengine.protocol.settings import Settings
from tests.models.native_engines import native_lm, needs_extension
from tests.serve.served import CHAT, NAME, TEXT, Served, served, until
from tests.toy import byte_tokenizer, policy_for, tiny

pytestmark = needs_extension


def native_engine() -> Engine:
    target = NativeTarget(native_lm(tiny(max_position_embeddings=512)))
    return Engine(target, Recycling(), policy_for("eagle"), byte_tokenizer())


def asked(number: int) -> dict[str, Any]:
    words = [{"role": "user", "content": f"Question {number}: " + "and so on " * (number % 5)}]
    return CHAT | {"messages": words, "max_tokens": 20 + number, "seed": number, "temperature": float(number % 2)}


def test_answers_at_once_are_those_given_alone() -> None:
    with served(native_engine) as server:
        alone = [server.post(asked(number)).json()["choices"][0] for number in range(12)]
    with served(native_engine, parallel=4) as server, ThreadPoolExecutor(12) as many:
        found = list(many.map(lambda number: server.post(asked(number)).json()["choices"][0], range(12)))
        until(lambda: server.worker.idle)
        assert server.metric("num_requests_running") == 0
    assert found == alone


def test_a_request_starts_while_another_is_answered() -> None:
    with served(native_engine, parallel=2) as server:
        long = TEXT | {"max_tokens": 450, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            until(lambda: server.metric("num_requests_running") == 1)
            short = server.post(TEXT | {"max_tokens": 5}, "/v1/completions")
            assert short.json()["usage"]["completion_tokens"] <= 5
            until(lambda: server.metric("num_requests_running") == 1)  # the long one goes on
            rest = [line for line in lines if line.startswith("data: {")]
        assert json.loads(rest[-1].removeprefix("data: "))["choices"] is not None


def test_the_queue_begins_behind_the_answers_at_once() -> None:
    with served(native_engine, parallel=2, queue=1) as server, ThreadPoolExecutor(4) as many:
        long = TEXT | {"max_tokens": 480, "ignore_eos": True}
        running = [many.submit(server.post, long, "/v1/completions") for _ in range(2)]
        until(lambda: server.metric("num_requests_running") == 2)
        waiting = many.submit(server.post, long, "/v1/completions")
        until(lambda: server.metric("num_requests_waiting") == 1 or running[0].done())
        refused = server.post(TEXT, "/v1/completions")
        if not running[0].done():
            assert refused.status_code == 429
        assert all(job.result().status_code == 200 for job in (*running, waiting))


def test_a_conversation_goes_on_where_its_prefix_is_held() -> None:
    with served(native_engine, parallel=3) as server:
        histories: list[list[dict[str, str]]] = [[{"role": "user", "content": f"Topic {n} " * 8}] for n in range(3)]
        for turn in range(2):
            for history in histories:
                body = server.post(CHAT | {"messages": history, "max_tokens": 12}).json()
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 40) == (turn > 0), (turn, cached)
                history += [body["choices"][0]["message"], {"role": "user", "content": "And then?"}]
                history[-2].setdefault("content", "")


def test_clients_that_leave_free_their_places() -> None:
    with served(native_engine, parallel=3) as server:

        def leave() -> None:
            with httpx.Client(base_url=server.address) as client:
                body = TEXT | {"max_tokens": 480, "stream": True, "ignore_eos": True}
                with client.stream("POST", "/v1/completions", json=body) as stream:
                    next(stream.iter_lines())

        threads = [threading.Thread(target=leave) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        until(lambda: server.worker.idle)
        assert server.post(CHAT).status_code == 200


def test_stopping_ends_all_answers() -> None:
    with served(native_engine, parallel=3) as server, ThreadPoolExecutor(3) as many:
        body = TEXT | {"max_tokens": 480, "ignore_eos": True}
        jobs = [many.submit(server.post, body, "/v1/completions") for _ in range(3)]
        until(lambda: server.worker.busy)
        server.stop()
        assert {job.result().status_code for job in jobs} <= {200, 503}
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert not server.worker.alive


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="parallel: got 0, accepted 1 or more"):
        Settings(name=NAME, parallel=0)


def test_an_engine_that_answers_one_at_a_time_says_so() -> None:
    failures: list[Served] = []
    with served(parallel=2) as server:  # transformers' modules
        failures.append(server)
        assert isinstance(server.worker.failure, InputError)
        assert "parallel: got 2, accepted 1 on" in str(server.worker.failure)

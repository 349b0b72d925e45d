"""Clients that go away, come in crowds, or send what cannot be answered."""

import asyncio
import random
import resource
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from specengine.errors import InputError
from tests.serve.served import CHAT, Gate, Served, served, tiny_engine, until


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e40}, "temperature"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"grammar": "root ::= 'a'"}, "grammar"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Served, change: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        answer = server.post(CHAT | change | {"stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"1", b"[" * 100_000, b'{"\\ud800": 1}', b""])
def test_what_is_no_request_is_refused(server: Served, body: bytes) -> None:
    answer = server.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_keys_and_large_bodies() -> None:
    with served(api_keys=("right", "other"), max_body_bytes=2000) as server:
        assert server.client.get("/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer \xe9"},
            {"Authorization": "right"},
        ):
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            assert server.post(CHAT, headers=raw).status_code == 401
        right = {"Authorization": "Bearer other"}
        assert server.post(CHAT, headers=right).status_code == 200
        assert server.post(CHAT | {"user": "x" * 2000}, headers=right).status_code == 413
        pieces = (b"x" * 500 for _ in range(10))
        json_type = right | {"Content-Type": "application/json"}
        assert server.client.post("/v1/completions", content=pieces, headers=json_type).status_code == 413


def test_health_while_loading_and_after_a_failure() -> None:
    gate = Gate()

    def load() -> Any:
        gate.open.wait(20)
        return tiny_engine()

    with served(load, wait=False) as server:
        assert server.client.get("/health").status_code == 503
        assert server.post(CHAT).status_code == 503
        gate.open.set()
        until(lambda: server.client.get("/health").status_code == 200)

    def fail() -> Any:
        raise InputError("model: none")

    with served(fail) as server:
        assert server.client.get("/health").json()["error"]["code"] == "failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_engine_within_a_cycle(stream: bool) -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.post(CHAT | {"stream": stream, "max_tokens": 200}, timeout=0.3)
        passed = gate.passed
        time.sleep(0.2)  # the disconnect reaches the server
        gate.open.set()
        until(lambda: not server.worker.busy)
        assert gate.passed <= passed + 1
        assert server.post(CHAT).status_code == 200
        assert server.metric('request_success_total{finished_reason="abort"}') == 1


def test_a_full_queue_is_told_when_to_come_again_and_a_leaver_makes_room() -> None:
    gate = Gate()
    with served(lambda: gate.engine, queue=1) as server:

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:

                def ask() -> Any:
                    return asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))

                first = ask()
                await asyncio.to_thread(until, lambda: server.worker.busy)
                second = ask()
                await asyncio.to_thread(until, lambda: server.metric("num_requests_waiting") == 1)
                refused = await ask()
                second.cancel()
                await asyncio.to_thread(until, lambda: server.metric("num_requests_waiting") == 0)
                third = ask()
                gate.open.set()
                return [refused, await first, await third]

        refused, *answered = asyncio.run(crowd())
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert [answer.status_code for answer in answered] == [200, 200]


@pytest.mark.slow
def test_fifty_clients_some_of_which_go_away() -> None:
    chance = random.Random(0)
    asked = CHAT | {"max_tokens": 8}
    with served(queue=64) as server:
        expected = server.post(asked).json()["choices"][0]["message"]["content"]

        async def one(client: httpx.AsyncClient, patience: float | None) -> str | None:
            try:
                answer = await client.post("/v1/chat/completions", json=asked, timeout=patience)
            except httpx.TimeoutException:
                return None
            assert answer.status_code == 200
            return answer.json()["choices"][0]["message"]["content"]

        async def crowd() -> list[str | None]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.address, limits=limits) as client:
                waits = [chance.uniform(0.05, 1) if chance.random() < 0.4 else 120 for _ in range(50)]
                return await asyncio.gather(*(one(client, wait) for wait in waits))

        answers = asyncio.run(crowd())
        assert {answer for answer in answers if answer is not None} == {expected}
        assert sum(answer is not None for answer in answers) >= 25
        until(lambda: not server.worker.busy)
        assert server.post(asked).json()["choices"][0]["message"]["content"] == expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_stays_flat_over_many_requests() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with served(lambda: tiny_engine(draft="none")) as server:

        def ask(count: int) -> None:
            for turn in range(count):
                body = CHAT | {"max_tokens": 2, "stream": turn % 2 == 0, "temperature": 1.0, "seed": turn}
                assert server.post(body).status_code == 200

        ask(50)
        before = resident()
        ask(300)
        assert resident() - before < 8 << 20

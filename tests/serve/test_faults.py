"""Clients that go away, come in crowds, or send what cannot be answered."""

import asyncio
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from specengine.errors import InputError
from specengine.protocol.settings import Settings
from specengine.serve import guards
from tests.serve.served import CHAT, NAME, Gate, Served, served, tiny_engine, until


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e40}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"grammar": "root ::= 'a'"}, "grammar"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"9": 1e39}}, "logit_bias.9"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"presence_penalty": -1e39}, "presence_penalty"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Served, change: dict[str, Any], field: str
) -> None:
    for stream in (False, True):
        answer = server.post(CHAT | change | {"stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (
            400,
            field,
            "invalid_request_error",
        )


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"\xff", b"1", b"[" * 100_000, b'{"\\ud800": 1}', b""]
)
def test_what_is_no_request_is_refused(server: Served, body: bytes) -> None:
    answer = server.client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
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
        assert (
            server.client.post("/v1/completions", content=pieces, headers=json_type).status_code
            == 413
        )
        text = server.client.get("/metrics", headers=right).text
        assert 'specengine_request_failure_total{status="401"} 4.0' in text
        assert 'specengine_request_failure_total{status="413"} 2.0' in text


def test_browsers_of_other_origins_are_told_nothing_unless_they_may() -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with served(lambda: tiny_engine(draft="none")) as closed:
        assert closed.client.options("/v1/chat/completions", headers=asked).status_code == 405
        answer = closed.post(CHAT, headers={"Origin": "https://page.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
    with served(
        lambda: tiny_engine(draft="none"), origins=("https://page.example",), api_keys=("k",)
    ) as opened:
        allowed = opened.client.options("/v1/chat/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        refused = opened.client.options(
            "/v1/chat/completions", headers=asked | {"Origin": "https://other.example"}
        )
        assert "access-control-allow-origin" not in refused.headers
        origin = {"Origin": "https://page.example"}
        answer = opened.post(CHAT, headers=origin)  # without a key, and the page may read that
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (
            401,
            "https://page.example",
        )


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return given == key

    monkeypatch.setattr(guards.hmac, "compare_digest", compare)
    settings = Settings(NAME, api_keys=("one", "two"))
    guard = guards.Guard(app=None, settings=settings, failed=None)  # type: ignore[arg-type]
    assert guard._allows(Headers({"Authorization": "Bearer one"}))
    assert compared == [b"one", b"two"]  # all of them, also after the right one


def test_an_answer_is_cut_where_its_time_is_over() -> None:
    with served(lambda: tiny_engine(draft="none"), max_seconds=1e-6) as server:
        answer = server.post(CHAT).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == (
            "length",
            1,
        )


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


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_engine_within_a_cycle(stream: bool) -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server:
        asyncio.run(_asked_and_left(server, gate, CHAT | {"stream": stream, "max_tokens": 200}))
        until(lambda: all(job.ticket.cancelled for job in server.worker.jobs.answered))
        passed = gate.passed
        gate.open.set()
        until(lambda: not server.worker.jobs.answered)
        assert gate.passed <= passed + 1
        assert server.post(CHAT).status_code == 200
        assert server.metric('request_success_total{finished_reason="abort"}') == 1


async def _asked_and_left(server: Served, gate: Gate, body: dict[str, Any]) -> None:
    """A client that goes away in the first cycle of its answer."""
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(until, lambda: gate.passed == 1)
        asked.cancel()


@pytest.mark.slow
def test_a_full_queue_is_told_when_to_come_again_and_a_leaver_makes_room() -> None:
    gate = Gate()
    with served(lambda: gate.engine, queue=1) as server:

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:

                def ask() -> Any:
                    return asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))

                first = ask()
                await asyncio.to_thread(until, lambda: server.worker.jobs.answered)
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
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_stays_flat_over_many_requests() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with served(lambda: tiny_engine(draft="none")) as server:

        def ask(count: int) -> None:
            for turn in range(count):
                body = CHAT | {
                    "max_tokens": 2,
                    "stream": turn % 2 == 0,
                    "temperature": 1.0,
                    "seed": turn,
                }
                assert server.post(body).status_code == 200

        ask(50)
        before = resident()
        ask(300)
        assert resident() - before < 8 << 20

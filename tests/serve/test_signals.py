"""A server's process that is killed, told to stop, and told twice."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import free_port, is_healthy, running
from tests.serve.served import Gate, served, until
from tests.serve.tiny_model import save

LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400, "ignore_eos": True}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny")


async def told_to_stop(process: Any, client: httpx.AsyncClient, count: int) -> tuple[list[httpx.Response], Any]:
    """What `count` requests under way get, and what one gets that comes after the signal."""
    asked = [asyncio.create_task(client.post(PATH, json=LONG)) for _ in range(count)]
    while "num_requests_waiting 5.0" not in (await client.get("/metrics")).text:
        assert not any(one.done() for one in asked)
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    while (health := await client.get("/health")).status_code == 200:
        await asyncio.sleep(0.01)
    assert health.json()["error"]["code"] == "stopping"
    return await asyncio.gather(client.post(PATH, json=LONG), *asked)


@pytest.mark.slow
def test_killed_it_starts_again_on_its_port_and_a_signal_lets_it_answer_what_it_has(folder: Path) -> None:
    port = free_port()
    stream = httpx.stream("POST", f"http://127.0.0.1:{port}{PATH}", json=LONG | {"stream": True})
    with running([str(folder), "--draft", "none"], port=port) as process, stream as answer:
        next(answer.iter_lines())
        process.kill()
        process.wait(10)
    assert not is_healthy(port)

    async def stop(process: Any) -> tuple[list[httpx.Response], Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            return await told_to_stop(process, client, 6)

    with running([str(folder), "--draft", "none"], port=port) as process:
        late, *answers = asyncio.run(stop(process))
        process.wait(10)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert all(answer.json()["usage"]["completion_tokens"] == 400 for answer in answers)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
    assert int(late.headers["Retry-After"]) > 0
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_the_second_signal_ends_it_at_once(folder: Path) -> None:
    port = free_port()
    with running([str(folder), "--draft", "none"], port=port) as process:
        with httpx.stream("POST", f"http://127.0.0.1:{port}{PATH}", json=LONG | {"stream": True}) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(5)
        assert time.monotonic() - began < 1


def test_what_is_not_answered_in_the_time_to_drain_is_told_so() -> None:
    gate = Gate()

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        streamed = LONG | {"stream": True, "max_tokens": 100}
        asked = [client.post(PATH, json=streamed), client.post(PATH, json=LONG), client.post(PATH, json=streamed)]
        return await asyncio.gather(*asked)

    async def crowd(server: Any) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.address, timeout=20) as client:
            waiting = asyncio.create_task(ask(client))
            await asyncio.to_thread(until, lambda: server.metric("num_requests_waiting") == 2)
            server.stop()
            return await waiting

    with served(lambda: gate.engine, drain_seconds=0.5) as server:
        answers = asyncio.run(crowd(server))
        gate.open.set()
    assert [answer.json()["error"]["code"] for answer in answers] == ["stopping"] * 3
    assert [answer.status_code for answer in answers] == [503] * 3

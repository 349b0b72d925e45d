"""A server's process that is killed, told to stop, and told twice."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import free_port, is_healthy, running
from tests.serve.served import Gate, served, until
from tests.serve.tiny_model import save

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 400,
    "ignore_eos": True,
}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny")


async def told_to_stop(
    process: Any, client: httpx.AsyncClient, count: int
) -> tuple[list[httpx.Response], Any]:
    """Return the replies to `count` requests under way, and to one that comes after the signal."""
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
@pytest.mark.parametrize("parallel", [1, 16])
def test_killed_it_starts_again_on_its_port_and_a_signal_lets_it_answer_what_it_has(
    folder: Path, parallel: int
) -> None:
    port, count = free_port(), parallel + 5
    options = [str(folder), "--draft", "none", "--parallel", str(parallel)]
    stream = httpx.stream("POST", f"http://127.0.0.1:{port}{PATH}", json=LONG | {"stream": True})
    with running(options, port=port) as process, stream as answer:
        next(answer.iter_lines())
        process.kill()
        process.wait(10)
    assert not is_healthy(port)

    async def stop(process: Any) -> tuple[list[httpx.Response], Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            return await told_to_stop(process, client, count)

    with running(options, port=port) as process:
        late, *answers = asyncio.run(stop(process))
        process.wait(10)
    assert [answer.status_code for answer in answers] == [200] * count
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert all(answer.json()["usage"]["completion_tokens"] == 400 for answer in answers)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
    assert int(late.headers["Retry-After"]) > 0
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """In the middle of an answer that would take much longer, for which the first one waits."""
    folder, port = save(tmp_path / "long"), free_port()
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 17}
    (folder / "config.json").write_text(json.dumps(config))
    asked = LONG | {"stream": True, "max_tokens": 100_000}
    stream = httpx.stream("POST", f"http://127.0.0.1:{port}{PATH}", json=asked, timeout=60)
    with (
        running([str(folder), "--draft", "none", "--drain-seconds", "600"], port=port) as process,
        stream as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 503)
        next(line for line in lines if line)  # it goes on answering
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        with contextlib.suppress(httpx.TransportError):
            assert not any("[DONE]" in line for line in lines)


def test_what_is_not_answered_in_the_time_to_drain_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "specengine.serve")
    gate = Gate()

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        streamed = LONG | {"stream": True, "max_tokens": 100}
        asked = [
            client.post(PATH, json=streamed),
            client.post(PATH, json=LONG),
            client.post(PATH, json=streamed),
        ]
        return await asyncio.gather(*asked)

    async def crowd(server: Any) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.address, timeout=20) as client:
            waiting = asyncio.create_task(ask(client))
            await asyncio.to_thread(until, lambda: server.metric("num_requests_waiting") == 2)
            server.stop()
            return await waiting

    with served(lambda: gate.engine, drain_seconds=0.5) as server:
        answers = asyncio.run(crowd(server))
        assert "stopping: answers in progress may take 0.5 s" in caplog.messages
        gate.open.set()
    assert [answer.json()["error"]["code"] for answer in answers] == ["stopping"] * 3
    assert [answer.status_code for answer in answers] == [503] * 3

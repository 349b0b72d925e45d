"""Streams that outlast their clients: read again from an event on, bounded, with the key that named them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any

import httpx
import pytest

from specengine.serve import answering
from specengine.serve.answering import STREAM_NAME, KeptStream
from specengine.serve.models import ServedModel
from tests.serve.served import CHAT, NAME, TEXT, Gate, Served, served, tiny_engine, until

PATH = "/v1/chat/completions"
LONG = CHAT | {"max_tokens": 40, "temperature": 0, "stream": True}
BODIES = {
    PATH: LONG | {"return_cycles": True},
    "/v1/completions": TEXT | {"max_tokens": 40, "temperature": 0, "stream": True},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 40, "temperature": 0, "stream": True},
    "/v1/messages": CHAT | {"max_tokens": 40, "temperature": 0, "stream": True},
}
NAMES = map("stream-{}".format, itertools.count())
_EVENT = re.compile(rb"id: (\d+)\n(.+)", re.DOTALL)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    gate = Gate()
    gate.open.set()
    with served(lambda: gate.engine) as running:
        yield running


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    yield shared
    for name, *_ in list(shared.models.streams):
        shared.client.delete(f"/v1/stream/{name}")
    until(lambda: shared.models.streams == {})


def events_of(answer: httpx.Response, count: int | None = None) -> list[tuple[int, bytes]]:
    """Read so many events of a stream, or all; return the number and the rest of each."""
    rest = b""
    events: list[tuple[int, bytes]] = []
    for received in answer.iter_raw():
        *whole, rest = (rest + received).split(b"\n\n")
        for event in whole:
            match = _EVENT.fullmatch(event)
            assert match is not None, event
            events.append((int(match[1]), match[2]))
            if len(events) == count:
                return events
    assert rest == b""
    return events


def begun(
    server: Served, name: str, count: int = 1, body: dict[str, Any] = LONG, path: str = PATH
) -> list[tuple[int, bytes]]:
    """Ask for a named stream, read so many events and leave."""
    with server.client.stream("POST", path, json=body, headers={STREAM_NAME: name}) as answer:
        assert answer.status_code == 200
        return events_of(answer, count)


def taken_up(server: Served, name: str, last: int, count: int | None = None) -> Any:
    headers = {} if last < 0 else {"Last-Event-ID": str(last)}
    with server.client.stream("GET", f"/v1/stream/{name}", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer, count)


def require_whole(found: list[tuple[int, bytes]]) -> None:
    assert [number for number, _ in found] == list(range(len(found)))


def said(events: Iterable[str | bytes]) -> str:
    """Return the text of an answer, from the data of its events in any protocol."""
    answer = ""
    for event in events:
        data = re.search(
            r"^data: (\{.+)", event if isinstance(event, str) else event.decode(), re.M
        )
        told = {} if data is None else json.loads(data[1])
        choice = next(iter(told.get("choices", ())), {})
        delta = choice.get("delta") or told.get("delta") or {}
        text = delta if isinstance(delta, str) else delta.get("content", delta.get("text"))
        answer += text or choice.get("text") or ""
    return answer


@pytest.mark.sliced(1)
@pytest.mark.parametrize("path", BODIES)
def test_no_event_is_lost_or_doubled_wherever_connections_end(server: Served, path: str) -> None:
    body = BODIES[path]
    whole = server.post(body, path).text
    assert "id: " not in whole, "a stream without a name is sent as ever"
    for seed in range(3):
        draws, name = random.Random(seed), next(NAMES)
        found = begun(server, name, draws.randint(1, 9), body, path)
        while True:
            count = draws.choice([1, 3, 9, None])
            found += (more := taken_up(server, name, found[-1][0], count))
            if count is None or len(more) < count:
                break
        require_whole(found)
        assert said(event for _, event in found) == said(whole.split("\n\n")) != ""
        assert taken_up(server, name, found[-1][0]) == []
        assert taken_up(server, name, found[-2][0]) == found[-1:], "it stays to be read"
        assert taken_up(server, name, -1) == found


@pytest.mark.slow
def test_it_goes_on_without_a_client_and_then_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "KEPT_SECONDS", 1.0)
    gate = Gate(seconds=0.05)  # the answer does not end by itself
    gate.open.set()
    with served(lambda: gate.engine) as server:
        begun(server, "left alone", body=LONG | {"max_tokens": 100_000})
        passed = gate.passed
        until(lambda: gate.passed > passed + 5)
        assert not server.worker.jobs.idle
        more = taken_up(server, "left alone", 0, 3)
        assert [number for number, _ in more] == [1, 2, 3], "and the time begins anew"
        until(lambda: server.worker.jobs.idle, 5)
        until(lambda: not server.models.streams, 5)
        refused = server.client.get("/v1/stream/left%20alone")
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].startswith("name: no stream 'left alone' is kept")
        assert server.metric('request_success_total{finished_reason="abort"}') == 1


@pytest.mark.parametrize(
    "headers", [{}, {"Last-Event-ID": "3"}, {"X-Conversation-Id": "of another kind"}]
)
def test_who_names_no_stream_is_cancelled_on_leaving(headers: dict[str, str]) -> None:
    gate = Gate()
    gate.open.set()
    with served(lambda: gate.engine) as server:
        with server.client.stream(
            "POST",
            PATH,
            json=LONG | {"max_tokens": 100_000, "return_cycles": True},
            headers=headers,
        ) as answer:
            next(answer.iter_raw())
        until(lambda: server.worker.jobs.idle, 3)


def test_whole_answers_and_lines_are_no_streams_to_keep(server: Served) -> None:
    named = {STREAM_NAME: "of another kind"}
    assert server.post(CHAT, headers=named).json()["choices"]
    lines = server.post({"messages": CHAT["messages"]}, "/api/chat", headers=named).text
    assert all(map(json.loads, lines.splitlines()))
    refused = server.post(LONG | {"top_p": 7}, headers=named)
    assert refused.status_code == 400
    assert server.client.get("/v1/stream/of%20another%20kind").status_code == 404


def test_it_is_ended_at_once(server: Served) -> None:
    begun(server, "to be ended", body=LONG | {"max_tokens": 100_000})
    assert not server.worker.jobs.idle
    assert server.client.delete("/v1/stream/to%20be%20ended").status_code == 204
    until(lambda: server.worker.jobs.idle, 3)
    assert server.client.get("/v1/stream/to%20be%20ended").status_code == 404
    assert server.client.delete("/v1/stream/to%20be%20ended").status_code == 204


def test_no_other_key_reads_or_ends_it() -> None:
    gate = Gate()
    gate.open.set()
    path, other = "/v1/stream/secret", {"Authorization": "Bearer two"}
    with served(lambda: gate.engine, api_keys=("one", "two")) as server:
        server.client.headers["Authorization"] = "Bearer one"
        begun(server, "secret", body=LONG | {"max_tokens": 100_000})
        assert server.client.get(path, headers=other).status_code == 404
        assert server.client.get(path, headers={"X-Api-Key": "one"}).status_code == 404
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer three"}):
            assert server.client.get(path, headers=headers).status_code == 401
            assert server.client.delete(path, headers=headers).status_code == 401
        assert server.client.delete(path, headers=other).status_code == 204
        assert taken_up(server, "secret", 0, 2)[0][0] == 1, "another key has ended nothing"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, server: Served) -> None:
    monkeypatch.setattr(answering, "KEPT_EVENTS", 8)
    found = begun(server, "long", 30)
    until(lambda: server.worker.jobs.idle)
    assert server.client.get("/v1/stream/long").status_code == 404
    for last in (0, found[-1][0] - 8):
        headers = {"Last-Event-ID": str(last)}
        assert server.client.get("/v1/stream/long", headers=headers).status_code == 404
    (stream,) = [each for key, each in server.models.streams.items() if key[0] == "long"]
    latest = taken_up(server, "long", stream.numbers.start - 1)
    assert len(latest) == 7, "and the end"
    assert latest[-1][1] == b"data: [DONE]"
    monkeypatch.setattr(answering, "KEPT_STREAMS", len(server.models.streams))
    for name in ("one more", "long"):
        assert "id: " not in server.post(LONG, headers={STREAM_NAME: name}).text
    assert taken_up(server, "long", latest[0][0]) == latest[1:]


@pytest.mark.parametrize(
    "last",
    ["x", "-2", "--1", "1.0", "1_0", "+1", "99", "9" * 9, "9" * 5000, "²", "0x1", "-1-1"],
)
def test_events_that_there_are_not(server: Served, last: str) -> None:
    name = next(NAMES)
    begun(server, name)
    until(lambda: server.worker.jobs.idle)
    headers = {"Last-Event-ID": last.encode("latin-1")}
    refused = server.client.get(f"/v1/stream/{name}", headers=headers)  # type: ignore[arg-type]
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "stream_not_found"


def test_several_clients_read_it(server: Served) -> None:
    name = next(NAMES)
    first = begun(server, name, 2, LONG | {"max_tokens": 200})
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(
                server.client.stream(
                    "GET", f"/v1/stream/{name}", headers={"Last-Event-ID": str(first[-1][0])}
                )
            )
            for _ in range(2)
        ]
        one, other = map(events_of, opened)
    assert one == other
    require_whole(first + one)


def test_a_server_that_stops_has_it_written_and_read() -> None:
    gate = Gate(seconds=0.01)
    gate.open.set()
    with served(lambda: gate.engine, drain_seconds=20) as server:
        found = begun(server, "drained", body=LONG | {"max_tokens": 100})
        server.stop()
        until(lambda: server.worker.state == "stopping")
        found += taken_up(server, "drained", found[-1][0])
        require_whole(found)
        assert found[-1][1] == b"data: [DONE]"


def test_of_any_model() -> None:
    with served(tiny_engine, ServedModel("other", tiny_engine)) as server:
        for model in (NAME, "other"):
            found = begun(server, model, 2, LONG | {"model": model})
            found += taken_up(server, model, found[-1][0])
            require_whole(found)
            assert json.loads(found[0][1].removeprefix(b"data: "))["model"] == model


def test_before_its_first_event_leaving_ends_it() -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server:
        with contextlib.suppress(httpx.ReadTimeout):
            server.post(LONG, headers={STREAM_NAME: "early"}, timeout=0.5)
        gate.open.set()
        until(lambda: server.worker.jobs.idle, 3)


class Shifted(KeptStream):
    """A control: it doubles an event of whoever takes it up."""

    async def read(self, number: int) -> AsyncGenerator[bytes, None]:
        async for event in super().read(max(number - 1, 0)):
            yield event


@pytest.mark.parametrize("kind", [KeptStream, Shifted])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_reading_and_leaving(kind: type[KeptStream], seed: int) -> None:
    draws = random.Random(seed)
    written = [b"data: %d\n\n" % number for number in range(draws.randint(1, 60))]
    wholes: list[list[bytes]] = []

    async def stream() -> AsyncIterator[bytes]:
        for event in written:
            for _ in range(draws.randint(0, 3)):
                await asyncio.sleep(0)
            yield event

    async def reader(kept: KeptStream) -> None:
        found: list[bytes] = []
        while True:
            reading, left = kept.read(len(found)), draws.choice([1, 2, 5, 100])
            async with contextlib.aclosing(reading):
                async for event in reading:
                    found.append(event)
                    left -= 1
                    if left == 0:
                        break
                else:
                    wholes.append(found)
                    return
            await asyncio.sleep(0)

    async def run() -> None:
        streams: dict[Any, Any] = {}
        kept = kind(stream(), streams, ("name",))
        await asyncio.gather(*[reader(kept) for _ in range(3)])
        kept.writing.cancel()
        await asyncio.wait({kept.writing})
        await asyncio.sleep(0)
        assert streams == {}

    asyncio.run(run())
    right = [b"id: %d\n%b" % pair for pair in enumerate(written)]
    doubles = kind is Shifted and len(written) > 5
    assert all(found == right for found in wholes) is not doubles

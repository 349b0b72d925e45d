"""Tests of the guards before requests: names, sizes, times; and messages for bodies that are not JSON."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from specengine.protocol.problems import RequestError
from specengine.protocol.settings import Settings
from specengine.serve import guards
from specengine.serve.guards import Guard, parsed
from specengine.serve.metrics import Metrics
from specengine.serve.server import MAX_HEADER_BYTES
from tests.serve.served import CHAT, NAME, Served, served, tiny_engine

FEW = CHAT | {"max_tokens": 1}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    with served(lambda: tiny_engine(draft="none"), request_seconds=1.5) as running:
        yield running


# ---- names


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:1"]
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/models", "/health", "/openapi.json"])
def test_whoever_calls_the_server_by_another_name_is_refused(
    hasty: Served, host: str, path: str
) -> None:
    answer = hasty.client.get(path, headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "host")


def test_a_page_of_elsewhere_gets_no_answer(hasty: Served) -> None:
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert hasty.post(FEW, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "localhost."]
)
def test_its_own_names_are_known(hasty: Served, host: str) -> None:
    assert hasty.client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("localhost", "127.0.0.1")),
        ({"host": "::1"}, ("localhost", "::1")),
        ({"allowed_hosts": ("my.example",)}, ("localhost", "127.0.0.1", "my.example")),
        ({"host": "0.0.0.0"}, ()),
        (
            {"host": "0.0.0.0", "allowed_hosts": ("my.example",)},
            ("localhost", "0.0.0.0", "my.example"),
        ),
        ({"api_keys": ("k",)}, ()),
        (
            {"api_keys": ("k",), "allowed_hosts": ("my.example",)},
            ("localhost", "127.0.0.1", "my.example"),
        ),
        ({"allowed_hosts": ("*",)}, ()),
    ],
)
def test_names_are_looked_at_where_a_page_could_do_harm(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert Settings(NAME, **settings).hosts == names


def passes(names: Sequence[str], *given: str) -> bool:
    """Return whether a request with these Host headers comes through to the application."""
    reached = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope)

    async def send(message: Message) -> None:
        assert message.get("status", 403) == 403

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/health",
        "headers": [(b"host", host.encode()) for host in given],
    }
    settings = Settings(NAME, allowed_hosts=tuple(names))
    asyncio.run(Guard(app, settings, Metrics().failed)(scope, receive_nothing, send))
    return bool(reached)


async def receive_nothing() -> Message:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("host", "known"), [("my.example", True), ("example", False), ("not-my.example", False)]
)
def test_a_name_that_is_allowed_is_known(host: str, known: bool) -> None:
    assert passes(["localhost", "My.Example"], host) == known


# ---- routes


def test_health_has_its_usual_names_and_heads(hasty: Served) -> None:
    for path in ("/health", "/healthz", "/v1/health", "/"):
        answer = hasty.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert hasty.client.get("/v1/health").json() == {"status": "ok", "parallel": 1}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]
)
def test_a_route_that_is_not_there_says_which_are(
    hasty: Served, method: str, path: str, status: int
) -> None:
    answer = hasty.client.request(method, path)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status
    assert path in message
    assert "POST /v1/chat/completions" in message
    paths = hasty.client.get("/openapi.json").json()["paths"].items()
    assert message.partition("there are ")[2].split(", ") == [
        f"{m.upper()} {p}" for p, each in paths for m in each
    ]


def test_a_route_that_is_not_there_draws_no_description(
    hasty: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FastAPI,
        "openapi",
        lambda _: pytest.fail("it takes 0.2 s, in which no other answer goes on"),
    )
    assert hasty.client.post("/v1/nothing").status_code == 404


def test_any_name_is_the_one_model_unless_the_server_is_strict(hasty: Served) -> None:
    answer = hasty.post(FEW | {"model": "gpt-4"})
    assert (answer.status_code, answer.json()["model"]) == (200, NAME)
    with served(lambda: tiny_engine(draft="none"), strict_model=True) as strict:
        assert strict.post(FEW | {"model": "gpt-4"}).status_code == 404
        assert strict.post(FEW).status_code == 200


def test_asking_for_health_is_no_failed_request() -> None:
    asked = threading.Event()

    def load() -> Any:
        asked.wait(60)
        return tiny_engine(draft="none")

    with served(load, wait=False) as server:
        try:
            for path in ("/health", "/v1/health"):
                assert server.client.get(path).status_code == 503
            assert "request_failure_total{" not in server.client.get("/metrics").text
            assert server.post(FEW).status_code == 503
            assert 'request_failure_total{status="503"} 1.0' in server.client.get("/metrics").text
        finally:
            asked.set()


# ---- bodies


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "too many digits"),
        (gzip.compress(b"{}", mtime=0), "looks compressed"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b'{"a": }', "at character 6"),
        (b"", "must be a JSON object"),
        (b"[" + b"[]," * 200_000 + b"[]]", "lists and objects, accepted at most"),
        (
            b'{"messages": [' + b'{"role":"user","content":""},' * 50_000 + b"{}]}",
            "objects, accepted at most",
        ),
        (b'{"prompt": [' + b"1," * 1_500_000 + b"1]}", "values, accepted at most"),
    ],
)
def test_a_body_that_is_not_read_says_why(hasty: Served, body: bytes, said: str) -> None:
    answer = hasty.client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_compressed_body_is_refused_by_its_header(hasty: Served) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = hasty.client.post(
        "/v1/chat/completions", content=gzip.compress(b"{}", mtime=0), headers=headers
    )
    assert answer.status_code == 415
    assert "compressed" in answer.json()["error"]["message"]


def test_a_text_of_brackets_and_quotes_has_few_parts() -> None:
    text = json.dumps({"prompt": '[{"\\' * 100_000 + ","})
    assert parsed(text.encode())["prompt"].count("[") == 100_000
    with pytest.raises(RequestError, match="strings, lists and objects"):
        guards._require_few(b'["a",' * (guards.MAX_PARTS + 1))


# ---- connections


def said(server: Served, sent: list[bytes], wait: float = 0.0) -> bytes:
    """Send bytes and return the reply until the connection is closed."""
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as opened:
        for piece in sent:
            opened.sendall(piece)
            time.sleep(wait)
        received = b""
        try:
            while piece := opened.recv(4096):
                received += piece
        except ConnectionResetError:
            pass
        return received


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        [b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"],
        [b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"],
        [b""],
        [b"G"],
    ],
)
def test_a_request_that_is_not_sent_whole_is_given_up(hasty: Served, sent: list[bytes]) -> None:
    began = time.monotonic()
    answer = said(hasty, sent)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 8
    assert hasty.post(FEW).status_code == 200


def test_headers_have_an_end(hasty: Served) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    line = b"X-A: " + b"a" * 30_000 + b"\r\n"
    assert said(hasty, [start, *[line] * (MAX_HEADER_BYTES // 30_000 + 1), b""], 0.02).startswith(
        b"HTTP/1.1 431 "
    )
    assert said(hasty, [start, line, b"Connection: close\r\n\r\n"], 0.02).startswith(
        b"HTTP/1.1 200 "
    )


@pytest.mark.slow
def test_a_connection_may_stay_longer_than_a_request(hasty: Served) -> None:
    """It counts from a request's first byte, and an answer may take what it takes."""

    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=hasty.address, timeout=30) as client:
            statuses = []
            for _ in range(4):
                answer = await client.post("/v1/chat/completions", json=FEW)
                statuses.append(answer.status_code)
                await asyncio.sleep(0.6)
            return statuses

    assert asyncio.run(ask()) == [200] * 4


@pytest.mark.parametrize(
    ("hosts", "known"), [(["localhost", "evil.example"], False), (["localhost", "localhost"], True)]
)
def test_the_first_host_does_not_hide_a_second(hosts: list[str], known: bool) -> None:
    assert passes(["localhost"], *hosts) == known

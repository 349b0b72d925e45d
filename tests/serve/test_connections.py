"""Tests of connections as clients of every age use them: half-closed, HTTP/1.0, upgrades, forms, large bodies."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from specengine.serve.server import MAX_HEADER_BYTES
from tests.serve.served import CHAT, Gate, Served, served, tiny_engine, until

FEW = CHAT | {"max_tokens": 3}
PATH = "/v1/chat/completions"
AS_JSON = "Content-Type: application/json\r\n"
PAGE = "http://localhost:3000"
CLOSE = "Connection: close\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        lambda: tiny_engine(draft="none"), max_body_bytes=200_000, origins=(PAGE,)
    ) as running:
        yield running


def request(
    body: dict[str, Any],
    headers: str = AS_JSON,
    path: str = PATH,
    version: str = "1.1",
    *,
    chunked: bool = False,
) -> bytes:
    content = json.dumps(body).encode()
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(content)}"
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content) if chunked else content
    return (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\n{headers}{framing}\r\n\r\n".encode()
        + sent
    )


def asked(server: Served, sent: bytes, *, half_closed: bool = False) -> tuple[str, bytes]:
    """Send bytes; return the head and the body of what comes until the server ends the connection."""
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as opened:
        opened.sendall(sent)
        if half_closed:
            opened.shutdown(socket.SHUT_WR)
        received = b""
        while piece := opened.recv(1 << 16):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode().lower(), body


def status(head: str) -> int:
    return int(head.split()[1])


# ---- ends


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/api/chat"])
def test_a_client_that_has_ended_its_side_gets_its_answer(
    server: Served, version: str, streams: bool, path: str
) -> None:
    body = (
        {"input": "Hello", "stream": streams}
        if path == "/v1/responses"
        else FEW | {"stream": streams}
    )
    body = (
        {name: value for name, value in body.items() if name != "max_tokens"}
        if path == "/api/chat"
        else body
    )
    body |= {"options": {"num_predict": 3}} if path == "/api/chat" else {}
    body |= {"max_output_tokens": 3} if path == "/v1/responses" else {}
    head, answer = asked(server, request(body, version=version, path=path), half_closed=True)
    assert status(head) == 200
    assert b"}" in answer


def test_requests_that_follow_each_other_are_answered_before_the_end(server: Served) -> None:
    head, rest = asked(server, 2 * request(FEW) + request(FEW)[:-5], half_closed=True)
    assert status(head) == 200
    assert rest.count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.slow
def test_a_client_that_has_gone_ends_its_answer_all_the_same() -> None:
    gate = Gate()
    with served(lambda: gate.engine) as waiting:
        host, port = waiting.address.removeprefix("http://").split(":")
        opened = socket.create_connection((host, int(port)))
        opened.sendall(request(CHAT | {"max_tokens": 100}))
        until(lambda: waiting.worker.jobs.answered)
        opened.close()
        gate.open.set()
        gate.open.clear()
        until(lambda: all(job.ticket.cancelled for job in waiting.worker.jobs.answered))
        gate.open.set()
        until(lambda: waiting.worker.jobs.idle)
        assert gate.passed < 100


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/messages", "/api/generate"])
def test_streams_of_http_1_0_are_not_chunked_and_end_with_the_connection(
    server: Served, path: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 3, "stream": True},
        "/api/generate": {"prompt": "Hello", "options": {"num_predict": 3}},
    }
    head, answer = asked(
        server, request(bodies.get(path, FEW | {"stream": True}), path=path, version="1.0")
    )
    lines = [line for line in answer.decode().splitlines() if line]
    assert "transfer-encoding" not in head
    assert all(line.startswith(("data: ", "event: ", ": ", "{")) for line in lines)
    assert lines[-1] == "data: [DONE]" or json.loads(lines[-1].removeprefix("data: ")) is not None


# ---- upgrades and paths


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0, HTTP/1.1"])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_to_go_on_in_another_protocol_is_passed_over(
    server: Served, offer: str, chunked: bool
) -> None:
    headers = f"{AS_JSON}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\nHTTP2-Settings: AAEAAEAA\r\n"
    head, answer = asked(server, request(FEW, headers, chunked=chunked), half_closed=True)
    assert status(head) == 200
    assert json.loads(answer)["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models/", "/v1/models/", "http://localhost/v1/models", "/models"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_paths_are_read_as_proxies_write_them(server: Served, path: str, method: str) -> None:
    head, answer = asked(
        server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{CLOSE}\r\n".encode()
    )
    assert status(head) == 200
    assert bool(answer) == (method == "GET")
    assert "content-length: 0" not in head


@pytest.mark.parametrize(
    "path", ["//v1/chat/completions", "/v1/chat/completions/", "/chat/completions"]
)
def test_paths_with_more_slashes_or_no_version_take_bodies(server: Served, path: str) -> None:
    assert status(asked(server, request(FEW, AS_JSON + CLOSE, path))[0]) == 200


def test_a_key_is_asked_for_whatever_the_path_looks_like() -> None:
    with served(api_keys=("key",)) as locked:
        for path in (
            "//v1/models",
            "/v1/models/",
            "//health/../v1/models",
            "/v1//models",
            "/models",
        ):
            head, _ = asked(
                locked, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{CLOSE}\r\n".encode()
            )
            assert status(head) == 401


# ---- bodies that are not declared as JSON

TYPES = [
    "",
    "Content-Type: text/plain\r\n",
    "Content-Type: application/x-www-form-urlencoded\r\n",
    "Content-Type:\r\n",
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("path", [PATH, "/api/show", "/tokenize"])
def test_json_is_read_however_it_is_declared(server: Served, kind: str, path: str) -> None:
    bodies = {"/api/show": {"model": "any"}, "/tokenize": {"content": "Hello"}}
    head, answer = asked(server, request(bodies.get(path, FEW), kind + CLOSE, path))
    assert status(head) == 200, answer


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "origin",
    [
        "Origin: http://evil.example\r\n",
        "Origin: null\r\n",
        "Origin: http://localhost:8001\r\n",
        "Origin: http://localhost\r\nOrigin: http://evil.example\r\n",
        "Sec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\n",
    ],
)
def test_a_page_of_elsewhere_can_have_no_form_answered(
    server: Served, kind: str, origin: str
) -> None:
    for path in (PATH, "//v1/messages", "/api/generate"):
        head, _ = asked(server, request(FEW, kind + origin + CLOSE, path))
        assert status(head) == 403
        assert "access-control-allow-origin" not in head


@pytest.mark.parametrize("origin", ["http://localhost", PAGE])
def test_own_pages_and_allowed_ones_are_read(server: Served, origin: str) -> None:
    headers = (
        f"Content-Type: text/plain\r\nOrigin: {origin}\r\nSec-Fetch-Site: same-site\r\n{CLOSE}"
    )
    assert status(asked(server, request(FEW, headers))[0]) == 200


# ---- browsers

STAINLESS = [
    f"x-stainless-{name}"
    for name in ("arch", "lang", "os", "package-version", "retry-count", "runtime")
]


@pytest.mark.parametrize(
    "headers",
    [
        ["authorization", "content-type", *STAINLESS],
        ["anthropic-dangerous-direct-browser-access", "anthropic-version", "x-api-key", *STAINLESS],
        ["openai-organization", "helicone-auth", "traceparent"],
    ],
)
def test_an_allowed_page_may_send_the_headers_that_it_names(
    server: Served, headers: list[str]
) -> None:
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": ",".join(headers),
    }
    answer = server.client.options(PATH, headers=asks | {"Origin": PAGE})
    allowed = {
        name.strip() for name in answer.headers["access-control-allow-headers"].lower().split(",")
    }
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert allowed >= set(headers)
    refused = server.client.options(PATH, headers=asks | {"Origin": "http://evil.example"})
    assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (400, None)


# ---- bodies that are refused while they come


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/nothing"])
def test_a_client_that_sends_all_before_it_reads_sees_why_it_was_refused(
    server: Served, path: str
) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", path, b" " * 20_000_000, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 413
    assert b"larger than" in answer.read()


def test_headers_that_are_refused_are_told_so_too(server: Served) -> None:
    many = b"X-A: " + b"a" * 1000 + b"\r\n"
    head, _ = asked(
        server, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + many * (3 * MAX_HEADER_BYTES // 1000)
    )
    assert status(head) == 431


def test_a_body_in_crumbs_is_refused(server: Served) -> None:
    head, answer = asked(
        server,
        request({}, chunked=True).partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + 4_000 * b"1\r\n \r\n",
    )
    assert status(head) == 400
    assert b"chunks" in answer


def test_a_connection_stays_for_another_request_as_long_as_is_said() -> None:
    with served(lambda: tiny_engine(draft="none"), keep_alive_seconds=0.2) as brief:
        assert asked(brief, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0].startswith(
            "http/1.1 200"
        )

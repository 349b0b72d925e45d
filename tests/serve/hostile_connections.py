"""Requests that no honest client makes, by kind: bodies, headers, framing, pauses and ends, from one random seed.

`attack` makes them at one server, a few at once, each in at most MAX_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable

HOST = "127.0.0.1"
HOSTILE_HOST = "127.0.0.2"  # clients are told apart by their addresses
MAX_SECONDS = 8.0
AT_ONCE = 12
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/tokenize",
)
FEW = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
Act = Callable[[random.Random], Awaitable[bytes]]


def whole(body: bytes, headers: str = "", path: str = PATHS[0], method: str = "POST") -> bytes:
    """Return a request with this body and these further lines of headers."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def bodies(chance: random.Random) -> list[bytes]:
    """Return bodies that are torn, deep, large, mistyped, or in another encoding."""
    right = json.dumps(FEW).encode()
    cut = chance.randrange(len(right))
    depth = chance.randrange(10, 50_000)
    odd: list[object] = [
        None,
        [],
        3,
        "x",
        {"messages": 7},
        {"messages": [[]] * 50},
        {"input": {}},
        {"prompt": [[-1]]},
    ]
    return [
        right[:cut],
        right[:cut] + bytes([chance.randrange(256)]) + right[cut:],
        b"[" * depth,
        b'{"a":' * depth + b"1" + b"}" * depth,
        json.dumps(chance.choice(odd)).encode(),
        json.dumps(FEW).encode("utf-16"),
        "\ufeff".encode() + right,
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}',
        gzip.compress(right),
        chance.randbytes(chance.randrange(2000)),
        b'{"max_tokens": ' + b"9" * chance.randrange(5, 6000) + b"}",
        b'{"messages": [' + b"{}," * chance.randrange(1, 20_000) + b"{}]}",
        json.dumps(FEW | {f"x{number}": 0 for number in range(chance.randrange(1, 3000))}).encode(),
        json.dumps(FEW | {"temperature": float("nan"), "seed": -(1 << 80)}).encode(),
        json.dumps(FEW | {"stop": ["a" * 5000] * 50}).encode(),
        b" " * chance.randrange(1, 300_000) + right,
    ]


def framings(chance: random.Random) -> list[bytes]:
    """Return requests whose heads are wrong, double, huge, or are two requests to some parsers."""
    right = json.dumps(FEW).encode()
    both = f"Content-Length: {len(right)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return [
        (start + both).encode() + right,
        f"{start}Content-Length: -1\r\n\r\n".encode() + right,
        f"{start}Content-Length: 5, 6\r\n\r\n".encode() + right,
        f"{start}Content-Length: 99999999999999999999\r\n\r\n".encode() + right,
        f"{start}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode() + right,
        f"{start}Transfer-Encoding: chunked\r\n\r\n{'f' * 17}\r\n".encode() + right,
        f"{start}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n".encode(),
        start.encode() + b"X-A: \x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + chance.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"a" * chance.randrange(1, 90_000) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        start.encode() + b"X-A: b\r\n" * chance.randrange(1, 12_000) + b"\r\n",
        start.replace("Host: localhost", "Host: a\r\nHost: b").encode() + b"\r\n",
        b"\r\n" * chance.randrange(1, 500),
        whole(right, method="DELETE") + whole(b"", path="//%2e%2e/..%00"),
        whole(right) * chance.randrange(2, 6),
        whole(b"", method="GET", path="/v1/models") * chance.randrange(2, 60),
        start.encode()
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"1\r\n \r\n" * chance.randrange(1, 20_000),
    ]


class Attack:
    """Hostile acts at a port, counted by what came of them."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.chance = port, random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """Make so many acts."""
        acts = iter(range(count))
        kinds: list[Act] = [
            self.body,
            self.body,
            self.framing,
            self.framing,
            self.torn,
            self.slow,
            self.left,
            self.half,
        ]

        async def one() -> None:
            for number in acts:
                chance = random.Random(self.chance.random() + number)
                kind = chance.choice(kinds)
                try:
                    answer = await asyncio.wait_for(kind(chance), MAX_SECONDS)
                    status = answer[9:12].decode("latin-1") if answer else "closed"
                except TimeoutError:
                    status = "left after a while"
                except OSError:
                    status = "closed"
                self.outcomes[f"{getattr(kind, '__name__', '')}: {status}"] += 1

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    async def body(self, chance: random.Random) -> bytes:
        kind = chance.choice(
            ["application/json", "text/plain", "multipart/form-data; boundary=x", "a" * 3000]
        )
        headers = f"Content-Type: {kind}\r\nConnection: close\r\n"
        return await self._exchange(
            whole(chance.choice(bodies(chance)), headers, chance.choice(PATHS))
        )

    async def framing(self, chance: random.Random) -> bytes:
        return await self._exchange(chance.choice(framings(chance)))

    async def torn(self, chance: random.Random) -> bytes:
        """Leave in the middle of a request."""
        sent = whole(json.dumps(FEW).encode())
        return await self._exchange(
            sent[: chance.randrange(len(sent))], leaves=chance.uniform(0, 0.1)
        )

    async def slow(self, chance: random.Random) -> bytes:
        """Send a request in single bytes, and leave before its end."""
        sent = whole(json.dumps(FEW).encode())[: chance.randrange(1, 40)]
        return await self._exchange(sent, pause=0.02, leaves=0.0)

    async def left(self, chance: random.Random) -> bytes:
        """Leave in the middle of an answer or of its stream."""
        sent = whole(json.dumps(FEW | {"max_tokens": 64, "stream": chance.random() < 0.7}).encode())
        return await self._exchange(sent, leaves=chance.uniform(0, 0.3))

    async def half(self, chance: random.Random) -> bytes:
        """End one's own side, with a request that is whole or not."""
        sent = whole(json.dumps(FEW).encode())
        return await self._exchange(sent[: len(sent) - chance.choice([0, 0, 1, 30])], ends=True)

    async def _exchange(
        self, sent: bytes, pause: float = 0.0, leaves: float | None = None, ends: bool = False
    ) -> bytes:
        """Send bytes; return what comes, read to the end or until one leaves."""
        reader, writer = await asyncio.open_connection(
            HOST, self.port, local_addr=(HOSTILE_HOST, 0)
        )
        received = b""
        try:
            for piece in [sent[at : at + 1] for at in range(len(sent))] if pause else [sent]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            if ends:
                writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.5 if leaves is None else leaves):
                    while piece := await reader.read(1 << 16):
                        received += piece
        finally:
            writer.transport.abort() if leaves else writer.close()
        return received


def attack(port: int, count: int, seed: int = 0) -> dict[str, int]:
    """Make so many hostile acts; return how many had which end."""
    attacker = Attack(port, seed)
    asyncio.run(attacker.run(count))
    return dict(sorted(attacker.outcomes.items()))

"""A server in this process: a socket, a worker, uvicorn."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from specengine.engine import Engine
from specengine.errors import InputError
from specengine.protocol.problems import RequestError
from specengine.protocol.settings import Settings
from specengine.serve.app import create_app
from specengine.serve.metrics import Metrics
from specengine.serve.worker import Worker

MAX_HEADER_BYTES = 1 << 16


_Protocol: Any = AutoHTTPProtocol


class _Limited(_Protocol):
    seconds: float
    _timer: Any = None
    _head = 0  # bytes of a request whose headers have not ended

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before, of_a_body = self.cycle, self._body_comes
        super().data_received(data)
        if self.cycle is not before:
            self._head = 0
        elif not of_a_body:
            self._head += len(data)
        if self._head > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers are larger than the {MAX_HEADER_BYTES} bytes that are accepted")
        elif self._head or self._body_comes:
            self._wait()
        else:
            self._ended()

    @property
    def _body_comes(self) -> bool:
        return self.cycle is not None and bool(self.cycle.more_body)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._too_late)

    def _ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._refuse(408, f"the request was not whole within {self.seconds:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Say so where no answer has begun, and close."""
        self._ended()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(RequestError(status, message).body).encode()
            head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            self.transport.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def limited(seconds: float) -> type[Any]:
    """Return uvicorn's protocol with a limit of `seconds` for a whole request to come.

    It answers headers of more than MAX_HEADER_BYTES with 431, and a slower request with 408; then it closes the
    connection.
    """
    return type("Limited", (_Limited,), {"seconds": seconds})


_FORMAT = {"format": "%(asctime)s %(levelname)s %(message)s"}
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": _FORMAT},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False} for name in ("uvicorn", "specengine.serve")
    },
}


class Server(uvicorn.Server):
    """Told to stop, it answers what it has within `drain_seconds` and refuses what comes; told again, it just ends."""

    def __init__(self, worker: Worker, settings: Settings, **options: Any) -> None:
        http = limited(settings.request_seconds)
        app = create_app(worker, settings)
        super().__init__(uvicorn.Config(app, http=http, server_header=False, lifespan="on", **options))
        self.worker, self.drain_seconds = worker, settings.drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = time.monotonic() + self.drain_seconds
        self.worker.drain()
        while not self.worker.idle and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.worker.abandon()
        self.config.timeout_graceful_shutdown = max(round(end - time.monotonic()), 1)  # to be read by their clients
        await super().shutdown(sockets)


Beside = Callable[[Callable[[], bool]], AbstractContextManager[None]]


def run(
    load: Callable[[], Engine],
    settings: Settings,
    listening: Callable[[str], None],
    beside: Beside = lambda idle: nullcontext(),
) -> None:
    """Serve until a signal says to stop; what `load` raises comes out here.

    load: makes the engine, in the worker's thread; listening: told the address before anything is loaded; beside:
    returns a context for serving, told how to ask whether nothing is answered.
    InputError where the address cannot be had.
    """
    opened, address = open_socket(settings)
    listening(address)
    worker = Worker(load, settings.queue, Metrics(), settings.parallel)
    server = Server(worker, settings, log_config=LOGGING)

    def give_up() -> None:
        server.should_exit = True

    worker.failed = give_up
    with opened, beside(lambda: worker.state == "ready" and worker.idle):
        server.run(sockets=[opened])
    if worker.failure is not None:
        raise worker.failure


def open_socket(settings: Settings) -> tuple[socket.socket, str]:
    """Return the socket and its address; InputError where the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        opened = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"host, port: cannot listen at {settings.host}:{settings.port} ({error.strerror})") from error
    host, port = opened.getsockname()[:2]
    return opened, f"http://{f'[{host}]' if ':' in host else host}:{port}"

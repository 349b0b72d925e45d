"""A server in this process: a socket, a worker, uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from specengine.engine import Engine
from specengine.errors import InputError
from specengine.serve.app import create_app
from specengine.serve.connections import limited
from specengine.serve.metrics import Metrics
from specengine.serve.settings import Settings
from specengine.serve.worker import Worker

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


def run(load: Callable[[], Engine], settings: Settings, listening: Callable[[str], None]) -> None:
    """Serve until a signal says to stop; what `load` raises comes out here.

    load: makes the engine, in the worker's thread; listening: told the address before anything is loaded.
    InputError where the address cannot be had.
    """
    opened, address = open_socket(settings)
    listening(address)
    worker = Worker(load, settings.queue, Metrics())
    server = Server(worker, settings, log_config=LOGGING)

    def give_up() -> None:
        server.should_exit = True

    worker.failed = give_up
    with opened:
        server.run(sockets=[opened])
    if worker.failure is not None:
        raise worker.failure


def open_socket(settings: Settings) -> tuple[socket.socket, str]:
    """The socket and its address; InputError where it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        opened = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"host, port: {settings.host}:{settings.port} cannot be had ({error.strerror})") from error
    host, port = opened.getsockname()[:2]
    return opened, f"http://{f'[{host}]' if ':' in host else host}:{port}"

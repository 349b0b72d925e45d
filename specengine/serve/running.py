"""A server in this process: a socket, a worker, uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from specengine.engine import Engine
from specengine.errors import InputError
from specengine.serve.app import create_app
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


def run(load: Callable[[], Engine], settings: Settings, listening: Callable[[str], None]) -> None:
    """Serve until a signal says to stop; what `load` raises comes out here.

    load: makes the engine, in the worker's thread; listening: told the address before anything is loaded.
    InputError where the address cannot be had.
    """
    opened, address = open_socket(settings)
    listening(address)
    worker = Worker(load, settings.queue, Metrics())
    config = uvicorn.Config(
        create_app(worker, settings),
        log_config=LOGGING,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(round(settings.drain_seconds), 1),
    )
    server = uvicorn.Server(config)

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

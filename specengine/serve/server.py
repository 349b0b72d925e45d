"""A server in this process: a socket, a worker, uvicorn."""

import asyncio
import errno
import functools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specengine.errors import InputError
from specengine.protocol.problems import RequestError, unavailable
from specengine.protocol.settings import Settings
from specengine.serve.app import create_app
from specengine.serve.guards import ALIVE, HEALTH, METRICS
from specengine.serve.models import Models, ServedModel, limit_arenas
from specengine.serve.worker import log

MAX_HEADER_BYTES = 1 << 16
MAX_FRAMING = 2  # bytes received per byte of a body, once PIECE_BYTES more have come
# of what has come that are read before it is looked at: each small chunk takes long to read
PIECE_BYTES = 1 << 13
LINGER_SECONDS = 5.0  # that a client may go on sending after its refusal, which a closed connection would take away
LEFT_SECONDS = 2.0  # that an answer goes on after its client has ended its side, before one looks whether it listens
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"


class _Limited(
    H11Protocol
):  # whatever else is installed: HTTP/1.0 and offers of upgrades are answered alike
    seconds: float
    _timer: Any = None
    _head = 0  # bytes of a request whose headers have not ended
    _framed = 0  # bytes that came with a body beyond MAX_FRAMING times its own
    _half_closed = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport = _Lingering(transport, self)  # type: ignore[assignment]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for first in range(0, len(data), PIECE_BYTES):
            if not self.transport.is_closing():
                self._read(data[first : first + PIECE_BYTES])

    def _read(self, data: bytes) -> None:
        before, of_a_body = self.cycle, self._body_comes
        held = len(before.body) if of_a_body else 0
        super().data_received(data)
        if self.cycle is not before:
            self._head = self._framed = 0
        elif not of_a_body:
            self._head += len(data)
        elif not before.response_complete:
            self._framed = max(
                self._framed + len(data) - MAX_FRAMING * (len(before.body) - held), 0
            )
        if self._head > MAX_HEADER_BYTES:
            self._refuse(
                431, f"the headers are larger than the {MAX_HEADER_BYTES} bytes that are accepted"
            )
        elif self._framed > PIECE_BYTES:
            self._refuse(
                400, f"the body comes in chunks that take more than {MAX_FRAMING} times its bytes"
            )
        elif self.sending:
            self._wait()
        else:
            self._ended()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has ended its side with a whole request; return whether the connection stays."""
        # who ends a stream has gone
        self._half_closed = self._answering and not self.cycle.response_started
        if (
            self._half_closed and self.scope["http_version"] != "1.0"
        ):  # which has no answers before the answer
            self.loop.call_later(LEFT_SECONDS, self._probe)
        return self._half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self._answering:
            self.transport.close()

    def _probe(self) -> None:
        """Send what a client that waits passes over; one that has gone refuses it, which ends its answer."""
        if self._answering and not self.transport.is_closing():
            if not self.cycle.response_started:
                self.transport.write(_PROBE)
            self.loop.call_later(LEFT_SECONDS / 2, self._probe)

    def _get_upgrade(self) -> None:
        """Return None: an offer to go on in another protocol is passed over, as a server may."""

    @property
    def sending(self) -> bool:
        """Whether a request is coming that is not whole."""
        return bool(self._head) or self._body_comes

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self._body_comes and not self.cycle.response_complete

    @property
    def _body_comes(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(
                self.seconds,
                self._refuse,
                408,
                f"the request was not whole within {self.seconds:g} s",
            )

    def _ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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


class _Lingering:
    """A transport whose `close` lets a client that still sends read its refusal: the rest is dropped for a while."""

    def __init__(self, transport: Any, protocol: _Limited) -> None:
        self._transport, self._protocol, self._ends = transport, protocol, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._ends or bool(self._transport.is_closing())

    def close(self) -> None:
        if not self._protocol.sending or self.is_closing():
            self._transport.close()
            return
        self._ends = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._protocol.loop.call_later(LINGER_SECONDS, self._transport.close)


def connections(settings: Settings) -> dict[str, Any]:
    """Return uvicorn's options of connections.

    Headers of more than MAX_HEADER_BYTES are answered with 431, and a request that is not whole after
    `request_seconds` with 408; then the connection is closed.
    """
    return {
        "http": type("Limited", (_Limited,), {"seconds": settings.request_seconds}),
        "server_header": False,
        "h11_max_incomplete_event_size": 2
        * MAX_HEADER_BYTES,  # smaller headers are refused here, by their size
        "timeout_keep_alive": settings.keep_alive_seconds,
        # who may open the socket's file says for whom it asks; elsewhere uvicorn believes this machine's proxies
        "forwarded_allow_ips": "*" if settings.unix_socket else None,
    }


def logging_of(level: str) -> dict[str, Any]:
    """Return the configuration of the log, on standard error, without what is below the level."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "plain",
                "stream": "ext://sys.stderr",
                "filters": [functools.partial(_lower_probes, level)],
            }
        },
        "loggers": {
            name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
            for name in ("uvicorn", "specengine.serve")
        },
    }


def _lower_probes(level: str, record: logging.LogRecord) -> bool:
    """Give the line of a probe's request the level debug; return whether a line is logged."""
    fields: Any = record.args if record.name == "uvicorn.access" else ("", "", "")
    if str(fields[2]).partition("?")[0] in (*HEALTH, *ALIVE, METRICS):
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return record.levelno >= logging.getLevelName(level.upper())


class Server(uvicorn.Server):
    """Told to stop, it answers what it has within `drain_seconds` and refuses what comes; told again, it just ends."""

    def __init__(self, models: Models, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(models), lifespan="on", **connections(models.settings), **options
            )
        )
        self.models = models

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = time.monotonic() + self.models.settings.drain_seconds
        workers = self.models.workers.values()
        for worker in workers:
            if worker.state == "ready":
                worker.state = "stopping"  # whoever submits sees to it that nothing more comes
        log.info("stopping: answers in progress may take %g s", self.models.settings.drain_seconds)
        while not all(worker.jobs.idle for worker in workers) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for worker in workers:
            worker.jobs.abandon(unavailable("stopping"))
        # to be read by their clients
        self.config.timeout_graceful_shutdown = max(round(end - time.monotonic()), 1)
        await super().shutdown(sockets)


Beside = Callable[[Callable[[], bool]], AbstractContextManager[None]]


def run(
    models: Sequence[ServedModel],
    settings: Settings,
    listening: Callable[[str], None],
    beside: Beside = lambda idle: nullcontext(),
) -> None:
    """Serve until a signal says to stop; what the first model's `load` raises comes out here.

    listening: told the address before anything is loaded; beside: returns a context for serving, told how to ask
    whether the first model answers nothing.
    InputError where the address cannot be had.
    """
    opened, address = open_socket(settings)
    listening(address)
    limit_arenas()
    served = Models(models, settings)
    server, worker = Server(served, log_config=logging_of(settings.log_level)), served.first
    worker.failed = lambda: setattr(server, "should_exit", True)
    with opened, beside(lambda: worker.state == "ready" and worker.jobs.idle):
        server.run(sockets=[opened])
    if worker.state == "failed" and worker.failure is not None:
        raise worker.failure


def open_socket(settings: Settings) -> tuple[socket.socket, str]:
    """Return the socket and its address; InputError where the address cannot be used."""
    path, place = (
        settings.unix_socket,
        f"host, port: cannot listen at {settings.host}:{settings.port}",
    )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        if path is not None:
            place = f"unix_socket: cannot listen at {path}"
            return UnixSocket(path), f"unix:{path}"
        opened = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(f"{place} ({error.strerror or error})") from error
    host, port = opened.getsockname()[:2]
    return opened, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class UnixSocket(socket.socket):
    """Listens at a path, and takes it away when it is closed.

    Only this user may connect, and the group where the umask lets it write. A socket that a server left there is
    replaced; OSError where one listens, or where the path is no socket.
    """

    def __init__(self, path: str) -> None:
        super().__init__(socket.AF_UNIX)
        self._path: Path | None = Path(path)
        with socket.socket(socket.AF_UNIX) as probe:
            if self._path.is_socket() and probe.connect_ex(path) == errno.ECONNREFUSED:
                self._path.unlink()
        mask = os.umask(0o177)
        try:
            self.bind(path)
        except OSError:
            super().close()
            raise
        finally:
            os.umask(mask)
        self._path.chmod(0o600 if mask & 0o020 else 0o660)
        self.listen(2048)

    def close(self) -> None:
        """Close, and remove the path the first time: later it may be another server's."""
        if self._path is not None:  # a loop may have taken the descriptor away already
            self._path.unlink(missing_ok=True)
            self._path = None
        super().close()

"""Connections that end where a client sends its request too slowly, or headers without end."""

from __future__ import annotations

import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from specengine.serve.problems import Problem

MOST_HEADER_BYTES = 1 << 16


def limited(seconds: float) -> type[Any]:
    """uvicorn's protocol, in which a whole request comes within so many seconds.

    Headers of more than MOST_HEADER_BYTES are told 431, what takes longer 408; then the connection is closed.
    """
    base: Any = AutoHTTPProtocol

    class Limited(base):
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
            if self._head > MOST_HEADER_BYTES:
                self._refuse(431, f"the headers are larger than the {MOST_HEADER_BYTES} bytes that are accepted")
            elif self._head or self._body_comes:
                self._wait()
            else:
                self._ended()

        @property
        def _body_comes(self) -> bool:
            return self.cycle is not None and bool(self.cycle.more_body)

        def _wait(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(seconds, self._too_late)

        def _ended(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_late(self) -> None:
            self._refuse(408, f"the request was not whole within {seconds:g} s")

        def _refuse(self, status: int, message: str) -> None:
            """Say so where no answer has begun, and close."""
            self._ended()
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                body = json.dumps(Problem(status, message).body).encode()
                head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
                self.transport.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return Limited

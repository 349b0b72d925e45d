"""Answers as asynchronous streams, all of them from one thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from specengine.engine.scheduler import Scheduler, Task, Ticket, run_tasks
from specengine.records import GenerationResult, StreamPiece

if TYPE_CHECKING:
    from specengine.engine import Engine

Begin = Callable[..., Any]  # makes a TextGeneration of an engine and a ticket


class AsyncTextGeneration:
    """One generation as an asynchronous iterator of StreamPiece, answered by a thread; leaving it ends the answer.

    `result` is there once the iterator has ended. Errors of `Engine.generate` are raised by the iterator.
    """

    def __init__(self, streams: Streams, begin: Begin) -> None:
        """streams: answers it, once one of its engines is idle."""
        self.result: GenerationResult | None = None
        self._pieces: asyncio.Queue[StreamPiece | GenerationResult | BaseException | None] = (
            asyncio.Queue()
        )
        self._ticket = Ticket()
        loop, pieces = asyncio.get_running_loop(), self._pieces

        def send(piece: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        streams.submit(begin, self._ticket, send)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamPiece:
        piece = None if self._ticket.cancelled else await self._pieces.get()
        if isinstance(piece, StreamPiece):
            return piece
        self._ticket.cancel()
        if isinstance(piece, BaseException):
            raise piece
        self.result = piece or self.result
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the answer with the cycle under way, or its waiting."""
        self._ticket.cancel()

    def __del__(self) -> None:
        self._ticket.cancel()


class Streams:
    """Answers what is submitted on these engines, in a thread that is there for as long as there is something to do."""

    def __init__(self, engines: list[Engine], scheduler: Scheduler | None = None) -> None:
        self._engines, self._scheduler = engines, scheduler
        self._waiting = deque[tuple[Begin, Ticket, Callable[[Any], None]]]()
        self._guard = threading.Lock()
        self._runs = False

    def submit(self, begin: Begin, ticket: Ticket, send: Callable[[Any], None]) -> None:
        """Answer in turn; send: is handed each piece, then the result or the error."""
        with self._guard:
            self._waiting.append((begin, ticket, send))
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="specengine-astream", daemon=True).start()

    def _run(self) -> None:
        for _ in run_tasks(self._engines, self._scheduler, self._take):
            pass

    def _take(self, idle: list[Engine], wait: bool) -> tuple[Engine, Task] | None:
        with self._guard:
            if self._waiting:
                return idle[0], _send_pieces(idle[0], *self._waiting.popleft())
            self._runs = not wait
            return None


def _send_pieces(engine: Engine, begin: Begin, ticket: Ticket, send: Callable[[Any], None]) -> Task:
    last: GenerationResult | BaseException | None = None
    stream: Any = None
    try:
        while not ticket.cancelled:
            stream = stream or begin(engine, ticket=ticket)
            if not stream.is_ready:
                yield
            elif (piece := next(stream, None)) is not None:
                send(piece)
            else:
                last = stream.result
                break
    except BaseException as error:  # of a thread: raised by who reads the pieces
        last = error
    send(last)

"""Answers as asynchronous streams, each from a thread with an engine that is idle."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from specengine.engine.pool import LOOK_AGAIN
from specengine.models.lanes import Ticket
from specengine.records import GenerationResult, StreamPiece

if TYPE_CHECKING:
    from specengine.engine import Engine

Begin = Callable[..., Any]  # makes a TextGeneration of an engine and a ticket


class AsyncTextGeneration:
    """One generation as an asynchronous iterator of StreamPiece, answered by a thread; leaving it ends the answer.

    `result` is there once the iterator has ended. Errors of `Engine.generate` are raised by the iterator.
    """

    def __init__(self, idle: queue.SimpleQueue[Engine], begin: Begin) -> None:
        """idle: engines that have nothing to do; the answer takes one, and waits where there is none."""
        self.result: GenerationResult | None = None
        self._pieces: asyncio.Queue[StreamPiece | GenerationResult | BaseException | None] = asyncio.Queue()
        self._ticket = Ticket()
        given = idle, begin, self._ticket, asyncio.get_running_loop(), self._pieces
        threading.Thread(target=_send_pieces, args=given, name="specengine-astream", daemon=True).start()

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


def _send_pieces(
    idle: queue.SimpleQueue[Engine],
    begin: Begin,
    ticket: Ticket,
    loop: asyncio.AbstractEventLoop,
    pieces: asyncio.Queue[Any],
) -> None:
    """Answer on an idle engine; send the pieces, then the result or the error."""
    last: GenerationResult | BaseException | None = None
    if (engine := _idle(idle, ticket)) is not None:
        try:
            with begin(engine, ticket=ticket) as stream, engine.target.running():
                while not ticket.cancelled and (piece := next(stream, None)) is not None:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
            last = stream.result
        except BaseException as error:  # of a thread: raised by who reads the pieces
            last = error
        finally:
            idle.put(engine)
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(pieces.put_nowait, last)


def _idle(idle: queue.SimpleQueue[Engine], ticket: Ticket) -> Engine | None:
    """Wait for an idle engine; None where the answer is left before there is one."""
    while not ticket.cancelled:
        with contextlib.suppress(queue.Empty):
            return idle.get(timeout=LOOK_AGAIN)
    return None

"""From the worker's thread to a client, which may go away at any time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from specengine.serve.asking import Asked
from specengine.serve.worker import Event, Job, Worker

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def events(worker: Worker, asked: Asked, request: Request) -> AsyncIterator[Event | None]:
    """What becomes of a request; None after `ping_seconds` of silence. QueueFullError, ClientGone.

    Leaving it early frees the engine, or the place in the queue.
    """
    inbox: asyncio.Queue[Event | ClientGone] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the thread
            loop.call_soon_threadsafe(inbox.put_nowait, event)

    job = Job(asked, deliver)
    worker.submit(job)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        worker.cancel(job)
        inbox.put_nowait(ClientGone())

    watching = asyncio.create_task(watch())
    try:
        while True:
            try:
                event = await asyncio.wait_for(inbox.get(), asked.settings.ping_seconds)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, ClientGone):
                raise event
            yield event
    finally:
        worker.cancel(job)
        watching.cancel()

"""From a request of any protocol to its answers: jobs for the worker, and what it delivers in the client's shapes."""

import asyncio
import contextlib
import functools
import json
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import islice
from typing import Any, TypeVar

import anyio
from fastapi import FastAPI
from prometheus_client import Counter
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from specengine.engine import Engine, Ticket
from specengine.errors import SpecEngineError, shown
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.dialects import Dialect
from specengine.protocol.preparing import CheckedRequest
from specengine.protocol.problems import RequestError, of_error, unavailable
from specengine.protocol.replies import EVENTS, Reply
from specengine.protocol.requests import CompletionRequest, Sampling
from specengine.serve.models import Models
from specengine.serve.worker import Event, Job, Worker, log

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
# schemas and grammars: each waits for a process, some for seconds
_READ_AT_ONCE = anyio.CapacityLimiter(256)
PLACE_SECONDS = 0.5  # between two looks at the place in the queue
STREAM_NAME = "x-stream-id"  # the header in which a request names a stream that is to go on without its client
KEPT_SECONDS = 60.0  # that such a stream goes on, and can be read, while nobody reads it
KEPT_EVENTS = 2048  # of each, the latest
KEPT_STREAMS = 16


Coming = tuple[int, Piece | Completion]  # the place of one of the answers that a request asks for
Waiting = bytes | dict[str, Any] | None  # a comment of a stream, figures of a prompt, or silence


async def answered(models: Models, dialect: Dialect, body: BaseModel, request: Request) -> Response:
    """Return the response to one request, whole or as a stream; RequestError."""
    require_ready(models.first.state)
    asked = dialect.translated(body)
    worker = models.named(asked.model)
    for note in getattr(body, "notes", ()):
        log.warning("%s", note)
    names: Mapping[str, str] = dialect.names
    outlasts = asyncio.Event()
    try:
        checked = await read_beside(
            asked,
            lambda: [
                CheckedRequest(each, worker.settings, renamed=dialect.names)
                for each in asked.each()
            ],
        )
        names = checked[0].names

        @functools.cache  # of the first event, before which the model may not have been loaded
        def reply() -> Reply:
            tokenizer = worker.beside and worker.beside.tokenizer
            return dialect.reply(body, asked, worker.settings.name, tokenizer)

        coming = events(worker, checked, request, outlasts)
        if not asked.stream:
            async with contextlib.aclosing(coming):
                return json_response(reply().whole(await _whole(checked, coming)))
        # A prompt that is refused is refused with a status: so what comes first is waited for, but not in silence.
        first = await anext(coming)
        stream = _stream(models.metrics.failed, checked, reply, dialect.reply.ping, first, coming)
        key = stream_key(request.headers.get(STREAM_NAME), request)
        if (
            STREAM_NAME in request.headers
            and dialect.reply.media_type == EVENTS
            and key not in models.streams
            and len(models.streams) < KEPT_STREAMS
        ):
            outlasts.set()
            stream = KeptStream(stream, models.streams, key).read(0)
        return StreamingResponse(stream, media_type=dialect.reply.media_type)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except SpecEngineError as error:
        raise of_error(error, names) from error


async def read_beside(asked: Sampling, read: Callable[[], T]) -> T:
    """Return what `read` returns, from a thread where the request has a schema or a grammar."""
    if not asked.constraints:
        return read()
    return await anyio.to_thread.run_sync(read, limiter=_READ_AT_ONCE)


async def _whole(
    asked: Sequence[CheckedRequest], coming: AsyncIterator[Coming | Waiting]
) -> list[Completion]:
    answers: dict[int, Completion] = {}
    while len(answers) < len(asked):
        come = await anext(coming)
        if isinstance(come, tuple) and isinstance(come[1], Completion):
            answers[come[0]] = come[1]
    return [answers[place] for place in range(len(asked))]


async def _stream(
    failed: Counter,
    asked: Sequence[CheckedRequest],
    reply: Callable[[], Reply],
    ping: bytes,
    come: Coming | Waiting,
    coming: AsyncGenerator[Coming | Waiting, None],
) -> AsyncIterator[bytes]:
    begun: set[int] = set()
    ended: dict[int, Completion] = {}
    try:
        while True:
            if not isinstance(come, tuple):
                if event := reply().progress(come) if isinstance(come, dict) else come or ping:
                    yield event
            else:
                for part in _told(reply(), begun, ended, *come):
                    yield part
                if len(ended) == len(asked):
                    for part in reply().finish([ended[place] for place in range(len(asked))]):
                        yield part
                    return
            come = await anext(coming)
    except RequestError as problem:
        failed.labels(problem.status).inc()
        yield reply().failed(problem)
    except ClientDisconnect:
        return
    finally:
        await coming.aclose()


def _told(
    reply: Reply,
    begun: set[int],
    ended: dict[int, Completion],
    place: int,
    event: Piece | Completion,
) -> Iterator[bytes]:
    if place not in begun:
        begun.add(place)
        yield from reply.begin(place, event if isinstance(event, Completion) else event.answer)
    if isinstance(event, Piece):
        yield from reply.piece(place, event)
    else:
        ended[place] = event
        yield from reply.end(place, event)


class KeptStream:
    """A stream that is written until nobody has read it for KEPT_SECONDS, its events numbered from 0.

    streams: where it is kept under `key`; writing: the task that ends when it is kept no longer
    """

    def __init__(
        self, stream: AsyncIterator[bytes], streams: dict[Hashable, Any], key: Hashable
    ) -> None:
        self._events = deque[bytes](maxlen=KEPT_EVENTS)
        self._next = 0  # event's number; an empty one is the end
        self._readers: set[asyncio.Queue[bytes]] = set()
        streams[key] = self
        self.writing = asyncio.create_task(self._write(stream))
        self.writing.add_done_callback(lambda _: streams.pop(key))
        self._wait()

    @property
    def numbers(self) -> range:
        """Return the numbers of the events from which on it can be read."""
        ended = bool(self._events) and not self._events[-1]
        return range(self._next - len(self._events), self._next + 1 - ended)

    async def read(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from one on, as they come."""
        inbox = asyncio.Queue[bytes]()
        for event in islice(self._events, number - self.numbers.start, None):
            inbox.put_nowait(event)
        self._readers.add(inbox)
        self._lapse.cancel()
        try:
            while event := await inbox.get():
                yield event
        finally:
            self._readers.remove(inbox)
            if not self._readers:
                self._wait()

    def _wait(self) -> None:
        self._lapse = asyncio.get_running_loop().call_later(KEPT_SECONDS, self.writing.cancel)

    async def _write(self, stream: AsyncIterator[bytes]) -> None:
        try:
            async for event in stream:
                self._add(b"id: %d\n%b" % (self._next, event))
        finally:
            self._add(b"")
        await asyncio.Future()  # it can be read until it is cancelled

    def _add(self, event: bytes) -> None:
        self._events.append(event)
        self._next += 1
        for inbox in self._readers:
            inbox.put_nowait(event)


def add_streams(app: FastAPI, models: Models) -> None:
    """Add the endpoints of streams that outlast their clients."""

    @app.get("/v1/stream/{name}", summary="A stream whose request has named it in X-Stream-Id")
    async def stream(name: str, request: Request) -> Response:
        stream = models.streams.get(stream_key(name, request))
        last = request.headers.get("last-event-id", "")
        number = int(last) + 1 if last.isdecimal() and len(last) < 10 else -bool(last)
        if stream is None or number not in stream.numbers:
            message = f"name: no stream {shown(name)} is kept for this key, or not the event after Last-Event-ID"
            raise RequestError(404, message, "name", "stream_not_found")
        return StreamingResponse(stream.read(number), media_type=EVENTS)

    @app.delete("/v1/stream/{name}", summary="End it, if there is one")
    async def end(name: str, request: Request) -> Response:
        if (stream := models.streams.get(stream_key(name, request))) is not None:
            stream.writing.cancel()
        return Response(status_code=204)


def stream_key(name: str | None, request: Request) -> tuple[str | None, ...]:
    return (name, *(request.headers.get(each) for each in ("authorization", "x-api-key")))


async def events(
    worker: Worker, asked: Sequence[CheckedRequest], request: Request, outlasts: asyncio.Event
) -> AsyncGenerator[Coming | Waiting, None]:
    """Yield the events of all answers, and None after `ping_seconds` of silence. RequestError, ClientDisconnect.

    As long as it waits, a request that asks for cycles is told how many answers end before its turn, or that the model
    is loaded, and one that asks for its progress how much of its prompt has been read; then None.
    Leaving it early frees the engine, or the places in the queue.

    outlasts: set where they go on when the client has gone
    """
    inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
    jobs = [
        _job(
            each,
            _who(each, request),
            place,
            inbox,
            "\n".join(filter(None, stream_key(None, request))),
        )
        for place, each in enumerate(asked)
    ]
    worker.jobs.submit(*jobs)

    async def watch() -> None:
        await gone(request.receive)
        if not outlasts.is_set():
            for each in jobs:
                worker.jobs.cancel(each)
            inbox.put_nowait((0, ClientDisconnect()))

    watching = asyncio.create_task(watch())
    ping = jobs[0].asked.settings.ping_seconds
    asks = bool(jobs[0].asked.request.return_cycles or jobs[0].asked.request.return_progress)
    told = False
    silent = 0.0  # seconds
    try:
        while True:
            try:
                pause = min(ping, PLACE_SECONDS) if asks else ping
                async with asyncio.timeout(pause):  # `wait_for` makes a task of every wait
                    place, event = await inbox.get()
                asks = False
            except TimeoutError:
                waiting = _waiting(worker, jobs[0]) if asks else None
                silent += pause
                if waiting is not None or told or silent >= ping:
                    yield waiting
                    silent = 0.0
                told = waiting is not None
                continue
            if isinstance(event, ClientDisconnect):
                raise event
            if isinstance(event, Exception):
                raise of_error(event, asked[place].names) from event
            yield place, event
    finally:
        for each in jobs:
            worker.jobs.cancel(each)
        watching.cancel()


def _waiting(worker: Worker, job: Job) -> Waiting:
    """Return what a client is told that waits for its first token, if it asks for that."""
    fields = job.asked.request
    if fields.return_progress and (figures := job.progress()) is not None:
        return figures
    if not fields.return_cycles:
        return None
    before = worker.jobs.before(job)
    if worker.engine is None:
        return b": loading\n\n"
    return None if before is None else b": %d before\n\n" % before


def _job(
    asked: CheckedRequest, who: int, place: int, inbox: asyncio.Queue[Any], owner: str = ""
) -> Job:
    """Return the job whose events come into the inbox, from any thread. owner: as in Ticket, the request's keys."""
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the thread
            loop.call_soon_threadsafe(inbox.put_nowait, (place, event))

    return Job(asked, deliver, who, Ticket(owner=owner))


def _who(asked: CheckedRequest, request: Request) -> int:
    """Return a number for whoever asks: by key, user and address."""
    names = (getattr(asked.request, name, None) for name in ("user", "safety_identifier"))
    return hash((stream_key(None, request), *names, request.client and request.client.host))


async def gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response in ASCII, so that it can name the halves of characters that a client sent."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def require_ready(state: str) -> None:
    if state != "ready":
        raise unavailable(state)


async def loaded(worker: Worker) -> Engine:
    """Return the engine; where there is none, once a request for no token has had it loaded. RequestError."""
    require_ready(worker.state)
    while (engine := worker.engine) is None:
        inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        nothing = CompletionRequest(prompt=[0], max_tokens=0)
        worker.jobs.submit(_job(CheckedRequest(nothing, worker.settings), 0, 0, inbox))
        while not isinstance(event := (await inbox.get())[1], Completion):
            if isinstance(event, Exception):
                raise of_error(event)
    return engine

"""From a request of any protocol to its answers: jobs for the worker, and what it delivers in the client's shapes."""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import anyio
from prometheus_client import Counter
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from specengine.engine import Engine
from specengine.errors import SpecEngineError
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.dialects import Dialect
from specengine.protocol.preparing import CheckedRequest
from specengine.protocol.problems import of_error, unavailable
from specengine.protocol.replies import Reply
from specengine.protocol.requests import CompletionRequest, Sampling
from specengine.serve.models import Models
from specengine.serve.worker import Event, Job, Worker, log

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
# schemas and grammars: each waits for a process, some for seconds
_READ_AT_ONCE = anyio.CapacityLimiter(256)
PLACE_SECONDS = 0.5  # between two looks at the place in the queue


Coming = tuple[int, Event]  # the place of one of the answers that a request has asked for


async def answered(models: Models, dialect: Dialect, body: BaseModel, request: Request) -> Response:
    """Return the response to one request, whole or as a stream; RequestError."""
    require_ready(models.first.state)
    asked = dialect.translated(body)
    worker = models.named(asked.model)
    for note in getattr(body, "notes", ()):
        log.warning("%s", note)
    names: Mapping[str, str] = dialect.names
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

        async with contextlib.AsyncExitStack() as stack:
            coming = await stack.enter_async_context(
                contextlib.aclosing(events(worker, checked, request))
            )
            if not asked.stream:
                return json_response(reply().whole(await _whole(checked, coming)))
            # A prompt that is refused is refused with a status: so what comes first is waited for, but not in silence.
            first = await anext(coming)
            if isinstance(first, tuple) and isinstance(first[1], Exception):
                raise of_error(first[1], names)
            stack.pop_all()  # the stream closes it
            return StreamingResponse(
                _stream(models.metrics.failed, checked, reply, dialect.reply.ping, first, coming),
                media_type=dialect.reply.media_type,
            )
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
    asked: Sequence[CheckedRequest], coming: AsyncIterator[Coming | int | None]
) -> list[Completion]:
    answers: dict[int, Completion] = {}
    while len(answers) < len(asked):
        come = await anext(coming)
        if isinstance(come, tuple):
            place, event = come
            if isinstance(event, Exception):
                raise of_error(event, asked[place].names)
            if isinstance(event, Completion):
                answers[place] = event
    return [answers[place] for place in range(len(asked))]


async def _stream(
    failed: Counter,
    asked: Sequence[CheckedRequest],
    reply: Callable[[], Reply],
    ping: bytes,
    come: Coming | int | None,
    coming: AsyncGenerator[Coming | int | None, None],
) -> AsyncIterator[bytes]:
    begun: set[int] = set()
    ended: dict[int, Completion] = {}
    try:
        while True:
            if come is None:
                if ping:
                    yield ping
            elif isinstance(come, int):
                yield b": %d before\n\n" % come
            elif isinstance(event := come[1], Exception):
                problem = of_error(event, asked[come[0]].names)
                failed.labels(problem.status).inc()
                yield reply().failed(problem)
                return
            else:
                for part in _told(reply(), begun, ended, come[0], event):
                    yield part
                if len(ended) == len(asked):
                    for part in reply().finish([ended[place] for place in range(len(asked))]):
                        yield part
                    return
            come = await anext(coming)
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


async def events(
    worker: Worker, asked: Sequence[CheckedRequest], request: Request
) -> AsyncGenerator[Coming | int | None, None]:
    """Yield the events of all answers, and None after `ping_seconds` of silence. RequestError, ClientDisconnect.

    A request that asks for cycles is told as long as it waits how many answers end before its turn, then None.
    Leaving it early frees the engine, or the places in the queue.
    """
    inbox: asyncio.Queue[Coming | ClientDisconnect] = asyncio.Queue()
    jobs = [_job(each, _who(each, request), place, inbox) for place, each in enumerate(asked)]
    worker.jobs.submit(*jobs)

    async def watch() -> None:
        await gone(request.receive)
        for each in jobs:
            worker.jobs.cancel(each)
        inbox.put_nowait(ClientDisconnect())

    watching = asyncio.create_task(watch())
    ping = jobs[0].asked.settings.ping_seconds
    waits = bool(jobs[0].asked.request.return_cycles)
    told = False
    try:
        while True:
            try:
                async with asyncio.timeout(
                    min(ping, PLACE_SECONDS) if waits else ping
                ):  # `wait_for` makes a task of every wait
                    come = await inbox.get()
            except TimeoutError:
                before = worker.jobs.before(jobs[0]) if waits else None
                if before is not None or told or not waits:
                    yield before
                waits = told = before is not None
                continue
            if isinstance(come, ClientDisconnect):
                raise come
            yield come
    finally:
        for each in jobs:
            worker.jobs.cancel(each)
        watching.cancel()


def _job(asked: CheckedRequest, who: int, place: int, inbox: asyncio.Queue[Any]) -> Job:
    """Return the job whose events come into the inbox, from any thread."""
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the thread
            loop.call_soon_threadsafe(inbox.put_nowait, (place, event))

    return Job(asked, deliver, who)


def _who(asked: CheckedRequest, request: Request) -> int:
    """Return a number for whoever asks: by key, user and address."""
    names = (getattr(asked.request, name, None) for name in ("user", "safety_identifier"))
    keys = (request.headers.get(name) for name in ("authorization", "x-api-key"))
    return hash((*keys, *names, request.client and request.client.host))


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
        inbox: asyncio.Queue[Coming] = asyncio.Queue()
        nothing = CompletionRequest(prompt=[0], max_tokens=0)
        worker.jobs.submit(_job(CheckedRequest(nothing, worker.settings), 0, 0, inbox))
        while not isinstance(event := (await inbox.get())[1], Completion):
            if isinstance(event, Exception):
                raise of_error(event)
    return engine

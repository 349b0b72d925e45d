"""From a request of any protocol to its answers: jobs for the worker, and what it delivers in the client's shapes."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio
from prometheus_client import Counter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from specengine.engine import Engine
from specengine.errors import SpecEngineError
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.dialects import Dialect
from specengine.protocol.preparing import CheckedRequest
from specengine.protocol.problems import json_response, of_error, unavailable
from specengine.protocol.replies import Reply
from specengine.protocol.requests import CompletionRequest, Sampling
from specengine.serve.models import Models
from specengine.serve.worker import Ended, Event, Failed, Job, Waiting, Worker, log

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
# schemas and grammars: each waits for a process, some for seconds
_READ_AT_ONCE = anyio.CapacityLimiter(256)
PLACE_SECONDS = 0.5  # between two looks at the place in the queue


class ClientGoneError(Exception):
    """Nobody waits for this answer any more."""


class Coming(NamedTuple):
    """An event of one of the answers that a request has asked for."""

    place: int
    event: Event


async def answered(
    models: Models, dialect: Dialect[Any], body: BaseModel, request: Request
) -> Response:
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
                answers = await _whole(checked, coming)
                return json_response(reply().whole(answers))
            # A prompt that is refused is refused with a status: so what comes first is waited for, but not in silence.
            first = await anext(coming)
            if isinstance(first, Coming) and isinstance(first.event, Failed):
                raise of_error(first.event.error, names)
            stack.pop_all()  # the stream closes it
            shape, failed = dialect.reply, models.metrics.failed
            return StreamingResponse(
                _stream(failed, checked, reply, shape.ping, first, coming),
                media_type=shape.media_type,
            )
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except SpecEngineError as error:
        raise of_error(error, names) from error


async def read_beside(asked: Sampling, read: Callable[[], T]) -> T:
    """Return what `read` returns, from a thread where the request has a schema or a grammar."""
    if not asked.constraints:
        return read()
    return await anyio.to_thread.run_sync(read, limiter=_READ_AT_ONCE)


async def _whole(
    asked: Sequence[CheckedRequest], coming: AsyncIterator[Coming | Waiting | None]
) -> list[Completion]:
    answers: dict[int, Completion] = {}
    async for come in coming:
        if not isinstance(come, Coming):
            continue
        if isinstance(come.event, Failed):
            raise of_error(come.event.error, asked[come.place].names)
        if isinstance(come.event, Ended):
            answers[come.place] = come.event.answer
            if len(answers) == len(asked):
                return [answers[place] for place in range(len(asked))]
    raise ClientGoneError


async def _stream(
    failed: Counter,
    asked: Sequence[CheckedRequest],
    reply: Callable[[], Reply],
    ping: bytes,
    come: Coming | Waiting | None,
    coming: AsyncGenerator[Coming | Waiting | None, None],
) -> AsyncIterator[bytes]:
    telling = _Telling(reply, len(asked))
    try:
        while True:
            if come is None:
                if ping:
                    yield ping
            elif isinstance(come, Waiting):
                yield b": %d before\n\n" % come.before
            elif isinstance(come.event, Failed):
                problem = of_error(come.event.error, asked[come.place].names)
                failed.labels(problem.status).inc()
                yield reply().failed(problem)
                return
            else:
                for part in telling.of(come.place, come.event):
                    yield part
                if telling.whole:
                    return
            come = await anext(coming)
    except ClientGoneError:
        return
    finally:
        await coming.aclose()


class _Telling:
    """What is told of several answers that come at once."""

    def __init__(self, reply: Callable[[], Reply], count: int) -> None:
        self._reply, self._count = reply, count
        self._begun: set[int] = set()
        self._ended: dict[int, Completion] = {}

    @property
    def whole(self) -> bool:
        return len(self._ended) == self._count

    def of(self, place: int, event: Piece | Ended) -> Iterator[bytes]:
        if place not in self._begun:
            self._begun.add(place)
            yield from self._reply().begin(place, event.answer)
        if not isinstance(event, Ended):
            yield from self._reply().piece(place, event)
            return
        self._ended[place] = event.answer
        yield from self._reply().end(place, event.answer)
        if self.whole:
            yield from self._reply().finish([self._ended[each] for each in range(self._count)])


class _PlaceInQueue:
    """What to say of a job in silence; of one that asks for cycles its place in the queue as long as it waits."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker, self._job, self._ping = worker, job, job.asked.settings.ping_seconds
        self._waits, self._told = bool(job.asked.request.return_cycles), False

    @property
    def seconds(self) -> float:
        """Of silence, after which to look."""
        return min(self._ping, PLACE_SECONDS) if self._waits else self._ping

    def look(self) -> list[Waiting | None]:
        before = self._worker.jobs.before(self._job) if self._waits else None
        said: list[Waiting | None] = [] if before is None else [Waiting(before)]
        if before is None and (self._told or not self._waits):
            said = [None]
        self._waits = self._told = before is not None
        return said


async def events(
    worker: Worker, asked: Sequence[CheckedRequest], request: Request
) -> AsyncGenerator[Coming | Waiting | None, None]:
    """Yield the events of all answers, and None after `ping_seconds` of silence. RequestError, ClientGoneError.

    A request that asks for cycles is told its place in the queue as long as it waits, then None.
    Leaving it early frees the engine, or the places in the queue.
    """
    inbox: asyncio.Queue[Coming | ClientGoneError] = asyncio.Queue()
    jobs = [_job(each, _who(each, request), place, inbox) for place, each in enumerate(asked)]
    worker.jobs.submit(*jobs)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for each in jobs:
            worker.jobs.cancel(each)
        inbox.put_nowait(ClientGoneError())

    watching = asyncio.create_task(watch())
    queue = _PlaceInQueue(worker, jobs[0])
    try:
        while True:
            try:
                async with asyncio.timeout(queue.seconds):  # `wait_for` makes a task of every wait
                    come = await inbox.get()
            except TimeoutError:
                for silent in queue.look():
                    yield silent
                continue
            if isinstance(come, ClientGoneError):
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
            loop.call_soon_threadsafe(inbox.put_nowait, Coming(place, event))

    return Job(asked, deliver, who)


def _who(asked: CheckedRequest, request: Request) -> int:
    """Return a number for whoever asks: by key, user and address."""
    names = (getattr(asked.request, name, None) for name in ("user", "safety_identifier"))
    keys = (request.headers.get(name) for name in ("authorization", "x-api-key"))
    return hash((*keys, *names, request.client and request.client.host))


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
        while not isinstance(event := (await inbox.get()).event, Ended):
            if isinstance(event, Failed):
                raise of_error(event.error)
    return engine

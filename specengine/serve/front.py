"""A server over several replicas: a front in this process hands each request to one of them and streams back.

A replica is the application with an engine in a process of its own, spoken to in ASGI's messages.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NamedTuple

import uvicorn
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private import replica
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from specengine.engine import Engine
from specengine.errors import ReplicaError
from specengine.protocol.dialects import CHAT, TEXT
from specengine.protocol.problems import RequestError, of_error
from specengine.protocol.replies import EVENTS, last_words, sse
from specengine.protocol.settings import Settings
from specengine.replicas import Scale, cluster
from specengine.serve.answering import (
    PLACE_SECONDS,
    STREAM_NAME,
    gone,
    json_response,
    require_ready,
)
from specengine.serve.app import alive, create_app, middleware
from specengine.serve.guards import ALIVE, HEALTH, parsed, refusal
from specengine.serve.metrics import Added, Metrics
from specengine.serve.models import Models, ServedModel
from specengine.serve.server import connections, logging_of, open_socket
from specengine.serve.worker import MAX_RETRY_SECONDS, log

LOADING_SECONDS = 0.05  # between two looks
LOST = "replica_lost"
RETRY = {"Retry-After": "1"}
FIGURES_SECONDS = 5.0


class HttpRequest(NamedTuple):
    """A request whose body has been read."""

    scope: Scope
    body: bytes


# ---- the front


class Front:
    """An ASGI application. `handle` is that of the replicas, once they are `ready`; replicas: how many there are."""

    def __init__(self, settings: Settings, replicas: int = 1) -> None:
        self.state: Literal["loading", "ready", "failed"] = "loading"
        self.handle: DeploymentHandle | None = None
        self._settings = settings
        self._added, self._own = Added(), Metrics()
        self._at_once = replicas * (settings.parallel or 1)
        self._under_way: dict[object, None] = {}  # requests, in the order of their coming
        self._mean_seconds = 1.0  # from a request's coming to its end, the latest counting most

    def app(self) -> Starlette:
        """Return the ASGI application, with keys, limits and browsers' rules before it."""
        routes = [
            *[Route(path, self._health) for path in HEALTH],
            *[Route(path, alive) for path in ALIVE],
            Route("/metrics", self._metrics),
            Mount("/", self._forward),
        ]
        return Starlette(
            routes=routes,
            middleware=middleware(self._settings, self._own.failed),
            exception_handlers={RequestError: self._told, Exception: self._told},
        )

    async def _health(self, request: Request) -> Response:
        require_ready(self.state)
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        own = "front", self._own.text().decode()
        if self.handle is None:
            self._added.take([own])
        else:
            with contextlib.suppress(RayError, asyncio.TimeoutError, TimeoutError):
                coming = self.handle.broadcast("figures").results_async(return_exceptions=True)
                found = await asyncio.wait_for(coming, FIGURES_SECONDS)
                self._added.take(
                    [own, *(each for each in found if not isinstance(each, BaseException))]
                )
        return Response(self._added.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        require_ready(self.state)
        body = await request.body()
        headers = [pair for pair in request.headers.raw if pair[0] != STREAM_NAME.encode()]
        asking = HttpRequest(
            {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "scheme": "http",
                "method": request.method,
                "path": scope["path"],
                "raw_path": scope["path"].encode(),
                "query_string": scope["query_string"],
                "root_path": "",
                "headers": headers,  # a replica keeps no stream that another would be asked for
                "client": None,
                "server": None,
            },
            body,
        )
        began = time.monotonic()
        passing = asyncio.ensure_future(self._passed(asking, send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done() and passing.exception() is None:
                self._mean_seconds += 0.3 * (time.monotonic() - began - self._mean_seconds)
        finally:
            for task in (passing, leaving):
                task.cancel()
            result, _ = await asyncio.gather(passing, leaving, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    async def _passed(self, asking: HttpRequest, send: Send) -> None:
        """Pass on the answer of a replica; of another one, where the first ends before it has said any of it."""
        assert self.handle is not None
        conversation, line = (
            conversation_of(asking.body),
            _Line(send, self._before if _wants_place(asking) else None),
        )
        self._under_way[line] = None
        try:
            for last in (False, True):
                coming: Any = self.handle.options(stream=True).ask.remote(
                    asking, conversation=conversation
                )
                try:
                    await _pass(line.through(coming), line.send, asking.scope["path"])
                    return
                except asyncio.CancelledError:
                    coming.cancel()
                    raise
                except RequestError as problem:
                    if last or problem.code != LOST:
                        if not line.told:
                            raise
                        self._own.failed.labels(problem.status).inc()
                        await send({"type": "http.response.body", "body": sse(problem.body)})
                        return
        finally:
            del self._under_way[line]

    def _before(self, line: object) -> int:
        """Return how many answers end before this request has its turn, as far as can be known here."""
        return max(list(self._under_way).index(line) + 1 - self._at_once, 0)

    async def _told(self, request: Request, error: Any) -> Response:
        problem = error if isinstance(error, RequestError) else _problem(error)
        if problem.status == 429:
            # until there is likely room: the recent mean time of an answer, waiting included
            problem.headers["Retry-After"] = str(
                min(max(math.ceil(self._mean_seconds), 1), MAX_RETRY_SECONDS)
            )
        return refusal(problem, request.url.path, self._own.failed)


class _Line:
    """What is sent to a client. One that wants to know its place is told it while no replica takes its request.

    before: returns the place, 0 where there is none to tell; told: whether it was, so that a status is sent already
    """

    def __init__(self, send: Send, before: Callable[[object], int] | None) -> None:
        self._send, self._before = send, before
        self.told = self._refused = False

    async def through(self, coming: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Yield what a replica says, and tell the place until it says something."""
        first = asyncio.ensure_future(anext(coming))
        try:
            while not (await asyncio.wait({first}, timeout=PLACE_SECONDS))[0]:
                if self._before is not None and (before := self._before(self)):
                    await self._tell(b": %d before\n\n" % before)
            yield first.result()
        finally:
            first.cancel()
        async for message in coming:
            yield message

    async def send(self, message: Message) -> None:
        """Send a message of a replica; once a status has been sent, a refusal becomes the stream's end."""
        if self.told and message["type"] == "http.response.start":
            self._refused = message["status"] != 200
            return
        if self._refused:
            message = {**message, "body": sse(json.loads(message["body"]))}
        await self._send(message)

    async def _tell(self, comment: bytes) -> None:
        if not self.told:
            self.told = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", f"{EVENTS}; charset=utf-8".encode())],
                }
            )
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})


def _wants_place(asking: HttpRequest) -> bool:
    """Return whether it is a stream that asks for cycles, whose comments tell places."""
    if asking.scope["path"] not in (CHAT, TEXT) or b"return_cycles" not in asking.body:
        return False
    asked = _object(asking.body)
    return asked.get("stream") is True and asked.get("return_cycles") is True


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; an empty one where it is none."""
    try:
        value = parsed(body)
    except RequestError:
        return {}
    return value if isinstance(value, dict) else {}


async def _pass(coming: AsyncIterator[Message], send: Send, path: str = "") -> None:
    """Send what a replica says; RequestError where it ends before it has said any of its answer.

    A status is sent with what comes after it: a replica that ends between the two has not answered.
    """
    start: Message | None = None
    media = ""
    begun = False
    try:
        async for message in coming:
            if message["type"] == "http.response.start":
                start = message
                media = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
                continue
            if start is not None:
                begun = True
                await send(start)
                start = None
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
    except RequestCancelledError:
        return  # the client has gone
    except Exception as error:
        problem = _problem(error)
        if not begun:
            raise problem from error
        await send(
            {
                "type": "http.response.body",
                "body": last_words(problem, media, path),
                "more_body": False,
            }
        )


def _problem(error: Exception) -> RequestError:
    if isinstance(error, BackPressureError):
        return RequestError(
            429,
            "as many requests wait as may; Retry-After says when to try again",
            code="queue_full",
            headers=RETRY,
        )
    if isinstance(error, DeploymentUnavailableError) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    ):
        return RequestError(
            503, "the replica that answered has ended; try again", code=LOST, headers=RETRY
        )
    return of_error(error)


# ---- a replica


def _listen_here_alone() -> None:
    """Listen on the loopback address in a replica's process, where Ray Serve would listen on every address."""
    serving: Any = replica
    opening = serving.add_port_to_grpc_server

    def opened(server: Any, address: str) -> Any:
        return opening(server, f"{cluster.LOOPBACK}:{address.rpartition(':')[2]}")

    serving.add_port_to_grpc_server = opened


class Replica:
    """A deployment of Ray Serve. Its front has asked for keys and told browsers what they may do."""

    async def __init__(self, load: Callable[[], Engine], settings: Settings) -> None:  # type: ignore[misc]
        """Wait until the engine is loaded; raises the errors of loading."""
        if cluster.is_alone():
            _listen_here_alone()
        self._models = Models(
            [ServedModel(settings.name, load)],
            dataclasses.replace(
                settings,
                api_keys=(),
                origins=(),
                allowed_hosts=("*",),
                parallel=settings.parallel or 1,
            ),
        )
        self._worker, self._app = self._models.first, create_app(self._models)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        while self._worker.state == "loading":
            await asyncio.sleep(LOADING_SECONDS)
        if self._worker.failure is not None:
            raise self._worker.failure
        self._running: set[asyncio.Task[None]] = set()

    async def ask(
        self, asking: HttpRequest, conversation: str | None = None
    ) -> AsyncIterator[Message]:
        """Yield the application's messages. Closing this early is a client that has gone.

        conversation: what the router reads.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, bodies = asyncio.Event(), [asking.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(asking.scope, receive, messages.put))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()

    async def figures(self) -> tuple[str, str]:
        """Return the replica's id, and its counters in Prometheus' text format."""
        return (
            serve.get_replica_context().replica_id.unique_id,
            self._models.figures().decode(),
        )

    def check_health(self) -> None:
        """Check the replica for Ray Serve, which replaces it if this raises."""
        if not self._worker.thread.is_alive():
            raise RuntimeError("the engine's thread has ended")


MAX_CONVERSATIONS = 4096
BEGINNING = 256  # characters of a text without turns


def conversation_of(body: bytes) -> str | None:
    """Return a key that the requests of one conversation share, or None where a request has no beginning.

    Of messages, or of the items of OpenAI's Responses: those up to the first of the user, and what stands before them;
    of a text or of token ids: the beginning.
    """
    asked = _object(body)
    messages, beginning = asked.get("messages"), asked.get("prompt", asked.get("input_prefix"))
    before = [said for name in ("system", "instructions") if (said := asked.get(name)) is not None]
    if messages is None:
        given = asked.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if isinstance(messages, list):
        users = [
            place
            for place, message in enumerate(messages)
            if isinstance(message, dict) and message.get("role") == "user"
        ]
        beginning = [*before, *(messages[: users[0] + 1] if users else messages)]
    elif beginning is not None:
        beginning = beginning[:BEGINNING] if isinstance(beginning, str | list) else None
    return hashlib.sha256(json.dumps(beginning).encode()).hexdigest()[:32] if beginning else None


class ConversationRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Sends a conversation to the replica it went to last, as long as that takes another request."""

    def initialize_state(self, **options: Any) -> None:
        self._last: OrderedDict[str, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas: Ray takes the least busy one of the first rank with room."""
        last = pending_request and self._last.get(pending_request.kwargs.get("conversation") or "")
        return [
            [replica for replica in candidate_replicas if replica.replica_id == last],
            random.sample(candidate_replicas, min(2, len(candidate_replicas))),
        ]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if conversation := pending_request.kwargs.get("conversation"):
            self._last[conversation] = replica_id
            self._last.move_to_end(conversation)
            if len(self._last) > MAX_CONVERSATIONS:
                self._last.popitem(last=False)


# ---- both, on a cluster

APPLICATION = "specengine"
_ERROR = re.compile(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception): .+)$", re.MULTILINE)
NEXT = 1  # request that waits at a replica beside those that it answers; the others wait for whoever is free


def run(
    loader: Callable[[int], Callable[[], Engine]],
    settings: Settings,
    scale: Scale,
    listening: Callable[[str], None],
) -> None:
    """Serve until a signal says to stop; ReplicaError where the model cannot be loaded.

    loader: returns the function that loads a replica's engine with so many threads. listening: called with the address
    before anything is loaded.
    """
    opened, address = open_socket(settings)
    front = Front(settings, scale.replicas)
    server = uvicorn.Server(
        uvicorn.Config(
            front.app(),
            log_config=logging_of(settings.log_level),
            lifespan="off",
            timeout_graceful_shutdown=max(round(settings.drain_seconds), 1),
            **connections(settings),
        )
    )
    with opened, cluster.running(scale):
        listening(address)
        failures: list[str] = []
        count = cluster.threads(scale)

        def load() -> None:
            try:
                front.handle = deploy(loader(count), settings, scale)
                front.state = "ready"
                log.info("ready: %d replicas of %d threads", scale.replicas, count)
            except Exception as error:  # told below
                front.state = "failed"
                failures.append(_why(error))
                server.should_exit = True

        threading.Thread(target=load, name="specengine", daemon=True).start()
        try:
            server.run(sockets=[opened])
        finally:
            serve.shutdown()
        if failures:
            raise ReplicaError(f"no replica started: {failures[0]}")


def deploy(load: Callable[[], Engine], settings: Settings, scale: Scale) -> Any:
    """Return the handle of replicas on the cluster that this process has joined. Raises Ray Serve's errors."""
    if scale.most > scale.replicas:
        bounds = {"min_replicas": scale.replicas, "max_replicas": scale.most}
        count: dict[str, Any] = {
            "autoscaling_config": bounds | {"target_ongoing_requests": settings.parallel or 1}
        }
    else:
        count = {"num_replicas": scale.replicas}
    made: Any = serve.deployment(Replica)
    routing: Any = ConversationRouter
    replicas = made.options(
        name="engine",
        ray_actor_options=cluster.needs(scale),
        max_ongoing_requests=(settings.parallel or 1) + min(NEXT, settings.queue),
        max_queued_requests=settings.queue,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        request_router_config=RequestRouterConfig(request_router_class=routing),
        **count,
    )
    serve.start(proxy_location="Disabled")
    return serve.run(replicas.bind(load, settings), name=APPLICATION, route_prefix=None)


def _why(error: Exception) -> str:
    """Return the message of the last replica that did not start, as far as Ray Serve kept it."""
    texts = [str(error)]
    with contextlib.suppress(Exception):
        texts += [
            deployment.message
            for deployment in serve.status().applications[APPLICATION].deployments.values()
        ]
    found = [line for text in texts for line in _ERROR.findall(text)]
    return found[-1] if found else " ".join(texts[0].split()) or type(error).__name__

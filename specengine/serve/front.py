"""What clients speak to where there are several replicas: it hands each request to one of them, and streams back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from specengine.serve.adding import Added
from specengine.serve.app import middleware
from specengine.serve.guards import HEALTH
from specengine.serve.metrics import Metrics
from specengine.serve.problems import Problem, json_response, of_error
from specengine.serve.replica import Asking, Message
from specengine.serve.routing import conversation_of
from specengine.serve.settings import Settings
from specengine.serve.streaming import sse
from specengine.serve.worker import MOST_RETRY_SECONDS

LOST = "replica_lost"
RETRY = {"Retry-After": "1"}
FIGURES_SECONDS = 5.0


class Front:
    """An ASGI application. `handle` is that of the replicas, once they are `ready`."""

    def __init__(self, settings: Settings) -> None:
        self.state: Literal["loading", "ready", "failed"] = "loading"
        self.handle: DeploymentHandle | None = None
        self._settings = settings
        self._added, self._own = Added(), Metrics()
        self._mean_seconds = 1.0  # from a request's coming to its end, the latest counting most

    def app(self) -> Starlette:
        """With keys, limits and browsers' rules before it."""
        healths = [Route(path, self._health) for path in HEALTH]
        routes = [*healths, Route("/metrics", self._metrics), Mount("/", self._forward)]
        return Starlette(
            routes=routes,
            middleware=middleware(self._settings, self._own.failed),
            exception_handlers={Problem: self._told, Exception: self._told},
        )

    async def _health(self, request: Request) -> Response:
        await self._require_ready()
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        own = "front", self._own.text().decode()
        if self.handle is None:
            self._added.take([own])
        else:
            with contextlib.suppress(RayError, asyncio.TimeoutError, TimeoutError):
                coming = self.handle.broadcast("figures").results_async(return_exceptions=True)
                found = await asyncio.wait_for(coming, FIGURES_SECONDS)
                self._added.take([own, *(each for each in found if not isinstance(each, BaseException))])
        return Response(self._added.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await self._require_ready()
        body = await request.body()
        path = scope["path"]
        asking = Asking(request.method, path, scope["query_string"], list(request.headers.raw), body)
        began = time.monotonic()
        passing = asyncio.ensure_future(self._passed(asking, send))
        leaving = asyncio.ensure_future(_gone(receive))
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

    async def _passed(self, asking: Asking, send: Send) -> None:
        """Pass on the answer of a replica; of another one, where the first ends before it has said any of it."""
        assert self.handle is not None
        conversation = conversation_of(asking.body)
        for last in (False, True):
            coming: Any = self.handle.options(stream=True).ask.remote(asking, conversation=conversation)
            try:
                await _pass(coming, send)
                return
            except asyncio.CancelledError:
                coming.cancel()
                raise
            except Problem as problem:
                if last or problem.code != LOST:
                    raise

    @property
    def _retry_seconds(self) -> int:
        """When there is likely to be room: what it took, waiting included, to answer those that came of late."""
        return min(max(math.ceil(self._mean_seconds), 1), MOST_RETRY_SECONDS)

    async def _require_ready(self) -> None:
        if self.state != "ready":
            message = "the model is being loaded" if self.state == "loading" else "the model could not be loaded"
            raise Problem(503, message, code=self.state, headers={"Retry-After": "5"})

    async def _told(self, request: Request, error: Any) -> Response:
        problem = error if isinstance(error, Problem) else _problem(error)
        if problem.status == 429:
            problem.headers["Retry-After"] = str(self._retry_seconds)
        if request.url.path not in HEALTH:
            self._own.failed.labels(problem.status).inc()
        return problem.response()


async def _pass(coming: AsyncIterator[Message], send: Send) -> None:
    """Send what a replica says; Problem where it ends before it has said any of its answer.

    A status is sent with what comes behind it: a replica that ends between the two has not answered.
    """
    start: Message | None = None
    streams = begun = False
    try:
        async for message in coming:
            if message["type"] == "http.response.start":
                start = message
                streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
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
        last = sse(problem.body) if streams else b""
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _problem(error: Exception) -> Problem:
    if isinstance(error, BackPressureError):
        return Problem(
            429, "as many requests wait as may; Retry-After says when to try again", code="queue_full", headers=RETRY
        )
    if isinstance(error, DeploymentUnavailableError) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)
    ):
        return Problem(503, "the replica that answered has ended; try again", code=LOST, headers=RETRY)
    return of_error(error)

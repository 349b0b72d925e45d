"""One of several engines behind a front: the application in a process of its own, spoken to in ASGI's messages."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any, NamedTuple

from ray import serve
from ray.serve._private import replica
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from specengine.engine import Engine
from specengine.protocol.problems import RequestError
from specengine.protocol.settings import Settings
from specengine.replicas import cluster
from specengine.serve.app import create_app
from specengine.serve.guards import parsed
from specengine.serve.metrics import Metrics
from specengine.serve.worker import Worker

Message = MutableMapping[str, Any]
LOADING_SECONDS = 0.05  # between two looks


def _listen_here_alone() -> None:
    """Listen on the loopback address in a replica's process, where Ray Serve would listen on every address."""
    serving: Any = replica
    opening = serving.add_port_to_grpc_server

    def opened(server: Any, address: str) -> Any:
        return opening(server, f"{cluster.LOOPBACK}:{address.rpartition(':')[2]}")

    serving.add_port_to_grpc_server = opened


class HttpRequest(NamedTuple):
    """A request whose body has been read."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
        }


class Replica:
    """A deployment of Ray Serve. Its front has asked for keys and told browsers what they may do."""

    async def __init__(self, load: Callable[[], Engine], settings: Settings) -> None:  # type: ignore[misc]
        """Wait until the engine is loaded; raises the errors of loading."""
        if cluster.is_alone():
            _listen_here_alone()
        self._worker = Worker(load, settings.queue, Metrics(), settings.parallel or 1)
        self._app = create_app(
            self._worker,
            dataclasses.replace(settings, api_keys=(), origins=(), allowed_hosts=("*",)),
        )
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
            self._worker.metrics.text().decode(),
        )

    def check_health(self) -> None:
        """Check the replica for Ray Serve, which replaces it if this raises."""
        if not self._worker.alive:
            raise RuntimeError("the engine's thread has ended")


MAX_CONVERSATIONS = 4096
BEGINNING = 256  # characters of a text without turns


def conversation_of(body: bytes) -> str | None:
    """Return a key that the requests of one conversation share, or None where a request has no beginning.

    Of messages, or of the items of OpenAI's Responses: those up to the first of the user, and what stands before them;
    of a text or of token ids: the beginning.
    """
    try:
        asked = parsed(body)
    except RequestError:
        return None
    if not isinstance(asked, dict):
        return None
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
        same = [replica for replica in candidate_replicas if replica.replica_id == last]
        return [same, random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if conversation := pending_request.kwargs.get("conversation"):
            self._last[conversation] = replica_id
            self._last.move_to_end(conversation)
            if len(self._last) > MAX_CONVERSATIONS:
                self._last.popitem(last=False)

"""A server over several replicas: a front in this process, engines in others, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from ray import serve
from ray.serve.config import RequestRouterConfig

from specengine.errors import ReplicaError
from specengine.replicas import cluster
from specengine.replicas.recipe import Recipe
from specengine.replicas.scale import Scale
from specengine.serve.connections import limited
from specengine.serve.front import Front
from specengine.serve.replica import Replica
from specengine.serve.routing import ConversationRouter
from specengine.serve.running import LOGGING, open_socket
from specengine.serve.settings import Settings

log = logging.getLogger("specengine.serve")
APPLICATION = "specengine"
_ERROR = re.compile(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception): .+)$", re.MULTILINE)
AT_ONCE = 2  # requests that a replica has: the one that it answers and the next; the others wait for whoever is free


def run(recipe: Callable[[int], Recipe], settings: Settings, scale: Scale, listening: Callable[[str], None]) -> None:
    """Serve until a signal says to stop; ReplicaError where the model cannot be loaded.

    recipe: of a replica with so many threads; listening: told the address before anything is loaded.
    """
    opened, address = open_socket(settings)
    front = Front(settings)
    server = uvicorn.Server(
        uvicorn.Config(
            front.app(),
            http=limited(settings.request_seconds),
            log_config=LOGGING,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=max(round(settings.drain_seconds), 1),
        )
    )
    with opened, cluster.running(scale):
        listening(address)
        failures: list[str] = []
        count = cluster.threads(scale)

        def load() -> None:
            try:
                front.handle = deploy(recipe(count), settings, scale)
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
            raise ReplicaError(f"the replicas do not start: {failures[0]}")


def deploy(recipe: Recipe, settings: Settings, scale: Scale) -> Any:
    """The handle of replicas that answer; needs a cluster that is joined. Raises what Ray Serve raises."""
    if scale.most > scale.replicas:
        target = {"min_replicas": scale.replicas, "max_replicas": scale.most, "target_ongoing_requests": 1}
        count: dict[str, Any] = {"autoscaling_config": target}
    else:
        count = {"num_replicas": scale.replicas}
    made: Any = serve.deployment(Replica)
    routing: Any = ConversationRouter
    replicas = made.options(
        name="engine",
        ray_actor_options=cluster.needs(scale),
        max_ongoing_requests=min(AT_ONCE, 1 + settings.queue),
        max_queued_requests=settings.queue,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        request_router_config=RequestRouterConfig(request_router_class=routing),
        **count,
    )
    serve.start(proxy_location="Disabled")
    return serve.run(replicas.bind(recipe, settings), name=APPLICATION, route_prefix=None)


def _why(error: Exception) -> str:
    """What the last replica said that did not start, as far as Ray Serve kept it."""
    texts = [str(error)]
    with contextlib.suppress(Exception):
        deployments = serve.status().applications[APPLICATION].deployments
        texts += [deployment.message for deployment in deployments.values()]
    found = [line for text in texts for line in _ERROR.findall(text)]
    return found[-1] if found else " ".join(texts[0].split()) or type(error).__name__

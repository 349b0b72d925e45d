"""A front over replicas of a tiny model, on a cluster of the test's own."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from ray import serve

from specengine.cli.given import EngineArguments
from specengine.protocol.settings import Settings
from specengine.replicas import Scale, cluster
from specengine.serve.front import Front, deploy
from tests.serve.served import NAME, until


@dataclasses.dataclass
class Replicated:
    """`client` speaks to the front."""

    address: str
    front: Front
    client: httpx.Client

    def metric(self, name: str) -> float:
        """0 where nothing was counted under this label yet."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(
            (float(line.split()[-1]) for line in lines if line.startswith(f"specengine_{name}")),
            0.0,
        )


@contextlib.contextmanager
def replicated(
    model: Path, address: str, replicas: int = 2, **settings: Any
) -> Iterator[Replicated]:
    chosen = Settings(name=NAME, **settings)
    scale = Scale(replicas, threads=1, address=address)
    front = Front(chosen, replicas)
    opened = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        front.app(), log_config=None, lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    with cluster.running(scale):
        thread.start()
        try:
            until(lambda: server.started)
            base = f"http://127.0.0.1:{opened.getsockname()[1]}"
            with httpx.Client(base_url=base, timeout=60) as client:
                assert client.get("/health").status_code == 503
                front.handle = deploy(EngineArguments(str(model), threads=1).load, chosen, scale)
                front.state = "ready"
                yield Replicated(base, front, client)
        finally:
            server.should_exit = True
            thread.join(20)
            opened.close()
            serve.shutdown()

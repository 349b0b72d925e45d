"""Servers over tiny models, in this process and on a port of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from specengine import Engine
from specengine.protocol.settings import Settings
from specengine.serve.models import Models, ServedModel
from specengine.serve.server import Server
from specengine.serve.worker import Worker
from tests.engine.engines import engine_of
from tests.toy import byte_tokenizer

NAME = "tiny"
CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 24,
}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "once upon a time", "max_tokens": 24}


def tiny_engine(**options: Any) -> Engine:
    return engine_of("llama", **options, tokenizer=byte_tokenizer())


@dataclass
class Served:
    """A running server; `client` speaks to it, `stop` is what a signal does."""

    address: str
    worker: Worker
    client: httpx.Client
    stop: Callable[[], None]
    models: Models

    def post(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", **options: Any
    ) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def metric(self, name: str) -> float:
        text = self.client.get("/metrics").text
        return next(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith(f"specengine_{name}")
        )


@contextlib.contextmanager
def served(
    load: Callable[[], Engine] = tiny_engine,
    *others: ServedModel,
    wait: bool = True,
    **settings: Any,
) -> Iterator[Served]:
    chosen = Settings(**{"name": NAME, "drain_seconds": 2} | settings)
    models = Models([ServedModel(NAME, load), *others], chosen)
    worker = models.first
    opened = socket.create_server(("127.0.0.1", 0))
    server = Server(models, log_config=None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    address = f"http://127.0.0.1:{opened.getsockname()[1]}"

    def stop() -> None:
        server.should_exit = True

    try:
        until(lambda: server.started)
        if wait:
            until(lambda: worker.state != "loading")
        with httpx.Client(base_url=address, timeout=60) as client:
            yield Served(address, worker, client, stop, models)
    finally:
        stop()
        thread.join(20)
        opened.close()
        assert not thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until it does; AssertionError where it does not come to that."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


class Gate:
    """An engine whose verifications wait to be let through, one by one or all, and then take `seconds` each."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.engine = tiny_engine(draft="none")
        self.seconds = seconds
        self.open = threading.Event()
        self.passed = 0
        self.engine.target.verify = self._held(self.engine.target.verify)  # type: ignore[method-assign]
        self.engine.target.choose = lambda tree: None  # type: ignore[method-assign]

    def _held(self, verify: Callable[..., Any]) -> Callable[..., Any]:
        def held(tree: Any) -> Any:
            self.passed += 1
            if not self.open.wait(30):
                raise TimeoutError
            time.sleep(self.seconds)
            return verify(tree)

        return held

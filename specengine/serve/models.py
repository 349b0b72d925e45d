"""The models of a server, loaded and unloaded as they are asked for, and memory that requests have freed.

glibc keeps freed memory for the thread that had it: a thousand large schemas left a server with 365 MB that nothing
used. Other C libraries are left alone.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import generate_latest

from specengine.engine import Engine
from specengine.engine.parts import free_memory
from specengine.errors import require, shown
from specengine.protocol.problems import RequestError
from specengine.protocol.settings import Settings
from specengine.serve.metrics import Added, Metrics
from specengine.serve.worker import Worker

GIB = 1 << 30
MAX_ARENAS = 2
GROWTH = 1.03  # of the resident memory, after which freed memory is looked for
SECONDS = 5.0  # between two looks
_M_ARENA_MAX = -8  # mallopt(3)


class ServedModel(NamedTuple):
    """A model that may be loaded.

    name    as clients see it
    load    makes its engine
    path    its path or Hub id, by which requests may name it as well
    size    returns the bytes of its weights' files, 0 while they are not here
    """

    name: str
    load: Callable[[], Engine]
    path: str | None = None
    size: Callable[[], int] = lambda: 0


class Models:
    """The models of one server by name. The first is loaded at the start, each other one at the first request for it.

    Where there is no room for one, those that were asked for least recently are unloaded before, each once the answers
    under way have ended, and idle ones first. Names outside the list load nothing.
    """

    def __init__(self, models: Sequence[ServedModel], settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.streams: dict[
            Hashable, Any
        ] = {}  # that outlast their clients, see answering.KeptStream
        alone = len(models) == 1
        self.workers = {
            each.name: Worker(
                each.load,
                dataclasses.replace(settings, name=each.name),
                self.metrics if alone else Metrics(),
                self._room,
            )
            for each in models
        }
        paths = {each.path or each.name: self.workers[each.name] for each in models}
        self._names = self.workers if alone else paths | self.workers
        self._sizes = {self.workers[each.name]: each.size for each in models}
        self._loading = threading.Lock()
        self._figures = Added("model_name")
        self.first, *others = self.workers.values()
        for worker in others:
            worker.state = "ready"

    def figures(self) -> bytes:
        """Return the metrics of all models, with their names as a label where there are several."""
        if len(self.workers) == 1:
            return self.metrics.text()
        texts = {name: worker.metrics.text() for name, worker in self.workers.items()}
        texts[""] = generate_latest(self.metrics.failed)  # of no model
        self._figures.take((name, text.decode()) for name, text in texts.items())
        return self._figures.text()

    def named(self, name: str | None) -> Worker:
        """Return the model of a request; RequestError. One model alone takes any name, unless it is strict."""
        is_strict = self.settings.strict_model or len(self.workers) > 1
        return self.exactly(name) if is_strict and name is not None else self.first

    def exactly(self, name: str) -> Worker:
        """Return the model of this name; RequestError."""
        if (worker := self._names.get(name)) is None:
            names = ", ".join(map(repr, self.workers))
            raise RequestError(
                404,
                f"model: got {shown(name)}, this server has {names}",
                "model",
                "model_not_found",
            )
        return worker

    @contextlib.contextmanager
    def _room(self, worker: Worker) -> Iterator[bool]:
        """Unload others until there is room for a model, in its thread; False where nobody waits for it any more."""
        with self._loading:
            while worker.state == "loading" or not (worker.jobs.is_closed or worker.jobs.idle):
                if (other := self._in_the_way(worker)) is None:
                    yield True
                    return
                other.unload()
            yield False

    def _in_the_way(self, worker: Worker) -> Worker | None:
        """Return the model to unload so that this one fits; InputError where it fits in no memory allowed."""
        loaded = [other for other in self.workers.values() if other.engine is not None]
        bytes_needed, bound = self._sizes[worker](), self.settings.max_model_memory
        room = free_memory()
        if bound is not None:
            accepted = f"{bytes_needed / GIB:.2f} GiB or more, the files of {worker.settings.name}"
            require("max_model_memory", bound, accepted, bytes_needed <= bound * GIB)
            room = int(bound * GIB) - sum(self._sizes[other]() for other in loaded)
        fits = bytes_needed <= room and len(loaded) < (self.settings.max_models or math.inf)
        if fits or not loaded:
            return None
        return min(loaded, key=lambda other: (not other.jobs.idle, other.jobs.used))


def limit_arenas() -> None:
    """Have threads share what they free. Acts on threads that start later."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, MAX_ARENAS)


async def give_back(seconds: float = SECONDS) -> None:
    """Give freed memory back whenever the process has grown, until cancelled."""
    library = _glibc()
    if library is None:
        return
    level = resident_bytes()
    while True:
        await asyncio.sleep(seconds)
        if resident_bytes() > GROWTH * level:
            await asyncio.to_thread(library.malloc_trim, 0)
            level = resident_bytes()


def resident_bytes() -> int:
    """Return the resident memory of this process. Linux only."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def _glibc() -> Any:
    """Return the C library if it is glibc, else None."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") else None

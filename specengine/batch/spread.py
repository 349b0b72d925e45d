"""Lines spread over replicas, each an engine in a process of its own, on this machine or on a cluster of Ray's."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specengine.batch.answering import AHEAD, Answered, answer, facts, failed
from specengine.batch.files import Record
from specengine.batch.lines import Item
from specengine.engine import Engine
from specengine.engine.scheduler import result_of
from specengine.errors import ReplicaError
from specengine.replicas import Scale
from specengine.replicas.cluster import needs, ray

MAX_TRIES = 3


class LineReplica:
    """Worker in a replica's process."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._engine: Engine | None = None

    def load(self) -> Record:
        self._engine = self._load()
        return facts(self._engine)

    def answer(self, item: Item) -> Answered:
        assert self._engine is not None
        answered: Answered = result_of(answer(self._engine, item))
        return answered


@dataclass
class Spread:
    """Gives every item to whichever replica is free.

    The first replica loads alone, so that what it measures and keeps is there for the others.
    loaded: told what the engine of each is; what it raises comes out of `answered`.

    A process that ends is replaced. The item that it had is tried again, MAX_TRIES times in all, and then is an error
    of that line.
    """

    load: Callable[[], Engine]
    scale: Scale
    loaded: Callable[[Record], None]
    _tries: Counter[int] = field(default_factory=Counter)
    _under_way: dict[Any, tuple[Any, Item | None]] = field(default_factory=dict)
    _free: list[Any] = field(default_factory=list)
    _lost_loading: int = 0

    def answered(self, items: Sequence[Item]) -> Iterator[Answered]:
        """Yield answers in the order of their coming, at most AHEAD per replica before the first that is missing."""
        waiting, missing = deque(items), {item.place for item in items}
        self._start()
        started = 1
        while missing:
            first = min(missing)
            while self._free and waiting and waiting[0].place < first + AHEAD * self.scale.replicas:
                replica = self._free.pop()
                line = waiting.popleft()
                self._under_way[replica.answer.remote(line)] = (replica, line)
            item, got = self._result()
            if item is None:
                if got is not None:
                    self.loaded(got)
                    self._lost_loading = 0
                    for _ in range(self.scale.replicas - started):
                        self._start()
                    started = self.scale.replicas
            elif got is None:
                waiting.appendleft(item)
            else:
                missing.remove(item.place)
                yield got

    def _result(self) -> tuple[Item | None, Any]:
        """Wait for one replica; return its item and the answer, or None and its facts after loading.

        The answer or the facts are None where the process has ended and the work is to be tried again.
        """
        ready, _ = ray.wait(list(self._under_way), num_returns=1)
        replica, item = self._under_way.pop(ready[0])
        try:
            result = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except ray.exceptions.RayError:
            self._start()
            return item, self._lost(item)
        self._free.append(replica)
        return item, result

    def _start(self) -> None:
        made: Any = ray.remote(LineReplica)
        replica = made.options(max_restarts=0, **needs(self.scale)).remote(self.load)
        self._under_way[replica.load.remote()] = (replica, None)

    def _lost(self, item: Item | None) -> Answered | None:
        """Return the failure of a process's work after it has ended, or None to try the work again."""
        if item is None:
            self._lost_loading += 1
            if self._lost_loading == MAX_TRIES:
                raise ReplicaError(
                    f"replicas: {MAX_TRIES} processes in succession ended while they loaded the model, as they do "
                    "where memory is short; ask for fewer replicas"
                )
            return None
        self._tries[item.place] += 1
        if self._tries[item.place] < MAX_TRIES:
            return None
        return failed(
            item, ReplicaError.__name__, f"the process that answered it ended, {MAX_TRIES} times"
        )


def in_order(answers: Iterator[Answered], first: int) -> Iterator[Answered]:
    """Yield the answers by place, from `first` on, each as soon as all before it are there."""
    early: dict[int, Answered] = {}
    for answered in answers:
        early[answered.place] = answered
        while first in early:
            yield early.pop(first)
            first += 1

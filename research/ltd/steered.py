"""The serving engine, its policy's decisions made from outside: it asks for them one after the other."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from research.ltd.observations import best_actions
from research.ltd.options import Stage
from specengine.engine import Engine
from specengine.policies._ltd import GO_ON, LtdShape, Networks
from specengine.policies.ltd import Decisions, Ltd
from specengine.records import Cycle

TIMED = 50  # forwards that the time of a decision is measured with


def steered_policy(
    shape: LtdShape, decisions: Decisions, depth: int | None = None, size: int | None = None
) -> Ltd:
    """Return a policy that follows `decisions`, for networks that are still being trained."""
    policy = Ltd.__new__(Ltd)
    policy.networks, policy.depth, policy.size, policy.check_every = "(steered)", depth, size, None
    policy.follow(shape, decisions)
    return policy


class Question(NamedTuple):
    """A decision of the network in training. observation: float32 [inputs]."""

    observation: Tensor


class Finished(NamedTuple):
    """A cycle that was decided about; its wall-clock seconds, with a decision's own in place of the wait for it."""

    cycle: Cycle
    seconds: float


class _Closed(Exception):
    """Nobody asks any more."""


class SteeredEngine:
    """Cycles of `engine` over prompts drawn at random, decided about from outside.

    which     the network that is asked for
    other     what decides in the other's place: networks, a number, or None for depths drawn from 1 to the most
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        shape: LtdShape,
        which: Stage,
        other: Networks | int | None,
        *,
        length: int,
        seed: int = 0,
        decision_seconds: float = 0.0,
    ) -> None:
        self._prompts, self._length = prompts, length
        self._random = np.random.default_rng(seed)
        self._decisions = _Decisions(which, other, shape, self._random)
        number = other if isinstance(other, int) else None
        fixed = {"size" if which == "depth" else "depth": number}
        policy = steered_policy(shape, self._decisions, **fixed)
        self._engine = Engine(engine.target, engine.drafter, policy, engine.tokenizer)
        self._decision_seconds = decision_seconds
        self._worker: threading.Thread | None = None
        self._open: Question | None = None

    def next(self, answer: int | None = None) -> Question | Finished:
        """Return what comes next: a question, which the next call answers, or the end of a cycle.

        Without an answer, returns the open question. An answer without an open question is ignored.
        """
        if answer is None and self._open is not None:
            return self._open
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, daemon=True)
            self._worker.start()
        elif self._open is not None:
            self._decisions.answers.put(answer)
        found = self._decisions.questions.get()
        if isinstance(found, BaseException):
            raise found
        self._open = found if isinstance(found, Question) else None
        return found

    def close(self) -> None:
        if self._worker is not None:
            self._decisions.closed = True
            self._decisions.answers.put(None)
            while self._worker.is_alive():
                try:  # it may be about to hand something over
                    self._decisions.questions.get(timeout=0.01)
                except queue.Empty:
                    continue
            self._worker = None

    def _work(self) -> None:
        try:
            while True:
                for found in self._cycles(
                    self._prompts[int(self._random.integers(len(self._prompts)))]
                ):
                    self._decisions.questions.put(found)
        except _Closed:
            self._engine.reset()
        except BaseException as error:
            self._decisions.questions.put(error)

    def _cycles(self, prompt: list[int]) -> Iterator[Finished]:
        target = self._engine.target
        cycles = self._engine.answer(prompt, max_new_tokens=self._length, temperature=0.0)
        while not self._decisions.closed:
            began = _now(target.device)
            self._decisions.start()
            cycle = next(cycles, None)
            if cycle is None:
                return
            waited, decisions = self._decisions.waited, self._decisions.decisions
            seconds = _now(target.device) - began - waited + decisions * self._decision_seconds
            yield Finished(cycle, seconds)
        raise _Closed


class _Decisions:
    """Decisions of one kind by whoever answers, of the other kind by the other network or at random."""

    def __init__(
        self,
        which: Stage,
        other: Networks | int | None,
        shape: LtdShape,
        random: np.random.Generator,
    ) -> None:
        self.questions: queue.SimpleQueue[Question | Finished | BaseException] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.closed, self.waited, self.decisions = False, 0.0, 0
        self._which, self._other, self._shape, self._random = which, other, shape, random
        self._drawn = 0

    def start(self) -> None:
        """Begin a cycle."""
        self.waited, self.decisions = 0.0, 0
        self._drawn = int(
            self._random.integers(max(1, self._shape.least), self._shape.expansions + 1)
        )

    def goes_on(self, observation: Tensor, expansions: Tensor) -> Tensor:
        if self._which == "depth":
            return torch.tensor(
                [self._ask(observation) == GO_ON], device=observation.device, dtype=torch.bool
            )
        if isinstance(self._other, Networks):
            return self._other.goes_on(observation, expansions)
        return expansions < self._drawn

    def choose_size(self, observation: Tensor) -> Tensor:
        if self._which == "size":
            return torch.tensor(
                [self._ask(observation)], device=observation.device, dtype=torch.int64
            )
        assert isinstance(self._other, Networks), "a number is the policy's own option"
        return self._other.choose_size(observation)

    def _ask(self, observation: Tensor) -> int:
        began = time.perf_counter()
        self.questions.put(Question(observation.cpu()))
        answer = self.answers.get()
        self.waited += time.perf_counter() - began
        self.decisions += 1
        if answer is None or self.closed:
            raise _Closed
        return answer


def decision_seconds(networks: Networks, which: Stage, device: torch.device) -> float:
    """Measure the median wall-clock seconds of one decision by a network of this shape on that device."""
    networks.to(device)
    observation = torch.zeros(networks.shape.inputs[which], device=device, dtype=torch.float32)
    times = []
    with torch.inference_mode():
        for _ in range(TIMED):
            began = _now(device)
            int(best_actions(networks, which, observation))
            times.append(_now(device) - began)
    return statistics.median(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

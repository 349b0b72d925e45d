"""The one thread that loads the engine and answers with it, and the queue before it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specengine.engine import Engine
from specengine.errors import InputError, QueueFullError
from specengine.generation.prompts import predicted_ids
from specengine.generation.text_generation import TextGeneration
from specengine.records import TokenLogprob
from specengine.serve.answers import Answer, found_again
from specengine.serve.asking import Asked
from specengine.serve.metrics import Metrics
from specengine.serve.problems import Problem, unavailable
from specengine.trace.writer import Texts, cycle_record

log = logging.getLogger("specengine.serve")
MOST_RETRY_SECONDS = 600


class Piece(NamedTuple):
    """Text of one cycle and the tokens that it committed; prompt tokens for usage on the way.

    extra: fields of the chunk, for those who look at cycles.
    """

    text: str
    tokens: list[int]
    answer: Answer
    extra: dict[str, Any]
    logprobs: list[TokenLogprob] | None = None


class Ended(NamedTuple):
    """The end of an answer."""

    answer: Answer


class Failed(NamedTuple):
    """The end of a request that gets no answer, or no more of one."""

    error: Exception


Event = Piece | Ended | Failed


@dataclass(eq=False)
class Job:
    """A request in the queue.

    deliver: called from the worker's thread, at last with Ended or Failed, unless the job is cancelled.
    """

    asked: Asked
    deliver: Callable[[Event], None]
    cancelled: bool = False
    came: float = field(default_factory=time.perf_counter)


class Worker:
    """Answers jobs one by one, the first that came first.

    load      makes the engine, in the worker's thread
    waiting   how many jobs may wait while another is answered
    failed    called, in that thread, if `load` raises; `failure` is then the error
    """

    def __init__(self, load: Callable[[], Engine], waiting: int, metrics: Metrics) -> None:
        self.state: Literal["loading", "ready", "failed", "stopping"] = "loading"
        self.failure: BaseException | None = None
        self.failed: Callable[[], None] = lambda: None
        self.metrics = metrics
        self.engine: Engine | None = None
        self._load, self._most = load, waiting
        self._jobs: deque[Job] = deque()
        self._job: Job | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._mean_seconds = 1.0  # of an answer, the latest counting most
        self._thread = threading.Thread(target=self._run, name="specengine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Answer what there is; whoever submits sees to it that nothing more comes."""
        with self._changed:
            if self.state == "ready":
                self.state = "stopping"

    def abandon(self) -> None:
        """Tell all whose answers have not ended that they will not."""
        with self._changed:
            jobs = [*self._jobs, *([self._job] if self._job else [])]
            for job in jobs:
                job.cancelled = True
            self._jobs.clear()
            self._gauge()
        for job in jobs:
            job.deliver(Failed(unavailable("stopping")))

    def stop(self, seconds: float = 10.0) -> None:
        """Cancel everything and end the thread, which is not waited for while it loads."""
        with self._changed:
            self._stopping = True
            for job in [*self._jobs, *([self._job] if self._job else [])]:
                job.cancelled = True
            self._changed.notify_all()
        if self.engine is not None:
            self._thread.join(seconds)

    def submit(self, job: Job) -> None:
        """Put into the queue; QueueFullError where as many wait as may."""
        with self._changed:
            waiting = len(self._jobs)
            if waiting >= self._most + (self._job is None):
                raise QueueFullError(f"{waiting} requests wait already; try again in {self.retry_seconds} s")
            self._jobs.append(job)
            self._gauge()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Take it out of the queue, or end it with the cycle under way."""
        with self._changed:
            job.cancelled = True
            if job in self._jobs:
                self._jobs.remove(job)
                self._gauge()

    @property
    def alive(self) -> bool:
        """Whether the thread runs that answers."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        return self._job is not None

    @property
    def idle(self) -> bool:
        """Nothing is being answered, and nothing waits."""
        with self._changed:
            return not self._jobs and self._job is None

    @property
    def retry_seconds(self) -> int:
        """When the queue is likely to have moved on, from what answers took of late."""
        return min(max(math.ceil(self._mean_seconds), 1), MOST_RETRY_SECONDS)

    def _run(self) -> None:
        try:
            self.engine = self._load()
        except BaseException as error:  # told by whoever waits for the engine
            self.failure, self.state = error, "failed"
            self.failed()
            return
        with self._changed:
            self.state = "ready"
        log.info("ready: %r", self.engine)
        while (job := self._next()) is not None:
            began = time.perf_counter()
            try:
                self._answer(self.engine, job, began - job.came)
            except Exception as error:
                self._failure(job, error)
            with self._changed:
                self._job = None
                self._mean_seconds += 0.3 * (time.perf_counter() - began - self._mean_seconds)
                self._gauge()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self._job = self._jobs.popleft()
            self._gauge()
            return self._job

    def _answer(self, engine: Engine, job: Job, waited: float) -> None:
        generation = job.asked.start(engine)
        texts = Texts(engine.tokenizer)
        answer = Answer(generation.stats, generation.prompt)
        deadline = time.perf_counter() + job.asked.settings.max_seconds
        began = time.perf_counter()
        with contextlib.closing(job.asked.score(engine, generation.prompt)) as scores:
            while not job.cancelled and (rated := next(scores, None)) is not None:
                answer.prompt_logprobs.append(rated)
        answer.scored_s = time.perf_counter() - began
        if not job.asked.answers:
            generation.stats.num_prompt_tokens, answer.reason = len(generation.prompt), "length"
        with contextlib.closing(generation):
            while not job.cancelled and answer.reason is None:
                piece = next(generation, None)
                if piece is None:
                    break
                answer.add(piece.cycle)
                answer.text += piece.text
                if generation.result is not None:
                    answer.text = generation.result.text
                    answer.reason = "stop" if generation.result.finish_reason == "stop" else "length"
                elif time.perf_counter() > deadline:
                    answer.reason = "length"
                extra = {}
                if job.asked.request.return_cycles:
                    plain = generation.policy and generation.policy.plain_seconds
                    extra = {"cycles": [cycle_record(piece.cycle, piece.text, texts)], "plain_cycle_seconds": plain}
                job.deliver(Piece(piece.text, piece.cycle.tokens, answer, extra, piece.cycle.logprobs))
        if answer.reason is not None:
            self._count_prediction(engine, job, generation, answer)
        ended = answer.reason or "abort"
        self.metrics.count(answer, ended, waited, time.perf_counter() - job.came)
        _log(answer, ended)
        if job.asked.settings.log_contents:
            log.info("asked: %s, said: %r", job.asked.request.model_dump_json(exclude_none=True), answer.text)
        if answer.reason is not None:
            job.deliver(Ended(answer))

    def _count_prediction(self, engine: Engine, job: Job, generation: TextGeneration, answer: Answer) -> None:
        expected = predicted_ids(job.asked.prediction, engine.tokenizer, engine.target.vocab_size)
        found = found_again(expected, answer.token_ids) if expected else 0
        answer.predicted = (found, len(expected) - found)

    def _failure(self, job: Job, error: Exception) -> None:
        if not isinstance(error, InputError | Problem):
            # without the error's text, which may quote what was asked
            log.error("%s at\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
        job.deliver(Failed(error))

    def _gauge(self) -> None:
        self.metrics.waiting.set(len(self._jobs))
        self.metrics.running.set(self._job is not None)


def _log(answer: Answer, ended: str) -> None:
    stats = answer.stats
    log.info(
        "%s: %d prompt tokens (%d cached), %d tokens in %.2f s, acceptance length %.2f",
        ended,
        stats.num_prompt_tokens,
        stats.num_cached_prompt_tokens,
        stats.num_generated_tokens,
        stats.elapsed_s,
        stats.mean_acceptance_length,
    )

"""The thread that loads the engine and answers all jobs, the queue before it, and one that reads long requests."""

import contextlib
import copy
import functools
import gc
import logging
import math
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from specengine.engine import (
    SCORED_ROWS,
    Client,
    Engine,
    Pool,
    TextGeneration,
    Ticket,
    parallel_of,
)
from specengine.engine.scheduler import Task, run_tasks
from specengine.errors import InputError, require_input
from specengine.protocol.completion import Completion, Piece, found_again
from specengine.protocol.preparing import CheckedRequest, ModelLimits, PreparedRequest
from specengine.protocol.problems import RequestError, unavailable
from specengine.protocol.settings import Settings
from specengine.request.options import GenerationOptions
from specengine.request.prompts import longest_token
from specengine.serve.metrics import Metrics
from specengine.trace.writer import Texts, cycle_record

log = logging.getLogger("specengine.serve")
MAX_RETRY_SECONDS = 600
MAX_CLIENTS = 4096  # that are remembered
SPARE = 1  # answers more at once than `parallel`, for a client that has none under way


# a piece, and at the end the whole answer, or why there is none, or no more of it
Event = Piece | Completion | Exception


@dataclass(eq=False)
class Job:
    """A request in the queue.

    deliver: called from a thread of the worker's, at last with the answer or an error, unless the job is cancelled.
    who: a name of whoever asks
    ticket: its place in the lines; cancelled where nobody waits for it any more
    prepared: once it has been read; until then it is passed over where `quick` does not say that reading it is nothing
    is_read: a thread has begun with it; read_s: seconds that it took
    progress: returns llama.cpp's figures of its prompt, once that is read
    """

    asked: CheckedRequest
    deliver: Callable[[Event], None]
    who: Hashable = None
    ticket: Ticket = field(default_factory=Ticket)
    came: float = field(default_factory=time.perf_counter)
    prepared: PreparedRequest | None = None
    quick: bool = True
    is_read: bool = False
    read_s: float = 0.0
    progress: Callable[[], dict[str, Any] | None] = lambda: None


class Clients:
    """Clients by name. Whoever was served least goes first, as in VTC (Sheng et al. 2024, arXiv 2401.00588).

    Served are tokens that were read, those of caches left out, and tokens that were written. A client that asks anew
    counts as served no less than the least served one that asked beside others last: nobody saves up a claim.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Client] = OrderedDict()
        self._least = 0  # served to whoever was served least, of those that asked

    def of(self, name: Hashable, asking: Collection[Client]) -> Client:
        """Return the client of this name; asking: those whose answers wait or are under way."""
        client = self._known.setdefault(name, Client())
        self._known.move_to_end(name)
        if asking:
            self._least = max(self._least, min(other.served for other in asking))
        if client not in asking:
            client.served = max(client.served, self._least)
        if len(self._known) > MAX_CLIENTS:
            self._known.popitem(last=False)
        return client


class JobQueue:
    """The jobs that wait for an answer, as many as its length says, and those that are answered.

    The client that was served least goes first, and of its jobs the one that came first.

    waiting   how many may wait while as many as may are answered
    parallel  how many are answered at once
    limits    of the model, once it is loaded
    answered  the jobs whose answers are under way
    used      time.monotonic() of the last job that came
    paused    time.perf_counter() since when those that come wait
    """

    def __init__(self, waiting: int, parallel: int) -> None:
        self.parallel = parallel
        self.limits: ModelLimits | None = None
        self.answered: set[Job] = set()
        self.is_closed = False
        self.paused = math.inf
        self.used = 0.0
        self._waiting: deque[Job] = deque()
        self._most = waiting
        self._clients = Clients()
        self._changed = threading.Condition()
        self._mean_seconds = 1.0  # of an answer, the latest counting most

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, *jobs: Job) -> None:
        """Put into the queue, all or none; RequestError where as many wait as may, InputError for a text that fits
        no context, and for more jobs than may ever wait.
        """
        most = self._most + self.parallel
        require_input(
            f"n: {len(jobs)} answers of one request, accepted up to {most}, by the server's queue",
            len(jobs) <= most,
        )
        for job in jobs:
            if self.limits is not None:
                job.asked.require_possible(self.limits)
            job.quick = job.asked.quick
        with self._changed:
            waiting = len(self._waiting)
            if waiting + len(jobs) > most - len(self.answered):
                # until the queue is likely empty, by the recent time of answers
                turns = max((waiting + len(self.answered)) / self.parallel, 1)
                seconds = min(max(math.ceil(self._mean_seconds * turns), 1), MAX_RETRY_SECONDS)
                raise RequestError(
                    429,
                    f"{waiting} requests wait already; try again in {seconds} s",
                    code="queue_full",
                    headers={"Retry-After": str(seconds)},
                )
            asking = {other.ticket.client for other in (*self._waiting, *self.answered)}
            for job in jobs:
                job.ticket.client = self._clients.of(job.who, asking)
                asking.add(job.ticket.client)
            self._waiting += jobs
            self.used = time.monotonic()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Take it out of the queue, or end its wait for room, or itself with the cycle under way."""
        job.ticket.cancel()
        self.drop(job)

    def drop(self, job: Job) -> bool:
        """Take a job that waits out of the queue. Return whether it did."""
        with self._changed:
            if waits := job in self._waiting:
                self._waiting.remove(job)
        return waits

    def before(self, job: Job) -> int | None:
        """Return how many answers end before the job has its turn; None where it does not wait for one."""
        with self._changed:
            if job not in self._waiting:
                return None
            turn = sum(other.ticket.rank <= job.ticket.rank for other in self._waiting)
            return max(turn - (self.parallel - len(self.answered)), 0)

    @property
    def idle(self) -> bool:
        """Return whether no job is answered and none waits."""
        with self._changed:
            return not self._waiting and not self.answered

    def abandon(self, problem: RequestError) -> None:
        """Fail all jobs whose answers have not ended."""
        with self._changed:
            jobs = [*self._waiting, *self.answered]
            for job in jobs:
                job.ticket.cancel()
            self._waiting.clear()
        for job in jobs:
            job.deliver(problem)

    def _has_place(self, job: Job) -> bool:
        """Return whether a job need not wait for an answer's end; a client that has none under way may be one more."""
        spare = (
            0 if any(other.ticket.client is job.ticket.client for other in self.answered) else SPARE
        )
        return len(self.answered) < self.parallel + spare

    def first(self, suits: Callable[[Job], bool], wait: bool = True) -> Job | None:
        """Return the first in line of the jobs that suit; None where the worker stops or pauses, or has none now."""
        with self._changed:
            while not self.is_closed:
                if (
                    job := min(
                        (job for job in self._waiting if job.came < self.paused and suits(job)),
                        key=lambda job: job.ticket.rank,
                        default=None,
                    )
                ) is not None:
                    return job
                if not wait or self.paused < math.inf:
                    return None
                self._changed.wait()
            return None

    def take(self, wait: bool) -> Job | None:
        """Move the first job that may be answered now to those that are, and return it; None as in `first`."""
        with self._changed:
            job = self.first(
                lambda job: (job.quick or job.prepared is not None) and self._has_place(job), wait
            )
            if job is not None:
                self.answered.add(job)
                self._waiting.remove(job)
            return job

    def finish(self, job: Job, seconds: float) -> None:
        """Take the end of an answer into account, and the seconds that it took."""
        with self._changed:
            self.answered.discard(job)
            self._mean_seconds += 0.3 * (seconds - self._mean_seconds)

    def wake(self) -> None:
        """Have the threads that wait for a job look again."""
        with self._changed:
            self._changed.notify_all()

    def pause(self, until: Callable[[], bool]) -> None:
        """Give out no more than there is, and wait until a thread that calls `wake` has seen to it."""
        with self._changed:
            self.paused = time.perf_counter()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.is_closed or until())

    def close(self) -> None:
        """Cancel all jobs, and give out no more."""
        with self._changed:
            self.is_closed = True
            for job in [*self._waiting, *self.answered]:
                job.ticket.cancel()
            self._changed.notify_all()


class Worker:
    """Answers the jobs of its queue in one loop, as many at once as the queue says.

    One that takes long to read is passed by those behind it until a thread beside has read it. Answers at once run on
    engines that share the weights (engine.Pool); one goes to the engine that holds most of its prompt.

    Its state begins with `loading`: the engine is loaded at the start. If it is set to `ready` before that, the first
    job has it loaded; the jobs that wait for that fail where `load` raises, and the next one has it tried again.

    load      makes the engine, in the worker's thread
    settings  name: of the model; parallel None: by the memory that is free once the engine is loaded, see
              engine.parallel_of
    failed    called, in that thread, if the loading at the start raises; `failure` is the error of the last loading
    thread    answers; whoever has a worker starts it
    room      returns the context for loading; nothing is loaded where that has False
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        settings: Settings,
        metrics: Metrics,
        room: Callable[["Worker"], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.state: Literal["loading", "ready", "failed", "stopping"] = "loading"
        self.failure: BaseException | None = None
        self.failed: Callable[[], None] = lambda: None
        self.metrics = metrics
        self.engine: Engine | None = None
        self.jobs = JobQueue(settings.queue, settings.parallel or 1)
        # for whoever reads texts without an answer; copied at the start, slowly
        self.beside: ModelLimits | None = None
        self.settings = settings
        self._room = room
        self._load = load
        self._pool: Pool | None = None
        self.thread = threading.Thread(target=self._run, name="specengine", daemon=True)
        metrics.running.set_function(lambda: len(self.jobs.answered) - self._without_room)
        metrics.waiting.set_function(lambda: len(self.jobs) + self._without_room)

    def stop(self, seconds: float = 10.0) -> None:
        """Cancel everything and end the threads, which are not waited for while they load."""
        self.jobs.close()
        if self.engine is not None:
            self.thread.join(seconds)

    @property
    def status(self) -> dict[str, Any]:
        """Return whether the model is loaded, in llama.cpp's words, and why not where that failed."""
        if self.engine is not None:
            return {"value": "loaded"}
        if not self.jobs.idle:
            return {"value": "loading"}
        failed = {"failed": True, "message": str(self.failure)} if self.failure is not None else {}
        return {"value": "unloaded"} | failed

    @property
    def _without_room(self) -> int:
        """The number of jobs that have an engine but wait for memory for its cache."""
        return 0 if self._pool is None else len(self._pool.waiting)

    def unload(self) -> None:
        """Free the model once the answers under way have ended; a job that waits then has it loaded again."""
        self.jobs.pause(until=lambda: self.engine is None)

    def _run(self) -> None:
        while self.state == "loading" or self.jobs.first(lambda job: True) is not None:
            try:
                with self._room(self) as has_room:
                    if has_room:
                        self._make_ready()
            except BaseException as error:  # told by whoever waits for the engine
                if self.state == "loading":
                    self.failure, self.state = error, "failed"
                    self.failed()
                    return
                self.failure = unavailable("failed", error)  # without frames, which hold weights
                log.error("%s could not be loaded: %s", self.settings.name, error)
                self.jobs.abandon(unavailable("failed", error))
            if self.engine is not None:
                self._answer_all(self.engine, self._pool)
            if not self.jobs.is_closed:
                self._free()

    def _make_ready(self) -> None:
        engine = self._load()
        if self.settings.parallel is None:
            self.jobs.parallel = parallel_of(engine)
        if self.jobs.parallel > 1:
            self._pool = Pool(engine, self.jobs.parallel, spare=SPARE)
            if self._pool.tokenizer is not None:
                self._pool.tokenizer.ready()  # the first answer need not wait for it
        self.metrics.answering = self._pool or engine
        self.jobs.limits, self.beside = limits_of(engine), limits_of(engine)
        with contextlib.suppress(Exception):  # whoever asks for a constraint is told
            target = engine.target
            engine.constraint(
                GenerationOptions.of(
                    {"json_object": True}, target.generation_config, 1, target.max_context
                )
            )  # reads the vocabulary, which holds up all threads
        gc.collect()
        gc.freeze()  # what is loaded stays: to look through it takes a quarter of a second, in midst of answers
        self.engine, self.failure = engine, None
        if self.state == "loading":
            self.state = "ready"
        log.info("ready: %r, answers at once: %d", engine, self.jobs.parallel)

    def _answer_all(self, engine: Engine, pool: Pool | None) -> None:
        reader = threading.Thread(
            target=self._read_all, args=(engine,), name="specengine-reader", daemon=True
        )
        reader.start()
        engines, scheduler = ([engine], None) if pool is None else (pool.engines, pool.scheduler)
        for _ in run_tasks(engines, scheduler, self._take):
            pass
        reader.join()

    def _free(self) -> None:
        self.engine = self._pool = self.metrics.answering = None
        gc.unfreeze()
        gc.collect()
        self.jobs.paused = math.inf
        self.jobs.wake()

    def _take(self, idle: list[Engine], wait: bool) -> tuple[Engine, Task] | None:
        job = self.jobs.take(wait)
        if job is None:
            return None
        began = time.perf_counter()
        engine = self._engine_for(job, idle)
        return engine, self._answer_job(engine, job, began)

    def _answer_job(self, engine: Engine, job: Job, began: float) -> Task:
        try:
            yield from self._answer(engine, job, began - job.came)
        except Exception as error:
            self._failure(job, error)
        self.jobs.finish(job, time.perf_counter() - began)

    def _engine_for(self, job: Job, idle: list[Engine]) -> Engine:
        """Return the idle engine that holds most of the prompt, else the one that has been idle for longest.

        An engine that holds another conversation is not taken for the few words that both begin with.
        """
        if len(idle) > 1 and job.prepared is None:
            with contextlib.suppress(Exception):  # raised again where it is answered
                self._prepare(idle[0], job)
        prompt = [] if job.prepared is None else job.prepared.prompt
        held = [engine.holds(prompt) for engine in idle]
        own = [
            2 * count >= len(engine.target.tokens) and count
            for count, engine in zip(held, idle, strict=True)
        ]
        return idle[own.index(max(own))]

    def _read_all(self, engine: Engine) -> None:
        """Read what takes long, texts one after the other."""
        limits = self.jobs.limits
        assert limits is not None
        while (
            job := self.jobs.first(lambda job: not (job.quick or job.is_read or job.prepared))
        ) is not None:
            job.is_read = True
            if job.asked.constrains:  # a schema of one does not wait for another's
                threading.Thread(
                    target=self._read,
                    args=(engine, job, limits),
                    name="specengine-grammar",
                    daemon=True,
                ).start()
            else:
                self._read(engine, job, limits)

    def _read(self, engine: Engine, job: Job, limits: ModelLimits) -> None:
        try:
            self._prepare(engine, job, limits)
        except Exception as error:
            if self.jobs.drop(job):
                self._failure(job, error)
        self.jobs.wake()

    def _prepare(
        self, engine: Engine, job: Job, limits: ModelLimits | None = None
    ) -> PreparedRequest:
        """Read the request; InputError, or RequestError where nobody waits for it any more or its time is over."""
        began = time.perf_counter()
        longest = self.jobs.limits and self.jobs.limits.longest
        limits = limits or ModelLimits(engine.tokenizer, engine.target.max_context, longest)
        most = math.inf if job.quick else job.asked.settings.max_seconds

        def still_wanted() -> None:
            if job.ticket.cancelled or self.jobs.is_closed:
                raise unavailable("stopping")
            if time.perf_counter() - began > most:
                raise RequestError(
                    503, f"reading the request takes longer than {most:g} s", code="timeout"
                )

        prepared = job.asked.prepare(engine, limits, still_wanted)
        job.read_s = time.perf_counter() - began
        job.prepared = prepared
        return prepared

    def _answer(self, engine: Engine, job: Job, waited: float) -> Generator[None, None, None]:
        began = time.perf_counter()
        prepared = job.prepared or self._prepare(engine, job)
        deadline = began + job.asked.settings.max_seconds - (job.read_s if not job.quick else 0.0)
        job.ticket.deadline = deadline
        generation = TextGeneration(
            engine,
            prepared.prompt,
            prepared.options,
            reuse_cache=True,
            shown=prepared.shown,
            constraint=prepared.constraint,
            ticket=job.ticket,
        )
        generation.answer.origins.wanted = bool(job.asked.request.return_cycles)
        texts = Texts(engine.tokenizer)
        answer = Completion(generation.stats, generation.prompt)
        job.progress = functools.partial(_progress, engine, answer, began)
        yield from _score(engine, job, answer, deadline)
        if (
            job.asked.request.wanted_tokens == 0 and answer.prompt_logprobs
        ):  # the prompt has been read
            generation.stats.num_prompt_tokens, answer.reason = len(generation.prompt), "length"
        with (
            contextlib.closing(generation),
            engine.target.running(),
        ):  # pieces are handed on at once
            while not job.ticket.cancelled and answer.reason is None:
                if not generation.is_ready:
                    yield
                elif (piece := next(generation, None)) is not None:
                    _deliver(job, generation, piece, answer, texts)
                else:  # it was given up while it waited
                    generation.stats.num_prompt_tokens = len(generation.prompt)
                    answer.reason = None if job.ticket.cancelled else "length"
        if self._pool is None:  # else they are counted piece by piece
            job.ticket.client.served += (
                generation.stats.num_prompt_tokens - generation.stats.num_cached_prompt_tokens
            )
        ended = answer.reason or "abort"
        self.metrics.count(answer, ended, waited, time.perf_counter() - job.came)
        stats = generation.stats
        log.info(
            "%s: %d prompt tokens (%d cached), %d tokens in %.2f s, acceptance length %.2f",
            ended,
            stats.num_prompt_tokens,
            stats.num_cached_prompt_tokens,
            stats.num_generated_tokens,
            stats.elapsed_s,
            stats.mean_acceptance_length,
        )
        if job.asked.settings.log_contents:
            log.info(
                "asked: %s, said: %r",
                job.asked.request.model_dump_json(exclude_none=True),
                answer.text,
            )
        if answer.reason is not None:
            prediction: Any = prepared.options.prediction or []
            predicted = found_again(prediction, answer.token_ids)
            answer.predicted = (predicted, len(prediction) - predicted)
            job.deliver(answer)

    def _failure(self, job: Job, error: Exception) -> None:
        if not isinstance(error, InputError | RequestError):
            # without the error's text, which may quote what was asked
            log.error(
                "%s at\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
            )
        job.deliver(error)


def _progress(engine: Engine, answer: Completion, began: float) -> dict[str, Any] | None:
    """Return llama.cpp's figures of a prompt that is being read; None where it waits for memory."""
    target: Any = engine.target
    total = answer.stats.num_prompt_tokens
    if not total:
        return None
    processed = engine.holds(answer.prompt_ids)
    if processed == len(target.tokens):  # what was read since they were noted
        processed = min(max(processed, target.cache.length), total)
    return {
        "total": total,
        "cache": answer.stats.num_cached_prompt_tokens,
        "processed": processed,
        "time_ms": 1000 * (time.perf_counter() - began),
    }


def _deliver(
    job: Job, generation: TextGeneration, piece: Any, answer: Completion, texts: Texts
) -> None:
    """Add a piece to its answer, and hand it on."""
    stats, request = generation.stats, job.asked.request
    if request.wanted_tokens == 0:  # the prompt is in the cache, and the token after it is nobody's
        stats.num_generated_tokens, answer.reason = 0, "length"
        return
    answer.add(piece.cycle)
    job.ticket.client.served += len(piece.cycle.tokens)
    answer.text += piece.text
    answer.passed = generation.stops_passed
    if generation.result is not None:
        answer.text = generation.result.text
        answer.reason = "length" if generation.result.finish_reason == "length" else "stop"
    elif time.perf_counter() > job.ticket.deadline or (
        "\n" in answer.text
        and 0 < (request.t_max_predict_ms or 0) < 1000 * (stats.elapsed_s - stats.ttft_s)
    ):
        answer.reason = "length"
    job.deliver(
        Piece(
            piece.text,
            piece.cycle.tokens,
            answer,
            _cycles(generation, piece, texts) if request.return_cycles else {},
            piece.cycle.logprobs,
        )
    )


def _score(
    engine: Engine, job: Job, answer: Completion, deadline: float
) -> Generator[None, None, None]:
    """Append the log-probabilities of the prompt's tokens, where the request wants them, as steps of a task."""
    began = time.perf_counter()
    if (top := job.asked.request.wanted_logprobs) is None or not job.asked.request.echoes:
        return
    with contextlib.closing(engine.score(answer.prompt_ids, top)) as scores:
        while not job.ticket.cancelled and (scored := next(scores, None)) is not None:
            answer.prompt_logprobs.append(scored)
            if (
                len(answer.prompt_logprobs) % SCORED_ROWS == 0
            ):  # other answers go on before the next forward
                yield
            if time.perf_counter() > deadline:
                raise RequestError(
                    503,
                    f"rating the prompt takes longer than {job.asked.settings.max_seconds:g} s",
                    code="timeout",
                )
    answer.scored_s = time.perf_counter() - began


def _cycles(generation: TextGeneration, piece: Any, texts: Texts) -> dict[str, Any]:
    """Return what a piece adds where the request wants cycles."""
    policy = generation.answer.policy
    return {
        "cycles": [cycle_record(piece.cycle, piece.text, texts)],
        "plain_cycle_seconds": policy and policy.plan().plain_seconds,
    }


def limits_of(engine: Engine) -> ModelLimits:
    """Return the limits with a tokenizer of the reading threads' own: a tokenizer's state is set for each text."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    return ModelLimits(
        tokenizer, engine.target.max_context, longest_token(tokenizer), threading.Lock()
    )

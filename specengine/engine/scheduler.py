"""One loop over several answers: a step runs one cycle of each, and pieces of the prompts that are taken in.

An answer is a generator (`run_cycles`). It yields its lane to have a cycle run, rows of its prompt to have them run,
None while it waits, and each cycle. A generator per answer, and not a list of states, because an answer's life is told
in one place then, alone and with others: room, prompt, cycles, and what it gives back at its end, whatever ends it.
Drafts and trees of all lanes are run together (`cycle.run_lanes`); one thread at a time steps them all.
"""

import asyncio
import contextlib
import itertools
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from specengine.cycle import Lane, result_of as result_of, run_lanes
from specengine.models import SharedRows
from specengine.models.kv_cache import CachedTarget
from specengine.ops.cuda_graphs import sharing
from specengine.records import Cycle, GenerationResult, StreamPiece

# tokens of a prompt that are run at a time beside other texts; see `piece_at`
PIECE, NEAR, LEAST = 64, 2048, 16
# cycles of an answer that wait for its consumer; a slower one holds up its own answer alone
MAX_READY = 4
POLL = 0.02  # seconds after which a thread whose answer waits for another consumer's looks again

# steps: a way is looked at every so many, tried for so many, and timed by the last
LOOK, TRIED, TIMED = 4, 16, 32
MIN_GAIN = 0.3  # share of a rate by which the ways must differ to be told apart after one step
# seconds of serving after which the slower way is tried again: twice as long each time
AGAIN, MAX_AGAIN = 3.0, 48.0
SOON = 0.5  # seconds of serving after which a number of texts that is new first rests: that costs little
IDLE = 0.1  # seconds between steps, if they take less themselves, after which timing begins anew
MAX_GAIN = 0.7  # tokens that a text's first drafted one brings at most: if it costs more, texts begin with a rest
MAX_MIXED = 16  # steps in a row with rows of prompts that are not timed


@dataclass(eq=False)
class Client:
    """Who asks; `served`: tokens that were read for it here, and written, as whoever hands those on counts them."""

    served: int = 0


class GivenUpError(Exception):
    """Raised where nobody waits for an answer any more, or its time is over."""


_numbers = itertools.count()


@dataclass(eq=False)
class Ticket:
    """An answer's place in every line: who asks, and for how long.

    client    whoever was served least goes first, and of one client's answers the one that was asked for first
    deadline  time.perf_counter() after which the answer waits no longer
    owner     of the texts that its draft copies from, as in checkpoints/texts.py
    """

    client: Client = field(default_factory=Client)
    deadline: float = math.inf
    owner: str = ""
    cancelled: bool = field(default=False, init=False)
    number: int = field(default_factory=_numbers.__next__, init=False)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the place in a line, lowest first. It changes as clients are served."""
        return self.client.served, self.number

    def cancel(self) -> None:
        """End the waiting, with the step under way. May be called from any thread."""
        self.cancelled = True

    @property
    def is_over(self) -> bool:
        """Return whether the answer is not wanted any more."""
        return self.cancelled or time.perf_counter() > self.deadline


class SteppedAnswer(Iterator[Cycle]):
    """One of several answers, as an iterator of its cycles. Asked for one that is not there, it steps all of them.

    So each may have a thread of its own, or all of them one, which asks those that are ready. Letting it go ends it.
    """

    def __init__(
        self, scheduler: "Scheduler", steps: Generator[Any, Any, None], ticket: Ticket
    ) -> None:
        self.ticket = ticket
        # cycles that nobody has taken yet, and whether each is the last
        self.ready = deque[tuple[Cycle, bool]]()
        self.is_over = False  # whether the cycle that was taken is the last
        self.need: Lane | SharedRows | None = None  # what it wants to be run; None: it waits
        self.is_ended = False
        self._error: BaseException | None = None
        self._scheduler, self._steps = scheduler, steps

    @property
    def is_ready(self) -> bool:
        """Return whether there is a cycle, an end or an error to be had without a step."""
        return bool(self.ready) or self.is_ended

    def __next__(self) -> Cycle:
        while not self.is_ready:
            with self._scheduler.turn:
                if not self.is_ready and not self._scheduler.step():
                    self._scheduler.turn.wait(POLL)
        if self.ready:
            cycle, self.is_over = self.ready.popleft()
            return cycle
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def go_on(self, result: Any = None) -> None:
        """Hand the answer what became of what it needed, a record or an error, and run it to its next need."""
        self.need = cycle = None
        goes_on = False
        try:
            fault = result if isinstance(result, BaseException) else None
            need = self._steps.send(result) if fault is None else self._steps.throw(fault)
            if isinstance(need, Cycle):
                cycle = need
                need = next(self._steps)
            self.need = need
            goes_on = True
        except StopIteration:
            pass
        except BaseException as error:  # raised where the next cycle is asked for
            self._error = error
        if cycle is not None:
            self.ready.append((cycle, not goes_on and self._error is None))
        self.is_ended = not goes_on

    def close(self) -> None:
        """End the answer, or its waiting; nothing more comes of it."""
        with self._scheduler.turn:
            self._steps.close()
            self.is_ended, self.need = True, None

    __del__ = close


@dataclass
class _Rate:
    """Steps of one way with one number of texts; `recent`: seconds and tokens of the last ones."""

    timed: float = -math.inf  # when the last one ended
    again: float = AGAIN  # seconds after which the way is tried again
    steps: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TIMED))

    @property
    def tokens(self) -> float:
        """Return tokens per second, 0 if none was timed. What kept a single step for long says nothing of a way."""
        longest = (
            2 * statistics.median(seconds for seconds, _ in self.recent) if self.recent else 1.0
        )
        spent = sum(min(seconds, longest) for seconds, _ in self.recent)
        return sum(tokens for _, tokens in self.recent) / spent if spent else 0.0


class SharedPace:
    """Chooses the faster way for several texts: one that rests gains nothing while others' drafts are waited for.

    Both ways are timed, by number of texts, with all that a step takes besides forwards. The slower one is tried for a
    few steps, ever more seldom: a try costs what the way loses, and drafts first take in what was put off.
    """

    def __init__(self) -> None:
        self.rests = False  # whether texts beside others decode plainly
        # of a step in which each drafts a token, over a plain one
        self.price: Callable[[int], float] = lambda texts: 0.0
        self._mixed = 0  # steps in a row that ran rows of prompts too
        self._ended = -math.inf  # when the last step did
        # texts as a power of two, and steps since that, or the way, has changed
        self._size, self._steady = 0, 0
        # whether the way is yet to be chosen by what is known of so many texts
        self._arrived = False
        self._clocks = dict[int, float]()  # seconds that so many texts were served
        self._rates: dict[tuple[bool, int], _Rate] = {}  # of both ways, by number of texts

    def observe(self, texts: int, tokens: int, began: float, mixed: bool = False) -> None:
        """Take in a step that ends now; go on, or turn, to the way that is faster with so many texts.

        texts: that had a cycle; tokens: that they committed; began: time.perf_counter() at its start; mixed: whether
        rows of prompts were run too, whose time says nothing of the ways.
        """
        # one bucket when a text has ended before the next
        now, size = time.perf_counter(), (texts + 1).bit_length()
        last, self._ended = self._ended, now
        self._mixed = self._mixed + 1 if mixed else 0
        if texts < 2 or 0 < self._mixed <= MAX_MIXED:  # a text alone decides for itself
            return
        seconds = now - last
        self._steady += 1
        if size != self._size or began - last > max(IDLE, now - began):
            self._size, self._steady, self._arrived = size, 0, True
        if self._steady < 1:  # of several numbers of texts, or drafts took in what was put off
            return
        own, other = (
            self._rates.setdefault((way, size), _Rate()) for way in (self.rests, not self.rests)
        )
        clock = self._clocks[size] = self._clocks.get(size, 0.0) + seconds
        own.steps += 1
        own.recent.append((seconds, tokens))
        own.timed = clock
        if self._is_left(own, other, texts, clock):
            self.rests ^= True
            self._steady = -1

    def _is_left(self, own: _Rate, other: _Rate, texts: int, clock: float) -> bool:
        if self._arrived:
            self._arrived = False
            if other.timed == -math.inf and own.steps == 1:
                rests = self.price(texts) > 1 + MAX_GAIN
                left = other if rests == self.rests else own
                left.timed = clock if rests else clock + SOON - AGAIN
                left.again = MAX_AGAIN if rests else AGAIN
                return rests != self.rests
            return other.tokens > own.tokens and own.steps >= TRIED
        if own.steps % LOOK:
            return False
        if clock - other.timed > other.again:
            other.steps = 0
            other.recent.clear()
            return True
        if own.tokens < other.tokens * (
            1 if own.steps == TRIED else 1 - MIN_GAIN / math.sqrt(min(own.steps, TIMED))
        ):
            own.again = min(2 * own.again, MAX_AGAIN)
            return True
        if own.steps == TRIED:
            own.again = AGAIN
        return False


class Scheduler:
    """Steps all answers of a pool. `turn` is held by the thread that does. Closing an answer takes it out."""

    def __init__(self, target: CachedTarget) -> None:
        """target: one whose model runs the rows of all texts."""
        self.forwards, self.rows = 0, 0  # since it was made
        self._lm = target.lm
        self._running = sharing(target.device, target.running)
        self._last_forward: tuple[int, float] | None = None
        self.pace = SharedPace()
        self.turn = threading.Condition(threading.RLock())
        self._answers: list[weakref.ref[SteppedAnswer]] = []

    def add(self, steps: Generator[Any, Any, None], ticket: Ticket) -> SteppedAnswer:
        """Return an answer that is stepped with the others from now on; steps: as of `run_cycles`."""
        answer = SteppedAnswer(self, steps, ticket)
        with self.turn:
            self._answers.append(weakref.ref(answer))
        return answer

    def step(self) -> list[SteppedAnswer]:
        """Run a cycle of each lane, and of prompts the pieces whose turn it is; return the answers that got on."""
        began = time.perf_counter()
        with self.turn, self._running():
            answers = [
                answer
                for reference in self._answers
                if (answer := reference()) is not None and not answer.is_ended
            ]
            self._answers = list(map(weakref.ref, answers))
            for answer in answers:
                if not isinstance(answer.need, Lane) and answer.ticket.is_over:
                    answer.go_on(GivenUpError())
                elif answer.need is None:
                    answer.go_on()
            lanes = [
                answer
                for answer in answers
                if isinstance(answer.need, Lane) and len(answer.ready) < MAX_READY
            ]
            pieces = self._pieces(
                [answer for answer in answers if isinstance(answer.need, SharedRows)], bool(lanes)
            )
            if lanes or pieces:
                self._run(lanes, pieces, began)
            return [*lanes, *pieces, *(answer for answer in answers if answer.is_ended)]

    def _run(self, lanes: list[SteppedAnswer], pieces: list[SteppedAnswer], began: float) -> None:
        rows: list[Any] = [answer.need for answer in pieces]
        before = self._lm.seconds
        try:
            results = run_lanes([answer.need for answer in lanes], rows)  # type: ignore[misc]
        except BaseException as error:  # of the only lane, or an interrupt: raised by every answer
            results = [error] * len(lanes)
            for piece in rows:
                piece.error = error
        cycles = [result for result in results if isinstance(result, Cycle)]
        self.forwards += 1
        nodes = sum(len(cycle.tree) for cycle in cycles)
        self.rows += nodes + sum(len(piece.tokens) for piece in rows)
        # rows of prompts have no logits
        self._last_forward = None if rows else (nodes, self._lm.seconds - before)
        for answer, result in zip(lanes, results, strict=True):
            answer.go_on(result)
        for answer, piece in zip(pieces, rows, strict=True):
            answer.ticket.client.served += len(piece.tokens) if piece.error is None else 0
            answer.go_on(piece.error)
        self.pace.observe(
            len(lanes), sum(len(cycle.tokens) for cycle in cycles), began, mixed=bool(rows)
        )

    def take_last_forward(self) -> tuple[int, float] | None:
        """Return rows and seconds of the last forward, of all texts together; None if they were returned before."""
        last, self._last_forward = self._last_forward, None
        return last

    def _pieces(self, prompts: list[SteppedAnswer], beside: bool) -> list[SteppedAnswer]:
        """Return the prompts of which a piece is run: beside answers, PIECE rows of those whose clients had least."""
        chosen: list[SteppedAnswer] = []
        left = PIECE if beside else math.inf  # prompts alone hold nobody up
        for answer in sorted(prompts, key=lambda answer: answer.ticket.rank):
            rows = len(answer.need.tokens)  # type: ignore[union-attr]
            if not chosen or rows <= left:
                chosen.append(answer)
                left -= rows
        return chosen


def piece_at(length: int) -> int:
    """Return how many tokens of a prompt are run at a time behind so many: the further behind, the longer one takes."""
    return max(LEAST, PIECE * NEAR // max(NEAR, length))


Task = Generator[None, None, Any]  # yields while what it waits for takes a step


def run_tasks(
    engines: list[Any],
    scheduler: Scheduler | None,
    take: Callable[[list[Any], bool], tuple[Any, Task] | None],
) -> Iterator[Any]:
    """Run tasks, each on an engine of its own, in this thread; yield the result of each that has ended.

    take: returns an engine of those that are idle, and its task, or None: there is none now, or, asked to wait for one
    as nothing is under way, there comes none any more. The first error ends all tasks and is raised.
    """
    idle = list(engines)
    tasks: dict[Any, Task] = {}
    try:
        while True:
            while idle and (taken := take(idle, not tasks)) is not None:
                engine, task = taken
                idle.remove(engine)
                tasks[engine] = task
            if not tasks:
                return
            for engine, task in list(tasks.items()):
                try:
                    next(task)
                except StopIteration as end:
                    del tasks[engine]
                    idle.append(engine)
                    yield end.value
            if scheduler is not None and tasks:
                scheduler.step()
    finally:
        for task in tasks.values():
            task.close()


def finished(generation: Any) -> Task:
    """Run a TextGeneration to its end, as a task."""
    while True:
        while not generation.is_ready:
            yield
        if next(generation, None) is None:
            return


# ---- answers as asynchronous streams, all of them from one thread

Begin = Callable[..., Any]  # makes a TextGeneration of an engine and a ticket


class AsyncTextGeneration(
    AsyncIterator[StreamPiece], contextlib.AbstractAsyncContextManager["AsyncTextGeneration"]
):
    """One generation as an asynchronous iterator of StreamPiece, answered by a thread; leaving it ends the answer.

    `result` is there once the iterator has ended. Errors of `Engine.generate` are raised by the iterator.
    """

    def __init__(self, streams: "Streams", begin: Begin) -> None:
        """streams: answers it, once one of its engines is idle."""
        self.result: GenerationResult | None = None
        self._pieces: asyncio.Queue[StreamPiece | GenerationResult | BaseException | None] = (
            asyncio.Queue()
        )
        self._ticket = Ticket()
        loop, pieces = asyncio.get_running_loop(), self._pieces

        def send(piece: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        streams.submit(begin, self._ticket, send)

    async def __anext__(self) -> StreamPiece:
        piece = None if self._ticket.cancelled else await self._pieces.get()
        if isinstance(piece, StreamPiece):
            return piece
        self._ticket.cancel()
        if isinstance(piece, BaseException):
            raise piece
        self.result = piece or self.result
        raise StopAsyncIteration

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the answer with the cycle under way, or its waiting."""
        self._ticket.cancel()

    def __del__(self) -> None:
        self._ticket.cancel()


class Streams:
    """Answers what is submitted on these engines, in a thread that is there for as long as there is something to do."""

    def __init__(self, engines: list[Any], scheduler: Scheduler | None = None) -> None:
        self.engines, self._scheduler = engines, scheduler
        self._waiting = deque[tuple[Begin, Ticket, Callable[[Any], None]]]()
        self._guard = threading.Lock()
        self._runs = False

    def submit(self, begin: Begin, ticket: Ticket, send: Callable[[Any], None]) -> None:
        """Answer in turn; send: is handed each piece, then the result or the error."""
        with self._guard:
            self._waiting.append((begin, ticket, send))
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="specengine-astream", daemon=True).start()

    def _run(self) -> None:
        for _ in run_tasks(self.engines, self._scheduler, self._take):
            pass

    def _take(self, idle: list[Any], wait: bool) -> tuple[Any, Task] | None:
        with self._guard:
            if self._waiting:
                return idle[0], _send_pieces(idle[0], *self._waiting.popleft())
            self._runs = not wait
            return None


def _send_pieces(engine: Any, begin: Begin, ticket: Ticket, send: Callable[[Any], None]) -> Task:
    last: GenerationResult | BaseException | None = None
    stream: Any = None
    try:
        while not ticket.cancelled:
            stream = stream or begin(engine, ticket=ticket)
            if not stream.is_ready:
                yield
            elif (piece := next(stream, None)) is not None:
                send(piece)
            else:
                last = stream.result
                break
    except BaseException as error:  # of a thread: raised by who reads the pieces
        last = error
    send(last)

"""Several texts on one native model: their trees and prompts are run together, in one forward.

Every text has a target of its own, and a thread that asks it. Where several ask at about the same time, one of them
runs a forward over all their rows. What a row gives does not depend on the rows beside it, so neither does an answer.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specengine.models import Successors, common_prefix
from specengine.models.kv_cache import KVCache
from specengine.models.native import PREFILL_ROWS, HeadRows, NativeHead, NativeLM, NativeTarget
from specengine.ops.tree import TokenTree

GRACE = 0.002  # seconds that a forward waits for a text whose consumer has the turn
LONGEST = 0.05  # seconds that a forward waits at most for texts that are being drafted for
LOOK, TRIED, TIMED = 4, 16, 32  # forwards: a way is looked at every so many, tried for so many, and timed by the last
DOUBT = 0.3  # share of a rate by which the ways must differ to be told apart after one forward
AGAIN, MAX_AGAIN = 3.0, 48.0  # seconds of serving after which the slower way is tried again: twice as long each time
SOON = 0.5  # seconds of serving after which the other way is tried with a number of texts that is new
IDLE = 0.1  # seconds between forwards, if they take less themselves, after which timing begins anew
PIECE, NEAR, LEAST = 64, 2048, 16  # tokens of a prompt that are run at a time beside other texts; see `piece_at`


@dataclass(eq=False)
class Client:
    """Who asks; `served`: tokens that were read for it here, and written, as whoever hands those on counts them."""

    served: int = 0


class GivenUpError(Exception):
    """Raised where nobody waits for an answer any more, or its time is over."""


_numbers = itertools.count()


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Ticket:
    """An answer's place in every line: who asks, and for how long.

    client    whoever was served least goes first, and of one client's answers the one that was asked for first
    deadline  time.perf_counter() after which the answer waits no longer
    """

    client: Client = field(default_factory=Client)
    deadline: float = math.inf
    cancelled: bool = field(default=False, init=False)
    wake: Callable[[], None] = field(default_factory=lambda: _nothing, init=False, repr=False)  # called when cancelled
    number: int = field(default_factory=_numbers.__next__, init=False)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the place in a line, lowest first. It changes as clients are served."""
        return self.client.served, self.number

    def cancel(self) -> None:
        """End the waiting. May be called from any thread."""
        self.cancelled = True
        self.wake()

    def check(self) -> None:
        """Raise GivenUpError if the answer is not wanted any more."""
        if self.cancelled or time.perf_counter() > self.deadline:
            raise GivenUpError


@dataclass(eq=False)
class _Request:
    """Rows of one text, and what became of them."""

    owner: LaneTarget
    error: BaseException | None = field(default=None, kw_only=True)
    asked: float = field(default_factory=time.perf_counter, kw_only=True)


@dataclass(eq=False)
class _Pass(_Request):
    """A draft pass."""

    head: NativeHead
    given: HeadRows


@dataclass(eq=False)
class _Rows(_Request):
    """Arguments of NativeLM.run, and the features found."""

    tokens: Tensor
    positions: Tensor
    cache: KVCache
    seen: tuple[int, int, Tensor | None]
    features: tuple[int, ...]
    logits: Tensor | None
    best: Successors | None
    prompt: bool = False  # whether it is a piece of a prompt
    states: Tensor | None = None


class _Rate:
    """Hold the rate of a way over its last forwards."""

    def __init__(self) -> None:
        self.timed, self.again = -math.inf, AGAIN  # when it was, and the seconds after which it is tried again
        self.restart()

    def restart(self) -> None:
        """Forget the forwards so far: texts have changed since."""
        self.forwards = 0
        self._recent = deque[tuple[float, int]](maxlen=TIMED)

    def add(self, seconds: float, tokens: int) -> None:
        """Count a forward."""
        self.forwards += 1
        self._recent.append((seconds, tokens))

    @property
    def tokens(self) -> float:
        """Return tokens per second, 0 if none was timed. What kept a single forward for long says nothing of a way."""
        longest = 2 * statistics.median(seconds for seconds, _ in self._recent) if self._recent else 1.0
        spent = sum(min(seconds, longest) for seconds, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / spent if spent else 0.0


class _Turn:
    """Wakes the thread of one text: for its turn, or to look again for how long it waits."""

    def __init__(self) -> None:
        self.has = False  # whether it is this text's
        self._signal = threading.Lock()
        self._signal.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it was woken already
            self._signal.release()

    def wait(self, seconds: float = -1) -> None:
        """Wait until the thread is woken, for so long at most; it may be woken for nothing."""
        self._signal.acquire(timeout=seconds)


class Gathering:
    """Runs the rows that several threads ask for in one forward of `lm`.

    Whether texts draft or decode plainly is decided for all of them: one that rests gains nothing while others' drafts
    are waited for. Both ways are timed, by number of texts, and the faster one is taken. The slower one is tried for
    a few forwards, ever more seldom: a try costs what the way loses, and drafts first take in what was put off.

    A forward begins once no text is expected any more: each one that is being drafted for asks soon, and so does one
    whose consumer has just taken a piece. It waits for these LONGEST and GRACE seconds at most.

    Between forwards one text has the turn, and hands it on where it waits or its consumer has a piece. Threads that
    run at once would pass the interpreter's lock to and fro at every tensor op, which takes longer than the ops.
    """

    def __init__(self, lm: NativeLM) -> None:
        self.lm = lm
        self.forwards, self.rows, self.passes = 0, 0, 0  # since it was made; passes are calls of heads
        self._guard = threading.Lock()  # of all that follows
        self._turns = deque[_Turn]()  # that are waited for
        self._taken = False  # whether a text has the turn
        self._waiting: list[_Request] = []
        self._leader: _Request | None = None  # whose thread runs the next forward, unless another one comes first
        self._expected: set[Any] = set()
        self._away: dict[Any, float] = {}  # when each of them left
        self._running = False
        self._served: list[_Request] = []  # that are run at present
        self.last_forward: tuple[int, float] | None = None  # rows and seconds of the last one, until they are taken
        self.rests = False  # whether texts beside others decode plainly
        self._tokens = 0  # committed, of all texts
        self._began, self._ran = -math.inf, -math.inf  # when the last forward began, and the last one ended
        self._before = 0  # tokens then
        self._size, self._steady = 0, 0  # texts as a power of two, and forwards since that, or the way, has changed
        self._arrived = False  # whether the way is yet to be chosen by what is known of so many texts
        self._clocks = dict[int, float]()  # seconds that so many texts were served
        self._rates: dict[tuple[bool, int], _Rate] = {}  # of both ways, by number of texts

    @contextmanager
    def turn_of(self, owner: LaneTarget) -> Iterator[None]:
        """Give a text the turn. One that was answered before asks soon; afterwards its consumer is busy."""
        with self._guard:
            if self._away.pop(owner, None) is not None:
                self._expected.add(owner)
            self._queue(owner.turn)
        self._wait_for(owner.turn)
        try:
            yield
        finally:
            with self._guard:
                if owner in self._expected:
                    self._expected.discard(owner)
                    self._away[owner] = time.perf_counter()
                    self._look_again()
                self._hand_on(owner.turn)

    @contextmanager
    def without_turn(self, turn: _Turn) -> Iterator[None]:
        """Hand on the turn, where it is this one's, and take it again afterwards."""
        had_turn = turn.has
        with self._guard:
            if had_turn:
                self._hand_on(turn)
        try:
            yield
        finally:
            if had_turn:
                with self._guard:
                    self._queue(turn)
                self._wait_for(turn)

    def _queue(self, turn: _Turn) -> None:
        if self._taken:
            self._turns.append(turn)
        else:
            self._taken = turn.has = True

    def _hand_on(self, turn: _Turn) -> None:
        turn.has = self._taken = False
        if self._turns:
            self._taken = self._turns[0].has = True
            self._turns.popleft().wake()

    def _wait_for(self, turn: _Turn) -> None:
        try:
            while not turn.has:
                turn.wait()
        except BaseException:  # the thread was interrupted, and others wait behind it
            with self._guard:
                if turn.has:
                    self._hand_on(turn)
                else:
                    self._turns.remove(turn)
            raise

    def _look_again(self) -> None:
        """Wake the thread that waits for texts, if none is expected any more."""
        if self._leader is not None and not self._expected:
            self._leader.owner.turn.wake()

    def leave(self, owner: Any) -> None:
        """Expect nothing of a text for now."""
        with self._guard:
            self._expected.discard(owner)
            self._away.pop(owner, None)
            self._look_again()

    def committed(self, tokens: int) -> None:
        """Count tokens that a text has committed."""
        self._tokens += tokens

    def _choose_way(self, texts: int) -> None:
        """Go on, or turn, to the way that is faster with so many texts, or has not been timed for long."""
        if texts < 2:  # which decides for itself
            return
        now, size = time.perf_counter(), (texts + 1).bit_length()  # one bucket when a text has ended before the next
        seconds, tokens = now - self._ran, self._tokens - self._before
        idle = self._began - self._ran > max(IDLE, now - self._began)
        self._ran, self._before = now, self._tokens
        self._steady += 1
        if size != self._size or idle:
            self._size, self._steady, self._arrived = size, 0, True
        if self._steady < 1:  # of several numbers of texts, or drafts took in what was put off
            return
        own, other = (self._rates.setdefault((way, size), _Rate()) for way in (self.rests, not self.rests))
        clock = self._clocks[size] = self._clocks.get(size, 0.0) + seconds
        own.add(seconds, tokens)
        own.timed = clock
        if self._is_left(own, other, size, clock):
            self.rests ^= True
            self._steady = -1

    def _is_left(self, own: _Rate, other: _Rate, size: int, clock: float) -> bool:
        """Return whether to leave a way, after a forward of it."""
        if self._arrived:
            self._arrived = False
            if other.timed == -math.inf and own.forwards == 1:
                if (rests := self._known_beside(size)) is not None:
                    (other if rests == self.rests else own).timed = clock
                    return rests != self.rests
                if {way for (way, at), rate in self._rates.items() if at != size and rate.tokens} == {True, False}:
                    other.timed = clock + SOON - AGAIN  # so many are there for a moment only, mostly
            return other.tokens > own.tokens and own.forwards >= TRIED
        if own.forwards % LOOK:
            return False
        if clock - other.timed > other.again:
            other.restart()
            return True
        tried = own.forwards == TRIED
        if own.tokens < other.tokens * (1 if tried else 1 - DOUBT / math.sqrt(min(own.forwards, TIMED))):
            own.again = min(2 * own.again, MAX_AGAIN)
            return True
        if tried:
            own.again = AGAIN
        return False

    def _known_beside(self, size: int) -> bool | None:
        """Return whether to rest by other numbers of texts: fewer ones that rest, more ones that draft; or None."""
        for (rests, other), rate in self._rates.items():
            against = self._rates.get((not rests, other), _Rate())
            if (other < size if rests else other > size) and rate.tokens > against.tokens > 0:
                return rests
        return None

    def count(self, owner: Any) -> int:
        """Return the number of texts under way, this one left out."""
        with self._guard:
            waiting = {request.owner for request in (*self._waiting, *self._served)}
            return len((self._expected | self._away.keys() | waiting) - {owner})

    def run(  # noqa: PLR0913
        self,
        owner: LaneTarget,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        seen: tuple[int, int, Tensor | None],
        *,
        features: tuple[int, ...] = (),
        logits: Tensor | None = None,
        best: Successors | None = None,
        prompt: bool = False,
    ) -> Tensor | None:
        """Run rows as NativeLM.run does, with those of other texts. Returns their features."""
        request = _Rows(owner, tokens.contiguous(), positions, cache, seen, features, logits, best, prompt)
        self._ask(request)
        return request.states

    def run_pass(self, owner: LaneTarget, head: NativeHead, *given: Any) -> tuple[Tensor, Tensor]:
        """Run a draft pass as NativeHead.forward does, with those of other texts that are being drafted for."""
        with self._guard:
            alone = not self._waiting and not self._running and self._expected <= {owner}
        if alone:
            return NativeHead.forward(head, *given)
        asked = head.asked(*given)
        self._ask(_Pass(owner, head, asked))
        return asked.logits, asked.out[-len(asked.logits) :]

    def _ask(self, request: _Request) -> None:
        """Wait until the rows were run. Draft passes come first: forwards wait for texts that are drafted for."""
        owner = request.owner
        had_turn = owner.turn.has
        with self._guard:
            self._expected.discard(owner)
            self._waiting.append(request)
            self._leader = request
            if had_turn:
                self._hand_on(owner.turn)
        while not owner.turn.has:
            with self._guard:
                pause = -1.0 if self._leader is not request or self._running else max(self._pause(), 0.0)
                if not pause:
                    batch = self._next()
                    self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
                    self._leader, self._served, self._running = None, batch, True
            if pause:
                owner.turn.wait(pause)
            else:
                self._take(batch)
        if not had_turn:
            with self._guard:
                self._hand_on(owner.turn)
        if request.error is not None:
            raise request.error

    def _next(self) -> list[_Request]:
        """Return what is run next: draft passes, or rows. Prompts have PIECE rows beside texts that are answered.

        Of several prompts the one goes first whose client was served least.
        """
        passes: list[_Request] = [waiting for waiting in self._waiting if isinstance(waiting, _Pass)]
        if passes:
            return passes
        trees, prompts = list[_Request](), list[_Rows]()
        for waiting in cast("list[_Rows]", self._waiting):
            (prompts if waiting.prompt else trees).append(waiting)
        if len(prompts) < 2 or not (trees or self._expected or self._away):  # prompts alone hold nobody up
            return self._waiting
        rows = 0
        for piece in sorted(prompts, key=lambda piece: piece.owner.ticket.rank):
            if not rows or rows + len(piece.tokens) <= PIECE:
                trees.append(piece)
                rows += len(piece.tokens)
            else:
                piece.asked = time.perf_counter()  # the next forward waits for others as long as ever
        return trees

    def _pause(self) -> float:
        """Return for how long to wait for more texts."""
        now = time.perf_counter()
        self._away = {owner: left for owner, left in self._away.items() if now - left < GRACE}
        if self._expected:
            return min(request.asked for request in self._waiting) + LONGEST - now
        if any(isinstance(request, _Pass) for request in self._waiting):
            return 0.0
        return max((left + GRACE - now for left in self._away.values()), default=0.0)

    def _take(self, batch: list[_Request]) -> None:
        """Run requests on this thread, while the others may go on asking; each of them has a turn then."""
        passes = [request for request in batch if isinstance(request, _Pass)]
        try:
            if passes:
                self._draft(passes)
            else:
                self._began = time.perf_counter()
                self._forward(cast("list[_Rows]", batch))
        except BaseException as error:
            for request in batch:
                request.error = error
        with self._guard:
            self._running, self._served = False, []
            if not passes:
                self._choose_way(len({request.owner for request in batch} | self._expected | self._away.keys()))
            for request in batch:
                self._expected.add(request.owner)
                self._queue(request.owner.turn)
                if request.owner.turn.has:
                    request.owner.turn.wake()
            if self._leader is None and self._waiting:
                self._leader = self._waiting[-1]
            if self._leader is not None:
                self._leader.owner.turn.wake()

    def _draft(self, batch: Sequence[_Pass]) -> None:
        """Run draft passes, those of one head's weights in one call."""
        self.passes += 1
        heads = {id(request.head.weights_of): request.head for request in batch}
        for key, head in heads.items():
            head.run_lanes([request.given for request in batch if id(request.head.weights_of) == key])

    def _forward(self, batch: Sequence[_Rows]) -> None:
        before = self.lm.seconds
        self._run(batch)
        seconds = self.lm.seconds - before
        if not any(request.prompt for request in batch):  # whose rows have no logits
            self.last_forward = sum(len(request.tokens) for request in batch), seconds
        for request in batch:
            request.owner.spent += seconds

    def _run(self, batch: Sequence[_Rows]) -> None:
        self.forwards, self.rows = self.forwards + 1, self.rows + sum(len(request.tokens) for request in batch)
        if len(batch) == 1:
            (one,) = batch
            given = one.tokens, one.positions, one.cache, one.seen
            one.states = self.lm.run(*given, features=one.features, logits=one.logits, best=one.best)
            return
        # logits are those of the last rows
        batch = sorted(batch, key=lambda request: request.logits is not None)
        features = max((request.features for request in batch), key=len)
        rated = sum(len(request.logits) for request in batch if request.logits is not None)
        count = max(0 if request.best is None else request.best.tokens.shape[1] for request in batch)
        rows = sum(len(request.tokens) for request in batch)
        logits = torch.empty(rated, self.lm.vocab_size, dtype=torch.float32, device="cpu") if rated else None
        best = None
        if count:
            tokens = torch.empty(rows, count, dtype=torch.int64, device="cpu")
            best = Successors(tokens, torch.empty(rows, count, dtype=torch.float32, device="cpu"))
        lanes = [(request.positions, request.cache, request.seen) for request in batch]
        found = self.lm.run_lanes(
            torch.cat([request.tokens for request in batch]), lanes, features=features, logits=logits, best=best
        )
        self._hand_out(batch, found, logits, best)

    @staticmethod
    def _hand_out(
        batch: Sequence[_Rows], states: Tensor | None, logits: Tensor | None, best: Successors | None
    ) -> None:
        row = rated = 0
        for request in batch:
            end = row + len(request.tokens)
            if request.features and states is not None:
                request.states = states[row:end]
            if request.logits is not None and logits is not None:
                request.logits.copy_(logits[rated : rated + len(request.logits)])
                rated += len(request.logits)
            if request.best is not None and best is not None:
                count = request.best.tokens.shape[1]
                request.best.tokens.copy_(best.tokens[row:end, :count])
                request.best.logits.copy_(best.logits[row:end, :count])
            row = end


class LaneTarget(NativeTarget):
    """One of several targets over a NativeLM, whose rows are run with those of the others."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering, self.spent = gathering, 0.0  # seconds in forwards that had rows of this text
        self.turn = _Turn()
        super().__init__(gathering.lm)
        self.counts = False  # experts are read for all texts at once
        self.runs = functools.partial(gathering.run, self)
        self.joins_passes = False  # whether passes of its draft are run with those of other texts
        self.ticket = Ticket()  # of the answer under way, or of the last one

    def join(self, head: NativeHead) -> None:
        """Run a head's passes with those of other texts."""
        head.forward = functools.partial(self.gathering.run_pass, self, head)  # type: ignore[method-assign]
        self.joins_passes = True

    def running(self) -> AbstractContextManager[None]:
        """Take the turn, unless this text has it: who takes its pieces at once keeps it from piece to piece."""
        return nullcontext() if self.turn.has else _both(super().running(), self.gathering.turn_of(self))

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.spent

    @property
    def others(self) -> int:
        """The number of other texts that are being answered."""
        return self.gathering.count(self)

    def last_forward(self) -> tuple[int, float] | None:
        """Return rows and seconds of the last forward, of all texts together; None if they were returned before."""
        last, self.gathering.last_forward = self.gathering.last_forward, None
        return last

    def is_resting(self) -> bool:
        """Return whether the texts that are answered side by side decode plainly at present."""
        return self.gathering.rests

    def aside(self) -> AbstractContextManager[None]:
        """Return a context in which others go on, and none waits for this text."""
        self.gathering.leave(self)
        return self.gathering.without_turn(self.turn)

    def shares(self, other: LaneTarget, tokens: list[int]) -> int:
        """Return how many of the first `tokens` another cache holds that can be copied."""
        if self.cache.memory is not None or other._version != self.lm.version:
            return 0
        return common_prefix(other.tokens, tokens)

    def copy_from(self, other: LaneTarget, count: int) -> None:
        """Become what another one is after its first `count` tokens. Both have the same weights."""
        self.cache.copy_from(other.cache, count)
        self.tokens, self._version = other.tokens[:count], other._version

    def forget(self) -> None:
        """Give back the memory of the cache."""
        self.cache, self.tokens = self.lm.new_cache(1), []

    @property
    def slot_bytes(self) -> int:
        """The bytes that a token takes in the cache."""
        return self.cache.slot_bytes

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of a cache with room for so many tokens; those of this one if it has more."""
        return self.cache.bytes_of(tokens)

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        super().commit(tree, path)
        self.gathering.committed(len(path))

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.gathering.leave(self)  # nobody waits for a prompt
        return super().prefill(tokens, keep)

    def _take_in(self, tokens: list[int]) -> Tensor | None:
        """Run tokens of a prompt in short pieces while there are other texts; return their features.

        GivenUpError between two pieces; those that were run stay in the cache.
        """
        states: list[Tensor] = []
        while tokens:
            self.ticket.check()
            length = self.cache.length
            size = piece_at(length) if self.others else PREFILL_ROWS
            piece, tokens = tokens[:size], tokens[size:]
            self.cache.reserve(length + len(piece))
            ids = torch.tensor(piece, dtype=torch.int64, device="cpu")
            positions = torch.arange(length, length + len(piece), dtype=torch.int64, device="cpu")
            seen = length, length, None
            found = self.gathering.run(self, ids, positions, self.cache, seen, features=self._features, prompt=True)
            self.gathering.leave(self)
            self.cache.length = length + len(piece)
            self.tokens.extend(piece)
            self.ticket.client.served += len(piece)
            states += [] if found is None else [found]
        return torch.cat(states) if states else None


def piece_at(length: int) -> int:
    """Return how many tokens of a prompt are run at a time behind so many: the further behind, the longer one takes."""
    return max(LEAST, PIECE * NEAR // max(NEAR, length))


def free_memory() -> int:
    """Return the bytes of memory that may be had; more than any machine has where the system is silent."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 1 << 50


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield

"""Several texts on one native model: their trees and prompts are run together, in one forward.

Every text has a target of its own, and a thread that asks it. Where several ask at about the same time, one of them
runs a forward over all their rows. What a row gives does not depend on the rows beside it, so neither does an answer.
"""

from __future__ import annotations

import functools
import itertools
import math
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
EPOCH, AGAIN = 0.25, 3.0  # seconds that a way is timed, and after which the other one is timed again: twice as long
MAX_AGAIN = 48.0  # each time that it is the slower one, up to this
IDLE = 0.1  # seconds without a forward, after which timing begins anew
PIECE = 64  # tokens of a prompt that are run at a time beside other texts


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


@dataclass
class _Rate:
    """What a way brings."""

    tokens: float = 0.0  # per second
    timed: float = -math.inf
    again: float = AGAIN  # seconds after which it is timed again, if the other one is faster


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
    are waited for. Both ways are timed, by number of texts, and the faster one is taken.

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
        self.rests = False  # whether texts beside others decode plainly
        self._tokens = 0  # committed, of all texts
        self._ran = -math.inf  # when the last forward ended
        self._epoch = (time.perf_counter(), 0, 0)  # began, tokens then, texts as a power of two
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
        began, tokens, of = self._epoch
        if now - self._ran > IDLE:
            of = 0
        self._ran = now
        if of == size and now - began < EPOCH:
            return
        rates = {way: self._rates.setdefault((way, size), _Rate()) for way in (True, False)}
        own, other, turns = rates[self.rests], rates[not self.rests], False
        if of == size:
            rate = (self._tokens - tokens) / (now - began)
            own.tokens, own.timed = (own.tokens + rate) / 2 if now - own.timed < 3 * EPOCH else rate, now
            own.again = min(2 * own.again, MAX_AGAIN) if own.tokens < other.tokens else AGAIN
            turns = now - other.timed > other.again or other.tokens > own.tokens
        elif of != -size and own.timed == other.timed == -math.inf:
            if (rests := self._known_beside(size)) is not None:
                rates[not rests].timed, turns = now, rests != self.rests
        elif of != -size:
            turns = other.tokens > own.tokens > 0
        self.rests ^= turns
        self._epoch = now, self._tokens, -size if turns else size  # drafts take in first what was put off, untimed

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
        for request in batch:
            request.owner.spent += self.lm.seconds - before

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
                request.states = states[row:end].clone()
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
        self.cache.reserve(count)
        for slab, there in zip(self.cache.slabs, other.cache.slabs, strict=True):
            slab[:, :, :, :count] = there[:, :, :, :count]
        self.cache.length, self.tokens, self._version = count, other.tokens[:count], other._version

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
            size = PIECE if self.others else PREFILL_ROWS
            piece, tokens = tokens[:size], tokens[size:]
            length = self.cache.length
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

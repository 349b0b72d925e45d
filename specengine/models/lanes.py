"""Several texts on one native model: their trees and prompts are run together, in one forward.

Every text has a target of its own, and a thread that asks it. Where several ask at about the same time, one of them
runs a forward over all their rows. What a row gives does not depend on the rows beside it, so neither does an answer.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specengine.models import Successors
from specengine.models.kv_cache import KVCache
from specengine.models.native import PREFILL_ROWS, NativeLM, NativeTarget
from specengine.ops.tree import TokenTree

GRACE = 0.002  # seconds that a forward waits for a text whose consumer has the turn
LONGEST = 0.05  # seconds that a forward waits at most for texts that are being drafted for
EPOCH, AGAIN = 0.15, 3.0  # seconds that a way is timed, and after which the other one is timed again
PIECE = 64  # tokens of a prompt that are run at a time beside other texts


@dataclass(eq=False)
class _Request:
    """Rows of one text: arguments of NativeLM.run, and what became of them."""

    owner: Any
    tokens: Tensor
    positions: Tensor
    cache: KVCache
    seen: tuple[int, int, Tensor | None]
    features: tuple[int, ...]
    logits: Tensor | None
    best: Successors | None
    asked: float = field(default_factory=time.perf_counter)
    states: Tensor | None = None
    error: BaseException | None = None
    done: bool = False


class Gathering:
    """Runs the rows that several threads ask for in one forward of `lm`.

    Whether texts draft or decode plainly is decided for all of them: one that rests gains nothing while others' drafts
    are waited for. Both ways are timed, by number of texts, and the faster one is taken.

    A forward begins once no text is expected any more: each one that is being drafted for asks soon, and so does one
    whose consumer has just taken a piece. It waits for these LONGEST and GRACE seconds at most.
    """

    def __init__(self, lm: NativeLM) -> None:
        self.lm = lm
        self.forwards, self.rows = 0, 0  # since it was made
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._expected: set[Any] = set()
        self._away: dict[Any, float] = {}  # when each of them left
        self._running = False
        self._served: list[_Request] = []  # that are run at present
        self.rests = False  # whether texts beside others decode plainly
        self._tokens = 0  # committed, of all texts
        self._epoch = (time.perf_counter(), 0, 0)  # began, tokens then, and how many texts, as a power of two
        self._rates: dict[
            tuple[bool, int], tuple[float, float]
        ] = {}  # tokens per second of a way, and when it was timed

    @contextmanager
    def turn_of(self, owner: Any) -> Iterator[None]:
        """Mark a text as one that asks soon, if it was answered before; afterwards its consumer has the turn."""
        with self._changed:
            if self._away.pop(owner, None) is not None:
                self._expected.add(owner)
        try:
            yield
        finally:
            with self._changed:
                if owner in self._expected:
                    self._expected.discard(owner)
                    self._away[owner] = time.perf_counter()
                    self._changed.notify_all()

    def leave(self, owner: Any) -> None:
        """Expect nothing of a text for now."""
        with self._changed:
            self._expected.discard(owner)
            self._away.pop(owner, None)
            self._changed.notify_all()

    def committed(self, tokens: int) -> None:
        """Count tokens that a text has committed."""
        self._tokens += tokens

    def _choose_way(self, texts: int) -> None:
        """Go on, or turn, to the way that is faster with so many texts, or has not been timed for long."""
        now, size = time.perf_counter(), texts.bit_length()
        began, tokens, of = self._epoch
        if of == size and now - began < EPOCH:
            return
        if of == size:
            self._rates[self.rests, size] = (self._tokens - tokens) / (now - began), now
        rate, timed = self._rates.get((not self.rests, size), (0.0, 0.0))
        if now - timed > AGAIN or rate > self._rates.get((self.rests, size), (0.0, now))[0]:
            self.rests = not self.rests
        self._epoch = now, self._tokens, size

    def count(self, owner: Any) -> int:
        """Return the number of texts under way, this one left out."""
        with self._changed:
            waiting = {request.owner for request in (*self._waiting, *self._served)}
            return len((self._expected | self._away.keys() | waiting) - {owner})

    def run(
        self,
        owner: Any,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        seen: tuple[int, int, Tensor | None],
        *,
        features: tuple[int, ...] = (),
        logits: Tensor | None = None,
        best: Successors | None = None,
    ) -> Tensor | None:
        """Run rows as NativeLM.run does, with those of other texts. Returns their features."""
        request = _Request(owner, tokens.contiguous(), positions, cache, seen, features, logits, best)
        with self._changed:
            self._expected.discard(owner)
            self._waiting.append(request)
            self._changed.notify_all()
            while not request.done:
                if self._running:
                    self._changed.wait()
                elif (pause := self._pause()) > 0:
                    self._changed.wait(pause)
                else:
                    self._take_turn()
        if request.error is not None:
            raise request.error
        return request.states

    def _pause(self) -> float:
        """Return for how long to wait for more texts."""
        now = time.perf_counter()
        self._away = {owner: left for owner, left in self._away.items() if now - left < GRACE}
        if self._expected:
            return min(request.asked for request in self._waiting) + LONGEST - now
        return max((left + GRACE - now for left in self._away.values()), default=0.0)

    def _take_turn(self) -> None:
        """Run what waits, on this thread, while the others may go on asking."""
        batch, self._waiting, self._running = self._waiting, [], True
        self._served = batch
        self._changed.release()
        try:
            self._forward(batch)
        except BaseException as error:
            for request in batch:
                request.error = error
        finally:
            self._changed.acquire()
            self._running, self._served = False, []
            self._choose_way(len({request.owner for request in batch} | self._expected | self._away.keys()))
            for request in batch:
                request.done = True
                self._expected.add(request.owner)
            self._changed.notify_all()

    def _forward(self, batch: Sequence[_Request]) -> None:
        before = self.lm.seconds
        self._run(batch)
        for request in batch:
            request.owner.spent += self.lm.seconds - before

    def _run(self, batch: Sequence[_Request]) -> None:
        self.forwards, self.rows = self.forwards + 1, self.rows + sum(len(request.tokens) for request in batch)
        if len(batch) == 1 or batch[0].cache.memory is not None:  # states of recurrent layers are one text's
            for one in batch:
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
        batch: Sequence[_Request], states: Tensor | None, logits: Tensor | None, best: Successors | None
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
        super().__init__(gathering.lm)
        self.counts = False  # experts are read for all texts at once
        self.runs = functools.partial(gathering.run, self)

    def running(self) -> AbstractContextManager[None]:
        return _both(super().running(), self.gathering.turn_of(self))

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

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        super().commit(tree, path)
        self.gathering.committed(len(path))

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.gathering.leave(self)  # nobody waits for a prompt
        return super().prefill(tokens, keep)

    def _extend(self, tokens: list[int]) -> Tensor | None:
        """Run the rest of a prompt in short pieces while there are other texts; return its features."""
        if self.cache.memory is not None:
            return super()._extend(tokens)
        states: list[Tensor] = []
        while tokens:
            size = PIECE if self.others else PREFILL_ROWS
            piece, tokens = tokens[:size], tokens[size:]
            length = self.cache.length
            self.cache.reserve(length + len(piece))
            ids = torch.tensor(piece, dtype=torch.int64, device="cpu")
            positions = torch.arange(length, length + len(piece), dtype=torch.int64, device="cpu")
            found = self.runs(ids, positions, self.cache, (length, length, None), features=self._features)
            self.gathering.leave(self)
            self.cache.length = length + len(piece)
            states += [] if found is None else [found]
        return torch.cat(states) if states else None


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield

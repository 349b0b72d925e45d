"""When `auto` drafts and when it rests: tokens of trees against those of plain decoding in the same time."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

MEMORY = 0.97  # of what cycles with trees brought, per cycle
# tokens per cycle that trees are credited with: at first, in a new text, later
FIRST_CREDIT, NEW_TEXT, LATER_CREDIT = 0.2, 0.03, 0.01
# tokens per cycle below which plain cycles are timed at first, and again after TIMED_AGAIN with trees
LITTLE_GAIN, SMALL_GAIN = 0.1, 0.5
TIMED, TIMED_AGAIN = 3, 128  # plain cycles in a row; cycles with trees between them
FIRST_REST, MAX_REST = 32, 128  # cycles of a rest
REPEATED = 4  # cycles of a rest for each of the last tokens that must stand in the text before, to end it at once
# cycles with trees after a rest, whose own mean decides whether to rest again
MIN_TRIAL, MAX_TRIAL = 3, 16
MAX_LOST = 2  # texts in a row in which trees did not pay, after which a text begins with a rest
STANDARD_ERRORS = 1.0  # standard errors by which gains are below nothing
SPREAD = 0.05  # tokens squared: variance of a cycle's gain, to begin with
# tokens: what a cycle loses at most, as a machine that was busy elsewhere says nothing of trees
MIN_GAIN = -2.0


class PaceState(Enum):
    """States of a pace, each with how a cycle enters it. docs/develop/policy.md draws the transitions."""

    DRAFTING = "drafting"  # at first, and after MAX_TRIAL cycles of a trial
    # the mean gain is little at first, or small long after plain cycles were timed: TIMED of them
    CALIBRATING = "calibrating"
    RESTING = "resting"  # gains are below nothing: FIRST_REST plain cycles, twice as many after each lost trial
    RETURNING = "returning"  # the plain cycles are over; the next cycle also catches the drafter up
    TRIAL = "trial"  # that cycle is over; gains since then decide


@dataclass
class Pace:
    """Weighs the tokens of trees against those of plain decoding in the same time, by the clock.

    Prices compare nodes and passes; they leave out the time of the comparison itself. A cycle's gain is its committed
    tokens less those that plain decoding commits in its time. Where recent gains are small a few cycles rest now and
    then: they decode plainly and are timed, as the machine may have become faster. Where gains fall below nothing
    more cycles rest. A trial of a few with trees follows: their own mean decides whether to go on or to rest for
    twice as long.
    """

    state: PaceState = PaceState.DRAFTING
    resting: int = 0  # cycles to go
    _gain: float = FIRST_CREDIT
    _spread: float = SPREAD
    _length: int = FIRST_REST  # of the next rest
    _worked: int = FIRST_REST  # cycles with trees since the last rest
    _trial_gain: float = 0.0  # of all cycles since the last rest
    # what plain cycles took over what they were thought to take; the last TIMED outvote those of a busy moment
    _plain: deque[float] = field(default_factory=partial(deque, maxlen=2 * TIMED - 1))
    _untimed: int = 0  # cycles with trees since plain ones were timed
    _lost: int = 0  # texts in a row in which trees did not pay

    def begin(self) -> None:
        """Begin another text, which may be of another kind; with a rest where trees did not pay in texts before.

        So a draft that is not expected to pay is not asked at once, and need not take in the prompt.
        """
        self._lost = self._lost + 1 if self.resting > 0 or self._worked < FIRST_REST else 0
        self.resting = (self.resting or FIRST_REST) if self._lost >= MAX_LOST else 0
        self._length = FIRST_REST
        self._worked = FIRST_REST
        self.state = PaceState.RESTING if self.resting else PaceState.DRAFTING
        self._gain = max(self._gain, NEW_TEXT)

    def observe(
        self,
        tokens: int,
        seconds: float,
        plain: float,
        drafted: bool = False,
        expected: float = 1.0,
        repeated: int = 0,
    ) -> None:
        """Take in a cycle's tokens and seconds.

        plain: the predicted seconds of a plain cycle; drafted: whether it drafted although it was to rest; expected:
        what a plain cycle is thought to take over `plain`, until some were timed; repeated: as in Cycle.
        """
        if self.state is PaceState.RETURNING:
            self.state = PaceState.TRIAL
        elif self.resting:
            self._rest(None if drafted else seconds / plain, repeated)
        else:
            ratio = statistics.median(self._plain) if self._plain else expected
            self._weigh(max(tokens - seconds / (plain * ratio), MIN_GAIN))

    def _rest(self, ratio: float | None, repeated: int) -> None:
        """Count a plain cycle; return to trees after the last one, or where the text has begun to repeat itself.

        ratio: its seconds over the predicted ones. A longer rest, after lost trials, takes a longer repetition.
        """
        if ratio is not None:
            self._plain.append(ratio)
        self.resting = 0 if REPEATED * repeated >= self._length else self.resting - 1
        if not self.resting:
            self.state = PaceState.RETURNING
            self._gain = max(self._gain, LATER_CREDIT)
            self._worked = 0
            self._trial_gain = 0.0

    def _weigh(self, gain: float) -> None:
        """Count the gain of a cycle with trees; rest where gains are below nothing, calibrate where they are small."""
        self._worked += 1
        self._untimed += 1
        off = gain - self._gain
        self._gain += off * (1 - MEMORY)
        self._spread += (off * off - self._spread) * (1 - MEMORY)
        self._trial_gain += gain
        mean, variance = self._gain, self._spread * (1 - MEMORY) / 2
        if self.state is PaceState.TRIAL and self._worked >= MIN_TRIAL:
            mean, variance = self._trial_gain / self._worked, self._spread / self._worked
        if self._worked == MAX_TRIAL:
            self.state = PaceState.DRAFTING
        loses = mean < -STANDARD_ERRORS * math.sqrt(variance)
        if loses:
            self._length = (
                FIRST_REST if self._worked >= FIRST_REST else min(2 * self._length, MAX_REST)
            )
        if (
            loses
            or (self._gain < LITTLE_GAIN and not self._plain)
            or (self._gain < SMALL_GAIN and self._untimed > TIMED_AGAIN)
        ):
            self.state = PaceState.RESTING if loses else PaceState.CALIBRATING
            self.resting = self._length if loses else TIMED
            self._untimed = 0

"""When trees have not been worth their time: decode plainly for a while, then look again."""

from __future__ import annotations

import math
import statistics
from collections import deque

MEMORY = 0.97  # of what cycles with trees brought, per cycle
HOPE, NEW_TEXT, AGAIN = 0.2, 0.03, 0.01  # tokens per cycle that trees are credited with: at first, in a new text, later
DOUBT, TIMED = 0.1, 4  # tokens per cycle below which plain cycles are timed, and so many of them
SHORTEST, LONGEST = 32, 64  # cycles of a rest
SURE = 1.0  # standard errors by which gains are below nothing
PLAIN_WINDOW = 16  # plain cycles that a median is of
SPREAD = 0.05  # tokens squared: variance of a cycle's gain, to begin with
WORST = -2.0  # tokens: what a cycle loses at most, as a machine that was busy elsewhere says nothing of trees


class Pace:
    """Weighs what trees bring against what plain decoding brings in the time that they take, by clock.

    Prices say what a node or a pass is worth beside the others; what asking itself takes they do not say. A cycle's
    gain is the tokens that it committed less those that plain decoding commits in its time. Where recent gains become
    small a few cycles rest, that is they are plain and ask nothing, and are timed; where they come to less than nothing
    more cycles rest. A few with trees follow, which decide whether to go on or to rest for twice as long.
    """

    def __init__(self) -> None:
        self.resting = 0  # cycles to go
        self._gain, self._spread = HOPE, SPREAD
        self._length, self._worked = SHORTEST, SHORTEST
        self._plain = deque[float](maxlen=PLAIN_WINDOW)  # what plain cycles took over what they were thought to take
        self._new = True

    def begin(self) -> None:
        """Another text, which may be of another kind."""
        self.resting, self._length, self._worked, self._new = 0, SHORTEST, SHORTEST, True
        self._gain = max(self._gain, NEW_TEXT)

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """A cycle brought so many tokens in so many seconds; plain: those that a plain cycle was thought to take."""
        if self.resting:
            self._plain.append(seconds / plain)
            self.resting -= 1
            if not self.resting:
                self._gain, self._worked = max(self._gain, AGAIN), -1
            return
        self._worked += 1
        if not self._worked:  # the first one after a rest also does what the rest had left
            return
        gain = tokens - seconds / (plain * (statistics.median(self._plain) if self._plain else 1.0))
        off = max(gain, WORST) - self._gain
        self._gain += off * (1 - MEMORY)
        self._spread += (off * off - self._spread) * (1 - MEMORY)
        if self._gain < -SURE * math.sqrt(self._spread * (1 - MEMORY) / 2):  # standard errors of such a mean
            self._length = SHORTEST if self._worked >= SHORTEST else min(2 * self._length, LONGEST)
            self.resting, self._new = self._length, False
        elif self._gain < DOUBT and self._new:
            self.resting, self._new = TIMED, False

"""Laws of costs by number of rows, and corrections that keep them: the seconds that cycles took, by their own rows."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specengine.costs import Points

MAX_EXCESS = 1.2  # by which measured costs may break a law before they are measured again
MAX_TRUST = 20.0  # cycles that a correction remembers
TRUST_DECAY = 0.999  # per cycle
MIN_TRUST = 0.5  # cycles, below which a number of rows counts as never tried
FAR_TRUST = 0.75  # cycles that one counts for whose price was far away
MIN_TRIED = 2.0  # cycles, below which it is tried again
# log of the seconds of one cycle over the expected ones, as far as it counts
MAX_RATIO = math.log(2)
EXPLORED_SHARE = 0.01  # of the time that cycles with untried numbers of rows may lose
INITIAL_ALLOWANCE = 3.0  # passes of one row that they may lose at first
MIN_CHARGE = 0.1  # passes of one row that a trial counts for at least
SMOOTHING = 0.01  # of the difference of two knots, per cycle between them
MIN_PREMIUM = 1.05  # price of an untried number over the last tried one's that is worth a trial


def fault(points: Points) -> str | None:
    """Return which law these costs break by more than a fifth, or None.

    More rows cost no less than fewer, and n rows no more than as many passes of fewer rows as hold them.
    """
    rows = sorted(points)
    for place, many in enumerate(rows):
        for few in rows[:place]:
            if points[many] * MAX_EXCESS < points[few]:
                return f"{many} rows are cheaper than {few}"
            passes = math.ceil(many / few)
            if points[many] > MAX_EXCESS * passes * points[few]:
                return f"{many} rows are dearer than {passes} passes of {few}"
    return None


def lawful(points: Points, trust: Mapping[int, float] | None = None) -> Points:
    """Return the nearest costs that keep both laws of `fault`; trust: weights by number of rows, all alike by default.

    Isotonic regression of the logarithms (pool adjacent violators), then the less trusted of two numbers of rows
    yields where many rows are dearer than passes of few. Costs with a 0 stay as they are.
    """
    rows = sorted(points)
    weights = {n: 1.0 if trust is None else trust[n] + 1e-3 for n in rows}
    fitted = dict(points)
    if not all(cost > 0 for cost in points.values()):
        return fitted
    for _ in rows:
        fitted = _rising(rows, fitted, weights)
        if not _bound(rows, fitted, weights):
            break
    # rounds of both may leave a fall
    return dict(zip(rows, itertools.accumulate((fitted[n] for n in rows), max), strict=True))


def _rising(rows: Sequence[int], points: Points, weights: Mapping[int, float]) -> Points:
    pools: list[tuple[float, float, list[int]]] = []  # mean logarithm, weight, rows
    for n in rows:
        mean = math.log(points[n])
        weight = weights[n]
        members = [n]
        while pools and pools[-1][0] > mean:
            last_mean, last_weight, last_members = pools.pop()
            mean = (mean * weight + last_mean * last_weight) / (weight + last_weight)
            weight += last_weight
            members = last_members + members
        pools.append((mean, weight, members))
    return {n: math.exp(mean) for mean, _, members in pools for n in members}


def _bound(rows: Sequence[int], points: Points, weights: Mapping[int, float]) -> bool:
    """Bound many rows by passes of few, in place. Return whether anything changed."""
    changed = False
    for place, many in enumerate(rows):
        for few in rows[:place]:
            passes = math.ceil(many / few)
            if points[many] <= passes * points[few] * (1 + 1e-9):
                continue
            changed = True
            if weights[many] > weights[few]:
                points[few] = points[many] / passes
            else:
                points[many] = passes * points[few]
    return changed


class Corrections:
    """Corrects costs by number of rows by the seconds that cycles took, each for its own number of rows.

    A factor of all numbers follows the machine, which becomes slower and faster. An offset per knot follows the shape.
    Knots that no cycle has tried follow the factor and the tried knots next to them, as far as the laws leave them. A
    price that is too high keeps its number of rows from being tried. So now and then a cycle is priced as if more rows,
    up to twice as many, cost as much as those that were tried. `EXPLORED_SHARE` bounds what such cycles lose.

    count: the largest number of rows
    """

    def __init__(self, count: int) -> None:
        self._knots = knots(count)
        self._around = [self._between(rows) for rows in range(count + 1)]
        self._log_factor = 0.0
        self._offsets = [0.0] * len(self._knots)
        self._trust = [0.0] * len(self._knots)
        self._allowance = INITIAL_ALLOWANCE  # passes of one row
        self._turn = 0  # of the knot whose trial comes next

    @property
    def factor(self) -> float:
        """Seconds over measured costs, of all numbers of rows alike."""
        return math.exp(self._log_factor)

    def observe(self, base: Sequence[float], rows: int, seconds: float, passes: int = 1) -> None:
        """Take in the seconds of passes with `rows` rows each; base: as measured, of 0 rows and more."""
        left, right, share = self._around[min(rows, len(self._around) - 1)]
        offsets = self._offsets
        few = offsets[left]
        many = offsets[right]
        expected = (
            passes * base[rows] * math.exp(self._log_factor + (1 - share) * few + share * many)
        )
        if not (expected > 0 and seconds > 0):
            return
        plain = base[1] * math.exp(self._log_factor + offsets[0])
        self._allowance = min(INITIAL_ALLOWANCE, self._allowance + EXPLORED_SHARE * seconds / plain)
        self._trust = trust = [TRUST_DECAY * each for each in self._trust]
        # other programs make a cycle longer, and none shorter
        off = min(math.log(seconds / expected), MAX_RATIO)
        is_near = abs(off) < MAX_RATIO
        # only the mean of two knots is observed
        pull = SMOOTHING * 2 * share * (1 - share) * (many - few)
        for knot, weight, pulled in ((left, 1 - share, pull), (right, share, -pull)):
            if not weight:
                continue
            gain = max(1 / MAX_TRUST, 1 / (1 + trust[knot]))
            is_nearer = weight >= 0.5  # the other knot is not tried by rows so far from it
            if is_near:
                offsets[knot] += pulled + off * weight * gain
                trust[knot] = min(MAX_TRUST, trust[knot] + is_nearer * weight * weight)
            else:  # the price is far away, which says nothing of how two knots share it
                offsets[knot] += pulled + off * gain
                trust[knot] = max(trust[knot], is_nearer * FAR_TRUST)

    def observe_all(self, predicted: float, seconds: float, weight: float) -> None:
        """Take in seconds that say the same of every number of rows: a cycle of graphs, which pads them all."""
        if predicted > 0 and seconds > 0:
            self._log_factor += weight * min(
                max(math.log(seconds / predicted), -MAX_RATIO), MAX_RATIO
            )

    def column(self, base: Sequence[float]) -> list[float]:
        """Return the corrected seconds of 0 rows and more, which keep the laws.

        base: as measured, of at least 1 row.
        """
        rows = [n for n in self._knots if n < len(base)]
        if not any(self._offsets) or not all(base[n] > 0 for n in rows):
            factor = self.factor
            return [seconds * factor for seconds in base]
        self._center()
        self._guess()
        seconds = {
            n: base[n] * math.exp(self._log_factor + offset)
            for n, offset in zip(rows, self._offsets, strict=False)
        }
        fitted = lawful(seconds, dict(zip(rows, self._trust, strict=False)))
        logs = [math.log(fitted[n] / base[n]) for n in rows]
        last = len(logs) - 1
        places = itertools.chain(self._around[1:], itertools.repeat(self._around[-1]))
        corrected = (
            cost * math.exp((1 - share) * logs[min(left, last)] + share * logs[min(right, last)])
            for cost, (left, right, share) in zip(base[1:], places, strict=False)
        )
        return list(itertools.accumulate(corrected, max, initial=base[0]))

    def exploring(self, column: Sequence[float]) -> list[float] | None:
        """Return prices under which a cycle tries a number of rows that none has, or None where no trial may pay.

        column: of `column`. A trial's rows cost as little as the laws allow, next to the rows that were tried. Calls
        take the untried knots in turn.
        """
        places = range(1, sum(n < len(column) for n in self._knots))
        if self._allowance <= 0 or not places:
            return None
        for turn in range(len(places)):
            place = places[(self._turn + turn) % len(places)]
            bounds = self._bounds(place, column)
            if bounds is not None and column[self._knots[place]] > MIN_PREMIUM * bounds[1]:
                self._turn = places.index(place) + 1
                first, price = bounds
                last = self._knots[place]
                return [
                    *column[:first],
                    *[min(price, seconds) for seconds in column[first : last + 1]],
                    *column[last + 1 :],
                ]
        return None

    def _bounds(self, place: int, column: Sequence[float]) -> tuple[int, float] | None:
        """Return the first rows after those tried below this untried knot, and its least lawful price.

        None of a tried knot, of one without a tried one below it, and of the last one if it is more than twice that.
        """
        n = self._knots[place]
        below = max(
            (other for other in range(place) if self._trust[other] >= MIN_TRUST), default=None
        )
        if self._trust[place] >= MIN_TRIED or below is None:
            return None
        above = next(
            (
                other
                for other in range(place + 1, len(self._knots))
                if self._trust[other] >= MIN_TRUST
            ),
            None,
        )
        price = column[self._knots[below]]
        if above is not None and self._knots[above] < len(column):
            price = max(price, column[self._knots[above]] / math.ceil(self._knots[above] / n))
        elif n > 2 * self._knots[below]:
            return None
        return self._knots[below] + 1, price

    def charge(self, plain: float, lost: float) -> None:
        """Enter the seconds that a trial lost against other cycles; at least a tenth of a pass."""
        self._allowance -= max(MIN_CHARGE, lost / plain)

    def _guess(self) -> None:
        """Set the offsets of untried knots: between tried ones on the line, beyond them half per doubling of rows."""
        tried = [place for place, trust in enumerate(self._trust) if trust >= MIN_TRUST]
        if tried:
            offsets, at = np.array(self._offsets), np.log2(self._knots)
            beyond = np.maximum(at[tried[0]] - at, at - at[tried[-1]]).clip(0)
            guesses = np.interp(at, at[tried], offsets[tried]) * 0.5**beyond
            guesses[tried] = offsets[tried]
            self._offsets = guesses.tolist()

    def _center(self) -> None:
        """Move what the offsets of tried knots have in common into the factor.

        Many rows that take longer than expected say nothing of few, which are cheap to try: these keep their prices.
        """
        mean = sum(
            trust * offset for trust, offset in zip(self._trust, self._offsets, strict=True)
        ) / sum(self._trust)
        if mean > 0 and max(self._trust[:2]) < MIN_TRUST:
            return
        self._log_factor += mean
        self._offsets = [
            offset - mean if trust > 0 else offset
            for trust, offset in zip(self._trust, self._offsets, strict=True)
        ]

    def _between(self, rows: int) -> tuple[int, int, float]:
        """Return the knots at both sides of a number of rows, and the right one's share by distance of logarithms."""
        right = next(
            (place for place, n in enumerate(self._knots) if n >= rows), len(self._knots) - 1
        )
        if self._knots[right] <= rows or right == 0:
            return right, right, 0.0
        few = math.log(self._knots[right - 1])
        return right - 1, right, (math.log(rows) - few) / (math.log(self._knots[right]) - few)


def knots(count: int) -> list[int]:
    """Return numbers of rows up to `count` at which corrections are kept: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    chosen = [1]
    step = 1
    while chosen[-1] < count:
        step = step if chosen[-1] < 4 * step else 2 * step
        chosen.append(min(count, chosen[-1] + step))
    return chosen

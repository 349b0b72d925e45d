"""Runs cases one after the other and counts what became of them."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.errors import shown
from tests.fuzz.cases import KINDS, Workplace
from tests.fuzz.outcomes import ANSWERED, REFUSED, Finding

MOST_SECONDS = 30.0  # of a case, on the processor


FOUND = "found"


@dataclass
class Ran:
    """A case as it is shown, what became of it (outcomes.py, or FOUND) by which error, and processor seconds."""

    given: str
    outcome: str = FOUND
    error: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """Counts by kind of case and outcome, processor seconds by kind, and what was found."""

    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in KINDS}
    )
    errors: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    findings: list[str] = field(default_factory=list)

    def count(self, kind: str, name: str, made: Ran) -> None:
        self.counts[kind][made.outcome] += 1
        self.seconds[kind] += made.seconds
        self.slowest = max(self.slowest, made.seconds)
        if made.outcome == FOUND:
            self.findings.append(f"{name}: {made.given}\n    {made.error}")
            print(self.findings[-1], file=sys.stderr, flush=True)
        elif made.error:
            self.errors[made.error] += 1

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{'':<10}{'answered':>10}{'refused':>10}{'found':>10}{'seconds':>10}"
        for kind, counted in [*self.counts.items(), ("all", sum(self.counts.values(), Counter()))]:
            seconds = sum(self.seconds.values()) if kind == "all" else self.seconds[kind]
            numbers = (counted[name] for name in (ANSWERED, REFUSED, FOUND))
            yield (
                f"{kind:<10}" + "".join(f"{number:>10}" for number in numbers) + f"{seconds:>10.1f}"
            )
        yield f"refused by: {', '.join(f'{name} {count}' for name, count in self.errors.most_common())}"
        yield f"slowest case: {self.slowest:.1f} s"


def fuzz(
    run: Callable[[str], Ran], cases: int, seed: int, kinds: Sequence[str] = tuple(KINDS)
) -> Report:
    """Run this many cases, evenly over the kinds.

    run: `ran` in this process, or that of a worker. A case is of its seed and number, whatever ran before; what is
    found says its name, by which it can be run again.
    """
    report = Report()
    for number in range(cases):
        kind = kinds[number % len(kinds)]
        name = f"{seed}/{kind}/{number}"
        report.count(kind, name, run(name))
    return report


def here(folder: Path) -> Callable[[str], Ran]:
    """Return a function that runs cases in this process."""
    place = Workplace(folder)
    return lambda name: ran(place, name)


def ran(place: Workplace, name: str) -> Ran:
    """Run the case of this name, SEED/KIND/NUMBER, and return its outcome."""
    given, run = KINDS[name.split("/")[1]](place, random.Random(name))
    began, made = time.process_time(), Ran(shown(given, 600))
    try:
        with warnings.catch_warnings(), _limited():
            warnings.simplefilter("ignore")
            made.outcome, made.error = run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also what ends a process
        where = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "specengine" in frame.filename
        ]
        place_of = f" at {Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
        made.outcome, made.error = FOUND, f"{type(error).__name__}{place_of}: {error!s:.600}"
    made.seconds = time.process_time() - began
    return made


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes the processor for too long, where there is such a clock and Python runs."""
    if not hasattr(signal, "SIGPROF"):
        yield
        return

    def late(*_: Any) -> None:
        raise Finding(f"it takes more than {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

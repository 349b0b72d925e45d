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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.errors import shown
from tests.fuzz.cases import KINDS, Finding, Workplace

MOST_SECONDS = 30.0  # of a case, on the processor


@dataclass
class Report:
    """Counts by kind of case and outcome, processor seconds by kind, and what was found."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    errors: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    findings: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{'':<10}{'answered':>10}{'refused':>10}{'found':>10}{'seconds':>10}"
        for kind, counted in [*self.counts.items(), ("all", sum(self.counts.values(), Counter()))]:
            seconds = sum(self.seconds.values()) if kind == "all" else self.seconds[kind]
            numbers = (counted[name] for name in ("answered", "refused", "found"))
            yield f"{kind:<10}" + "".join(f"{number:>10}" for number in numbers) + f"{seconds:>10.1f}"
        yield f"refused by: {', '.join(f'{name} {count}' for name, count in self.errors.most_common())}"
        yield f"slowest case: {self.slowest:.1f} s"


def fuzz(folder: Path, cases: int, seed: int, only: str | None = None) -> Report:
    """Run this many cases, evenly over the kinds or of one kind alone.

    A case is of its seed and number, whatever ran before; what is found says how to run it again.
    """
    report, place = Report(), Workplace(folder)
    kinds = [only] if only else list(KINDS)
    for number in range(cases):
        kind = kinds[number % len(kinds)]
        run_one(report, place, kind, f"{seed}/{kind}/{number}")
    return report


def run_one(report: Report, place: Workplace, kind: str, name: str) -> None:
    """Run the case of this name and count it."""
    given, run = KINDS[kind](place, random.Random(name))
    began = time.process_time()
    try:
        with warnings.catch_warnings(), _limited():
            warnings.simplefilter("ignore")
            outcome = run()
        report.counts[kind][outcome.kind] += 1
        report.errors.update([outcome.error] if outcome.error else [])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also what ends a process
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if "specengine" in frame.filename]
        place_of = f" at {Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
        _find(report, kind, name, given, f"{type(error).__name__}{place_of}: {error!s:.600}")
    took = time.process_time() - began
    report.seconds[kind] += took
    report.slowest = max(report.slowest, took)


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


def _find(report: Report, kind: str, name: str, given: Any, what: str) -> None:
    report.counts[kind]["found"] += 1
    report.findings.append(f"{name}: {shown(given, 600)}\n    {what}")
    print(report.findings[-1], file=sys.stderr, flush=True)

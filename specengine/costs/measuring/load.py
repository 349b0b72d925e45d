"""What other programs take of the processors, as Linux counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from specengine.costs import busy as busy

PROCESSOR_TIMES = Path("/proc/stat")
MIN_SECONDS = 0.1  # of a look: the system counts hundredths of a second


class Look(NamedTuple):
    """Counters at one moment, in seconds: the clock, of all processors in use and stolen, and of this process."""

    clock: float
    in_use: float
    own: float


def look() -> Look | None:
    """Return the counters now; None where the system does not tell them."""
    try:
        line = PROCESSOR_TIMES.read_text(encoding="ascii").splitlines()[0]
        user, nice, system, _, _, irq, softirq, steal = (float(field) for field in line.split()[1:9])
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return Look(time.monotonic(), (user + nice + system + irq + softirq + steal) / ticks, time.process_time())


def share_since(before: Look | None) -> float | None:
    """Return the share of all processors, 0 to 1, that others took since then; None if unknown or too short a time."""
    now = look()
    if before is None or now is None or now.clock - before.clock < MIN_SECONDS:
        return None
    others = (now.in_use - before.in_use) - (now.own - before.own)
    return min(1.0, max(0.0, others / ((now.clock - before.clock) * (os.cpu_count() or 1))))

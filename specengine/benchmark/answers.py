"""An answer as it was measured, what its cycles count, and a row of all answers of one way to one prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from specengine.models import common_prefix
from specengine.records import Cycle, Seconds

COUNTS = ("cycles", "emitted", "passes", "verified", "drafted")
PARTS = ("draft", "policy", "verify", "walk", "commit", "total")


class Answer(NamedTuple):
    """New tokens, the prompt's length, wall-clock seconds with the prompt's; `cycles` is what `counted` gives.

    first: seconds until the first tokens were there, where the way tells.
    """

    tokens: list[int]
    prompt_tokens: int
    seconds: float
    cycles: dict[str, Any] | None = None
    first: float | None = None


class Figures(NamedTuple):
    """Counts of a cycle, and its seconds."""

    emitted: int
    passes: int
    verified: int
    drafted: int
    seconds: Seconds

    @classmethod
    def of(cls, cycle: Cycle) -> Figures:
        return cls(len(cycle.tokens), int(cycle.tree.passes), len(cycle.tree), cycle.drafted, cycle.seconds)


def counted(cycles: Sequence[Figures]) -> dict[str, Any]:
    """Return sums over an answer's cycles, medians of their parts in milliseconds, and seconds of policies and of all.

    emitted: tokens; passes: of the draft; verified: nodes, with the root; drafted: nodes, without it. Where some cycles
    stayed on a device, whose parts are not known, `total` stands alone.
    """
    split = all(cycle.seconds.split for cycle in cycles)
    medians = {
        part: round(1e3 * statistics.median(getattr(cycle.seconds, part) for cycle in cycles), 4)
        for part in (PARTS if split else ("total",))
    }
    return {
        "cycles": len(cycles),
        **{name: sum(getattr(cycle, name) for cycle in cycles) for name in COUNTS[1:]},
        "median_ms": medians,
        **({"policy_s": round(sum(cycle.seconds.policy for cycle in cycles), 6)} if split else {}),
        "total_s": round(sum(cycle.seconds.total for cycle in cycles), 6),
    }


def row(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return counters of the first round, seconds of every round, and medians over rounds of the parts' medians."""
    first = answers[0]
    measured: dict[str, Any] = {"prompt_tokens": first.prompt_tokens, "new_tokens": len(first.tokens)}
    cycles = [answer.cycles for answer in answers if answer.cycles is not None]
    if cycles:
        measured |= {name: cycles[0][name] for name in COUNTS}
    measured["seconds"] = [round(answer.seconds, 4) for answer in answers]
    if all(answer.first is not None for answer in answers):
        measured["first"] = [round(answer.first, 6) for answer in answers if answer.first is not None]
    if cycles:
        parts = [part for part in PARTS if all(part in each["median_ms"] for each in cycles)]
        measured["median_ms"] = {
            part: round(statistics.median(each["median_ms"][part] for each in cycles), 4) for part in parts
        }
    if cycles and all("policy_s" in each for each in cycles):
        share = sum(each["policy_s"] for each in cycles) / sum(each["total_s"] for each in cycles)
        measured["policy_share"] = round(share, 5)
    return measured


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """Return the first position at which these tokens differ; None where they are the same."""
    return None if expected == got else common_prefix(expected, got)

"""An answer as it was measured, what its cycles count, and a row of all answers of one way to one prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from specengine.models import common_prefix
from specengine.records import Cycle

COUNTS = ("cycles", "emitted", "passes", "verified", "drafted")
PARTS = ("draft", "policy", "verify", "total")


class Answer(NamedTuple):
    """New tokens, the prompt's length, wall-clock seconds with the prompt's; `cycles` is what `counted` gives."""

    tokens: list[int]
    prompt_tokens: int
    seconds: float
    cycles: dict[str, Any] | None = None


class Figures(NamedTuple):
    """What is read from a cycle while it is there; seconds of its parts and of the whole."""

    emitted: int
    passes: int
    verified: int
    drafted: int
    draft: float
    policy: float
    verify: float
    total: float

    @classmethod
    def of(cls, cycle: Cycle) -> Figures:
        seconds, tree = cycle.seconds, cycle.tree
        sizes = len(cycle.tokens), int(tree.passes), len(tree), cycle.drafted
        return cls(*sizes, seconds.draft, seconds.policy, seconds.verify, seconds.total)


def counted(cycles: Sequence[Figures]) -> dict[str, Any]:
    """Sums over an answer's cycles, medians of their parts in milliseconds, and the seconds that policies took of all.

    emitted: tokens; passes: of the draft; verified: nodes, with the root; drafted: nodes, without it.
    """
    return {
        "cycles": len(cycles),
        **{name: sum(getattr(cycle, name) for cycle in cycles) for name in COUNTS[1:]},
        "median_ms": {
            part: round(1e3 * statistics.median(getattr(cycle, part) for cycle in cycles), 4) for part in PARTS
        },
        "policy_s": round(sum(cycle.policy for cycle in cycles), 6),
        "total_s": round(sum(cycle.total for cycle in cycles), 6),
    }


def row(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counters of the first round; seconds of every round; of a cycle's parts the medians of the rounds' medians."""
    found: dict[str, Any] = {"prompt_tokens": answers[0].prompt_tokens, "new_tokens": len(answers[0].tokens)}
    cycles = [answer.cycles for answer in answers if answer.cycles is not None]
    if cycles:
        found |= {name: cycles[0][name] for name in COUNTS}
    found["seconds"] = [round(answer.seconds, 4) for answer in answers]
    if cycles:
        found["median_ms"] = {
            part: round(statistics.median(each["median_ms"][part] for each in cycles), 4) for part in PARTS
        }
        found["policy_share"] = round(
            sum(each["policy_s"] for each in cycles) / sum(each["total_s"] for each in cycles), 5
        )
    return found


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """The first position at which these tokens differ; None where they are the same."""
    return None if expected == got else common_prefix(expected, got)

"""Tests of the states of a pace: the transitions that the page draws are those that happen."""

from __future__ import annotations

import random
import re
from pathlib import Path

from specengine.policies.auto.pacing import Pace, PaceState

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "policy.md"


def drawn() -> set[tuple[str, str]]:
    """Return the transitions of the page's table, as pairs of states."""
    rows = re.findall(
        r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$",
        PAGE.read_text().partition("## When `auto` rests")[2],
        re.M,
    )
    return {(state, other) for state, others in rows for other in re.findall(r"`(\w+)`", others)}


def test_the_page_draws_the_transitions_that_happen() -> None:
    seen = set[tuple[str, str]]()
    for seed in range(200):
        draw, pace = random.Random(seed), Pace()
        gain = draw.uniform(-0.3, 0.6)
        for number in range(400):
            if number % 80 == 79:
                gain = draw.uniform(-0.3, 0.6)
            before = pace.state
            pace.observe(1, 1.0 - gain * draw.random(), 1.0)
            if pace.state is not before:
                seen.add((before.value, pace.state.value))
    assert seen == drawn()
    assert {state for pair in seen for state in pair} == {state.value for state in PaceState}

"""Rewards of LTD's training and the costs they are made of."""

from __future__ import annotations

import pytest

from bench.costs_record import costs_record
from research.ltd.outcomes import cycle_cost, reward
from tests.research.ltd.engines import COSTS, SHAPE, environment

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rewards() -> None:
    """Equation 4 as a multiple of plain decoding's throughput; the ablations of section 6.3."""
    assert reward("table", 3, 60.0, 30.0) == reward("wallclock", 3, 60.0, 30.0) == 1.5
    assert reward("accept", 3, 60.0, 30.0) == 3
    assert reward("time", 3, 60.0, 30.0) == -2


def test_the_reward_can_be_recomputed_from_the_log() -> None:
    for costs in (COSTS, None):
        live = environment("size", costs)
        live.reset(seed=1)
        for step in range(30):
            _, given, done, _, facts = live.step(step % 3)
            assert done
            if costs is None:
                expected = facts["tokens"] / (100 * facts["seconds"])
            else:
                spent = costs.cycle(facts["verified"], facts["widths"])
                expected = facts["tokens"] * costs.plain / spent
            assert given == pytest.approx(expected)
            assert given > 0
            live.reset()
        live.close()


def test_costs_of_a_cycle() -> None:
    found = cycle_cost(COSTS, SHAPE, 2, 9)
    assert found == pytest.approx(40 + 3 + 2 + 2)
    assert cycle_cost(COSTS, SHAPE, 0, 9) == pytest.approx(30 + 10 / 9 * 3 + 3), (
        "three candidates are all there are"
    )
    record = costs_record(COSTS)
    assert (record["name"], record["verify"]["10"], record["draft"]["3"]) == ("toy", 40, 2)

"""Laws of costs by rows, and corrections by what cycles took."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from specengine.costs.laws import INITIAL_ALLOWANCE, Corrections, fault, knots, lawful
from tests.policies.simulated import QUIET, SEEN

POINTS = st.dictionaries(st.integers(1, 96), st.floats(1e-4, 10.0), min_size=1, max_size=12)
BASE = [0.0, *(float(n) for n in range(1, 65))]  # each row as dear as a pass of its own


def column_of(points: dict[int, float]) -> list[float]:
    from specengine.costs import interpolated

    return [0.0, *(interpolated(points, n) for n in range(1, 65))]


# ---- laws


@settings(deadline=None)
@given(POINTS)
def test_what_is_fitted_keeps_both_laws(points: dict[int, float]) -> None:
    fitted = lawful(points)
    assert fitted.keys() == points.keys()
    assert fault(fitted) is None
    rows = sorted(fitted)
    for few, many in itertools.pairwise(rows):
        assert fitted[few] <= fitted[many] * (1 + 1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8))
def test_costs_that_keep_the_laws_stay(steps: list[float]) -> None:
    """Each row costs between nothing and a whole pass more than the rows before it, ever less."""
    points = {1: 1.0}
    for n, step in enumerate(sorted(steps, reverse=True), 2):
        points[n] = points[n - 1] + step
    assert lawful(points) == pytest.approx(points)


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ({1: 1.0, 2: 1.1, 4: 0.8}, "4 rows are cheaper than 1"),
        ({1: 1.0, 8: 10.0}, "8 rows are dearer than 8 passes of 1"),
        ({1: 1.0, 8: 1.4, 16: 4.0}, "16 rows are dearer than 2 passes of 8"),
        ({1: 1.0, 16: 795.0}, "16 rows are dearer than 16 passes of 1"),
    ],
)
def test_a_broken_law_is_named(points: dict[int, float], why: str) -> None:
    assert fault(points) == why


def test_true_costs_and_small_noise_break_none() -> None:
    draw = random.Random(0)
    assert fault(QUIET) is None
    for _ in range(50):
        assert fault({n: cost * draw.uniform(0.95, 1.05) for n, cost in QUIET.items()}) is None
    assert fault(SEEN["8 rows 3.6, 16 rows 10.8"]) is not None


def test_the_less_trusted_of_two_numbers_yields() -> None:
    points = {1: 1.0, 8: 1.0, 16: 4.0}
    assert lawful(points, {1: 1, 8: 9, 16: 1})[16] == pytest.approx(2.0)
    assert lawful(points, {1: 1, 8: 1, 16: 9})[8] == pytest.approx(2.0)


def test_costs_of_nothing_stay_nothing() -> None:
    assert lawful({1: 0.0, 4: 0.0}) == {1: 0.0, 4: 0.0}
    assert fault({1: 0.0}) is None


# ---- corrections


@pytest.mark.parametrize("count", [1, 2, 8, 48, 64, 100])
def test_knots_begin_at_one_row_and_end_at_the_last(count: int) -> None:
    chosen = knots(count)
    assert chosen[0] == 1
    assert chosen[-1] == count
    assert chosen == sorted(set(chosen))


def test_nothing_observed_changes_nothing() -> None:
    assert Corrections(64).column(BASE) == BASE


def test_a_cycle_corrects_its_own_rows_and_the_laws_bound_the_others() -> None:
    corrections = Corrections(64)
    for _ in range(60):
        corrections.observe(BASE, 1, 1.0)
        corrections.observe(BASE, 8, 1.4)
    column = corrections.column(BASE)
    assert column[1] == pytest.approx(1.0, rel=0.02)
    assert column[8] == pytest.approx(1.4, rel=0.02)
    assert column[16] <= 2.9
    assert all(few <= many for few, many in itertools.pairwise(column))


def test_a_machine_that_slows_down_slows_rows_that_were_not_tried() -> None:
    corrections, base = Corrections(64), column_of(QUIET)
    for _ in range(200):
        corrections.observe(base, 1, 2 * base[1])
        corrections.observe(base, 8, 2 * base[8])
    assert corrections.column(base)[32] == pytest.approx(2 * base[32], rel=0.05)
    assert corrections.factor == pytest.approx(2.0, rel=0.05)


def test_one_burst_moves_what_was_learnt_by_little() -> None:
    corrections, base = Corrections(64), column_of(QUIET)
    for _ in range(50):
        corrections.observe(base, 1, base[1])
        corrections.observe(base, 8, base[8])
    corrections.observe(base, 8, 50 * base[8])
    assert corrections.column(base)[8] == pytest.approx(base[8], rel=0.05)


def test_a_wrong_unit_is_found_in_a_few_cycles() -> None:
    corrections, base = Corrections(64), column_of(QUIET)
    for _ in range(8):
        corrections.observe(base, 8, 10 * base[8])
    assert corrections.column(base)[8] == pytest.approx(10 * base[8], rel=0.1)


def test_a_price_that_is_far_too_high_is_found_in_one_cycle_and_stays() -> None:
    """No other program makes a cycle shorter; and what was seen once is not guessed anew."""
    corrections, truth = Corrections(64), column_of(QUIET)
    base = [6.0 * seconds if rows > 1 else seconds for rows, seconds in enumerate(truth)]
    for cycle in range(300):
        corrections.observe(base, 2 if cycle == 5 else 1, truth[2 if cycle == 5 else 1])
        corrections.column(base)
    assert corrections.column(base)[2] == pytest.approx(truth[2], rel=0.1)


def test_several_passes_of_one_cycle_are_corrected_together() -> None:
    corrections = Corrections(8)
    for _ in range(60):
        corrections.observe([0.0, *[1.0] * 8], 4, 6.0, passes=3)
    column = corrections.column([0.0, *[1.0] * 8])
    assert column[4] == pytest.approx(2.0, rel=0.05)


def test_trials_are_of_untried_rows_and_cost_a_bounded_share() -> None:
    """A machine on which rows cost what passes cost: trials never pay, and lose one hundredth of the time."""
    corrections, spent, lost = Corrections(64), 0.0, 0.0
    for _ in range(5000):
        corrections.observe(BASE, 1, 1.0)
        spent += 1.0
        column = corrections.column(BASE)
        prices = corrections.exploring(column)
        if prices is None:
            continue
        changed = [n for n in range(1, 65) if prices[n] < column[n]]
        assert changed
        assert all(prices[n] >= column[1] for n in changed)
        rows = changed[-1]
        corrections.observe(BASE, rows, float(rows))
        corrections.charge(1.0, rows - 1.0)
        lost += rows - 1.0
        spent += rows
    assert 0 < lost < 0.011 * spent + INITIAL_ALLOWANCE + 64


@pytest.mark.parametrize("rows", [9, 13, 17, 25])
def test_rows_below_a_knot_do_not_keep_it_from_being_tried(rows: int) -> None:
    """Many cycles of rows little above the knot below: the next one's price stays a guess, and is tried."""
    corrections, truth = Corrections(64), column_of(QUIET)
    for _ in range(400):
        corrections.observe(BASE, 1, truth[1])
        corrections.observe(BASE, rows, truth[rows])
    column = corrections.column(BASE)
    above = min(n for n in knots(64) if n > rows)
    trials = [corrections.exploring(column) for _ in knots(64)]
    assert any(prices is not None and prices[above] < column[above] for prices in trials)


def test_a_price_that_is_too_high_does_not_keep_itself_alive() -> None:
    corrections, truth = Corrections(64), column_of(QUIET)
    for cycle in range(2000):
        column = corrections.column(BASE)
        prices = corrections.exploring(column) if cycle % 4 == 0 else None
        best = min(range(1, 65), key=lambda n, prices=prices or column: prices[n] / n)  # type: ignore[misc]
        corrections.observe(BASE, best, truth[best])
        if prices is not None:
            corrections.charge(truth[1], truth[best] - best * truth[64] / 64)
    column = corrections.column(BASE)
    best = min(range(1, 65), key=lambda n: column[n] / n)
    assert truth[best] / best < 1.02 * min(truth[n] / n for n in range(1, 65))
    assert math.isclose(column[best], truth[best], rel_tol=0.05)

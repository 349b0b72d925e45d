"""Which way the steps of several texts run, drafted or plain: the faster one, as it is measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from specengine.costs import ASSUMED, PassCosts
from specengine.engine import Pool, scheduler
from specengine.engine.scheduler import LOOK, MAX_MIXED, SharedPace
from tests.engine.lanes import engine_of, prompts
from tests.models.native_engines import needs_extension

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


class Served:
    """Texts under a clock of its own: so many tokens per second, by whether they rest and how many they are."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rates: Callable[[bool, int], float]
    ) -> None:
        self.pace, self.now, self.rates = SharedPace(), 0.0, rates
        self.mixed: Callable[[], bool] = lambda: False  # whether a step has rows of prompts
        self.held: Callable[[], float] = lambda: 0.0  # seconds that a forward takes more
        monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def resting(self, texts: int, seconds: float, forward: float = 0.01) -> float:
        """Serve so many texts for a while; the share of time in which they rested."""
        rested, count = 0, round(seconds / forward)
        for _ in range(count):
            rested += self.pace.rests
            began, tokens = self.now, self.rates(self.pace.rests, texts) * forward
            self.now += forward + self.held()
            self.pace.observe(texts, tokens, began, self.mixed())  # type: ignore[arg-type]
        return rested / count


def test_the_faster_way_is_kept_and_the_other_one_seldom_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests == (texts > 4) else 70.0)
    served.pace.price = lambda texts: 0.2 * texts
    assert served.resting(8, 30.0) > 0.95
    assert 0 < 1 - served.resting(8, 90.0) < 0.02  # it is tried
    served.resting(16, 0.02)
    assert served.resting(16, 2.0) == 1.0
    assert served.resting(4, 30.0) < 0.05
    served.resting(2, 0.02)
    assert served.resting(2, 0.4) == 0.0
    assert served.resting(8, 2.0) > 0.8  # what was known


def test_a_way_that_became_slower_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = [False]
    served = Served(
        monkeypatch,
        lambda rests, texts: (100.0 if rests else 80.0) * (0.5 if slower[0] and rests else 1),
    )
    assert served.resting(8, 30.0) > 0.9
    slower[0] = True
    assert served.resting(8, 10.0) < 0.2


def test_time_without_texts_counts_for_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests else 90.0)
    for _ in range(20):
        served.resting(8, 0.2)
        served.now += 60.0
    timed = {rests: rate.tokens for (rests, _), rate in served.pace._rates.items()}
    assert timed == {True: pytest.approx(100.0), False: pytest.approx(90.0)}
    assert served.resting(8, 10.0) > 0.95  # it was not tried again for being old


def test_a_try_is_short_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests else 80.0)
    served.pace.price = lambda texts: 2.0
    drafted = round((1 - served.resting(16, 2.0)) * 200)
    assert drafted == 2  # the first of so many texts is not timed, and the second chooses
    assert served.resting(16, 30.0) == 1.0
    drafted = round((1 - served.resting(16, 30.0)) * 3000)
    assert 0 < drafted <= LOOK + 2  # costs that forbid it are believed for 48 seconds
    served.pace.price = lambda texts: 1.0
    served.resting(32, 2.0)
    drafted = round((1 - served.resting(32, 30.0)) * 3000)
    assert 0 < drafted <= 4 * (LOOK + 2)  # after 3, 6, 12 and 24 seconds


@pytest.mark.parametrize(
    ("cheap", "rested"), [({1: 1.0, 64: 1.2}, 0.0), ({1: 1.0, 4: 1.2, 8: 1.4, 16: 2.6}, 1.0)]
)
def test_the_first_way_is_the_one_that_costs_allow(
    monkeypatch: pytest.MonkeyPatch, cheap: dict[int, float], rested: float
) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0)
    served.pace.price = PassCosts("toy", cheap, {1: 0.1, 8: 0.2}, measured=True).over_plain
    served.resting(8, 0.02)  # the first of so many texts is not timed
    assert served.resting(8, 0.05) == rested


def test_steps_with_prompts_are_timed_only_where_they_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests else 80.0)
    served.mixed = lambda: True
    served.resting(8, 0.01 * MAX_MIXED)
    assert not served.pace._rates
    served.resting(8, 30.0)
    assert served.resting(8, 30.0) > 0.9
    tokens = {rests: rate.tokens for (rests, _), rate in served.pace._rates.items()}
    assert tokens == {True: pytest.approx(100.0), False: pytest.approx(80.0)}


def test_a_text_learns_at_once_that_others_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(engine_of(policy="auto"), 2)
    policy = pool.engines[0].policy
    calls: list[int] = []
    monkeypatch.setattr(policy, "reprice", lambda: calls.append(pool.engines[0].target.others))  # type: ignore[union-attr]
    results = pool.generate(prompts(2), max_new_tokens=8, eos_token_id=[])
    assert len(results) == 2
    assert {0, 1} <= set(calls)


def test_costs_are_looked_up_where_no_other_text_is_under_way() -> None:
    """Looking takes a millisecond, which the first token of every answer would wait for."""
    pool = Pool(engine_of(policy="auto"), 2)
    engine, calls = pool.engines[0], list[int]()

    def find() -> PassCosts:
        calls.append(engine.target.others)  # type: ignore[attr-defined]
        return ASSUMED

    for others, looks in ((0, 1), (0, 2), (1, 3), (1, 3), (2, 3), (0, 4), (2, 5)):
        engine.target.others = others  # type: ignore[attr-defined]
        costs = pool.costs(engine, find)
        assert len(calls) == looks
        assert (costs is ASSUMED) is (others == 0)
        assert getattr(costs, "others", 0) == others


def test_forwards_that_were_held_up_speak_for_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    served, draw = (
        Served(monkeypatch, lambda rests, texts: 100.0 if rests else 85.0),
        random.Random(0),
    )
    served.held = lambda: 0.08 if draw.random() < 0.1 else 0.0
    assert served.resting(8, 30.0) > 0.9


def test_long_forwards_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda rests, texts: 10.0 if rests else 8.0)
    served.resting(8, 20.0, forward=0.4)
    assert served.resting(8, 40.0, forward=0.4) > 0.8

"""auto on simulated machines: whatever its first table says, it comes to answer as fast as with the true one."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterator

import pytest
import torch

from specengine.costs import PassCosts, Points
from specengine.costs.laws import fault
from tests.policies.simulated import QUIET, SEEN, TEXTS, Machine, Simulation, table

ANSWERS, JUDGED = 8, 3  # of 200 tokens; the last ones


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rising(seed: int) -> Points:
    """Return a random table whose costs rise."""
    draw = random.Random(seed)
    costs = sorted(20 ** draw.random() for _ in range(6))
    return {1: 1.0, **dict(zip((2, 4, 8, 16, 32, 64), costs, strict=True))}


FIRST: dict[str, PassCosts] = {
    **{name: table(points) for name, points in SEEN.items()},
    "constant": table({1: 1.0, 64: 1.0}),
    "linear": table({1: 1.0, 64: 64.0}),
    "10 times too dear": table(QUIET, scale=10.0),
    "10 times too cheap": table(QUIET, scale=0.1),
    **{f"rising {seed}": table(rising(seed)) for seed in range(10)},
}


def rate(text: str, first: PassCosts, seeds: int = 3, **machine: object) -> float:
    """Return the rate of the last answers, the median over machines."""
    rates = []
    for seed in range(seeds):
        simulation = Simulation(text, Machine(table(QUIET), seed=seed, **machine), first)  # type: ignore[arg-type]
        rates.append(statistics.mean([simulation.answer() for _ in range(ANSWERS)][-JUDGED:]))
    return statistics.median(rates)


@functools.cache
def best(text: str) -> float:
    with torch.inference_mode():
        return rate(text, table(QUIET))


@pytest.mark.sliced(1)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", FIRST)
def test_any_first_table_comes_to_the_true_one(name: str, text: str) -> None:
    """Within 5 %, and 5 % for the answers' own luck, which is not the same for both."""
    assert rate(text, FIRST[name]) > 0.9 * best(text)


def test_dear_rows_that_are_cheap_are_found_by_small_trees() -> None:
    """The steepest table: two rows for more than six passes, so that no tree pays by it."""
    assert rate("head", FIRST["rising 5"], seeds=1) > 0.9 * best("head")


def test_a_table_that_is_never_corrected_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the same simulation without corrections."""
    monkeypatch.setattr("specengine.costs.laws.Corrections.observe", lambda *_: None)
    assert rate("copies", FIRST["linear"], seeds=1) < 0.8 * best("copies")


@pytest.mark.slow
@pytest.mark.parametrize(
    "slower",
    [lambda cycle: 2.0 if 300 < cycle < 600 else 1.0, lambda cycle: 3.0 if cycle % 50 < 5 else 1.0],
    ids=["a machine that throttles and recovers", "bursts of other load"],
)
@pytest.mark.parametrize("text", TEXTS)
def test_a_machine_that_changes_spoils_nothing_for_long(text: str, slower: object) -> None:
    """In the last answers each is as slow as its machine, and no slower."""
    known = rate(text, table(QUIET), slower=slower)
    assert rate(text, FIRST["linear"], slower=slower) > 0.9 * known


def test_noise_that_no_draft_foresees_costs_little() -> None:
    assert rate("noise", FIRST["linear"]) > 0.97


def test_first_tables_of_every_kind_are_here() -> None:
    assert fault(FIRST["8 rows 3.6, 16 rows 10.8"].verify) is not None
    assert len(FIRST) == 16

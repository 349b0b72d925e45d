"""A log of every position: the replay visits what serving visits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from research.ltd import candidates, compare
from research.ltd.candidates import log_candidates
from research.ltd.environments import LoggedEnvironment, cycle_facts
from research.ltd.grounds import live_cycles, speed_of
from research.ltd.outcomes import Outcomes
from research.ltd.steered import steered_policy
from specengine.policies._ltd import Networks
from tests.research.ltd.engines import COSTS, LOGGING, PROMPTS, SHAPE, engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("depth", "size"), [(None, None), (1, 2), (4, 9)])
def test_speed_over_a_dense_log_is_the_engines_own(
    tmp_path: Path, depth: int | None, size: int | None
) -> None:
    """Where every position is logged, the replay visits what serving visits: same cycles, same throughput."""
    torch.manual_seed(5)
    networks = Networks(SHAPE, {"depth": (8,), "size": (8,)}).requires_grad_(False)
    every = log_candidates(
        engine(), PROMPTS[:4], tmp_path, replace(LOGGING, verified=1, length=48), name="toy"
    )
    logged = Outcomes.of(list(every.answers()), SHAPE, COSTS)
    assert logged.dense
    committed = cost = 0.0
    cycles = 0
    for number, prompt in enumerate(PROMPTS[:4]):
        context, last = len(prompt), float(logged.contexts[logged.answers == number].max())
        for cycle in live_cycles(
            engine(), steered_policy(SHAPE, networks, depth, size), prompt, 48
        ):
            if context <= last:
                facts = cycle_facts(cycle)
                committed, cycles = committed + len(cycle.tokens), cycles + 1
                cost += COSTS.cycle(facts["verified"], facts["widths"])
            context += len(cycle.tokens)
    found = speed_of(logged, networks, depth, size)
    assert found.speed == pytest.approx(committed * COSTS.plain / cost)
    assert found.tau == pytest.approx(committed / cycles)


def test_a_dense_log_is_gone_through_in_order(tmp_path: Path) -> None:
    every = log_candidates(
        engine(), PROMPTS[:2], tmp_path, replace(LOGGING, verified=1), name="toy"
    )
    logged = Outcomes.of(list(every.answers()), SHAPE, COSTS)
    one = LoggedEnvironment(logged, "size", "accept", 2, count=3)
    one.reset()
    for _ in range(8):
        before = one._trees.copy()
        _, given, _, _ = one.step(np.full(3, 1))
        following = logged.following(before, given.astype(int))
        inside = following >= 0
        assert (one._trees[inside] == following[inside]).all()
    assert logged.following(np.array([len(logged) - 1]), np.array([1])).tolist() == [-1]


def test_an_answers_end_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that ends in time behind one that does not would make the replay take all positions as visited."""
    monkeypatch.setattr(
        candidates, "_accepted", lambda _, following: None if len(following) == 4 else []
    )
    options = replace(LOGGING, verified=1, length=12)
    every = log_candidates(engine(), PROMPTS[:2], tmp_path, options, name="toy")
    for prompt, trees in zip(PROMPTS, every.answers(), strict=False):
        contexts = [tree.context - len(prompt) for tree in trees]
        assert contexts == list(range(8))


def test_all_positions_count_where_each_is_asked_for(tmp_path: Path) -> None:
    options = replace(LOGGING, verified=1)
    every = log_candidates(engine(), PROMPTS[:2], tmp_path, options, name="toy")
    logged = replace(Outcomes.of(list(every.answers()), SHAPE, COSTS), each=True)
    grown = SHAPE.grown(2)
    tokens = [1 + int((tree.path < grown).sum()) for answer in every.answers() for tree in answer]
    assert logged.speed(2, grown).tau == pytest.approx(np.mean(tokens))


def test_the_grid_is_searched_on_the_other_half_of_the_answers(tmp_path: Path) -> None:
    options = replace(LOGGING, verified=1)
    answers = list(log_candidates(engine(), PROMPTS[:4], tmp_path, options, name="toy").answers())
    logged = Outcomes.of(answers, SHAPE, COSTS)
    depths, sizes = compare.best_on_others(logged)
    for number in range(4):
        others = Outcomes.of([answers[n] for n in range(4) if n % 2 != number % 2], SHAPE, COSTS)
        own = logged.answers == number
        chosen = set(zip(depths[own].tolist(), sizes[own].tolist(), strict=True))
        assert chosen == {compare.best_of_grid(others)}


def test_facts_of_a_cycle() -> None:
    policy = steered_policy(
        SHAPE, Networks(SHAPE, {"depth": (4,), "size": (4,)}).requires_grad_(False), 2, 5
    )
    cycle = live_cycles(engine(), policy, [1, 2], 8)[0]
    assert cycle_facts(cycle) == {"tokens": len(cycle.tokens), "verified": 6, "widths": [1, 3, 3]}

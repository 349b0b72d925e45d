"""Environments of LTD's training, live and logged, against the serving engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from research.ltd.candidates import CandidateTrees
from research.ltd.environments import LoggedEnvironment
from research.ltd.grounds import speed_of
from research.ltd.observations import depth_observation, size_observation
from research.ltd.outcomes import Outcomes, cycle_cost
from research.ltd.steered import Finished, Question, SteeredEngine, decision_seconds
from specengine import policies
from specengine.engine import Engine
from specengine.policies._ltd import GO_ON, STOP, Networks
from tests.research.ltd.engines import COSTS, PROMPTS, SHAPE, TARGET, engine, environment
from tests.toy import CPU, ToyTarget

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_live_size_environment_is_the_serving_engine() -> None:
    """One decision per episode; what it verifies is what was asked for; depths are drawn from 1 to the most."""
    live = environment("size", COSTS)
    seen, _ = live.reset(seed=3)
    depths = set()
    for step in range(60):
        assert seen.shape == (SHAPE.inputs["size"],)
        expansions = round(float(seen[-1]) * 10)
        depths.add(expansions)
        _, _, done, truncated, facts = live.step(step % 3)
        assert (done, truncated) == (True, False)
        assert facts["verified"] == 1 + min(SHAPE.sizes[step % 3], SHAPE.grown(expansions))
        assert facts["widths"] == [1, *[3] * expansions]
        seen, _ = live.reset()
    live.close()
    assert depths == {1, 2, 3, 4}


def test_the_live_depth_environment_ends_at_stop_and_at_the_most() -> None:
    live = environment("depth", COSTS, 5)
    for actions, passes in (([STOP], 2), ([GO_ON, STOP], 3), ([GO_ON] * 3, 5)):
        live.reset(seed=2)
        for place, action in enumerate(actions):
            seen, given, done, _, facts = live.step(action)
            assert done == (place == len(actions) - 1)
            assert (given > 0) == done
            assert seen.shape == (SHAPE.inputs["depth"],)
        assert len(facts["widths"]) == passes
        assert facts["verified"] == 6
        live.close()


def test_live_environments_take_networks_for_the_other_decision() -> None:
    torch.manual_seed(0)
    networks = Networks(SHAPE, {"depth": (4,), "size": (4,)}).requires_grad_(False)
    for which in ("size", "depth"):
        live = environment(which, COSTS, networks)
        live.reset(seed=1)
        assert any(live.step(GO_ON)[2] or live.reset() is None for _ in range(8))
        live.close()


def test_an_error_in_the_engine_reaches_who_asks() -> None:
    class Failing(ToyTarget):
        def verify(self, tree: Any) -> Any:
            raise RuntimeError("out of memory")

    broken = Engine(Failing(TARGET), engine().drafter, policies.make("chain"))
    steered = SteeredEngine(broken, PROMPTS, SHAPE, "size", None, length=8)
    assert isinstance(steered.next(), Question)
    with pytest.raises(RuntimeError, match="out of memory"):
        steered.next(0)
    steered.close()
    steered.close()


class Clock:
    """Stands for the module `time`: seconds pass where the test says so, and a microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


def test_the_wait_for_a_decision_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("research.ltd.steered.time", clock)
    steered = SteeredEngine(
        engine(), PROMPTS, SHAPE, "size", None, length=24, decision_seconds=100.0
    )
    assert isinstance(steered.next(), Question)
    clock.now += 50.0
    found = steered.next(0)
    assert isinstance(found, Finished)
    assert 100 < found.seconds < 100.01, "the network's own time in place of the wait"
    steered.close()
    networks = Networks(SHAPE, {"depth": (4,), "size": (4,)})
    assert decision_seconds(networks, "depth", CPU) == pytest.approx(1e-6)


def test_logged_and_live_episodes_agree(trees: CandidateTrees, logged: Outcomes) -> None:
    """The same observation and action give the same reward, whichever environment they come from."""
    known = {}
    for expansions in range(1, SHAPE.expansions + 1):
        rows = size_observation(logged.laid, logged.contexts, expansions, SHAPE)
        known |= {row.numpy().tobytes(): (number, expansions) for number, row in enumerate(rows)}
    live, met = environment("size", COSTS), 0
    seen, _ = live.reset(seed=0)
    for step in range(400):
        place = known.get(np.ascontiguousarray(seen).tobytes())
        action = step % 3
        _, given, _, _, _ = live.step(action)
        if place is not None:
            at, expansions, size = (np.array([value]) for value in (*place, SHAPE.sizes[action]))
            expected = (
                logged.committed(at, expansions, size) * COSTS.plain / logged.cost(expansions, size)
            )
            assert given == pytest.approx(float(expected[0]), abs=1e-5) or given < expected, (
                "cut short by the end"
            )
            met += given == pytest.approx(float(expected[0]), abs=1e-5)
        seen, _ = live.reset()
    live.close()
    assert met > 30


def test_logged_environments_step_by_step(logged: Outcomes) -> None:
    many = LoggedEnvironment(logged, "depth", "table", 5, count=4, seed=1)
    seen = many.reset()
    assert seen.shape == (4, SHAPE.inputs["depth"])
    assert seen[:, -1] == pytest.approx(0.1), "the first expansion is forced"
    trees = many._trees.copy()
    seen, given, done, _ = many.step(np.array([STOP, GO_ON, GO_ON, STOP]))
    assert done.tolist() == [True, False, False, True]
    expected = (
        logged.committed(trees, np.ones(4, dtype=int), 5) * 30 / cycle_cost(COSTS, SHAPE, 1, 5)
    )
    assert given[[0, 3]] == pytest.approx(expected[[0, 3]])
    assert (given[[1, 2]] == 0).all()
    assert seen[:, -1] == pytest.approx([0.1, 0.2, 0.2, 0.1])
    many.step(np.full(4, GO_ON))
    _, given, done, infos = many.step(np.full(4, GO_ON))
    assert done.tolist() == [False, True, True, False], "closed at the most"
    assert infos[1]["reward"] == pytest.approx(float(given[1]))

    one = LoggedEnvironment(logged, "size", "accept", 3, count=6)
    seen = one.reset()
    assert seen[:, -1] == pytest.approx(0.3)
    trees = one._trees.copy()
    _, given, done, _ = one.step(np.full(6, 2))
    assert done.all()
    assert given.tolist() == logged.committed(trees, np.full(6, 3), 9).tolist()


def test_depths_that_are_not_asked_about_are_passed_over(logged: Outcomes) -> None:
    sparse = replace(logged, shape=replace(SHAPE, check_every=2))
    many = LoggedEnvironment(sparse, "depth", "table", 5, count=2)
    assert many.reset()[:, -1] == pytest.approx(0.2)
    _, _, done, _ = many.step(np.full(2, GO_ON))
    assert done.all(), "from two expansions to four without a question"


def test_speed_by_networks_is_that_of_serving(trees: CandidateTrees) -> None:
    """Throughput over the logged positions of a whole answer, against the engine under the same networks."""
    torch.manual_seed(3)
    networks = Networks(SHAPE, {"depth": (8,), "size": (8,)}).requires_grad_(False)
    logged = Outcomes.of(list(trees.answers()), SHAPE, COSTS)
    seen = depth_observation(logged.laid, logged.contexts, 1, SHAPE)
    # so that half of the trees go on
    networks.depth[-1].bias[GO_ON] -= networks.depth(seen).diff(dim=-1).median()
    depths = logged.depths_by(networks)
    sizes = logged.sizes_by(networks, depths)
    assert len(set(depths.tolist())) > 1
    assert set(sizes.tolist()) <= set(SHAPE.sizes)
    for number in range(0, len(logged), 7):
        laid, context = logged.laid[number], int(logged.contexts[number])
        done = SHAPE.least
        while SHAPE.asks(done) and networks.goes_on(
            depth_observation(laid, context, done, SHAPE), done
        ):
            done += 1
        assert depths[number] == done
        assert (
            sizes[number]
            == SHAPE.sizes[networks.choose_size(size_observation(laid, context, done, SHAPE))]
        )
    found = speed_of(logged, networks)
    assert found.tau == pytest.approx(
        logged.committed(np.arange(len(logged)), depths, sizes).mean()
    )
    fixed = speed_of(logged, networks, 2, 5)
    assert (fixed.delta, fixed.verified) == (3, 6)

"""Costs of captured cycles: measured, and corrected by cycles' own times, on a pretended device with a clock."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import Engine, policies
from specengine.costs import PassCosts, measuring
from specengine.costs.measuring import stored
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from specengine.policies.auto import Auto
from specengine.policies.auto.pacing import Pace
from specengine.records import Cycle
from tests import toy
from tests.graphs.pretended import Clock, cuda
from tests.graphs.replays import PROMPT, on_the_device
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
SHAPE = {"budget": 8, "width": 3, "max_passes": 3}
DRAFTS = ("small_model", "eagle3")


@pytest.fixture
def clock(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Run on a pretended device whose work takes the time of this clock. param: whether graphs have branches."""
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)
    monkeypatch.setattr(stored, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    clock = Clock()
    with cuda(clock, branches=getattr(request, "param", False)):
        yield clock


def engine_of(draft: str, **options: Any) -> Engine:
    model, other = on_the_device("eagle3" if draft == "eagle3" else "small_model", True)
    target = HuggingFaceTarget(model, captured=True)
    made: dict[str, Any] = {
        "small_model": lambda: SmallModel(other, target.vocab_size),
        "eagle3": lambda: EagleDraft(other, target.lm),
        "recycling": Recycling,
    }
    return Engine(target, made[draft](), policies.make("auto", **SHAPE | options))


def auto_of(engine: Engine) -> Auto:
    assert isinstance(engine.policy, Auto)
    return engine.policy


def seconds_of(engine: Engine, clock: Clock) -> dict[str, float]:
    """What the device takes for each graph."""
    assert engine.drivers.own.captured is not None
    found = engine.drivers.own.captured.graphs._captured
    return {str(name): known.graph.launches.total() * clock.node for name, known in found.items()}


def answer(engine: Engine, tokens: int = 12) -> list[Cycle]:
    return [piece.cycle for piece in engine.stream(PROMPT, max_new_tokens=tokens)]


WAYS = pytest.mark.parametrize(
    "clock", [False, True], indirect=True, ids=["passes as graphs", "trees as graphs"]
)


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_measured_is_what_graphs_take(draft: str, clock: Clock) -> None:
    """Not what was compiled meanwhile, nor what the host takes to launch; a pass has the policy's rule."""
    engine = engine_of(draft)
    answer(engine, 2)
    costs, real = auto_of(engine)._costs.base, seconds_of(engine, clock)
    level = real["level"] + clock.wake + clock.graph  # the host may read whether there is one
    assert costs.padded
    verify = costs.table(8, 3, 0).verify.tolist()
    assert verify[2:] == pytest.approx([real["finish greedy"]] * 7, rel=0.02)
    assert verify[1] == pytest.approx(real.get("plain greedy", verify[2]), rel=0.02)
    assert costs.table(8, 3, 0).draft[1] == pytest.approx(level, rel=0.02)
    overhead = real["first"] + max(0.0, real["root"] - real["level"])
    assert costs.overhead == pytest.approx(overhead, rel=0.03, abs=5 * (clock.wake + clock.graph))
    assert max(costs.verify_growth.values()) == pytest.approx(0.0, abs=1e-6)
    assert stored.find(engine.target, engine.drafter, engine.drivers.own.captured) is costs


def test_what_the_host_grows_and_walks_is_measured_without_compiling(clock: Clock) -> None:
    engine = engine_of("recycling")
    answer(engine, 2)
    costs, real = auto_of(engine)._costs.base, seconds_of(engine, clock)
    walked = 30 * (clock.eager + clock.node)  # the host sends the tree and chooses
    assert real["verify"] < costs.table(8, 3, 0).verify[1] < real["verify"] + walked
    assert costs.overhead < 0.1 < clock.compiling
    assert max(costs.draft.values()) < 0.1


def test_without_a_draft_a_cycle_is_a_verification(clock: Clock) -> None:
    model, _ = on_the_device("small_model", True)
    engine = Engine(HuggingFaceTarget(model, captured=True), None, None)
    costs = measuring.measure(engine.target, None, engine.drivers.own.captured)
    assert costs.plain == pytest.approx(seconds_of(engine, clock)["finish greedy"], rel=0.02)
    assert (costs.draft, costs.overhead) == ({1: 0.0}, 0.0)


@pytest.mark.slow
def test_a_measurement_keeps_to_its_time(clock: Clock) -> None:
    engine = engine_of("small_model")
    driver = engine.drivers.own.captured
    measuring.measure(engine.target, engine.drafter, driver)
    began = clock.now
    measuring.measure(engine.target, engine.drafter, driver, seconds=1.0)
    cycle = sum(seconds_of(engine, clock).values())
    assert 1.0 < clock.now - began < 1.0 + measuring.WARM_SECONDS + 4 * measuring.REHEARSED * cycle


@pytest.mark.slow
def test_measuring_leaves_the_engine_as_it_was(clock: Clock) -> None:
    engine, other = engine_of("eagle3"), engine_of("eagle3")
    driver = engine.drivers.own.captured
    assert driver is not None
    measuring.measure(engine.target, engine.drafter, driver, seconds=0.1)
    before = [tensor.held.clone() for tensor in driver._lasting()]  # type: ignore[attr-defined]
    costs = measuring.measure(engine.target, engine.drafter, driver, seconds=0.1)
    kept = auto_of(engine).state_on(driver.tree.device)
    assert all(
        torch.equal(now.held, then) for now, then in zip(kept, before[-len(kept) :], strict=True)
    )  # type: ignore[attr-defined]
    assert not engine.target.tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "find", lambda *_: costs)
        found = [
            [(cycle.tokens, cycle.tree.tokens.tolist()) for cycle in answer(made)]
            for made in (engine, other)
        ]
    assert found[0] == found[1]


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("draft", DRAFTS)
def test_cycles_are_timed_by_the_device(draft: str, clock: Clock) -> None:
    engine = engine_of(draft)
    answer(engine)
    cycles, real = answer(engine, 16), seconds_of(engine, clock)
    for cycle in cycles:
        seconds, passes = cycle.seconds, int(cycle.tree.passes)
        assert seconds.captured
        assert seconds.split
        assert seconds.verify == pytest.approx(real["finish greedy"], rel=0.02)
        grown = real["root"] + (passes - 1) * real["level"] if passes else 0.0
        # a pass for nothing
        tried = real["root"] if not passes and seconds.draft > 1.5 * real["first"] else 0.0
        assert seconds.draft == pytest.approx(real["first"] + grown + tried, rel=0.05)
        assert seconds.draft + seconds.verify == seconds.model <= seconds.total
    assert statistics.median(cycle.seconds.host for cycle in cycles) < 0.1 * real["finish greedy"]


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_prices_stay_where_nothing_changes(draft: str, clock: Clock) -> None:
    """Whatever the eager first cycle of an answer takes, which compiles and launches each operation."""
    engine = engine_of(draft)
    for _ in range(10):
        answer(engine)
    correction = auto_of(engine)._costs.corrections
    assert [correction.verify.factor, correction.draft.factor] == pytest.approx(
        [1.0, 1.0], rel=0.03
    )


@pytest.mark.slow
def test_prices_follow_a_device_that_becomes_slower(clock: Clock) -> None:
    engine = engine_of("eagle3")
    answer(engine)
    clock.node *= 2
    for _ in range(6):
        answer(engine, 24)
    assert auto_of(engine)._costs.corrections.verify.factor == pytest.approx(2.0, rel=0.1)


def test_pace_learns_from_cycles_on_the_device(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("eagle3")
    answer(engine)
    policy, seen, observe = auto_of(engine), list[tuple[int, float]](), Pace.observe

    def observed(
        self: Pace, tokens: int, seconds: float, plain: float, drafted: bool = False
    ) -> None:
        seen.append((tokens, seconds / plain))
        observe(self, tokens, seconds, plain, drafted)

    monkeypatch.setattr(Pace, "observe", observed)
    before = policy._pace._spread
    cycles = answer(engine, 24)
    assert [tokens for tokens, _ in seen] == [len(cycle.tokens) for cycle in cycles]
    assert all(1.0 <= ratio < 6.0 for _, ratio in seen)
    assert policy._pace._spread != before
    assert policy._costs.context == len(PROMPT) + 24  # so prices are those of the present context


def test_a_resting_pace_takes_no_cycle_with_a_tree_for_a_plain_one() -> None:
    pace = Pace()
    pace.resting = 3
    for _ in range(3):
        pace.observe(2, 9.0, 1.0, drafted=True)
    assert not pace.resting
    assert not pace._plain


def test_the_key_follows_what_kernels_depend_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(**options: Any) -> dict[str, Any]:
        engine = engine_of("eagle3", **options)
        return stored.identity(engine.target, engine.drafter, engine.drivers.own.captured)

    keys = [key(), key(width=2)]
    with monkeypatch.context() as patch:
        patch.setattr(stored, "_driver_version", lambda: "580.65.06")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(stored, "_version", lambda package="specengine": f"{package} 9")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setenv("SPECENGINE_BACKEND", "triton,reference")
        keys.append(key())
    assert len({stored.digest(found) for found in keys}) == len(keys)
    assert key() == keys[0]


def test_the_drivers_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    )
    monkeypatch.setattr(stored, "DRIVER_FACTS", file)
    assert stored._driver_version() == "580.65.06"


def test_on_a_cpu_a_driver_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceTarget(toy.tiny(), captured=True)
    engine = Engine(target, SmallModel(toy.near_copy()), policies.make("auto", **SHAPE))
    driver, given = engine.drivers.own.captured, list[Any]()
    assert stored.identity(target, engine.drafter, driver) == stored.identity(
        target, engine.drafter
    )
    assert (
        not {"policy", "triton", "ops", "cuda"}
        & stored.identity(target, engine.drafter, driver).keys()
    )

    def measure(*parts: Any) -> PassCosts:
        given.extend(parts)
        return PassCosts("mine", {1: 1.0}, {1: 1.0}, measured=True)

    monkeypatch.setattr(stored, "measure", measure)
    stored.find(target, engine.drafter, driver, fresh=True)
    assert given == [target, engine.drafter, None]
    assert dataclasses.asdict(measuring.measure(target, engine.drafter, seconds=0.1))["padded"]

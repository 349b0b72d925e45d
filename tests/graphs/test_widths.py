"""Trees are finished in as many rows as they need: the answers and waits of one width, and none where it cannot pay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specengine import Engine, policies
from specengine.costs import PassCosts, measuring
from specengine.costs.measuring import stored
from specengine.drafters.small_model import SmallModel
from specengine.engine.captured import CapturedDriver
from specengine.ops import cuda_graphs as graphs
from specengine.policies import TreePolicy
from tests import toy
from tests.graphs import engines, pretended
from tests.graphs.pretended import Clock
from tests.graphs.replays import PROMPT, WAYS, answer, engine_of
from tests.graphs.test_strict import strict_target
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
STEPS = PassCosts(
    "steps", {1: 1.0, 8: 1.05, 16: 1.1, 20: 1.2}, {1: 0.02}, padded=True, measured=True
)
SHAPES: dict[str, dict[str, Any]] = {
    "auto": {"budget": 20, "width": 3, "max_passes": 4, "costs": STEPS},
    "svip": {"width": 3, "expansions": 4, "budget": 20},
    "ddd": {"width": 3, "expansions": 5, "budget": 20, "checks": (1, 2, 3)},
}


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)


def policy_of(name: str) -> Any:
    return policies.make(name, **SHAPES[name])


def with_policy(policy: TreePolicy, draft: str = "small_model", *, captured: bool = True) -> Engine:
    engine = engine_of(draft, "eagle", captured=captured, least=True)
    engine.policy = policy
    return engine


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What graphs finish trees, by name."""
    names, run = Counter[str](), CapturedDriver._run

    def noted(self: CapturedDriver, name: str) -> Any:
        names[name] += name.startswith(("finish", "plain"))
        return run(self, name)

    monkeypatch.setattr(CapturedDriver, "_run", noted)
    return names


@pytest.mark.sliced(1)
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
@pytest.mark.parametrize("policy", [*SHAPES])
def test_answers_are_those_of_one_width(policy: str, draft: str, ran: Counter[str]) -> None:
    """Memory of a graph is garbage before it is replayed, so no padded row counts."""
    ways = WAYS[:1] if policy == "auto" else WAYS  # which learns from the cycle after an end
    host = with_policy(policy_of(policy), draft, captured=False)
    expected = [answer(host, way) for way in ways]
    with pretended.cuda():
        engine = with_policy(policy_of(policy), draft)
        engines.driver_of(engine).narrow = [16, 8]
        assert [answer(engine, way) for way in ways] == expected
    assert ran["finish 8"] + ran["finish 16"] > len(ways), ran
    assert set(engines.driver_of(engine).graphs.captures.values()) == {1}


def test_scratch_of_narrow_rows_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = CapturedDriver._grow

    def poisoned(self: CapturedDriver) -> str:
        cache = self.target.cache
        cache.slab[:, :, :, cache.length :] = math.nan
        for array in (self.tree.log_probs, self.tree.path_log_probs):
            array[1:] = math.nan
        return grow(self)

    policy = policy_of("ddd")
    expected = engines.engine_of("small_model", policy, captured=False).generate(
        engines.PROMPT, max_new_tokens=12
    )
    engine = engines.engine_of("small_model", policy, captured=True)
    engines.driver_of(engine).narrow = [16, 8]
    monkeypatch.setattr(CapturedDriver, "_grow", poisoned)
    with engines.frozen() as calls:
        answered = engine.generate(engines.PROMPT, max_new_tokens=12)
    assert answered.token_ids == expected.token_ids
    assert any(str(name).startswith(("finish 8", "finish 16")) for _, name in calls)


def test_the_host_waits_no_more_and_launches_the_same() -> None:
    waits, launches = list[int](), dict[str, int]()
    for narrow in ([], [16, 8]):
        with pretended.cuda() as device:
            engine = with_policy(policy_of("ddd"))
            driver = engines.driver_of(engine)
            driver.narrow = narrow
            engine.warmup(100)
            before = device.waits
            engine.generate(PROMPT, max_new_tokens=10)
            waits.append(device.waits - before)
            launches |= {
                str(name): known.graph.launches.total()
                for name, known in driver.graphs._captured.items()
            }
    assert waits[0] == waits[1]
    counts = [launches[f"finish{rows} greedy"] for rows in (" 8", " 16", "")]
    assert max(counts) - min(counts) < 5  # of those that pad


def test_a_width_is_captured_once_a_tree_needs_it_and_by_a_warmup(ran: Counter[str]) -> None:
    with pretended.cuda():
        engine = with_policy(policy_of("ddd"))
        driver = engines.driver_of(engine)
        driver.narrow = [16, 8]
        cycles = [piece.cycle for piece in engine.stream(PROMPT, max_new_tokens=16)]
        assert all(len(cycle.tree) <= 16 for cycle in cycles)
        # the first cycle is the host's; the first tree of a size that has no graph yet takes all rows
        assert ran["finish 16"] > 1
        assert not {"finish 8 greedy", "finish 16 sampled"} & {*driver.graphs.captures}
        names = engine.warmup(100).captured
    assert {f"finish {n} {way}" for n in (8, 16) for way in ("greedy", "sampled")} <= {*names}


def test_where_the_host_reads_no_size_or_rows_must_be_alike_there_is_one_width() -> None:
    with pretended.cuda():
        for policy, widths in (
            (policies.make("eagle", budget=40), []),
            (policy_of("auto"), [16, 8]),
        ):
            driver = engines.driver_of(with_policy(policy))
            assert driver.widths == widths
            driver.narrow_to(range(100))
            assert driver.narrow == widths
        short = policies.make("auto", budget=40, max_passes=1)
        assert engines.driver_of(with_policy(short)).widths == []
    with pretended.cuda(branches=True):
        assert engines.driver_of(with_policy(policy_of("auto"))).widths == []
    target = strict_target()
    drafter = SmallModel(engines.near_copy(), target.vocab_size)
    assert engines.driver_of(Engine(target, drafter, policy_of("auto"))).widths == []


def test_a_tree_that_the_last_pass_ends_takes_all_rows(ran: Counter[str]) -> None:
    policy = policies.make("ddd", **SHAPES["ddd"] | {"expansions": 1, "checks": (1,)})
    with pretended.cuda():
        engine = with_policy(policy)
        engines.driver_of(engine).narrow = [16, 8]
        cycles = [piece.cycle for piece in engine.stream(PROMPT, max_new_tokens=12)]
    last = [int(cycle.tree.passes) == policy.passes for cycle in cycles]
    assert any(last)
    assert all(len(cycle.tree) <= 16 for cycle in cycles)
    assert ran["finish"] >= sum(last)


# ---- where widths pay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Clock]:
    monkeypatch.setattr(stored, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    clock = Clock()
    with pretended.cuda(clock):
        yield clock


def by_rows(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """Have a finish take so many seconds a row longer."""
    run = CapturedDriver._run

    def slow(self: CapturedDriver, name: str) -> Any:
        result = run(self, name)
        if name.startswith("finish"):
            clock.busy = max(clock.busy, clock.now) + seconds * int(name[7:] or self.budget)
        return result

    monkeypatch.setattr(CapturedDriver, "_run", slow)


@pytest.mark.parametrize(("seconds", "widths"), [(0.0, []), (0.01, [16, 8])], ids=["flat", "steep"])
def test_widths_are_used_where_they_were_measured_to_pay(
    seconds: float, widths: list[int], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rows(monkeypatch, clock, seconds)
    policy: Any = policies.make("auto", **SHAPES["auto"] | {"costs": "measured"})
    engine = with_policy(policy)
    engine.generate(PROMPT, max_new_tokens=2)
    driver, costs = engines.driver_of(engine), policy._costs.base
    assert driver.narrow == widths
    assert sorted(costs.verify) == sorted([1, *widths, 20])
    assert PassCosts.from_dict(costs.to_dict()) == costs
    assert widths or not any(
        str(name).startswith(("finish 8", "finish 16")) for name in driver.graphs.captures
    )
    verify = costs.table(20, 3, 0).verify
    if widths:
        assert verify[8] - verify[1] > 0.07
        assert float(verify[9] - verify[8]) == pytest.approx(0.08, abs=0.01)
        assert float(verify[20] - verify[16]) == pytest.approx(0.04, abs=0.01)
    assert len({*verify[2:9].tolist()}) == len({*verify[9:17].tolist()}) == 1


def test_prices_of_widths_stay_where_nothing_changes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cycle corrects the price of the rows that it had."""
    by_rows(monkeypatch, clock, 0.01)
    policy: Any = policies.make("auto", **SHAPES["auto"] | {"costs": "measured"})
    engine = with_policy(policy)
    for _ in range(4):
        engine.generate(PROMPT, max_new_tokens=24)
    assert policy._costs.corrections.verify.factor == pytest.approx(1.0, rel=0.05)


def test_a_measurement_names_the_rows_that_are_worth_a_graph() -> None:
    driver: Any = type("Driver", (), {"policy": None, "budget": 64})
    parts = {"finish 32": 0.97, "finish 16": 0.8, "finish 8": 0.79, "plain": 0.7, "finish": 1.0}
    points, _ = measuring._points(driver, {"level": 0.0, "root": 0.1} | parts)
    assert points == {1: 0.7, 16: 0.8, 64: 1.0}
    assert measuring._points(driver, {"level": 0.0, "root": 0.1, "plain": 0.0, "finish": 1.0})[
        0
    ] == {64: 1.0}


def test_toys_have_the_widths_of_this_file() -> None:
    assert all(policy_of(name).ends_early for name in SHAPES)
    assert set(SHAPES) <= set(toy.POLICIES)

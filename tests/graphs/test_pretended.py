"""Captured cycles, replayed on a pretended CUDA device: the answers, trees and counters of the eager engine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine, ops, policies
from specengine.costs import PassCosts
from specengine.engine import generation
from specengine.engine.captured import PARTS_NOTE, CapturedDriver
from specengine.errors import UnsupportedModelError
from specengine.models import attention, eagle, kv_cache
from specengine.models.huggingface import CausalLM
from specengine.ops import _registry, cuda_graphs as graphs
from specengine.ops.cuda_graphs import Graphs
from tests import toy
from tests.graphs import pretended
from tests.graphs.pretended import CUDA, Refused
from tests.graphs.replays import (
    DRAFTS,
    POLICIES,
    PROMPT,
    WAYS,
    answer,
    check,
    engine_of,
    on_the_device,
)
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]


@pytest.fixture(autouse=True)
def _meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)


@pytest.mark.sliced(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_equal_the_eager_engine(policy: str) -> None:
    """Over two generations of one engine, whose first cycles run on the host; each draft meets every other policy."""
    for ways in toy.histories(policy, WAYS):
        check(DRAFTS[POLICIES.index(policy) % 2], policy, ways)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["talon", "auto"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_where_the_host_walks(draft: str, policy: str) -> None:
    check(
        draft,
        policy,
        [{"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 5, "typical_p": 0.9}],
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["talon", "auto"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_truncations_are_replayed(draft: str, policy: str) -> None:
    shape = {"temperature": 0.6, "seed": 5}
    ways = [shape | {"top_p": 0.9}, shape | {"top_p": 0.95, "min_p": 0.02}, shape | {"top_k": 9}]
    for together in toy.histories(policy, ways):
        captures = check(draft, policy, together).captures
        assert captures["finish truncated"] == 1
        assert "verify" not in captures


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["device", "host"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_caches_that_grow_within_an_answer(
    draft: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are captured again, between two cycles, and what lasts longer than a tree is as it was."""
    monkeypatch.setattr(generation, "MIN_ROOM", 4)
    monkeypatch.setattr(graphs, "MIN_SLOTS", 16)
    monkeypatch.setattr(kv_cache, "GRANULE", 8)
    captures = check(draft, "eagle", [options | {"max_new_tokens": 48}]).captures
    assert min(captures.values()) > 1


@pytest.mark.slow
def test_a_large_limit_takes_no_memory_of_its_own() -> None:
    with pretended.cuda():
        engine = engine_of("small_model", "eagle", captured=True)
        engine.target.max_context = 1 << 30
        end = engine.generate(PROMPT, max_new_tokens=8).token_ids[5]
        options: dict[str, Any] = {"max_new_tokens": 10**6, "eos_token_id": end}
        assert engine.generate(PROMPT, **options).finish_reason == "stop"
        assert engine.target.cache.capacity < 2048  # type: ignore[attr-defined]


def test_capacities_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_SLOTS", 1024)
    for slots in (1, 1024, 1025, 2049, 8300, 33000, 131072, 131136):
        capacity = graphs.room(slots)
        assert slots <= capacity <= max(1024, slots * 9 / 8)
        assert graphs.room(capacity) == capacity
    assert graphs.room(131136, 131200) == 131200
    assert graphs.room(900, 1000) == 1000
    assert graphs.room(1100, 1000) == 1100


def test_prompts_on_a_device_run_by_our_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's would be planned anew for each length, of the target and of the head."""
    wanted = answer(engine_of("eagle3", "eagle", captured=False), {})

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's attention over a prompt")

    with pretended.cuda():
        engine = engine_of("eagle3", "eagle", captured=True)
        engine.target.want(engine.drafter.traits.features)  # which looks at a token
        monkeypatch.setattr(attention, "sdpa_attention_forward", refuse)
        monkeypatch.setattr(eagle, "causal", refuse)
        assert answer(engine, {}) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_where_no_tree_pays_a_cycle_verifies_one_row(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in plain decoding, and not the rows of the largest tree."""
    costs = PassCosts("a draft that never pays", {1: 1.0}, {1: 50.0})
    policy = policies.make("auto", budget=8, width=3, max_passes=3, costs=costs)
    ran, run = Counter[str](), CapturedDriver._run
    rows, forward = dict[str, set[int]](), CausalLM.forward

    def noted(self: CapturedDriver, name: str) -> Any:
        ran[name] += 1
        return run(self, name)

    def counted(self: CausalLM, tree: Any, *given: Any, **more: Any) -> Any:
        if self is engine.target.lm:
            rows.setdefault(list(ran)[-1], set()).add(len(tree))
        return forward(self, tree, *given, **more)

    wanted = engine_of(draft, "eagle", captured=False).generate(PROMPT, max_new_tokens=9)
    with pretended.cuda():
        engine = engine_of(draft, "eagle", captured=True)
        engine.policy = policy
        engine.generate(PROMPT, max_new_tokens=3)  # captures
        ran.clear()
        monkeypatch.setattr(CapturedDriver, "_run", noted)
        result = engine.generate(PROMPT, max_new_tokens=9)
        assert (ran["plain"], ran["finish"], ran["root"]) == (9, 0, 0)
        engine.drivers.own.captured.graphs.drop("plain greedy", "finish greedy")
        ran.clear()
        monkeypatch.setattr(CausalLM, "forward", counted)
        engine.warmup(64)
    assert result.token_ids == wanted.token_ids
    assert (rows["plain"], rows["finish"]) == ({1}, {8})


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_where_a_tree_is_one_graph(policy: str) -> None:
    for ways in toy.histories(policy, WAYS):
        captures = check(DRAFTS[POLICIES.index(policy) % 2], policy, ways, branches=True).captures
        names = {name.partition(" ")[0] for name in map(str, captures)}
        assert names in ({"tree", "finish"}, {"root", "level", "finish"})
        assert ("tree" in names) == toy.policy_for(policy, 3).ends_early


@pytest.mark.sliced(1)
@pytest.mark.parametrize(
    ("policy", "branches"), [("auto", False), ("auto", True), ("eagle", False)]
)
def test_waits_of_a_cycle(policy: str, branches: bool) -> None:
    """The host reads the record; where a tree may end early and is not one graph, also after each pass if it has ended.

    After the first one it reads with that whether it was run.
    """
    with pretended.cuda(branches=branches) as device:
        engine = engine_of("small_model", policy, captured=True)
        engine.generate(PROMPT, max_new_tokens=4)
        waits, passes = list[int](), list[int]()
        for piece in engine.stream(PROMPT, max_new_tokens=16):
            passes.append(int(piece.cycle.tree.passes))
            waits.append(device.waits)
    reads = (
        [0] * len(passes)
        if branches or policy == "eagle"
        else [max(number, 1) for number in passes]
    )
    assert len(waits) > 4
    found = [after - before for before, after in itertools.pairwise(waits[:-1])]
    # of a cycle's record, and of the tree that is grown meanwhile; the second one is grown behind the first token
    expected = [1 + number for number in reads[2:]]
    expected[0] += reads[1]
    assert found == expected


@pytest.mark.slow
def test_a_tree_that_is_another_as_one_graph_is_grown_by_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = answer(engine_of("small_model", "talon", captured=False), {})

    def never(self: pretended.Branching, flag: Any) -> None:
        begin(self, flag & False)

    def refused(self: pretended.Branching, flag: Any) -> None:
        raise RuntimeError("no conditional nodes here")

    begin = pretended.Branching.begin_capture_to_if_node
    for broken in (never, refused):
        monkeypatch.setattr(pretended.Branching, "begin_capture_to_if_node", broken)
        with pretended.cuda(branches=True):
            engine = engine_of("small_model", "talon", captured=True)
            assert answer(engine, {}) == wanted
            driver = engine.drivers.own.captured
            assert driver is not None
            assert set(driver.graphs.captures) == {"root", "level", "finish greedy"}
            assert PARTS_NOTE in engine.generate(PROMPT, max_new_tokens=4).stats.notes


def test_on_a_device_graphs_are_the_default() -> None:
    with pretended.cuda():
        model, other = on_the_device("small_model", False)
        engine = Engine.from_pretrained(model, other, "eagle")
        assert engine.drivers.own.captured is not None
        assert engine.drivers.own.captured.grows_there
        assert not Engine.from_pretrained(model, other, graphs=False).target.captured


# ---- the device can fail


def graph_of(function: Callable[[], Any]) -> Callable[[], Any]:
    part = Graphs(CUDA)
    return lambda: part.run("f", [], function)


def test_a_replay_runs_on_the_same_memory() -> None:
    with pretended.cuda():
        given, sums = torch.zeros(2, device=CUDA), torch.zeros(2, device=CUDA)
        run = graph_of(lambda: (sums.add_(given), sums * 2)[1])
        run()
        assert sums.tolist() == [0.0, 0.0]  # warm-ups have run, a capture writes nothing
        given.fill_(1.0)
        assert [run().tolist() for _ in range(2)] == [[2.0, 2.0], [4.0, 4.0]]


def test_a_number_of_the_host_is_frozen() -> None:
    with pretended.cuda():
        numbers = iter(range(100))
        run = graph_of(lambda: torch.zeros(1, device=CUDA) + next(numbers))
        assert run().tolist() == run().tolist()


def test_memory_that_nobody_keeps_is_missed() -> None:
    with pretended.cuda():
        made = [torch.zeros(3, device=CUDA)]
        run = graph_of(lambda: made[0] + 1)
        assert run().tolist() == [1.0] * 3
        made.clear()
        with pytest.raises(Refused, match="freed since its capture"):
            run()


def test_fresh_memory_is_garbage() -> None:
    with pretended.cuda():
        run = graph_of(lambda: torch.empty(2, device=CUDA))
        run()
        assert run().view(torch.uint8).eq(pretended.GARBAGE).all()


def test_branches_of_a_graph_run_in_another_order() -> None:
    """The last one first, so that one which reads what another writes is seen; what follows waits for all."""
    with pretended.cuda():
        values, total = torch.zeros(3, device=CUDA), torch.zeros(1, device=CUDA)

        def count(place: int) -> None:
            total.add_(1)
            values[place].copy_(total[0])

        def apart() -> Tensor:
            total.zero_()
            graphs.side_by_side(CUDA, [lambda i=i: values[i].copy_(total[0] + i) for i in range(3)])
            return values.sum(0, keepdim=True)

        def mixed() -> Tensor:
            total.zero_()
            graphs.side_by_side(CUDA, [lambda i=i: count(i) for i in range(3)])
            return values.clone()

        assert graph_of(apart)().tolist() == [3.0]
        assert graph_of(mixed)().tolist() == [3.0, 2.0, 1.0]
        mixed()  # not in a capture
        assert values.tolist() == [1.0, 2.0, 3.0]


def test_branches_are_counted_by_the_longest() -> None:
    with pretended.cuda():
        rows = torch.zeros(3, 2, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            rows.add_(1)
            graphs.side_by_side(CUDA, [lambda: rows[0].add_(1).add_(1), lambda: rows[1].add_(1)])
            rows.sum()
        assert sum(graph.launches.values()) == 5  # type: ignore[attr-defined]
        assert graph.chain == 4  # type: ignore[attr-defined]


def test_a_branch_that_nobody_waits_for_is_refused() -> None:
    with pretended.cuda():
        numbers, stream = torch.zeros(2, device=CUDA), torch.cuda.Stream()

        def lost() -> None:
            numbers.add_(1)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                numbers.add_(1)

        with pytest.raises(graphs.CaptureError, match="unjoined work"):
            graph_of(lost)()


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_of_products_are_made_within_each_capture(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the warm-ups stand in ordinary memory, and what another capture clears no graph may read."""
    said: list[str] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("clear"), raising=False
    )
    with pretended.cuda() as device:

        def function() -> Tensor:
            inside = device.capturing is not None
            said.append("capture" if inside else "warm-up")
            if inside and fails:
                raise RuntimeError("not here")
            return torch.zeros(1, device=CUDA)

        run = graph_of(function)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="not here") if fails else nullcontext():
                run()
    once = [*["warm-up"] * graphs.WARM_UPS, "clear", "capture", "clear"]
    assert said == (once * 2 if fails else once)


def test_memory_of_a_graph_is_what_it_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the warm-ups leave in the cache is returned before, and so hides nothing."""
    reserved = {"cached": 0, "graphs": 0}
    with pretended.cuda() as device:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: sum(reserved.values()))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.update(cached=0))

        def function() -> Tensor:
            reserved["graphs" if device.capturing is not None else "cached"] += 100
            return torch.zeros(1, device=CUDA)

        part = Graphs(CUDA)
        for name in range(3):
            part.run(name, [], function)
    assert part.bytes == 300


@pytest.mark.parametrize(
    "function",
    [
        lambda given: given * float(given.sum()),
        lambda given: given[given > 0],
        lambda given: given.cpu(),
        lambda given: given + torch.ones(2).to(CUDA),
        lambda given: torch.tensor([1.0], device=CUDA),
        lambda given: given + torch.ones(2),
        lambda given: given[torch.tensor([0, 1])],
    ],
)
def test_what_waits_for_the_host_cannot_be_captured(function: Callable[[Tensor], Any]) -> None:
    with pretended.cuda() as device:
        given = torch.ones(2, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(Refused), torch.cuda.graph(graph):
            function(given)
        assert device.capturing is None


def test_a_number_from_a_kernel_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "triton")
    monkeypatch.setattr(_registry, "_loaded", lambda _: {"choose_tokens": lambda *_: 3})
    with pretended.cuda():
        logits = torch.ones(1, 4, device=CUDA)
        assert ops.choose_tokens(logits) == 3
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(Refused, match="a number from"),
        ):
            ops.choose_tokens(logits)

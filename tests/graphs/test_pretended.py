"""Captured cycles, replayed on a pretended CUDA device: the answers, trees and counters of the eager engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine, ops
from specengine import cuda_graphs as graphs
from specengine.cuda_graphs import Graphs
from specengine.drafters.eagle import Eagle
from specengine.drafters.small_model import SmallModel
from specengine.errors import UnsupportedModelError
from specengine.targets.huggingface import HuggingFaceTarget
from tests import toy
from tests.graphs import pretended
from tests.graphs.pretended import CUDA, Refused

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
PROMPT = [*range(40, 56), *range(40, 50)]
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
POLICIES = [name for name in toy.POLICIES if name != "random"]  # what that does depends on its own past
COUNT = 7


@pytest.fixture(autouse=True)
def _meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ops.VARIABLE, "reference")
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 128)


def parts_of(draft: str) -> tuple[Any, Any]:
    """New modules of a target and of its draft."""
    model = toy.tiny("llama", num_hidden_layers=2 if draft == "small_model" else 4)
    return model, toy.near_copy() if draft == "small_model" else toy.tiny_head(toy.head_config(3, model))


@cache
def on_the_device(draft: str) -> tuple[Any, Any]:
    model, other = parts_of(draft)
    return pretended.moved(model), pretended.moved(other)


@cache
def on_the_host(draft: str) -> tuple[Any, Any]:
    return parts_of(draft)


def engine_of(draft: str, policy: str, *, captured: bool) -> Engine:
    model, other = on_the_device(draft) if captured else on_the_host(draft)
    target = HuggingFaceTarget(model, captured=captured)
    drafter = SmallModel(other, target.vocab_size) if draft == "small_model" else Eagle(other, target.lm)
    return Engine(target, drafter, toy.policy_for(policy, 3))


def answer(engine: Engine, options: dict[str, Any]) -> Any:
    """Tokens, each cycle's tree and path, and the counters."""
    stream = engine.stream(PROMPT, max_new_tokens=COUNT, **options)
    cycles = [piece.cycle for piece in stream]
    trees = [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.path, cycle.tokens) for cycle in cycles]
    stats = stream.result.stats
    counters = stats.num_draft_tokens, stats.num_draft_passes, stats.acceptance_histogram, stats.reached_histogram
    return stream.result.token_ids, trees, counters, [cycle.drafted for cycle in cycles]


def check(draft: str, policy: str, ways: list[dict[str, Any]] = WAYS) -> None:
    host = engine_of(draft, policy, captured=False)  # one engine here as well: a history outlives a generation
    expected = [answer(host, way) for way in ways]
    with pretended.cuda():
        engine = engine_of(draft, policy, captured=True)
        for way, wanted in zip(ways, expected, strict=True):
            assert engine._captured is not None
            assert answer(engine, way) == wanted
            assert all(known.graph is not None for known in engine._captured.graphs._captured.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_replays_equal_the_eager_engine(policy: str) -> None:
    """Over two generations of one engine, whose first cycles run on the host; each draft meets every other policy."""
    check(("small_model", "eagle3")[POLICIES.index(policy) % 2], policy)


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_where_the_host_walks(draft: str) -> None:
    check(draft, "talon", [{"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 5, "top_k": 9}])


def test_on_a_device_graphs_are_the_default() -> None:
    with pretended.cuda():
        model, other = on_the_device("small_model")
        engine = Engine.from_pretrained(model, other, "eagle")
        assert engine._captured is not None
        assert engine._captured.grows_there
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


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_of_products_are_made_within_each_capture(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the warm-ups stand in ordinary memory, and what another capture clears no graph may read."""
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("clear"), raising=False)
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

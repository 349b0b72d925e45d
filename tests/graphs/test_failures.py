"""Captures that fail: what waits is refused before a capture, and graphs that nobody asked for are done without; and
how many graphs an engine keeps.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine
from specengine.costs import ASSUMED
from specengine.costs.measuring import stored
from specengine.engine.captured import NOTE, CapturedDriver
from specengine.errors import InputError
from specengine.ops import cuda_graphs as graphs
from specengine.ops.cuda_graphs import CaptureError, Graphs
from tests import toy
from tests.graphs import pretended
from tests.graphs.pretended import CUDA
from tests.graphs.replays import PROMPT, on_the_device, on_the_host
from tests.ops.backends import choose

pytestmark = pytest.mark.usefixtures("one_thread")
without_a_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
GREEDY = {"max_new_tokens": 6}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[pretended.Device]:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)
    with pretended.cuda() as found:
        yield found


def run(function: Any, part: Graphs | None = None) -> Any:
    return (part or Graphs(CUDA)).run("f", [], function)


# ---- one capture


@without_a_device
@pytest.mark.parametrize("before", [0, "warn"])
def test_what_waits_is_refused_before_a_capture(
    device: pretended.Device, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: begun.append("a capture"))
    device.sync_debug_mode = before
    ones = torch.ones(2, device=CUDA)
    with pytest.raises(
        CaptureError, match=r"graphs: f cannot be captured \(called a synchronizing CUDA operation"
    ):
        run(lambda: ones * float(ones.sum()))
    assert not begun
    assert device.sync_debug_mode == before
    assert float(ones.sum()) == 2.0


@without_a_device
def test_other_threads_may_wait_before_a_capture(device: pretended.Device) -> None:
    """As one does that loads a model meanwhile; torch's own mode would raise an error there."""
    ones = torch.ones(2, device=CUDA)

    def function() -> Tensor:
        if device.capturing is None:
            with ThreadPoolExecutor(1) as others:
                others.submit(device.wait, "another thread").result()
        return ones * 2

    assert run(function).tolist() == [2.0, 2.0]


class OutOfResources(Exception):
    """As Triton's, which is no RuntimeError."""


@without_a_device
@pytest.mark.parametrize(
    "error", [RuntimeError("no\nmore"), OutOfResources("no"), NotImplementedError("no")]
)
def test_a_capture_that_fails_leaves_the_process_usable(
    device: pretended.Device, error: Exception
) -> None:
    part, before = Graphs(CUDA), torch.cuda.current_stream()
    run(lambda: torch.zeros(1, device=CUDA), part)
    pool, stream = part._pool, part._stream

    def fails() -> Tensor:
        if device.capturing is not None:
            raise error
        return torch.ones(1, device=CUDA)

    with pytest.raises(
        CaptureError, match=r"cannot be captured \(no\); load with graphs=False"
    ) as found:
        part.run("g", [], fails)
    assert found.value.__cause__ is error
    assert torch.cuda.current_stream() is before
    assert device.capturing is None
    assert "g" not in part.captures
    assert run(lambda: torch.ones(1, device=CUDA), part).tolist() == [
        0.0
    ]  # the graph captured before
    assert part.run("h", [], lambda: torch.ones(1, device=CUDA)).tolist() == [1.0]
    assert part._pool is not pool
    assert part._stream is not stream


@without_a_device
def test_errors_of_ours_say_enough(device: pretended.Device) -> None:
    def fails() -> None:
        raise InputError("policy: which only EAGLE heads give")

    with pytest.raises(InputError, match="which only EAGLE heads give"):
        run(fails)


@without_a_device
def test_a_pool_goes_with_its_last_graph(device: pretended.Device) -> None:
    model, part = torch.nn.Linear(1, 1), Graphs(CUDA)
    part.require_same(model)
    for moved in (False, True, False):
        assert part.require_same(model) == moved
        assert run(lambda: torch.ones(1, device=CUDA), part).tolist() == [1.0]
        if not moved:
            model.weight = torch.nn.Parameter(torch.ones(1, 1, device=CUDA))


def test_buffers_are_watched() -> None:
    model, part = torch.nn.BatchNorm1d(2), Graphs(torch.device("cpu"))
    part.require_same(model)
    assert not part.require_same(model)
    model.register_buffer("running_mean", torch.ones(2))
    assert part.require_same(model)


@without_a_device
def test_memory_that_another_graph_has_given_up_is_missed(device: pretended.Device) -> None:
    part, made = Graphs(CUDA), list[Tensor]()
    part.run("first", [], lambda: made.insert(0, torch.ones(3, device=CUDA)))

    def again() -> Any:
        return part.run("second", [], lambda: made[0] + 1)

    assert again().tolist() == [2.0] * 3
    made.clear()
    with pytest.raises(pretended.Refused, match="freed since its capture"):
        again()


@without_a_device
def test_a_graph_may_write_to_what_its_pools_others_have_given_up(device: pretended.Device) -> None:
    part, kept = Graphs(CUDA), torch.zeros(3, device=CUDA)
    first = part.run("first", [], lambda: kept + 1 + 1)
    graph = part._captured["first"].graph
    part.run("second", [], lambda: kept + 5)
    garbage = [block for block in graph._own.values() if block.eq(pretended.GARBAGE).all()]
    assert len(garbage) == 1  # the sum between
    assert first.tolist() == [2.0] * 3


@pytest.mark.gpu
def test_on_a_device_the_same_is_refused() -> None:
    """In a process of its own, as a capture that fails may ruin it."""
    subprocess.run([sys.executable, "-c", ON_A_DEVICE], check=True, timeout=300)


ON_A_DEVICE = """
import torch
from specengine.ops.cuda_graphs import CaptureError, Graphs

DEVICE = torch.device("cuda", torch.cuda.current_device())
given, part, host = torch.ones(1, device=DEVICE), Graphs(DEVICE), torch.ones(1)


def refused(name, function):
    before = torch.cuda.current_stream()
    try:
        part.run(name, [given], function)
    except CaptureError as error:
        print(error)
    else:
        raise AssertionError(name)
    assert torch.cuda.current_stream() == before
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.empty_cache()


def in_a_capture():
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return given * 2


assert part.run("before", [given], lambda: given + 1).tolist() == [2.0]
refused("waiting", lambda: given * float(given))
refused("nonzero", lambda: given.nonzero())
refused("unseen", in_a_capture)  # sync debug mode has nothing to say about it
assert part.run("before", [given], lambda: given + 1).tolist() == [2.0]
for number in range(3):
    assert part.run(number, [given], lambda: (given * 2 @ given)[None] + given).tolist() == [3.0]
given.fill_(2.0)
assert part.run(0, [given], lambda: None).tolist() == [10.0]
assert part.run("before", [given], lambda: None).tolist() == [3.0]
"""


# ---- engines


def waiting(self: CapturedDriver) -> None:
    """Stand for the forward of a model that waits for the device, after it has changed what lasts."""
    for tensor in self._lasting():
        tensor.add_(1)
    float(self.sampler.temperature)


def loaded(policy: Any, **options: Any) -> Engine:
    return Engine.from_pretrained(*on_the_device("small_model", False), policy, **options)


def expected(policy: Any) -> list[int]:
    engine = Engine.from_pretrained(*on_the_host("small_model", False), policy, lookup=False)
    return list(engine.generate(PROMPT, **GREEDY).token_ids)


@pytest.mark.slow
@without_a_device
@pytest.mark.parametrize("warm", [False, True])
def test_graphs_that_nobody_asked_for_are_done_without(
    device: pretended.Device, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected("eagle")
    monkeypatch.setattr(CapturedDriver, "run_finish", waiting)
    engine = loaded(toy.policy_for("auto"))
    early = engine.stream(PROMPT, **GREEDY)
    assert engine.target.captured
    before = [tensor.clone() for tensor in engine.policy.state_on(CUDA)]
    assert before
    if warm:
        assert engine.warmup(64).captured == ()
        assert all(map(torch.equal, engine.policy.state_on(CUDA), before))
    for stream in (
        engine.stream(PROMPT, **GREEDY),
        early,
        engine.stream(PROMPT, policy="eagle", **GREEDY),
    ):
        found = stream.run()
        assert found.token_ids == wanted
        noted = [note for note in found.stats.notes if note.startswith("graphs:")]
        assert len(noted) == 1
        assert "cannot be captured (called a synchronizing" in noted[0]
        assert noted[0].endswith("; cycles run without graphs")
    assert not engine.target.captured
    assert engine.drivers.own.captured is None


@without_a_device
def test_graphs_that_were_asked_for_are_an_error(
    device: pretended.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded("talon", graphs=True)
    with monkeypatch.context() as patch:
        patch.setattr(CapturedDriver, "run_finish", waiting)
        for fails in (lambda: engine.generate(PROMPT, **GREEDY), lambda: engine.warmup(64)):
            with pytest.raises(CaptureError, match=r"graphs: finish .* cannot be captured"):
                fails()
    assert engine.target.captured
    assert engine.generate(PROMPT, **GREEDY).token_ids


@without_a_device
def test_a_capture_may_fail_while_costs_are_measured(
    device: pretended.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, asked = expected("eagle"), list[bool]()

    def find(target: Any, drafter: Any, driver: Any = None) -> Any:
        asked.append(target.captured)
        if target.captured:
            raise CaptureError("graphs: verify cannot be captured (no); load with graphs=False")
        return ASSUMED

    monkeypatch.setattr(stored, "find", find)
    found = loaded("auto").generate(PROMPT, **GREEDY)
    assert found.token_ids == wanted
    assert asked == [True, False]
    assert [note for note in found.stats.notes if note.startswith("graphs: verify cannot")]


@pytest.mark.slow
@without_a_device
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError("no")]
)
def test_a_capture_without_memory_makes_one_answer_eager(
    device: pretended.Device, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, engine, record = expected("eagle"), loaded("eagle"), Graphs._record
    failing = [error]

    def scarce(self: Graphs, function: Any) -> Any:
        if failing:
            raise failing.pop()
        return record(self, function)

    monkeypatch.setattr(Graphs, "_record", scarce)
    first, second = (engine.generate(PROMPT, **GREEDY) for _ in range(2))
    assert first.token_ids == second.token_ids == wanted
    notes = [note for note in first.stats.notes if note.startswith("graphs:")]
    assert [note.endswith("; this answer's cycles ran without graphs") for note in notes] == [True]
    assert NOTE in second.stats.notes
    assert len([note for note in second.stats.notes if note.startswith("graphs:")]) == 1
    assert engine.target.captured
    assert engine.drivers.own.captured is not None


@pytest.mark.slow
@without_a_device
def test_a_capture_without_memory_is_an_input_error_where_graphs_were_asked_for(
    device: pretended.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded("eagle", graphs=True)

    def scarce(self: Graphs, function: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "_record", scarce)
        with pytest.raises(InputError, match=r"graphs: root cannot .* \(CUDA out of memory. Tried"):
            engine.generate(PROMPT, **GREEDY)
    assert engine.generate(PROMPT, **GREEDY).token_ids == expected("eagle")


# ---- how many are kept


def test_engines_keep_the_graphs_of_the_last_policies() -> None:
    model, other = on_the_host("small_model", False)
    engine = Engine.from_pretrained(model, other, "talon", graphs=True)
    names = ["eagle", "chain", "fixed", "dynatree", "svip", "opt_tree"]
    kept = [engine.drivers.asked(name) for name in names]
    captured = [weakref.ref(drivers.captured) for drivers in kept]
    eager = [drivers.eager for drivers in kept]
    del kept
    gc.collect()
    assert [graph() is not None for graph in captured] == [False, False, True, True, True, True]
    own = engine.drivers.asked("talon")
    assert own is engine.drivers.own
    again = engine.drivers.asked("eagle")
    assert again.eager is eager[0]  # with what its policy has learnt
    assert again.captured is not None
    assert again.captured.policy is again.policy
    assert engine.drivers.asked("dynatree").captured is captured[3]()
    engine.drivers.asked("chain")
    gc.collect()
    assert [graph() is not None for graph in captured] == [False, False, False, True, False, True]
    assert engine.generate(PROMPT, policy="eagle", **GREEDY).token_ids == expected("eagle")

"""Threads on one device: cycles run at once, a capture runs alone, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.engine.captured import CapturedDriver
from specengine.ops import cuda_graphs as graphs
from specengine.ops.cuda_graphs import Graphs, Turns, sharing, turns
from tests.graphs import pretended
from tests.graphs.pretended import CUDA
from tests.graphs.replays import PROMPT, engine_of
from tests.ops.backends import choose

LONG = 10.0  # seconds, after which something waits for ever
without_a_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as threads:
        return [done.result(LONG) for done in [threads.submit(function) for function in functions]]


def test_cycles_run_at_once() -> None:
    device, together = Turns(), threading.Barrier(3)

    def cycle() -> None:
        with device.running(), device.running():
            together.wait(LONG)

    at_once(*[cycle] * 3)


def test_a_capture_waits_for_cycles_and_cycles_for_a_capture() -> None:
    device, began, said = Turns(), threading.Event(), list[str]()

    def cycle() -> None:
        with device.running():
            began.set()
            while not device._waiting:
                pass
            said.append("cycle")

    def capture() -> None:
        began.wait(LONG)
        with device.capturing():
            said.append("capture")
            waits.set()
            threading.Event().wait(0.05)
            said.append("captured")

    waits = threading.Event()

    def next_cycle() -> None:
        waits.wait(LONG)
        with device.running():
            said.append("next cycle")

    at_once(cycle, capture, next_cycle)
    assert said == ["cycle", "capture", "captured", "next cycle"]


def test_two_threads_that_run_cycles_may_both_capture() -> None:
    device, together, inside = Turns(), threading.Barrier(2), list[int]()

    def capture() -> None:
        with device.running(), device.running():
            together.wait(LONG)
            for _ in range(20):
                with device.capturing():
                    inside.append(len(inside))
                    assert len(device._running) == 0
                    with device.running():  # what is captured may ask for that
                        pass
                assert device._captures != threading.get_ident()
                assert device._running[threading.get_ident()] == 2

    at_once(capture, capture)
    assert inside == list(range(40))
    assert not device._running
    assert not device._waiting


@pytest.mark.parametrize("kind", ["running", "capturing"])
def test_an_error_leaves_no_turn_taken(kind: str) -> None:
    device = Turns()
    for within in (nullcontext, device.running):
        with pytest.raises(ValueError, match="no"), within(), getattr(device, kind)():
            raise ValueError("no")
    assert not device._running
    assert device._captures is None
    with device.capturing():
        pass


def test_a_device_has_turns_of_its_own_and_a_cpu_none() -> None:
    assert turns(CUDA) is turns(torch.device("cuda", 0)) is not turns(torch.device("cuda", 1))
    assert sharing(torch.device("cpu"), nullcontext) is nullcontext


@pytest.mark.slow
@without_a_device
def test_captures_and_cycles_take_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)
    device, me = turns(CUDA), threading.get_ident()
    seen: dict[str, set[bool]] = {}

    def noted(owner: Any, name: str, holds: Callable[[], bool]) -> None:
        function = getattr(owner, name)

        def noting(self: Any, *given: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(holds())
            return function(self, *given, **options)

        monkeypatch.setattr(owner, name, noting)

    noted(Graphs, "_record", lambda: device._captures == me and not device._running)
    noted(CapturedDriver, "_grow", lambda: me in device._running)
    noted(CapturedDriver, "verify", lambda: me in device._running)
    with pretended.cuda():
        engine = engine_of("small_model", "eagle", captured=True)
        engine.warmup(64)
        for way in ({}, {"repetition_penalty": 1.3}):
            engine.generate(PROMPT, max_new_tokens=4, **way)
    assert seen == {name: {True} for name in ("_record", "_grow", "verify")}
    assert not device._running


@without_a_device
def test_scores_that_nobody_reads_hold_up_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    with pretended.cuda():
        scores = engine_of("small_model", "eagle", captured=True).score(PROMPT)
        next(scores)
        assert not turns(CUDA)._running
        scores.close()


@pytest.mark.gpu
def test_engines_of_threads_capture_and_answer_at_once() -> None:
    """In a process of its own, as a capture that fails may ruin it."""
    subprocess.run(
        [sys.executable, "-c", ON_A_DEVICE], check=True, timeout=300, cwd=Path(__file__).parents[2]
    )


ON_A_DEVICE = """
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.graphs.engines import PROMPT, engine_of

WAYS = [{}, {"policy": "chain"}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3}, {"policy": "plain"}] * 2
sys.setswitchinterval(1e-4)  # so that threads take turns often


def answers(draft, captured):
    engine = engine_of(draft, "talon", captured=captured)
    return [engine.generate(PROMPT, max_new_tokens=24, **way).token_ids for way in WAYS]


drafts = ["small_model", "eagle3", "small_model", "eagle3"]
wanted = [answers(draft, False) for draft in drafts]
with ThreadPoolExecutor(len(drafts)) as threads:
    found = list(threads.map(answers, drafts, [True] * len(drafts)))
assert found == wanted
"""

"""The journey of one cycle through the package: files entered, calls, changes of file and calls of C++.

Counted by sys.setprofile while `next` of a stream runs one cycle, up to its piece of text. Each entry of a function of
the package counts as a call, and so does a generator that goes on; an entry counts as a change of file when the last
one was in another file. C++ calls are those of functions of the package's own extension modules. Of the cycles of an
answer each figure is the largest; its first cycle, which also takes in the prompt, and its last one are left out.

The engine is the default one, with published costs and on a named instruction set, so that no tree depends on measured
time or on the machine. An answer before has done what is done once.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, NamedTuple

import pytest
import torch

import specengine
from specengine import Engine

PACKAGE = str(Path(specengine.__file__).parent) + os.sep
COSTS = {"costs": "2-cores-amx"}
INSTRUCTIONS = "avx2"
WARM_UP, PROMPT = "List the days of the week.", "Write a Python function that adds two numbers."
WARM_UP_TOKENS, TOKENS = 8, 24
PASSES = 4  # of the cycle of `auto` that has a budget
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "salf/cpu": {"policy": "salf/cpu"},
    "eagle/cpu": {"policy": "eagle/cpu"},
    "chain": {"policy": "chain"},
    "plain": {"policy": "plain"},
}


@dataclass
class Journey:
    """Counts of one run."""

    files: set[str] = field(default_factory=set)
    calls: int = 0
    changes: int = 0
    native: int = 0


class Walked(NamedTuple):
    """A cycle's journey, and the draft passes and nodes of its tree."""

    journey: Journey
    passes: int
    nodes: int


def watched(run: Callable[[], Any]) -> tuple[Journey, Any]:
    """Run a function; return its journey and its result."""
    journey, compiled, last = Journey(), extensions(), ""

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal last
        if event == "c_call":
            journey.native += getattr(argument, "__module__", None) in compiled
        elif event == "call" and (file := frame.f_code.co_filename).startswith(PACKAGE):
            journey.calls += 1
            journey.files.add(file.removeprefix(PACKAGE))
            journey.changes += file != last
            last = file

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        value = run()
    finally:
        sys.setprofile(before)
    return journey, value


def extensions() -> set[str]:
    """Return the names of the package's loaded modules that are compiled."""
    endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    return {
        name for name, file in files.items() if file.startswith(PACKAGE) and file.endswith(endings)
    }


def unseen() -> list[str]:
    """Return the functions of extension modules whose calls sys.setprofile does not report."""
    return [
        f"{name}.{key}"
        for name in sorted(extensions())
        for key, value in vars(sys.modules[name]).items()
        if callable(value) and not isinstance(value, type | BuiltinFunctionType)
    ]


@contextmanager
def _one_machine() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECENGINE_CPU", INSTRUCTIONS)
        patch.delenv("SPECENGINE_BACKEND", raising=False)
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


def _load() -> Engine:
    return Engine.from_pretrained(policy="auto", policy_options=COSTS)


def _cycles(engine: Engine, options: dict[str, Any]) -> list[Walked]:
    for _ in engine.stream(WARM_UP, max_new_tokens=WARM_UP_TOKENS, **options):
        pass
    vars(engine).pop("memory", None)  # of this prompt, by the way before
    pieces = iter(engine.stream(PROMPT, max_new_tokens=TOKENS, **options))
    walked = []
    while True:
        journey, piece = watched(lambda: next(pieces, None))
        if piece is None:
            return walked[1:-1]
        walked.append(Walked(journey, int(piece.cycle.tree.passes), len(piece.cycle.tree)))


def _largest(cycles: list[Walked]) -> dict[str, int]:
    journeys = [cycle.journey for cycle in cycles]
    return {
        "files": max(len(journey.files) for journey in journeys),
        "calls": max(journey.calls for journey in journeys),
        "changes of file": max(journey.changes for journey in journeys),
        "C++ calls": max(journey.native for journey in journeys),
    }


def measure() -> dict[str, int]:
    """Return all figures by name."""
    figures: dict[str, int] = {}
    with _one_machine():
        engine = _load()
        for way, options in WAYS.items():
            cycles = _cycles(engine, options)
            if way != "auto":
                figures |= {f"{way}: {name}": value for name, value in _largest(cycles).items()}
                continue
            wanted = [cycle for cycle in cycles if cycle.passes == PASSES]
            deepest = max(cycles, key=lambda cycle: (cycle.passes, cycle.nodes))
            if not wanted:
                raise RuntimeError(
                    f"no cycle has {PASSES} passes, choose another prompt; passes: {cycles}"
                )
            figures["auto: files"] = _largest(cycles)["files"]
            for name, chosen in ((f"auto, {PASSES} passes", wanted), ("auto, deepest", [deepest])):
                figures |= {
                    f"{name}: {key}": value
                    for key, value in _largest(chosen).items()
                    if key != "files"
                }
        figures["loading: files"] = len(watched(_load)[0].files)
    return figures

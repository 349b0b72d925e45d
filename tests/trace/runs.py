"""Toy engines whose runs are traced, the trace as it is read, and a tree by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specengine.engine import Engine
from specengine.policies import TreePolicy
from specengine.records import Cycle
from specengine.trace import Trace, TracedCycle, TraceWriter, read_trace
from tests.toy import LetterTokenizer, Tables, ToyDrafter, ToyTarget

TARGET = Tables(8, 1, concentration=0.3)
DRAFT = Tables(8, 2, concentration=0.3, like=TARGET, share=0.7)
PROMPT = [1, 2, 3]


def toy_engine(
    policy: TreePolicy | None, tokenizer: Any = None, seed: int = 0, **draft: Any
) -> Engine:
    target = ToyTarget(TARGET)
    drafter = None if policy is None else ToyDrafter(DRAFT, **draft)
    return Engine(target, drafter, policy, tokenizer or LetterTokenizer())


def write(
    file: Path, engine: Engine, *prompts: list[int], **options: Any
) -> tuple[Trace, list[Cycle]]:
    """The trace of these generations as it is read, and the engine's own cycles."""
    cycles = []
    with TraceWriter(file, engine) as trace:
        for prompt in prompts or (PROMPT,):
            pieces = trace.follow(engine.stream(prompt, **{"max_new_tokens": 24, **options}))
            cycles += [piece.cycle for piece in pieces]
    return read_trace(file), cycles


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rewritten(trace: Trace, change: Any) -> Path:
    """The file after `change` was let loose on its records."""
    lines = records(trace.file)
    change(lines)
    trace.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace.file


def set_field(number: int, name: str, value: Any) -> Any:
    return lambda lines: lines[number].__setitem__(name, value)


TREE = TracedCycle(
    tokens=[7, 1, 2, 3, 4, 5, 6],
    texts=["root", " a", "b\n", "\x1b[31m", "d", "e", "f"],
    parents=[-1, 0, 0, 1, 1, 1, 2],
    probabilities=[1.0, 0.5, 0.25, 0.125, 0.5, 0.25, 0.001],
    path_probabilities=[1.0, 0.5, 0.25, 0.0625, 0.25, 0.125, 0.0002],
    kept=[0, 1, 2, 4],
    accepted=[0, 1],
    committed=[1, 9],
    committed_texts=[" a", "?"],
    text=" a?",
    passes=2,
    seconds={},
)

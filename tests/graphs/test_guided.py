"""A grammar guides the trees of an engine with graphs as it does without, on the pretended CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from specengine import Engine
from specengine.engine.captured import GUIDED_NOTE, NOTE
from specengine.ops import cuda_graphs as graphs
from tests import toy
from tests.graphs import pretended
from tests.graphs.replays import engine_of
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
GRAMMAR = 'start: "the only " ("one" | "answer that there is")'
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]


def engine_with_text(draft: str, policy: str, *, captured: bool) -> Engine:
    made = engine_of(draft, policy, captured=captured)
    return Engine(made.target, made.drafter, made.policy, toy.byte_tokenizer())


def answer(engine: Engine, way: dict[str, Any]) -> tuple[Any, list[str]]:
    stream = engine.stream([7, 9], grammar=GRAMMAR, max_new_tokens=40, **way)
    cycles = [piece.cycle for piece in stream]
    trees = [
        (cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.path, cycle.tokens)
        for cycle in cycles
    ]
    return (stream.result.text, trees), stream.result.stats.notes


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "policy"), [("small_model", "auto"), ("eagle3", "talon")])
def test_trees_follow_it(draft: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)
    host = engine_with_text(draft, policy, captured=False)
    wanted = [answer(host, way)[0] for way in WAYS]
    with pretended.cuda():
        engine = engine_with_text(draft, policy, captured=True)
        for way, expected in zip(WAYS, wanted, strict=True):
            found, notes = answer(engine, way)
            assert found == expected
            assert GUIDED_NOTE in notes
        after = engine.generate([7, 9], max_new_tokens=4).stats.notes
        assert GUIDED_NOTE not in after
        assert NOTE in after

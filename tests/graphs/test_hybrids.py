"""Models with recurrent layers on a pretended CUDA device: the eager engine's answers, trees and next turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.drafters.small_model import SmallModel
from specengine.engine import TextGeneration
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from tests import toy
from tests.graphs import pretended
from tests.graphs.replays import answer
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
FEW = {"vocab_size": 5}  # of which drafts guess one now and then
PROMPT = [place * place % 5 for place in range(70)]
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.1}]


@pytest.fixture(autouse=True)
def _meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)


def engine_of(family: str, policy: str | None, *, captured: bool) -> Engine:
    model, draft = toy.tiny(family, **FEW), toy.tiny("llama", **FEW, num_hidden_layers=1)
    if captured:
        model, draft = pretended.moved(model), pretended.moved(draft)
    target = HuggingFaceTarget(model, captured=captured)
    if policy is None:
        return Engine(target, None, None)
    return Engine(target, SmallModel(draft, 5), toy.policy_for(policy, 3))


def turns(engine: Engine, ways: list[dict[str, Any]]) -> list[Any]:
    """The answers to one prompt, each after those before; then of a prompt that goes on with the last."""
    answers = [answer(engine, way | {"eos_token_id": []}, PROMPT) for way in ways]
    text = [*PROMPT, *engine.generate(PROMPT, max_new_tokens=9, eos_token_id=[]).token_ids]
    for prompt in ([*text, 1, 2, 3], [*PROMPT[:66], 3, 3, 3], [*PROMPT[:9], 4, 4]):
        options = {"max_new_tokens": 6, "eos_token_id": []}
        result = TextGeneration(engine, prompt, options, reuse_cache=True).run()
        answers.append((result.token_ids, result.stats.num_accepted_draft_tokens))
    return answers


@pytest.mark.sliced(2)
@pytest.mark.parametrize("family", ["lfm3", "qwen3_5_text", "falcon_h1"])
@pytest.mark.parametrize("policy", [None, "eagle"])
def test_replays_equal_the_eager_engine(family: str, policy: str | None) -> None:
    ways = WAYS if policy else WAYS[:1]
    expected = turns(engine_of(family, policy, captured=False), ways)
    if policy:
        assert sum(len(cycle[2]) - 1 for cycle in expected[0][1]) > 0  # nodes were accepted
    with pretended.cuda():
        engine = engine_of(family, policy, captured=True)
        assert turns(engine, ways) == expected
        driver = engine.drivers.own.captured
        assert driver is not None
        assert all(known.graph is not None for known in driver.graphs._captured.values())
        assert {name.split()[0] for name in driver.graphs.captures} >= {"finish"}

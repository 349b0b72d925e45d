"""Every kind of draft on the pretended CUDA device, without graphs and with them: trees stand where the draft does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.drafters import Drafter
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from tests import toy
from tests.graphs import pretended
from tests.graphs.replays import Way, answer
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
DRAFTS: dict[str, Callable[[Any, HuggingFaceTarget], Drafter | None]] = {
    "eagle3": lambda head, target: EagleDraft(head, target.lm),
    "eagle3 with temperatures": lambda head, target: EagleDraft(head, target.lm),
    "small_model": lambda model, target: SmallModel(model, target.vocab_size),
    "lookup": lambda model, target: Lookup(SmallModel(model, target.vocab_size)),
    "ngram": lambda _, target: NGram(longest=3, shortest=1),
    "recycling": lambda _, target: Recycling(),
    "recycling with lookup": lambda _, target: Lookup(Recycling()),
    "none": lambda _, target: None,
}
WAYS: dict[str, Way] = {
    "greedy": {},
    "penalised": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
}


def engine_of(draft: str, policy: str, *, there: bool, captured: bool) -> Engine:
    """there: on the device, where `pretended.cuda` is entered."""
    model = toy.tiny("llama", num_hidden_layers=4)
    given = {"temperatures": (0.5, 2.0)} if draft.endswith("temperatures") else {}
    head = draft.startswith("eagle3")
    other = (
        toy.tiny_head(toy.head_config(3, model, **given))
        if head
        else toy.near_copy(num_hidden_layers=4)
    )
    if there:
        model, other = pretended.moved(model), pretended.moved(other)  # type: ignore[assignment]
    target = HuggingFaceTarget(model, captured=captured)
    drafter = DRAFTS[draft](other, target)
    return Engine(target, drafter, None if drafter is None else toy.policy_for(policy, 3))


@pytest.mark.sliced(1)
@pytest.mark.parametrize("policy", ["talon", "auto"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_and_trees_are_those_of_the_host(
    draft: str, captured: bool, way: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)
    wanted = answer(engine_of(draft, policy, there=False, captured=False), WAYS[way])
    with pretended.cuda():
        found = answer(engine_of(draft, policy, there=True, captured=captured), WAYS[way])
    if (draft, policy) == (
        "lookup",
        "auto",
    ):  # which leaves passes out on the host alone, where it need not wait
        assert found[0] == wanted[0]
    else:
        assert found == wanted

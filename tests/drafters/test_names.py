"""A draft's name means one thing, and a user is told where another draft is the better one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.short_models import first_layers
from specengine import Engine
from specengine.checkpoints import embedded
from specengine.engine import loading
from specengine.errors import InputError
from tests.engine.engines import PROMPT, model_of, near_copy


def test_the_shipped_head_has_a_name_as_a_draft() -> None:
    with pytest.raises(
        InputError,
        match=r"draft: it was made for a target with hidden size 576, .*specengine train draft",
    ):
        Engine.from_pretrained(model_of(), "default-head")


def test_a_draft_as_large_as_its_target_is_said_to_cost_as_much() -> None:
    engine = Engine.from_pretrained(model_of(), near_copy())
    notes = engine.generate(PROMPT, max_new_tokens=4).stats.notes
    assert any("is a whole model of no fewer weights than the target" in note for note in notes)


def test_a_smaller_draft_is_left_alone() -> None:
    engine = Engine.from_pretrained(model_of(), first_layers(model_of(), 1))
    assert not engine.notes


def target(name: str = "mine", hidden: int = 576, vocabulary: int = 49152, layers: int = 30) -> Any:
    lm = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden), layers=layers)
    return SimpleNamespace(name=name, vocab_size=vocabulary, lm=lm)


def test_the_whole_default_model_as_a_draft_is_told_of_the_head() -> None:
    twin = SimpleNamespace(name="small_model (it)", lm=target().lm)
    small = loading.SmallModel.__new__(loading.SmallModel)
    vars(small).update(vars(twin))
    note = loading._note(target(), embedded.NAME, small)
    assert note.endswith("the head that ships is draft='default-head'")

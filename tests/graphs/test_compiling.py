"""Blocks compiled around their attention: the same answers, and the model untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specengine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.twins import compiled
from tests import toy
from tests.graphs.engines import DEVICE, PROMPT

pytestmark = pytest.mark.usefixtures("one_thread")


def test_answers_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, names = torch.compile, list[str]()

    def noted(module: nn.Module) -> Any:
        names.append(type(module).__name__)
        return compile_(module, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")

    monkeypatch.setattr(torch, "compile", noted)
    model = toy.tiny("llama").to(DEVICE)
    before = [id(module) for module in model.modules()]
    options: dict[str, Any] = {"graphs": True}
    engine = Engine.from_pretrained(model, "ngram", "eagle", compile_blocks=True, **options)
    plain = Engine.from_pretrained(model, policy="plain")
    for way in ({}, {"temperature": 1.0, "seed": 3}):
        given = {"max_new_tokens": 10, **way}
        assert engine.generate(PROMPT, **given).token_ids == plain.generate(PROMPT, **given).token_ids
    layers = model.config.num_hidden_layers
    assert sorted(names) == sorted(["LlamaMLP", "LlamaRMSNorm", "LlamaRMSNorm"] * layers)
    assert [id(module) for module in model.modules()] == before


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="compile: Linear has no decoder blocks"):
        compiled(nn.Linear(2, 2))
    with pytest.raises(InputError, match="compile_blocks: it is for the padded forwards of graphs; add graphs=True"):
        Engine.from_pretrained(toy.tiny("llama"), "ngram", compile_blocks=True)

"""Packed linear layers: the same bits, the original untouched, changes of the weights noticed."""

from __future__ import annotations

import pytest
import torch

from specengine import Engine
from specengine.models import twins
from specengine.models.huggingface import CausalLM
from specengine.models.twins import Packed, PackedLinear
from tests import toy
from tests.backend import needs_packing

pytestmark = needs_packing
PROMPT = [1, 5, 9, 5, 9, 7, 5, 9]


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_gives_the_same_bits(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = torch.nn.Linear(40, 72, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(1, rows, 40, dtype=torch.bfloat16)
    assert torch.equal(PackedLinear(linear)(inputs), linear(inputs))


def test_twin_replaces_linear_layers_and_leaves_the_model_alone() -> None:
    model = toy.tiny("llama").to(torch.bfloat16)
    before = [type(module) for module in model.modules()]
    twin = Packed(model).model()
    assert [type(module) for module in model.modules()] == before
    assert not any(type(module) is torch.nn.Linear for module in twin.modules())
    assert twin.get_input_embeddings().weight is model.get_input_embeddings().weight
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(twin(ids).logits, model(ids).logits)


def test_changed_weights_are_packed_again() -> None:
    model = toy.tiny("llama").to(torch.bfloat16)
    packed = Packed(model)
    first = packed.model()
    assert packed.model() is first
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert packed.model() is not first
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(packed.model()(ids).logits, model(ids).logits)


def test_a_hook_added_later_is_called() -> None:
    model = toy.tiny("llama").to(torch.bfloat16)
    lm = CausalLM(model, pack=True)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    lm.refresh()
    with torch.inference_mode():
        lm.extend(lm.new_cache(8), PROMPT)
    assert calls


def test_engine_answers_the_same_packed_or_not() -> None:
    model = toy.tiny("qwen2").to(torch.bfloat16)
    answers = [
        Engine.from_pretrained(model, "ngram", "eagle", pack=pack)
        .generate(PROMPT, max_new_tokens=24)
        .token_ids
        for pack in (True, False)
    ]
    assert answers[0] == answers[1]


def test_packing_is_left_out_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.tiny("llama").to(torch.bfloat16)
    assert twins.worth_packing(model)
    monkeypatch.setattr(twins, "free_memory", lambda *_: 10.0)
    assert not twins.worth_packing(model)
    assert not CausalLM(model).packed


def test_float32_models_are_not_packed() -> None:
    assert not twins.worth_packing(toy.tiny("llama"))

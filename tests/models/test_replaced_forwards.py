"""A model answers as it was given: replaced forwards, layers that convert themselves, and rows that mix."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specengine import Engine
from specengine.errors import UnsupportedModelError
from specengine.models import twins
from specengine.models.huggingface import CausalLM
from specengine.models.refusals import mixing
from tests.backend import PACKS, needs_packing

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 17, 33, 2, 90, 41]
BFLOAT16 = torch.bfloat16


def model(dtype: torch.dtype = BFLOAT16) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def answer(target: PreTrainedModel, length: int = 12) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length
        )
    return out[0, len(PROMPT) :].tolist()


# ---- replaced forwards


def by_method(layer: nn.Module) -> None:
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return changed(type(self).forward(self, *given, **options))

    layer.forward = types.MethodType(forward, layer)


def by_closure(layer: nn.Module) -> None:
    before = layer.forward
    layer.forward = lambda *given, **options: changed(before(*given, **options))


def by_partial(layer: nn.Module) -> None:
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return changed(type(self).forward(self, *given, **options))

    layer.forward = functools.partial(forward, layer)


def as_accelerate_does(layer: nn.Module) -> None:
    """The old forward stands on the module, and the new one calls it there."""

    def forward(module: Any, *given: Any, **options: Any) -> Any:
        return changed(module._old_forward(*given, **options))

    layer._old_forward = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(forward, layer), layer.forward)


def by_call(layer: nn.Module) -> None:
    before = layer._call_impl
    layer._call_impl = lambda *given, **options: changed(before(*given, **options))


def by_class(layer: nn.Module) -> None:
    kind = type(layer)
    body = {
        "forward": lambda self, *given, **options: changed(kind.forward(self, *given, **options))
    }
    layer.__class__ = type("Steered", (kind,), body)


def by_hook(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda _layer, _given, out: changed(out))


def by_pre_hook(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(
        lambda _layer, given: (changed(given[0]), *given[1:]) if given else None
    )


def changed(out: Any) -> Any:
    return 0.25 * out.flip(-1) if isinstance(out, Tensor) and out.is_floating_point() else out


WAYS = (
    by_method,
    by_closure,
    by_partial,
    as_accelerate_does,
    by_call,
    by_class,
    by_hook,
    by_pre_hook,
)
PARTS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "inner layers": lambda target: [layer.mlp.down_proj for layer in target.model.layers],
    "head": lambda target: [target.lm_head],
    "embeddings": lambda target: [target.model.embed_tokens],
    "norm": lambda target: [target.model.norm],
}


@pytest.mark.sliced
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_replaced_forward_is_the_models(
    way: Callable[[nn.Module], None], part: str, when: str
) -> None:
    target = model()
    untouched = answer(target)
    engine = Engine.from_pretrained(target, pack=PACKS) if when == "after" else None
    for layer in PARTS[part](target):
        way(layer)
    if engine is None:
        engine = Engine.from_pretrained(target, pack=PACKS)
    expected = answer(target)
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == expected
    assert (expected == untouched) is (
        way is by_pre_hook and part == "embeddings"
    )  # whose inputs are token ids


@pytest.mark.parametrize("way", WAYS)
def test_a_replaced_forward_is_the_models_by_default(way: Callable[[nn.Module], None]) -> None:
    target = model()
    for layer in PARTS["inner layers"](target):
        way(layer)
    assert Engine.from_pretrained(target).generate(PROMPT, max_new_tokens=12).token_ids == answer(
        target
    )


def test_a_parametrization_is_the_models() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 0.5 * weight.flip(0)

    target = model()
    nn.utils.parametrize.register_parametrization(target.lm_head, "weight", Halved())
    assert Engine.from_pretrained(target).generate(PROMPT, max_new_tokens=12).token_ids == answer(
        target
    )


@needs_packing
@pytest.mark.parametrize("when", ["before", "after"])
def test_no_layer_is_packed_where_all_of_them_were_replaced(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model()
    assert list(twins.packable(target))
    engine = Engine.from_pretrained(target, pack=True) if when == "after" else None
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, rows: linear(rows, self.weight.flip(0), self.bias)
    )
    assert not list(twins.packable(target))
    expected = answer(target)
    if engine is None:
        engine = Engine.from_pretrained(target, pack=True)
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == expected


# ---- layers that convert themselves


class Lazy(nn.Linear):
    """A layer of packed numbers, which it unpacks in its first forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype
        )
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer(
            "weight_packed", (layer.weight.detach() / scale).round().to(torch.int8)
        )
        self.register_buffer("weight_scale", scale)
        del self.weight

    def unpack(self) -> None:
        self.weight = nn.Parameter(self.weight_packed * self.weight_scale)
        del self.weight_packed, self.weight_scale

    def forward(self, rows: Tensor) -> Tensor:
        if "weight_packed" in self._buffers:
            self.unpack()
        return super().forward(rows)


def of_its_class(layer: nn.Linear) -> nn.Module:
    return Lazy(layer)


def of_torchs_class(layer: nn.Linear) -> nn.Module:
    """An nn.Linear with a forward on the layer itself, as compressed-tensors leaves it."""
    made = Lazy(layer)
    made.__class__ = nn.Linear

    def forward(self: Any, rows: Tensor) -> Tensor:
        if "weight_packed" in self._buffers:
            Lazy.unpack(self)
        return linear(rows, self.weight)

    made.forward = types.MethodType(forward, made)
    return made


def rounding_its_inputs(layer: nn.Linear) -> nn.Module:
    """The same, whose inputs are rounded row by row once it is unpacked."""
    made = of_torchs_class(layer)
    before = made.forward

    def forward(rows: Tensor) -> Tensor:
        scale = rows.abs().amax(-1, keepdim=True) / 127
        return before((rows / scale).round() * scale)

    made.forward = forward
    return made


def with_layers(target: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    for layer in target.model.layers:
        layer.mlp.down_proj, layer.self_attn.q_proj = (
            make(layer.mlp.down_proj),
            make(layer.self_attn.q_proj),
        )
    return target


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("make", [of_its_class, of_torchs_class, rounding_its_inputs])
def test_layers_that_unpack_themselves_answer(
    make: Callable[[nn.Linear], nn.Module], dtype: torch.dtype
) -> None:
    target = with_layers(model(dtype), make).train()
    engine = Engine.from_pretrained(target)
    assert target.training
    assert target.model.layers[0].mlp.training
    assert engine.target.lm.attention == "tree"
    found = engine.generate(PROMPT, max_new_tokens=12)
    assert found.token_ids == answer(target.eval())
    with torch.enable_grad():
        target(torch.tensor([PROMPT])).logits.sum().backward()  # what was unpacked can be trained


# ---- rows that mix


class Outliers(nn.Linear):
    """Rounds the columns in which no row is large."""

    def forward(self, rows: Tensor) -> Tensor:
        large = (rows.abs() > 1.0).flatten(0, -2).any(0)
        return linear(torch.where(large, rows, (rows * 8).round() / 8), self.weight)


class OneScale(nn.Linear):
    """Rounds its inputs by the largest of all rows."""

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().amax() / 7
        return linear((rows / scale).round() * scale, self.weight)


class Centred(nn.Linear):
    """Takes the mean of all rows off each."""

    def forward(self, rows: Tensor) -> Tensor:
        return linear(
            rows - rows.mean(dim=tuple(range(rows.ndim - 1)), keepdim=True) / 4, self.weight
        )


Linear8bitLt = type("Linear8bitLt", (Outliers,), {})
MIXING = {
    Outliers: "layers of type Outliers compute a row from those that are run with it",
    OneScale: "layers of type OneScale compute a row from those that are run with it",
    Centred: "layers of type Centred compute a row from those that are run with it",
    Linear8bitLt: "8-bit layers of bitsandbytes choose outliers over all rows",
}


def of_class(target: PreTrainedModel, kind: type[nn.Linear]) -> PreTrainedModel:
    for layer in target.model.layers:
        layer.mlp.down_proj.__class__ = kind
    return target


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("kind", MIXING)
def test_a_model_whose_rows_mix_is_decoded_plainly_and_says_why(
    kind: type[nn.Linear], dtype: torch.dtype
) -> None:
    target = of_class(model(dtype), kind)
    engine = Engine.from_pretrained(target)
    expected = answer(target)
    for _ in range(2):  # the second one finds the first one's cache
        found = engine.generate(PROMPT, max_new_tokens=12)
        assert found.token_ids == expected
    (note,) = [note for note in found.stats.notes if "decoded plainly on its own cache" in note]
    assert note.endswith(MIXING[kind])
    with pytest.raises(UnsupportedModelError, match=MIXING[kind]):
        CausalLM(target)
    with pytest.raises(UnsupportedModelError, match=f"draft: .*{MIXING[kind]}.* policy='plain'"):
        Engine.from_pretrained(target, "recycling")


def test_layers_of_other_kinds_do_not_mix() -> None:
    assert not mixing(model())
    assert not mixing(with_layers(model(torch.float32), rounding_its_inputs))
    noisy = model(torch.float32)
    noisy.lm_head.register_forward_hook(lambda _layer, _given, out: 2 * out)
    assert not mixing(noisy)


# ---- results by place


@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize(
    "fields",
    [
        {"return_dict": False},
        {"torchscript": True},
        {"return_dict": False, "output_hidden_states": True},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_config_that_asks_for_tuples_is_served(
    fields: dict[str, Any], backend: str | None, tmp_path: Path
) -> None:
    target = model(torch.float32)
    target.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    engine = Engine.from_pretrained(str(tmp_path), backend=backend)
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == answer(target)


@pytest.mark.parametrize("backend", [None, "huggingface"])
def test_a_loaded_model_that_gives_tuples_is_served_and_stays_as_it_is(backend: str | None) -> None:
    target = model(torch.float32)
    expected = answer(target)
    target.config.return_dict = False
    engine = Engine.from_pretrained(target, backend=backend)
    assert target.config.return_dict is False
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == expected

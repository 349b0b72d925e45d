"""Families say what there is: their blocks cover transformers' tensors, and what they leave out is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.checkpoints import gguf
from specengine.errors import UnsupportedModelError
from specengine.models import families
from specengine.models.configs import family_of, layer_template, rope_of
from specengine.models.families import Family, GatedMLP, Layer, Name
from specengine.models.native import from_model
from specengine.models.native.weights import VECTORS, Weight
from tests.models.native_engines import FAMILIES, OTHERS, needs_extension
from tests.toy import tiny


def test_the_families_are_those_that_are_tested() -> None:
    assert list(families.known()) == sorted((*FAMILIES, *OTHERS))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_a_familys_blocks_are_transformers_modules(name: str) -> None:
    config = tiny(name, tie_word_embeddings=False).config
    parts, template = list(family_of(config).parts(config)), layer_template(config)
    names = {part.name.transformers for part in parts}
    owners = {
        tensor: tensor if tensor in names else tensor.rpartition(".")[0] for tensor in template
    }
    assert names == set(owners.values())
    assert len({part.native for part in parts}) == len(parts)
    stored = gguf.tensor_names(config, template)
    assert len({one for found in stored.values() for one in found}) == sum(
        map(len, stored.values())
    )
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.name.transformers] = sizes.get(part.name.transformers, 0) + part.size
    vectors = {part.name.transformers for part in parts if part.native.endswith(VECTORS)}
    for name, given in template.items():
        shape = gguf.turned(config, given)
        rows = shape if owners[name] in vectors or len(shape) == 1 else shape[:-1]
        assert math.prod(rows) == sizes[owners[name]]


def test_a_family_has_the_template_that_transformers_makes_of_its_config() -> None:
    model = tiny("qwen3", tie_word_embeddings=True)
    assert layer_template(model.config) == {
        name: tuple(weight.shape) for name, weight in model.named_parameters()
    }


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the family of a model type."""

    def replace(name: str, family: Family | None) -> None:
        known = families.known() | {name: family}
        monkeypatch.setattr(
            families, "known", lambda: {key: value for key, value in known.items() if value}
        )

    return replace


@needs_extension
def test_tensors_of_no_block_are_refused(changed: Any) -> None:
    changed("qwen3", Family())
    with pytest.raises(
        UnsupportedModelError, match=r"native: model\.layers\.0\.\S+_norm\.weight is in none of"
    ):
        from_model(tiny("qwen3"))


@needs_extension
def test_blocks_of_another_order_are_refused(changed: Any) -> None:
    """Names may fit while the meaning does not: the first layer's states are compared."""
    swapped = GatedMLP(gate=Name("mlp.up_proj", "ffn_up"), up=Name("mlp.gate_proj", "ffn_gate"))
    changed("llama", Family(layer=Layer(mlp=swapped)))
    with pytest.raises(
        UnsupportedModelError, match="gives other hidden states than its own modules"
    ):
        from_model(tiny())


@needs_extension
def test_queries_that_grow_otherwise_are_refused(changed: Any) -> None:
    """They do so from a position on that is tried."""
    family = families.known()["ministral3"]
    plain = replace(family.attention, query_factors=lambda config: None)
    changed("ministral3", replace(family, layer=Layer(attention=plain)))
    with pytest.raises(
        UnsupportedModelError, match="gives other hidden states than its own modules"
    ):
        from_model(tiny("ministral3"))


@needs_extension
def test_a_type_without_a_family_is_named_with_the_known_ones(changed: Any) -> None:
    changed("mistral", None)
    with pytest.raises(
        UnsupportedModelError,
        match=r"native: model type mistral, known are .*llama, ministral3, .*qwen3",
    ):
        from_model(tiny("mistral"))


def test_places_are_those_of_the_modules() -> None:
    model = tiny("gemma3_text", sliding_window=9, num_hidden_layers=4)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [9, None, 9, None]
    assert (
        family_of(model.config).places(model.config)
        == [
            ("sliding_attention", 9, None),
            ("full_attention", None, None),
        ]
        * 2
    )
    model = tiny("gemma4_text", sliding_window=9)
    assert family_of(model.config).places(model.config) == [
        ("sliding_attention", 9, None),
        ("full_attention", None, None),
        ("sliding_attention", 9, None),
        ("full_attention", None, 1),
        ("sliding_attention", 9, 2),
        ("full_attention", None, 1),
    ]
    model = tiny("smollm3", num_hidden_layers=4)
    assert [place.rope is not None for place in family_of(model.config).places(model.config)] == [
        bool(layer.self_attn.use_rope) for layer in model.model.layers
    ]
    assert (
        family_of(tiny().config).places(tiny(sliding_window=9).config) == [("", None, None)] * 2
    )  # which Llama never reads


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_frequencies_of_a_config_are_those_of_the_modules(name: str) -> None:
    model = tiny(name)
    decoder = model.get_decoder()
    rotary: Any = next(
        (getattr(decoder, own) for own in ("rotary_emb", "pos_emb") if hasattr(decoder, own)), None
    )
    for key in {place.rope for place in family_of(model.config).places(model.config)} - {None}:
        frequencies, scale = rope_of(model.config, key)
        prefix = f"{key}_" if key else ""
        assert torch.equal(frequencies, getattr(rotary, f"{prefix}inv_freq"))
        assert scale == getattr(rotary, f"{prefix}attention_scaling")


def test_fused_rows_are_cut_in_their_order() -> None:
    data = torch.arange(24.0).reshape(6, 4)
    pieces = list(Weight.of("qkv", data).parts({"q": 3, "k": 1, "v": 2}))
    assert [(piece.name, piece.kind, piece.shape) for piece in pieces] == [
        ("q", "f32", (3, 4)),
        ("k", "f32", (1, 4)),
        ("v", "f32", (2, 4)),
    ]
    assert torch.equal(torch.cat([whole(piece) for piece in pieces]), data)
    assert torch.equal(pieces[2].rows(1, 2), data[5:])


def test_fused_rows_of_another_order_keep_it() -> None:
    data, order = torch.arange(6.0)[:, None], torch.tensor([1, 0, 2, 5, 4, 3], dtype=torch.int32)
    pieces = list(Weight.of("qkv", data)._replace(order=order).parts({"q": 3, "k": 3}))
    assert [whole(piece)[:, 0].tolist() for piece in pieces] == [[1, 0, 2], [5, 4, 3]]


def whole(weight: Weight) -> Tensor:
    rows = weight.rows(0, weight.shape[0])
    return rows if weight.order is None else rows[weight.order.long()]

"""Linear layers that keep codes and scales: of GGUF's blocks, of other libraries' codes, and rounded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specengine.checkpoints import gguf
from specengine.checkpoints.pretrained import open_native
from specengine.models.twins import (
    BLOCKS,
    QuantizedLinear,
    linear_layers,
    quantize,
    quantized_blocks,
    quantized_rows,
)
from tests import toy
from tests.checkpoints.gguf_files import ARCHITECTURES, blocks, write_model
from tests.checkpoints.quantized_folders import awq, gptq, written

TOKENS = torch.tensor([[40, 41, 42, 43, 44, 40, 41]])


@pytest.mark.parametrize("kind", sorted(BLOCKS.keys() - {"f8_e4m3"}))  # which no file has
def test_blocks_keep_their_numbers(kind: str) -> None:
    rows = torch.from_numpy(blocks(kind, 5, 768, 3))
    weight = quantized_blocks(kind, rows)
    expected = torch.from_numpy(gguf.dequantize(kind, rows.numpy(), (5, 768)))
    assert torch.equal(weight.numbers(), expected)
    assert (weight.inputs, weight.codes.shape[0]) == (768, 5)
    assert all(part is None or part.is_contiguous() for part in weight)
    size = sum(part.nbytes for part in weight if part is not None)
    more = {
        "q4_k": 148 / 144,
        "q5_0": 34 / 22,
        "q6_k": 274 / 210,
    }  # scales, or codes, of a byte each
    assert size == pytest.approx(rows.nbytes * more.get(kind, 1.0))


def test_rows_are_rounded_by_half_a_step() -> None:
    layer = nn.Linear(77, 9)
    with torch.no_grad():
        layer.weight[3] = 0.0
    weight = quantized_rows(layer.weight)
    error = (weight.numbers() - layer.weight).abs()
    assert (error <= weight.scales * 0.5001).all()
    assert torch.equal(weight.numbers()[3], torch.zeros(77))
    rows = torch.randn(2, 3, 77)
    product = QuantizedLinear(layer, weight)(rows)
    wanted = nn.functional.linear(rows, weight.numbers(), layer.bias)
    torch.testing.assert_close(product, wanted)


def test_layers_are_replaced_where_there_is_a_weight() -> None:
    model = toy.tiny("llama")
    exact = model(TOKENS).logits
    names = [name for name in linear_layers(model) if "mlp" in name]
    weights = ((name, model.get_parameter(f"{name}.weight")) for name in names)
    quantize(model, ((name, quantized_rows(weight)) for name, weight in weights))
    kinds = {name: type(layer) for name, layer in model.named_modules() if "proj" in name}
    assert all((kind is QuantizedLinear) == ("mlp" in name) for name, kind in kinds.items())
    assert 0 < (model(TOKENS).logits - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q5_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_file_answers_as_the_unpacked_one(
    architecture: str, kind: str, tied: bool, tmp_path: Path
) -> None:
    """Query rows of a Llama are in another order there, and a tied head is read from the embeddings' blocks."""
    path = write_model(tmp_path / "model.gguf", architecture, kind=kind, tied=tied)
    source = open_native(str(path)).source
    model, unpacked = source.model(packed=True), source.model()
    linear = [layer for layer in unpacked.modules() if type(layer) is nn.Linear]
    packed = [layer for layer in model.modules() if type(layer) is QuantizedLinear]
    assert len(packed) == len(linear) == 15
    assert not [layer for layer in model.modules() if type(layer) is nn.Linear]
    assert type(model.get_output_embeddings()) is QuantizedLinear
    assert torch.equal(model(TOKENS).logits, unpacked(TOKENS).logits)


@pytest.mark.parametrize("layout", [awq(), gptq(4, even=True)], ids=["awq", "gptq"])
def test_codes_of_other_libraries_stay_codes(layout: Any, tmp_path: Path) -> None:
    written(tmp_path, *layout)
    source = open_native(str(tmp_path)).source
    model = source.model(packed=True)
    packed = [name for name, layer in model.named_modules() if type(layer) is QuantizedLinear]
    assert len(packed) == 14
    assert torch.equal(model(TOKENS).logits, source.model()(TOKENS).logits)


def test_kinds_that_are_not_packed_are_numbers(tmp_path: Path) -> None:
    """And float32 is asked for to have the file's numbers."""
    path = write_model(
        tmp_path / "model.gguf", kind="q8_0", tensors={"blk.0.ffn_up.weight": ("q4_1", (96, 64))}
    )
    model = open_native(str(path)).source.model(packed=True)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(model.model.layers[1].mlp.up_proj) is QuantizedLinear
    exact = open_native(str(path), dtype=torch.float32).source.model(packed=True)
    assert not [layer for layer in exact.modules() if type(layer) is QuantizedLinear]

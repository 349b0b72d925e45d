"""Blocks of tensors and their numbers are the gguf package's; names, shapes and rows are transformers'."""

from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter

from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, InputError
from specengine.models.configs import layer_template
from tests.checkpoints import gguf_files as files
from tests.checkpoints.gguf_files import ARCHITECTURES, opened


@pytest.mark.parametrize("kind", [kind.name.lower() for kind in gguf.Kind])
def test_blocks_and_their_numbers_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    files.add(writer, "first", kind, (3, 512))
    files.add(writer, "second", kind, (2, 3, 256), seed=1)
    with gguf.read(files.finish(writer, tmp_path / "model.gguf")) as file:
        assert [(tensor.shape, tensor.kind) for tensor in file.tensors.values()] == [
            ((3, 512), kind),
            ((2, 3, 256), kind),
        ]
        for seed, (name, rows, columns) in enumerate([("first", 3, 512), ("second", 6, 256)]):
            packed = files.blocks(kind, rows, columns, seed)
            assert np.array_equal(file.read(name), packed.reshape(-1))
            expected = gguf_package.quants.dequantize(packed, GGMLQuantizationType[kind.upper()])
            numbers = file.numbers(name)
            assert numbers.dtype == np.float32
            assert np.array_equal(
                numbers.reshape(rows, columns).view(np.int32),
                expected.astype(np.float32).view(np.int32),
            )


@pytest.mark.parametrize("kind", gguf.Kind)
def test_numbers_and_sizes_of_kinds_are_those_of_the_gguf_package(kind: gguf.Kind) -> None:
    assert GGMLQuantizationType(kind.value).name == kind.name
    assert gguf_package.GGML_QUANT_SIZES[GGMLQuantizationType(kind.value)] == (
        kind.elements,
        kind.bytes,
    )


def test_blocks_are_copied_whole_and_by_rows(models: dict[str, Path]) -> None:
    file = gguf.read(models["llama"])
    name = "blk.0.attn_q.weight"
    rows = file.tensors[name].shape[0]
    whole = file.read(name)
    assert whole.shape == (file.tensors[name].nbytes,)
    assert np.array_equal(
        whole, np.concatenate([file.read_rows(name, 0, 3), file.read_rows(name, 3, rows)])
    )
    with pytest.raises(InputError, match=r"no tensor 'blk\.9"):
        file.read("blk.9.attn_q.weight")


def test_dequantize_refuses_what_does_not_fit() -> None:
    for kind, size, shape in [
        ("q4_0", 17, (1, 32)),
        ("q4_0", 18, (2, 16)),
        ("q8_1", 36, (1, 32)),
        ("f32", 8, (1,)),
    ]:
        with pytest.raises(InputError):
            gguf.dequantize(kind, np.zeros(size, np.uint8), shape)


# ---- names, shapes, rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_model(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    file = opened(tmp_path, architecture, tied=tied)
    config = gguf.config(file)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert layer_template(config) == expected
    names = gguf.require_complete(file, config, expected)
    assert {name: file.tensors[stored].shape for name, (stored,) in names.items()} == expected
    assert {stored for (stored,) in names.values()} == set(file.tensors)


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    changes = {
        "blk.1.ffn_up.weight": None,
        "blk.0.attn_v.weight": ("q8_0", (64, 64)),
        **{f"blk.{layer}.attn_norm.weight": ("f32", (64,)) for layer in range(7, 15)},
        "rope_freqs.weight": None,
    }
    file = opened(tmp_path, tensors=changes)
    config = gguf.config(file)
    with pytest.raises(CheckpointError) as caught:
        gguf.require_complete(file, config, layer_template(config))
    message = str(caught.value)
    assert (
        "missing: blk.1.ffn_up.weight; of another shape: blk.0.attn_v.weight [64, 64], not [32, 64]; not used"
        in message
    )
    assert message.endswith("blk.12.attn_norm.weight and 2 more")


def unpacking() -> dict[str, Any]:
    """Return options with which transformers keeps no packed blocks; before 5.19 it never does."""
    has_option = hasattr(transformers, "GgufConfig")
    return {"quantization_config": transformers.GgufConfig(dequantize=True)} if has_option else {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_that_transformers_loads(
    models: dict[str, Path], architecture: str
) -> None:
    path = models[architecture]
    file = gguf.read(path)
    config = gguf.config(file)  # given, as transformers does not read the size of a head for qwen3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, config=config, **unpacking()
    ).state_dict()
    for name, (stored,) in gguf.tensor_names(config, layer_template(config)).items():
        order = gguf.row_order(config, stored)
        numbers = file.numbers(stored) if order is None else file.numbers(stored)[order]
        assert np.array_equal(loaded[name].numpy(), numbers), name


def test_rows_are_reordered_for_llama_alone(models: dict[str, Path]) -> None:
    config = gguf.config(gguf.read(models["llama"]))
    order = gguf.row_order(config, "blk.0.attn_k.bias")
    assert order is not None
    assert order.dtype == np.int32
    assert order[:10].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3]
    assert sorted(order) == list(range(files.KEY_HEADS * files.HEAD))
    assert gguf.row_order(config, "blk.0.attn_v.weight") is None
    assert gguf.row_order(config, "blk.0.attn_q_norm.weight") is None
    assert gguf.row_order(gguf.config(gguf.read(models["qwen2"])), "blk.0.attn_q.weight") is None

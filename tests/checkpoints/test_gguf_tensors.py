"""Blocks of tensors and their numbers are the gguf package's; names, shapes and rows are transformers'."""

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter

from specengine.checkpoints import gguf
from specengine.checkpoints.gguf_source import GGUFSource
from specengine.errors import CheckpointError, InputError
from specengine.models.configs import layer_template
from tests.checkpoints import gguf_files as files
from tests.checkpoints.gguf_files import ARCHITECTURES, opened

# ggml's number of a type that the gguf package does not unpack, the elements of a block, and its bytes
UNKNOWN_TO_THE_PACKAGE = {"q1_0": (41, 128, 18), "q2_0": (42, 64, 18), "i64": (27, 1, 8)}
KNOWN = [kind for kind in gguf.KINDS if kind not in UNKNOWN_TO_THE_PACKAGE]


@pytest.mark.parametrize("kind", KNOWN)
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


@pytest.mark.parametrize("kind", KNOWN)
def test_numbers_and_sizes_of_kinds_are_those_of_the_gguf_package(kind: str) -> None:
    number, *sizes = gguf.KINDS[kind]
    assert GGMLQuantizationType(number).name == kind.upper()
    assert gguf_package.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == tuple(sizes)


@pytest.mark.parametrize("name", UNKNOWN_TO_THE_PACKAGE)
def test_other_kinds_have_the_numbers_and_sizes_of_ggml(name: str) -> None:
    assert gguf.KINDS[name] == UNKNOWN_TO_THE_PACKAGE[name]


def test_integers_are_read_as_numbers(tmp_path: Path) -> None:
    numbers = np.array([[0, -3], [1 << 24, 7]], np.int64)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("d2t", numbers)
    with gguf.read(files.finish(writer, tmp_path / "model.gguf")) as file:
        assert file.tensors["d2t"].kind == "i64"
        assert np.array_equal(file.numbers("d2t"), numbers)


def one_bit(block: bytes) -> Iterator[float]:
    """A half d, then a bit of each number, the lowest of a byte first: d where it is set, -d where not."""
    (scale,) = struct.unpack("<e", block[:2])
    for place in range(128):
        yield scale if block[2 + place // 8] >> place % 8 & 1 else -scale


def two_bits(block: bytes) -> Iterator[float]:
    """A half d, then two bits of each number, the lowest of a byte first: one less than they say, times d."""
    (scale,) = struct.unpack("<e", block[:2])
    for place in range(64):
        yield ((block[2 + place // 4] >> 2 * (place % 4) & 3) - 1) * scale


def nvidia(block: bytes) -> Iterator[float]:
    """Four scales of 16 numbers each, then for each of them eight bytes: the first half in low nibbles.

    Scales have four bits of exponent above three of fraction, bias 7; all bits set is not a number, read as zero. The
    top bit says nothing. Numbers have a sign, two bits of exponent, bias 1, and one of fraction.
    """
    for group in range(4):
        exponent, fraction = block[group] >> 3 & 15, block[group] & 7
        scale = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        packed = block[4 + 8 * group : 12 + 8 * group]
        for code in (*(byte & 15 for byte in packed), *(byte >> 4 for byte in packed)):
            sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
            size = math.copysign(sizes[code & 7], -1.0 if code & 8 and code & 7 else 1.0)
            yield 0.0 if block[group] == 0x7F else size * scale


LAYOUTS = {"q1_0": one_bit, "q2_0": two_bits, "nvfp4": nvidia}
ODD_HALVES = [
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0xBC00,
    0x7BFF,
    0x7C00,
    0xFC00,
    0x7E00,
]


def odd_blocks(kind: str) -> np.ndarray:
    """Blocks of every byte, with scales of every sort: zero, subnormal, infinite, not a number, largest."""
    random = np.random.default_rng(3)
    size = gguf.KINDS[kind].bytes
    if kind == "nvfp4":
        scales = np.arange(256, dtype=np.uint8).reshape(64, 4)
        return np.concatenate([scales, random.integers(0, 256, (64, size - 4), np.uint8)], axis=1)
    scales = np.array(ODD_HALVES * 6, "<u2").view(np.uint8).reshape(-1, 2)
    codes = random.integers(0, 256, (len(scales), size - 2), np.uint8)
    codes[:16] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    return np.concatenate([scales, codes], axis=1)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers_of_odd_blocks_are_those_of_the_layout(kind: str) -> None:
    packed = odd_blocks(kind)
    expected = [number for block in packed for number in LAYOUTS[kind](block.tobytes())]
    numbers = gguf.dequantize(kind, packed, (2, len(expected) // 2)).reshape(-1)
    assert np.array_equal(numbers, np.array(expected, np.float32), equal_nan=True)
    assert np.isfinite(numbers).any()
    assert len(set(numbers.tolist())) > 20


# ---- scales of NVFP4


GATE = "blk.0.ffn_gate"
MATRIX = ("nvfp4", (files.INNER, files.HIDDEN))


def test_a_scale_of_nvfp4_multiplies_the_matrix_before_it_is_rounded(tmp_path: Path) -> None:
    scale = np.array([0.3], np.float32)
    scales = {f"{GATE}.scale": scale, f"{GATE}.input_scale": np.array([7.0], np.float32)}
    file = opened(tmp_path, tensors={f"{GATE}.weight": MATRIX, **scales})
    config = gguf.config(file)
    gguf.require_complete(file, config, layer_template(config))
    alone = gguf.dequantize(MATRIX[0], file.read(f"{GATE}.weight"), MATRIX[1])
    assert np.array_equal(file.numbers(f"{GATE}.weight"), alone * scale)
    source = GGUFSource(file, config, torch.bfloat16, name="model.gguf")
    held = source.tensor("model.layers.0.mlp.gate_proj.weight")
    assert torch.equal(held, torch.from_numpy(alone * scale).bfloat16())


def test_each_expert_of_a_stack_has_its_scale(tmp_path: Path) -> None:
    scales = np.array([0.5, -3.0, 0.7], np.float32)
    shape = (3, files.INNER, files.HIDDEN)
    stacks = {"experts.weight": ("nvfp4", shape), "experts.scale": scales}
    file = opened(tmp_path, tensors=stacks)
    alone = gguf.dequantize("nvfp4", file.read("experts.weight"), shape)
    for expert, scale in enumerate(scales):
        assert np.array_equal(file.numbers("experts.weight")[expert], alone[expert] * scale)


@pytest.mark.parametrize("shape", [(2,), (files.INNER,), (files.INNER, files.HIDDEN)])
def test_a_scale_that_fits_no_matrix_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scale = np.ones(shape, np.float32)
    file = opened(tmp_path, tensors={f"{GATE}.weight": MATRIX, f"{GATE}.scale": scale})
    with pytest.raises(CheckpointError, match=rf"'{GATE}\.scale' is \[.*, and scales \[96, 64\]"):
        file.numbers(f"{GATE}.weight")


@pytest.mark.parametrize(
    ("matrix", "scale"),
    [
        (("q8_0", MATRIX[1]), f"{GATE}.scale"),
        (("f32", MATRIX[1]), f"{GATE}.input_scale"),
        (MATRIX, f"{GATE}.weight.scale"),
        (MATRIX, f"{GATE}.weight_scale"),
        (MATRIX, "blk.0.ffn_up.scale"),
    ],
)
def test_scales_of_others_are_refused_by_name(tmp_path: Path, matrix: Any, scale: str) -> None:
    tensors = {f"{GATE}.weight": matrix, scale: np.array([0.3], np.float32)}
    file = opened(tmp_path, tensors=tensors)
    config = gguf.config(file)
    with pytest.raises(CheckpointError, match=f"not used by this model: {re.escape(scale)}$"):
        gguf.require_complete(file, config, layer_template(config))


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

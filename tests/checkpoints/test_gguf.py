"""GGUF files: what is read and what is refused; configuration, names, rows and tokenizer are transformers' own."""

import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from tests.checkpoints import gguf_files as files

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def written(folder: Path, raw: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: files.write_model(folder / f"{name}.gguf", name) for name in ARCHITECTURES}


# ---- reading


@pytest.mark.parametrize("kind", gguf.KINDS)
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
                numbers.reshape(rows, columns).view(np.int32), expected.astype(np.float32).view(np.int32)
            )


def test_metadata_of_every_type(tmp_path: Path) -> None:
    values = {
        "u8": (GGUFValueType.UINT8, 255),
        "i8": (GGUFValueType.INT8, -128),
        "u16": (GGUFValueType.UINT16, 65535),
        "i16": (GGUFValueType.INT16, -32768),
        "u32": (GGUFValueType.UINT32, 2**32 - 1),
        "i32": (GGUFValueType.INT32, -(2**31)),
        "u64": (GGUFValueType.UINT64, 2**64 - 1),
        "i64": (GGUFValueType.INT64, -(2**63)),
        "f32": (GGUFValueType.FLOAT32, 0.5),
        "f64": (GGUFValueType.FLOAT64, 1e-300),
        "bool": (GGUFValueType.BOOL, True),
        "text": (GGUFValueType.STRING, "naïve 🎉"),
    }
    lists = {"integers": [1, -2], "numbers": [0.5, 2.0], "words": ["", "Ġa", "é"], "switches": [True, False]}
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, (kind, value) in values.items():
        writer.add_key_value(key, value, kind)
    for key, listed in lists.items():
        writer.add_array(key, listed)
    found = gguf.read(files.finish(writer, tmp_path / "model.gguf")).metadata
    expected = {key: value for key, (_, value) in values.items()} | lists
    assert found == {"general.architecture": "llama", **expected}
    assert [type(found[key]) for key in expected] == [type(value) for value in expected.values()]


def test_a_long_vocabulary_spans_several_pieces(tmp_path: Path) -> None:
    words = [f"{number:04d}" * (number % 40) for number in range(60_000)]  # 4.7 MB; pieces are of 1, 1 and 2 MB
    entries = [files.entry("words", 9, struct.pack("<IQ", 8, len(words)) + b"".join(map(files.text, words)))]
    path = written(tmp_path, files.encode([*entries, files.entry("last", 0, b"\7")]))
    assert gguf.read(path).metadata == {"words": words, "last": 7}


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    entries = [files.entry("general.alignment", 4, struct.pack("<I", 128))]
    raw = files.encode(entries, [files.info("t", [4, 2])], 32, version=2, alignment=128)
    file = gguf.read(written(tmp_path, raw[:-32] + np.arange(8, dtype="<f4").tobytes()))
    assert file.numbers("t").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_blocks_into_a_given_buffer(models: dict[str, Path]) -> None:
    file = gguf.read(models["llama"])
    name = "blk.0.attn_q.weight"
    out = np.empty(file.tensors[name].nbytes, np.uint8)
    assert file.read(name, out=out) is out
    assert np.array_equal(out, file.read(name))
    for wrong in (out[1:], out.view(np.int8), np.empty(2 * out.size, np.uint8)[::2]):
        with pytest.raises(InputError, match="contiguous uint8"):
            file.read(name, out=wrong)
    with pytest.raises(InputError, match=r"no tensor 'blk\.9"):
        file.read("blk.9.attn_q.weight")


def test_dequantize_refuses_what_does_not_fit() -> None:
    for kind, size, shape in [("q4_0", 17, (1, 32)), ("q4_0", 18, (2, 16)), ("q5_0", 22, (1, 32)), ("f32", 8, (1,))]:
        with pytest.raises(InputError):
            gguf.dequantize(kind, np.zeros(size, np.uint8), shape)


# ---- files that change


@pytest.mark.parametrize("change", ["appended", "shortened", "rewritten"])
def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path, change: str) -> None:
    path = files.write_model(tmp_path / "model.gguf")
    file = gguf.read(path)
    file.read("output.weight")
    raw = path.read_bytes()
    path.write_bytes({"appended": raw + b"\0", "shortened": raw[: len(raw) // 2], "rewritten": raw}[change])
    if change == "rewritten":
        os.utime(path, ns=(1, 1))  # the clock of file times may not have moved on yet
    with pytest.raises(CheckpointError, match=r"model.gguf was changed"):
        file.read("output.weight")


def test_a_file_that_is_replaced_stays_readable(tmp_path: Path) -> None:
    path = files.write_model(tmp_path / "model.gguf")
    file = gguf.read(path)
    before = file.read("output.weight")
    other = files.write_model(tmp_path / "other.gguf", kind="f16")
    os.replace(other, path)
    assert np.array_equal(file.read("output.weight"), before)


def test_a_closed_file_is_not_read(models: dict[str, Path]) -> None:
    with gguf.read(models["llama"]) as file:
        pass
    file.close()
    with pytest.raises(CheckpointError, match="is closed"):
        file.read("output.weight")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_no_descriptor_is_left_open(tmp_path: Path, models: dict[str, Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    gguf.read(models["llama"])
    for raw in (b"", b"GGUF", files.encode(version=1)):
        with pytest.raises(CheckpointError):
            gguf.read(written(tmp_path, raw))
    assert len(os.listdir("/proc/self/fd")) == before


# ---- damaged files

U32 = struct.Struct("<I").pack
HUGE = struct.pack("<Q", 2**63)

DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut off"),
    "magic": (b"GGML" + bytes(60), r"no GGUF file: it begins with b'GGML'"),
    "version 1": (files.encode(version=1), "version 1: only 2 and 3"),
    "version 0": (files.encode(version=0), "version 0: only 2 and 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "is big endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(64), "more than the file of 88 bytes"),
    "entry count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(64), "more than the file of 88 bytes"),
    "length of a key": (files.encode([HUGE + U32(4) + U32(0)]), "key of metadata entry 0 reaches to byte"),
    "long key": (files.encode([files.entry("k" * 70_000, 4, U32(0))]), "70000 characters"),
    "length of a text": (files.encode([files.entry("k", 8, HUGE)]), "metadata 'k' reaches to byte"),
    "length of a list": (files.encode([files.entry("k", 9, U32(4) + HUGE)]), "metadata 'k' reaches to byte"),
    "length of a list of texts": (files.encode([files.entry("k", 9, U32(8) + HUGE)]), "claims 9223372036854775808"),
    "text in a list": (files.encode([files.entry("k", 9, U32(8) + struct.pack("<Q", 1) + HUGE)]), "reaches to byte"),
    "UTF-8": (files.encode([files.entry("k", 8, files.text(b"\xff"))]), "metadata 'k' is not UTF-8"),
    "type of a value": (files.encode([files.entry("k", 13, U32(0))]), "metadata 'k' has the unknown type 13"),
    "list of lists": (files.encode([files.entry("k", 9, U32(9) + HUGE)]), "array of arrays"),
    "truth value": (files.encode([files.entry("k", 7, b"\2")]), "neither 0 nor 1"),
    "key twice": (files.encode([files.entry("k", 0, b"\0")] * 2), "metadata 'k' stands there twice"),
    "alignment": (files.encode([files.entry("general.alignment", 4, U32(24))]), "power of two, not 24"),
    "no alignment": (files.encode([files.entry("general.alignment", 4, U32(0))]), "power of two, not 0"),
    "alignment as text": (files.encode([files.entry("general.alignment", 8, files.text("32"))]), "power of two"),
    "parts": (files.encode([files.entry("split.count", 2, b"\3\0")]), "one of 3 parts"),
    "tensor twice": (files.encode([], [files.info("t", [4]), files.info("t", [4], offset=32)]), "tensor 't' stands"),
    "five dimensions": (files.encode([], [files.info("t", [4] * 5)]), "tensor 't' has 5 dimensions"),
    "no dimension": (files.encode([], [files.info("t", [])]), "tensor 't' has 0 dimensions"),
    "empty tensor": (files.encode([], [files.info("t", [4, 0])]), r"tensor 't' is empty: \[0, 4\]"),
    "huge tensor": (files.encode([], [files.info("t", [2**63] * 4)]), "tensor 't' ends at byte"),
    "type Q5_K": (files.encode([], [files.info("t", [256], 13)]), "'t' is of type Q5_K, and accepted are F32, .*Q6_K"),
    "unknown type": (files.encode([], [files.info("t", [256], 999)]), "'t' is of type number 999"),
    "part of a block": (files.encode([], [files.info("t", [48], 2)]), "rows of 48, no multiple of the 32"),
    "offset": (files.encode([], [files.info("t", [4], offset=16)]), "begins at byte 16 of the data, no multiple of 32"),
    "overlap": (files.encode([], [files.info("a", [16]), files.info("b", [4], offset=32)]), "'b' overlaps tensor 'a'"),
    "far offset": (files.encode([], [files.info("t", [4], offset=2**63)]), "tensor 't' ends at byte"),
    "data cut off": (files.encode([], [files.info("t", [17])]), "the file has .*cut off"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    raw, message = DAMAGED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        gguf.read(written(tmp_path, raw))
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None, os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is not a file"):
        gguf.read(tmp_path / "model.gguf")


def small_vocabulary() -> dict[str, Any]:
    whole = files.byte_level_vocabulary()
    kept = {key: value for key, value in whole.items() if not isinstance(value, list)}
    words = {"tokens": ["<|end|>", "a", "b", "ab", "<think>"], "token_type": [3, 1, 1, 1, 4], "merges": ["a b"]}
    return kept | {f"tokenizer.ggml.{name}": value for name, value in words.items()}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole model with five tokens, and the bytes before its data."""
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    file = gguf.read(files.write_model(path, tied=True, vocabulary=small_vocabulary()))
    return path.read_bytes(), min(tensor.offset for tensor in file.tensors.values())


def used(path: Path) -> None:
    """All that a loader does with a file before it computes."""
    with gguf.read(path) as file:
        gguf.require_complete(file, gguf.config(file))
        gguf.tokenizer(file)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    raw, head = small_file
    path = written(tmp_path, raw)
    used(path)
    padding = 32  # bytes at most behind the last tensor, which nobody misses
    for end in [*range(len(raw) - padding, head, -997), *range(head, -1, -1)]:
        os.truncate(path, end)
        with pytest.raises(CheckpointError):
            gguf.read(path)


def test_changed_bytes_lead_to_a_refusal_or_to_another_model(tmp_path: Path, small_file: tuple[bytes, int]) -> None:
    raw, head = small_file
    draw = random.Random(0)
    read = 0
    with written(tmp_path, raw).open("r+b", buffering=0) as stream:
        for place in range(head):
            changed = draw.choice([0, 1, 0x7F, 0x80, 0xFF, raw[place] ^ 1 << draw.randrange(8)])
            os.pwrite(stream.fileno(), bytes([changed]), place)
            try:
                used(tmp_path / "model.gguf")
                read += 1
            except (CheckpointError, UnsupportedModelError) as error:
                assert "model.gguf" in str(error)  # noqa: PT017 (either outcome is right)
            os.pwrite(stream.fileno(), raw[place : place + 1], place)
    assert 0 < read < head


# ---- configuration


def opened(folder: Path, architecture: str = "llama", **changes: Any) -> gguf.GGUFFile:
    return gguf.read(files.write_model(folder / "model.gguf", architecture, **changes))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_configuration_is_that_of_transformers(models: dict[str, Path], architecture: str) -> None:
    path = models[architecture]
    theirs = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    ours = gguf.config(gguf.read(path)).to_dict()
    without_meaning = {"_name_or_path", "_model_name_or_path", "architectures", "transformers_version"}
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} - without_meaning
    assert differing <= {"head_dim"}  # which transformers leaves to Qwen2Config, and does not read for qwen3
    assert ours["head_dim"] == files.HEAD
    assert ours["architectures"] == [
        {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture] + "ForCausalLM"
    ]


def test_what_the_tensors_say_of_the_configuration(tmp_path: Path) -> None:
    plain = gguf.config(opened(tmp_path))
    assert (plain.tie_word_embeddings, plain.attention_bias, plain.mlp_bias) == (False, False, False)
    biases = {f"blk.{layer}.attn_{part}.bias": ("f32", (64,)) for layer in (0, 1) for part in ("q", "output")}
    biases |= {f"blk.{layer}.attn_{part}.bias": ("f32", (32,)) for layer in (0, 1) for part in "kv"}
    file = opened(tmp_path, tied=True, tensors=biases)
    config = gguf.config(file)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True, True, False)
    gguf.require_complete(file, config)


def test_absent_values_have_the_meaning_that_llama_cpp_gives_them(tmp_path: Path) -> None:
    absent = ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv")
    config = gguf.config(opened(tmp_path, vocabulary={}, metadata={f"llama.{key}": None for key in absent}))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.num_key_value_heads, config.head_dim) == (files.HEADS, files.HEAD)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


SCALED = {
    "linear": ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "no type": ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "factor 1": ({"type": "linear", "factor": 1.0}, {"rope_type": "default"}),
    "none": ({"type": "none", "factor": 2.0}, {"rope_type": "default"}),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 1.0,
        },
    ),
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_rotary_positions(tmp_path: Path, case: str) -> None:
    stored, expected = SCALED[case]
    metadata = {f"qwen2.rope.scaling.{key}": value for key, value in stored.items()}
    config = gguf.config(opened(tmp_path, "qwen2", metadata=metadata))
    assert config.rope_parameters == {"rope_theta": 50_000.0, **expected}
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    assert Qwen2RotaryEmbedding(config).inv_freq.shape == (files.HEAD // 2,)


def llama3_factors(factor: float, theta: float = 50_000.0) -> np.ndarray:
    """As convert_hf_to_gguf.py computes them: llama.cpp divides each frequency by its factor."""
    frequencies = 1.0 / theta ** (np.arange(0, files.HEAD, 2, dtype=np.float32) / files.HEAD)
    found = []
    for wavelength in 2 * np.pi / frequencies:
        smooth = (8192 / wavelength - 1) / 3
        known = {wavelength < 2048: 1.0, wavelength > 8192: factor}
        found.append(known.get(True, 1 / ((1 - smooth) / factor + smooth)))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3(tmp_path: Path, factor: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stored = llama3_factors(factor)
    assert {1.0, factor} < set(stored.tolist())
    file = opened(tmp_path, tensors={"rope_freqs.weight": stored})
    config = gguf.config(file)
    gguf.require_complete(file, config)
    plain = 50_000.0 ** (-np.arange(0, files.HEAD, 2) / files.HEAD)
    np.testing.assert_allclose(LlamaRotaryEmbedding(config).inv_freq.numpy(), plain / stored, rtol=1e-5)


@pytest.mark.parametrize("stored", [llama3_factors(8.0) * 1.01, np.ones(4, np.float32), np.full(8, np.nan, np.float32)])
def test_other_rotary_factors_are_refused(tmp_path: Path, stored: np.ndarray) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight are not those of Llama 3"):
        gguf.config(opened(tmp_path, tensors={"rope_freqs.weight": stored.astype(np.float32)}))


UNSUPPORTED = {
    "expert_count": 8,
    "attention.sliding_window": 4096,
    "attention.causal": False,
    "logit_scale": 0.5,
    "rope.dimension_count": 8,
    "attention.value_length": 8,
    "rope.scaling.type": "longrope",
    "rope.scaling.attn_factor": 0.5,
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_model_that_no_configuration_describes_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} = {UNSUPPORTED[key]} "):
        gguf.config(opened(tmp_path, metadata={f"llama.{key}": UNSUPPORTED[key]}))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture 'gemma2', and accepted are llama, qwen2, qwen3"):
        gguf.config(opened(tmp_path, "gemma2"))
    with pytest.raises(CheckpointError, match=r"lacks general\.architecture"):
        gguf.config(gguf.read(written(tmp_path, files.encode())))


CONTRADICTING = {
    "llama.block_count": (None, "must be a positive integer; it is missing"),
    "llama.attention.head_count": ("four", "must be a positive integer; it is four"),
    "llama.context_length": (0, "must be a positive integer; it is 0"),
    "llama.attention.head_count_kv": (3, "must be a divisor of the 4 heads"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "must be a positive number; it is nan"),
    "llama.rope.freq_base": (-1.0, "must be a positive number; it is -1.0"),
    "llama.embedding_length": (128, r"token_embd.weight must be \[vocabulary, 128\]; it is \[265, 64\]"),
    "tokenizer.ggml.eos_token_id": (265, "must be one of 265 token ids, not 265"),
}


@pytest.mark.parametrize("key", CONTRADICTING)
def test_values_that_contradict_the_tensors_are_refused(tmp_path: Path, key: str) -> None:
    value, message = CONTRADICTING[key]
    with pytest.raises(CheckpointError, match=message):
        gguf.config(opened(tmp_path, metadata={key: value}))


def test_more_tokens_than_embeddings_are_refused_and_fewer_accepted(tmp_path: Path) -> None:
    assert gguf.config(opened(tmp_path, tensors={"token_embd.weight": ("q8_0", (288, 64))})).vocab_size == 288
    with pytest.raises(CheckpointError, match=r"token_embd.weight has 256 rows for 265 tokens"):
        gguf.config(opened(tmp_path, tensors={"token_embd.weight": ("q8_0", (256, 64))}))


# ---- names, shapes, rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_model(tmp_path: Path, architecture: str, tied: bool) -> None:
    file = opened(tmp_path, architecture, tied=tied)
    config = gguf.config(file)
    gguf.require_complete(file, config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = gguf.tensor_names(config.num_hidden_layers)
    assert {names[name]: shape for name, shape in gguf.tensor_shapes(config).items()} == expected


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    changes = {
        "blk.1.ffn_up.weight": None,
        "blk.0.attn_v.weight": ("q8_0", (64, 64)),
        **{f"blk.{layer}.attn_norm.weight": ("f32", (64,)) for layer in range(7, 15)},
        "rope_freqs.weight": None,
    }
    file = opened(tmp_path, tensors=changes)
    with pytest.raises(CheckpointError) as caught:
        gguf.require_complete(file, gguf.config(file))
    message = str(caught.value)
    assert (
        "missing: blk.1.ffn_up.weight; of another shape: blk.0.attn_v.weight [64, 64], not [32, 64]; not used"
        in message
    )
    assert message.endswith("blk.12.attn_norm.weight and 2 more")


def unpacking() -> dict[str, Any]:
    """What has transformers keep no packed blocks: before 5.19 it never does."""
    has_option = hasattr(transformers, "GgufConfig")
    return {"quantization_config": transformers.GgufConfig(dequantize=True)} if has_option else {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_that_transformers_loads(models: dict[str, Path], architecture: str) -> None:
    path = models[architecture]
    file = gguf.read(path)
    config = gguf.config(file)  # given, as transformers does not read the size of a head for qwen3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, config=config, **unpacking()
    ).state_dict()
    names = gguf.tensor_names(config.num_hidden_layers)
    for name in gguf.tensor_shapes(config):
        order = gguf.row_order(config, name)
        numbers = file.numbers(name) if order is None else file.numbers(name)[order]
        assert np.array_equal(loaded[names[name]].numpy(), numbers), name


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


# ---- tokenizer

TEXTS = (
    "",
    "hello world",
    "  hello\n\n hello 12 1234",
    "<|im_start|>hello<|end|>",
    "<think>é🎉</think>",
    "</s> wor<s>!",
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("vocabulary", [files.byte_level_vocabulary, files.sentencepiece_vocabulary])
def test_the_tokenizer_is_that_of_transformers(
    tmp_path: Path, architecture: str, vocabulary: Callable[[], dict[str, Any]]
) -> None:
    file = opened(tmp_path, architecture, vocabulary=vocabulary())
    ours = gguf.tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_the_chat_template_and_the_special_tokens(models: dict[str, Path]) -> None:
    tokenizer = gguf.tokenizer(gguf.read(models["llama"]))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>hello<|end|>"
    assert (ids[0], ids[-1], len(ids)) == (tokenizer.bos_token_id, tokenizer.eos_token_id, 3)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|end|>", None)


def test_an_older_transformers_reads_the_file_itself(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf.read(models["llama"])
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder, gguf_file: (folder, gguf_file))
    assert gguf.tokenizer(file) == (file.path.parent, file.path.name)


VOCABULARIES = {
    "tokenizer.ggml.model": ("bert", "a tokenizer of kind 'bert', and accepted are gpt2"),
    "tokenizer.ggml.tokens": ([1, 2], "tokens must be a list of str"),
    "tokenizer.ggml.merges": (["a b c"], "two pieces with one space between, not 'a b c'"),
    "tokenizer.ggml.token_type": ([1, 1], "must be as long as the 265 tokens"),
    "tokenizer.ggml.bos_token_id": (265, "must be one of 265 token ids, not 265"),
    "tokenizer.chat_template": (7, "chat_template must be text"),
}


@pytest.mark.parametrize("key", VOCABULARIES)
def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path, key: str) -> None:
    value, message = VOCABULARIES[key]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        gguf.tokenizer(opened(tmp_path, metadata={key: value}))


def test_merges_of_unknown_pieces_and_a_missing_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer can be built"):
        gguf.tokenizer(opened(tmp_path, metadata={"tokenizer.ggml.merges": ["xyz q"]}))
    with pytest.raises(UnsupportedModelError, match="has no tokenizer"):
        gguf.tokenizer(opened(tmp_path, vocabulary={}))

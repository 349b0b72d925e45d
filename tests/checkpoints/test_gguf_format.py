"""GGUF files: what is read, files that change, and damaged ones, which are refused."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.models.configs import layer_template
from tests.checkpoints import gguf_files as files
from tests.checkpoints.gguf_files import written


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
    lists = {
        "integers": [1, -2],
        "numbers": [0.5, 2.0],
        "words": ["", "Ġa", "é"],
        "switches": [True, False],
    }
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
    # 4.7 MB; pieces are of 1, 1 and 2 MB
    words = [f"{number:04d}" * (number % 40) for number in range(60_000)]
    entries = [
        files.entry(
            "words", 9, struct.pack("<IQ", 8, len(words)) + b"".join(map(files.text, words))
        )
    ]
    path = written(tmp_path, files.encode([*entries, files.entry("last", 0, b"\7")]))
    assert gguf.read(path).metadata == {"words": words, "last": 7}


def test_data_begin_after_a_list_of_any_length(tmp_path: Path) -> None:
    """One of these lengths ends at a multiple of the alignment, where the data begin at once."""
    numbers = np.arange(8, dtype=np.float32)
    for length in range(32):
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_string("general.description", "x" * length)
        writer.add_tensor("numbers", numbers)
        with gguf.read(files.finish(writer, tmp_path / "model.gguf")) as file:
            assert file.numbers("numbers").tolist() == numbers.tolist()


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    entries = [files.entry("general.alignment", 4, struct.pack("<I", 128))]
    raw = files.encode(entries, [files.info("t", [4, 2])], 32, version=2, alignment=128)
    file = gguf.read(written(tmp_path, raw[:-32] + np.arange(8, dtype="<f4").tobytes()))
    assert file.numbers("t").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ---- files that change


@pytest.mark.parametrize("change", ["appended", "shortened", "rewritten"])
def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path, change: str) -> None:
    path = files.write_model(tmp_path / "model.gguf")
    file = gguf.read(path)
    file.read("output.weight")
    raw = path.read_bytes()
    path.write_bytes(
        {"appended": raw + b"\0", "shortened": raw[: len(raw) // 2], "rewritten": raw}[change]
    )
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
    "magic": (b"GGML" + bytes(60), r"not a GGUF file: it begins with b'GGML'"),
    "version 1": (files.encode(version=1), "version 1: only 2 and 3"),
    "version 0": (files.encode(version=0), "version 0: only 2 and 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "is big endian"),
    "tensor count": (
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(64),
        "more than the file of 88 bytes",
    ),
    "entry count": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(64),
        "more than the file of 88 bytes",
    ),
    "length of a key": (
        files.encode([HUGE + U32(4) + U32(0)]),
        "key of metadata entry 0 reaches to byte",
    ),
    "long key": (files.encode([files.entry("k" * 70_000, 4, U32(0))]), "70000 characters"),
    "length of a text": (files.encode([files.entry("k", 8, HUGE)]), "metadata 'k' reaches to byte"),
    "length of a list": (
        files.encode([files.entry("k", 9, U32(4) + HUGE)]),
        "metadata 'k' reaches to byte",
    ),
    "length of a list of texts": (
        files.encode([files.entry("k", 9, U32(8) + HUGE)]),
        "claims 9223372036854775808",
    ),
    "text in a list": (
        files.encode([files.entry("k", 9, U32(8) + struct.pack("<Q", 1) + HUGE)]),
        "reaches to byte",
    ),
    "UTF-8": (
        files.encode([files.entry("k", 8, files.text(b"\xff"))]),
        "metadata 'k' is not UTF-8",
    ),
    "type of a value": (
        files.encode([files.entry("k", 13, U32(0))]),
        "metadata 'k' has the unknown type 13",
    ),
    "list of lists": (files.encode([files.entry("k", 9, U32(9) + HUGE)]), "array of arrays"),
    "truth value": (files.encode([files.entry("k", 7, b"\2")]), "neither 0 nor 1"),
    "key twice": (files.encode([files.entry("k", 0, b"\0")] * 2), "metadata 'k' is there twice"),
    "alignment": (
        files.encode([files.entry("general.alignment", 4, U32(24))]),
        "power of two, not 24",
    ),
    "no alignment": (
        files.encode([files.entry("general.alignment", 4, U32(0))]),
        "power of two, not 0",
    ),
    "alignment as text": (
        files.encode([files.entry("general.alignment", 8, files.text("32"))]),
        "power of two",
    ),
    "parts": (
        files.encode([files.entry("split.count", 2, b"\3\0")]),
        "one of 3 parts, and is not named so",
    ),
    "tensor twice": (
        files.encode([], [files.info("t", [4]), files.info("t", [4], offset=32)]),
        "tensor 't' is there twice",
    ),
    "five dimensions": (
        files.encode([], [files.info("t", [4] * 5)]),
        "tensor 't' has 5 dimensions",
    ),
    "no dimension": (files.encode([], [files.info("t", [])]), "tensor 't' has 0 dimensions"),
    "empty tensor": (files.encode([], [files.info("t", [4, 0])]), r"tensor 't' is empty: \[0, 4\]"),
    "huge tensor": (files.encode([], [files.info("t", [2**63] * 4)]), "tensor 't' ends at byte"),
    "type Q8_K": (
        files.encode([], [files.info("t", [256], 15)]),
        "'t' is of ggml's type 15; accepted: F32, .*Q6_K",
    ),
    "unknown type": (
        files.encode([], [files.info("t", [256], 999)]),
        "'t' is of ggml's type 999; accepted",
    ),
    "part of a block": (
        files.encode([], [files.info("t", [48], 2)]),
        "rows of 48, not a multiple of the 32",
    ),
    "offset": (
        files.encode([], [files.info("t", [4], offset=16)]),
        "begins at byte 16 of the data, not a multiple of 32",
    ),
    "overlap": (
        files.encode([], [files.info("a", [16]), files.info("b", [4], offset=32)]),
        "'b' overlaps tensor 'a'",
    ),
    "Q2_0 by blocks of 128, as a fork has written it": (
        files.encode(
            [], [files.info("a", [128, 64], 42), files.info("b", [4], offset=34 * 64)], 4096
        ),
        "'b' overlaps tensor 'a'",
    ),
    "far offset": (
        files.encode([], [files.info("t", [4], offset=2**63)]),
        "tensor 't' ends at byte",
    ),
    "data cut off": (files.encode([], [files.info("t", [17])]), "the file has .*cut off"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    raw, message = DAMAGED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        gguf.read(written(tmp_path, raw))
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert len(str(caught.value)) - len(str(tmp_path)) < 340


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None, os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is not a file"):
        gguf.read(tmp_path / "model.gguf")


def small_vocabulary() -> dict[str, Any]:
    whole = files.byte_level_vocabulary()
    kept = {key: value for key, value in whole.items() if not isinstance(value, list)}
    words = {
        "tokens": ["<|end|>", "a", "b", "ab", "<think>"],
        "token_type": [3, 1, 1, 1, 4],
        "merges": ["a b"],
    }
    return kept | {f"tokenizer.ggml.{name}": value for name, value in words.items()}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole model with five tokens, and the bytes before its data."""
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    file = gguf.read(files.write_model(path, tied=True, vocabulary=small_vocabulary()))
    return path.read_bytes(), min(tensor.offset for tensor in file.tensors.values())


def used(path: Path) -> None:
    """Do all that a loader does with a file before it computes."""
    with gguf.read(path) as file:
        config = gguf.config(file)
        gguf.require_complete(file, config, layer_template(config))
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


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3))
def test_changed_bytes_lead_to_a_refusal_or_to_another_model(
    tmp_path: Path, small_file: tuple[bytes, int], first: int
) -> None:
    """Each byte from the first one on, by steps of three."""
    raw, head = small_file
    draw = random.Random(first)
    read = 0
    with written(tmp_path, raw).open("r+b", buffering=0) as stream:
        for place in range(first, head, 3):
            changed = draw.choice([0, 1, 0x7F, 0x80, 0xFF, raw[place] ^ 1 << draw.randrange(8)])
            os.pwrite(stream.fileno(), bytes([changed]), place)
            try:
                used(tmp_path / "model.gguf")
                read += 1
            except (CheckpointError, UnsupportedModelError) as error:
                assert "model.gguf" in str(error)  # noqa: PT017 (either outcome is right)
            os.pwrite(stream.fileno(), raw[place : place + 1], place)
    assert 0 < read < len(range(first, head, 3))


# ---- split files


def split(
    folder: Path, shapes: dict[str, tuple[int, ...]], names: list[list[str]], **changes: Any
) -> list[Path]:
    """Write tensors of consecutive numbers to the parts of a split file; changes: of their metadata."""
    paths = []
    for part, inside in enumerate(names):
        path = folder / f"model-{part + 1:05d}-of-{len(names):05d}.gguf"
        writer = GGUFWriter(path, "llama")
        keys = {"split.no": part, "split.count": len(names), "split.tensors.count": len(shapes)}
        for key, value in (keys | changes).items():
            writer.add_uint16(key, value)
        if not part:
            writer.add_uint32("llama.block_count", 7)
        for name in inside:
            size = int(np.prod(shapes[name]))
            writer.add_tensor(
                name, np.arange(size, dtype=np.float32).reshape(shapes[name]) + len(name)
            )
        paths.append(files.finish(writer, path))
    return paths


SHAPES = {"a": (4, 2), "bb": (3,), "ccc": (5, 8)}
NAMES = [["a"], [], ["ccc", "bb"]]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_the_parts_of_a_split_file_are_one_model(tmp_path: Path, given: int) -> None:
    paths = split(tmp_path, SHAPES, NAMES)
    with gguf.read(paths[given]) as file:
        assert file.path == paths[0]
        assert file.metadata["llama.block_count"] == 7
        assert {name: tensor.shape for name, tensor in file.tensors.items()} == SHAPES
        for name, shape in SHAPES.items():
            expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name)
            assert np.array_equal(file.numbers(name), expected)
        assert np.array_equal(file.read_rows("ccc", 1, 3).view(np.float32), np.arange(8, 24) + 3)
    with pytest.raises(CheckpointError, match="is closed"):
        file.numbers("ccc")


def test_split_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path, SHAPES, NAMES)
    (tmp_path / "other").mkdir()
    renamed = (tmp_path / "other" / "model.gguf", paths[0].read_bytes())
    renamed[0].write_bytes(renamed[1])
    with pytest.raises(
        CheckpointError, match=r"one of 3 parts, and is not named so \(NAME-00001-of-00003\.gguf\)"
    ):
        gguf.read(renamed[0])
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of its 3 parts are missing: model-00002-of-00003\.gguf"
    ):
        gguf.read(paths[0])


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ([["a", "bb"], ["ccc", "a"]], {}, "tensor 'a' is in another part as well"),
        ([["a"], ["ccc"]], {}, "its 2 parts have 2 tensors, not 3"),
        ([["a", "bb"], ["ccc"]], {"split.no": 0}, "does not say that it is part 2 of 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, names: list[list[str]], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf.read(split(tmp_path, SHAPES, names, **changes)[0])

"""The contents of a GGUF file: its metadata, and its tensors as packed blocks.

Version 2 and 3, little endian, one file or the parts of a split one. Everything is checked against the file's size
before it is believed. Faults are CheckpointErrors with the file's path. Source of the format: ggml's docs/gguf.md and
ggml/src/gguf.cpp.
"""

import math
import os
import re
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specengine.errors import CheckpointError, require_input, require_intact, restating

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_LEVELS = {  # that codes of one and two bits stand for
    "q1_0": np.array([-1, 1], np.float32),
    "q2_0": np.array([-1, 0, 1, 2], np.float32),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_PARTS = 1000
_MAX_KEY_LENGTH = 65535  # docs/gguf.md
_MIN_ENTRY_BYTES = 8 + 4 + 1  # bytes: length of the key, type, value
# bytes: length of the name, dimensions, one dimension, type, offset
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GGUFTensor:
    """The place of a tensor: `nbytes` from byte `offset` of a file on. `shape` is torch's, outputs before inputs.

    part: the number of its file among those of a split one.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int
    part: int = 0


@dataclass(eq=False)
class GGUFFile(AbstractContextManager["GGUFFile"]):
    """An open GGUF file: its metadata and list of tensors, and the tensors' blocks on demand.

    `metadata` maps keys to int, float, bool, str or lists of one of them; of a split file it is the first part's. The
    descriptors are freed by `close`, by the end of a `with` block, or with the object.
    """

    _sources: "Sequence[_Source]"
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def path(self) -> Path:
        """Return the path of the file, of a split one that of its first part."""
        return self.parts[0]

    @property
    def parts(self) -> list[Path]:
        """Return the paths of its files, more than one of a split file."""
        return [source.path for source in self._sources]

    def read(self, name: str) -> np.ndarray:
        """Return a copy of the blocks of one tensor: uint8 [nbytes].

        Raises CheckpointError where the file has changed since it was opened, and InputError for an unknown name.
        """
        require_input(f"{self.path} has no tensor {name!r}", name in self.tensors)
        return self.read_rows(name, 0, math.prod(self.tensors[name].shape[:-1]))

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return a copy of the blocks of rows [first, last) of one tensor: uint8 [bytes]. Raises as `read`.

        The rows of a stack of matrices are those of one after those of the other.
        """
        tensor = self.tensors[name]
        each = tensor.nbytes // math.prod(tensor.shape[:-1])
        out = np.empty((last - first) * each, np.uint8)
        self._sources[tensor.part].read_into(out.data, tensor.offset + first * each)
        return out

    def place(self, name: str) -> tuple[int, int, str]:
        """Return the descriptor, byte offset and path of the file that one tensor's blocks are read from."""
        tensor = self.tensors[name]
        source = self._sources[tensor.part]
        return source.descriptor, tensor.offset, str(source.path)

    def numbers(self, name: str) -> np.ndarray:
        """Return one tensor in float32, in its shape, times its scale where it has one.

        Raises CheckpointError for a scale that fits neither the whole tensor nor the experts of a stack.
        """
        tensor = self.tensors[name]
        numbers = dequantize(tensor.kind, self.read(name), tensor.shape)
        scale = self.tensors.get(name.removesuffix("weight") + "scale")
        if tensor.kind == "nvfp4" and scale is not None:
            require_intact(
                f"{self.path}: tensor {scale.name[:80]!r} is {list(scale.shape)}, "
                f"and scales {list(tensor.shape)}",
                math.prod(scale.shape) in (1, *tensor.shape[:-2]),
            )
            numbers *= dequantize(scale.kind, self.read(scale.name), scale.shape).reshape(
                -1, *(1,) * (numbers.ndim - 1)
            )
        return numbers

    def close(self) -> None:
        """Free the descriptors. Copies stay."""
        for source in self._sources:
            source.close()

    def __exit__(self, *_error: object) -> None:
        self.close()


def read(path: Path, accept: Callable[[Path, Mapping[str, Any]], object] | None = None) -> GGUFFile:
    """Open a file and read all but its tensors' blocks. Raises CheckpointError for any fault in it.

    path: of a whole file, or of any part of a split one, whose other parts lie next to it
    accept: called with the path and the metadata before the tensors are read; raises to refuse the file.
    """
    sources: list[_Source] = []
    try:
        cursor, metadata, count = _opened(Path(path), sources)
        paths = _parts(Path(path), metadata)
        if paths[0] != Path(path):
            sources.pop().close()
            cursor, metadata, count = _opened(paths[0], sources)
        if accept is not None:
            accept(paths[0], metadata)
        tensors = _read_tensors(cursor, metadata, count, 0)
        for number, other in enumerate(paths[1:], 1):
            cursor, inside, count = _opened(other, sources)
            require_intact(
                f"{other} does not say that it is part {number + 1} of {len(paths)}",
                (inside.get("split.no"), inside.get("split.count")) == (number, len(paths)),
            )
            more = _read_tensors(cursor, inside, count, number)
            if twice := sorted(tensors.keys() & more.keys()):
                raise CheckpointError(
                    f"{other}: tensor {twice[0][:80]!r} is in another part as well"
                )
            tensors |= more
        stated = metadata.get("split.tensors.count", len(tensors))
        require_intact(
            f"{paths[0]}: its {len(paths)} parts have {len(tensors)} tensors, not {str(stated)[:80]}",
            len(paths) <= 1 or stated == len(tensors),
        )
        return GGUFFile(sources, metadata, tensors)
    except BaseException:
        for source in sources:
            source.close()
        raise


def dequantize(kind: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of the blocks `data` (uint8, any shape), as float32 of `shape`."""
    require_input(f"kind must be one of {', '.join(KINDS)}, not {kind!r}", kind in KINDS)
    block = KINDS[kind]
    elements, row = math.prod(shape), shape[-1] if shape else 1
    require_input(
        f"{data.dtype} {data.shape} does not hold {list(shape)} numbers in {kind}",
        row % block.elements == 0
        and data.dtype == np.uint8
        and data.size == elements // block.elements * block.bytes,
    )
    data = np.ascontiguousarray(data).reshape(-1)
    if kind == "i64":
        return data.view("<i8").astype(np.float32).reshape(shape)
    if kind in _LEVELS:  # in units of a half, codes from the lowest bits of each byte on
        blocks, levels = data.reshape(-1, block.bytes), _LEVELS[kind]
        places = np.arange(0, 8, len(levels) // 2, dtype=np.uint8)
        codes = blocks[:, 2:, None] >> places & (len(levels) - 1)
        numbers = levels[codes.reshape(len(blocks), -1)]
        numbers *= blocks[:, :2].copy().view("<f2")
        return numbers.reshape(shape)
    from gguf import GGMLQuantizationType, quants

    rows = data.reshape(-1, row // block.elements * block.bytes)
    return quants.dequantize(rows, GGMLQuantizationType(block.number)).reshape(shape)


# ---- reading


class _Source:
    """An open file whose bytes must stay what they were: copied, never mapped, so that no reader can be cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with restating(
            OSError, lambda error: CheckpointError(f"{path} cannot be opened: {error.strerror}")
        ):
            require_intact(f"{path} is not a file", path.is_file())
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self._state = self._present_state()
        self.size = self._state[0]

    def read_into(self, out: bytearray | memoryview, offset: int) -> None:
        """Fill `out` (bytes) from byte `offset` on."""
        # the number may already belong to another file
        require_intact(f"{self.path} is closed", self.close.alive)
        done = 0
        with (
            restating(
                OSError,
                lambda error: CheckpointError(f"{self.path} cannot be read: {error.strerror}"),
            ),
            memoryview(out) as view,
        ):
            while done < len(view) and (
                count := os.preadv(self.descriptor, [view[done:]], offset + done)
            ):
                done += count
            changed = done < len(view) or self._present_state() != self._state
        require_intact(
            f"{self.path} was changed while it was read: load it again once it is complete",
            not changed,
        )

    def _present_state(self) -> tuple[int, int]:
        state = os.fstat(self.descriptor)
        return state.st_size, state.st_mtime_ns


class _Cursor:
    """The values of a file one after the other from its start; `place` says in an error what is being read."""

    def __init__(self, source: _Source) -> None:
        self.source, self.position, self.place = source, 0, "the header"
        self._data = bytearray()

    def require(self, holds: bool, message: str) -> None:
        require_intact(f"{self.source.path}: {self.place} {message}", holds)

    def take(self, count: int) -> bytearray:
        self._load(self.position + count)
        self.position += count
        return self._data[self.position - count : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, texts, size = self._data, [], _LENGTH.size
        position, there, length_at = self.position, len(data), _LENGTH.unpack_from
        for _ in range(count):  # of hundreds of thousands, with nothing asked twice
            start = position + size
            if start > there:
                there = self._load(start)
            position = start + length_at(data, position)[0]
            if position > there:
                there = self._load(position)
            texts.append(data[start:position])
        self.position = position
        with restating(
            UnicodeDecodeError,
            lambda error: CheckpointError(
                f"{self.source.path}: {self.place} is not UTF-8 ({error.reason})"
            ),
        ):
            return [piece.decode() for piece in texts]

    def require_room(self, count: int, size: int) -> None:
        """Refuse a count of entries of `size` bytes or more each that the rest of the file cannot hold."""
        self.require(
            count * size <= self.source.size - self.position,
            f"claims {count} entries, more than the file of {self.source.size} bytes can hold",
        )

    def _load(self, end: int) -> int:
        self.require(
            end <= self.source.size,
            f"reaches to byte {end}, and the file has {self.source.size}: it is cut off or damaged",
        )
        if end > (have := len(self._data)):
            more = bytearray(min(self.source.size, max(end, 2 * have, 1 << 20)) - have)
            self.source.read_into(more, have)
            self._data += more
        return len(self._data)


def _opened(path: Path, sources: list[_Source]) -> tuple[_Cursor, dict[str, Any], int]:
    """Open a file, which joins `sources`. Returns where its tensors are listed, its metadata, and their count."""
    sources.append(_Source(path))
    cursor = _Cursor(sources[-1])
    magic = bytes(cursor.take(4))
    require_intact(f"{path} is not a GGUF file: it begins with {magic!r}", magic == b"GGUF")
    version = cursor.number("I")
    require_intact(
        f"{path} is big endian: only little-endian GGUF files are read",
        version == 0 or version & 0xFFFF != 0,
    )
    require_intact(f"{path} has GGUF version {version}: only 2 and 3 are read", version in (2, 3))
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    cursor.require_room(tensor_count, _MIN_TENSOR_BYTES)
    cursor.require_room(entry_count, _MIN_ENTRY_BYTES)
    metadata: dict[str, Any] = {}
    for number in range(entry_count):
        cursor.place = f"the key of metadata entry {number}"
        key = cursor.string()
        cursor.require(
            len(key) <= _MAX_KEY_LENGTH,
            f"has {len(key)} characters, more than {_MAX_KEY_LENGTH}",
        )
        cursor.place = f"metadata {key[:80]!r}"
        cursor.require(key not in metadata, "is there twice")
        code = cursor.number("I")
        metadata[key] = (
            _read_array(cursor, cursor.number("I"), cursor.number("Q"))
            if code == _ARRAY
            else cursor.string()
            if code == _STRING
            else _read_numbers(cursor, code, 1)[0]
        )
    return cursor, metadata, tensor_count


def _read_tensors(
    cursor: _Cursor, metadata: dict[str, Any], count: int, file_number: int
) -> dict[str, GGUFTensor]:
    infos: dict[str, GGUFTensor] = {}  # their offsets counted from the start of the data
    for place in range(count):
        cursor.place = f"the name of tensor {place}"
        name = cursor.string()
        cursor.place = f"tensor {name[:80]!r}"
        cursor.require(name not in infos, "is there twice")
        dimensions = cursor.number("I")
        cursor.require(
            1 <= dimensions <= 4, f"has {dimensions} dimensions, and 1 to 4 are accepted"
        )
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        number, offset = cursor.number("I"), cursor.number("Q")
        kind = next((kind for kind in KINDS if KINDS[kind].number == number), "")
        cursor.require(
            bool(kind),
            f"is of ggml's type {number}; accepted: {', '.join(KINDS).upper()}; take a file of those, "
            "as Q4_K_M and Q8_0 mostly are, or make one with llama-quantize",
        )
        cursor.require(0 not in shape, f"is empty: {list(shape)}")
        block = KINDS[kind]
        cursor.require(
            shape[-1] % block.elements == 0,
            f"has rows of {shape[-1]}, not a multiple of the {block.elements} in a block",
        )
        size = math.prod(shape) // block.elements * block.bytes
        infos[name] = GGUFTensor(name, shape, kind, offset, size, file_number)
    alignment = metadata.get("general.alignment", 32)
    require_intact(
        f"{cursor.source.path}: general.alignment must be a power of two, not {str(alignment)[:80]}",
        type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0,
    )
    return _placed(cursor, infos, alignment)


def _read_array(cursor: _Cursor, code: int, count: int) -> list[Any]:
    cursor.require(code != _ARRAY, "is an array of arrays, which is not read")
    if code != _STRING:
        return _read_numbers(cursor, code, count)
    cursor.require_room(count, _LENGTH.size)
    return cursor.strings(count)


def _read_numbers(cursor: _Cursor, code: int, count: int) -> list[Any]:
    if code == _BOOL:
        values = list(cursor.take(count))
        cursor.require(max(values, default=0) <= 1, "is a boolean that is neither 0 nor 1")
        return [bool(value) for value in values]
    cursor.require(code in _NUMBERS, f"has the unknown type {code}")
    dtype = np.dtype(_NUMBERS[code])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()


def _parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the paths of all parts of a split file, the first one first; the path alone of a whole file.

    Parts are named as llama-gguf-split names them: NAME-00001-of-00003.gguf.
    """
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return [path]
    require_intact(
        f"{path}: split.count must be 1 to {_MAX_PARTS}, not {str(count)[:80]}",
        type(count) is int and 1 < count <= _MAX_PARTS,
    )
    match: Any = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", path.name)
    require_intact(
        f"{path} is one of {count} parts, and is not named so (NAME-00001-of-{count:05d}.gguf); rename them, or "
        "join them with llama-gguf-split --merge",
        match is not None and int(match[2]) == count,
    )
    paths = [
        path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part_path.name for part_path in paths if not part_path.is_file()]
    require_intact(
        f"{path}: {len(missing)} of its {count} parts are missing: {', '.join(missing[:4])}",
        not missing,
    )
    return paths


def _placed(cursor: _Cursor, infos: dict[str, GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    """Return the tensors with their offsets in the file, in the order of the file's list."""
    start = -(-cursor.position // alignment) * alignment
    placed = {name: replace(info, offset=start + info.offset) for name, info in infos.items()}
    taken, last = start, ""
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
        cursor.place = f"tensor {tensor.name[:80]!r}"
        cursor.require(
            tensor.offset % alignment == 0,
            f"begins at byte {tensor.offset - start} of the data, not a multiple of {alignment}",
        )
        cursor.require(tensor.offset >= taken, f"overlaps tensor {last[:80]!r}")
        taken, last = tensor.offset + tensor.nbytes, tensor.name
        cursor.require(
            taken <= cursor.source.size,
            f"ends at byte {taken}, and the file has {cursor.source.size}: it is cut off or damaged",
        )
    return placed


# ---- how numbers are stored: the last thing here, so that one more kind is one more line


class Kind(NamedTuple):
    """A kind of numbers: ggml's number of the type, and that `elements` of a row share a block of `bytes`."""

    number: int
    elements: int
    bytes: int


# A kind with a file in csrc/cpu/integers stays packed under integer numerics. One with a file in csrc/cpu/formats
# stays packed under others. The rest is unpacked when it is loaded.
KINDS = {
    "f32": Kind(0, 1, 4),
    "f16": Kind(1, 1, 2),
    "bf16": Kind(30, 1, 2),
    "i64": Kind(27, 1, 8),
    "q4_0": Kind(2, 32, 18),
    "q4_1": Kind(3, 32, 20),
    "q5_0": Kind(6, 32, 22),
    "q5_1": Kind(7, 32, 24),
    "q8_0": Kind(8, 32, 34),
    "q2_k": Kind(10, 256, 84),
    "q3_k": Kind(11, 256, 110),
    "q4_k": Kind(12, 256, 144),
    "q5_k": Kind(13, 256, 176),
    "q6_k": Kind(14, 256, 210),
    "iq4_nl": Kind(20, 32, 18),
    "iq4_xs": Kind(23, 256, 136),
    "mxfp4": Kind(39, 32, 17),
    # never packed in memory: a matrix may have a scale in another tensor
    "nvfp4": Kind(40, 64, 36),
    "q1_0": Kind(41, 128, 18),
    "q2_0": Kind(42, 64, 18),
    "iq1_s": Kind(19, 256, 50),
    "iq1_m": Kind(29, 256, 56),
    "iq2_xxs": Kind(16, 256, 66),
    "iq2_xs": Kind(17, 256, 74),
    "iq2_s": Kind(22, 256, 82),
    "iq3_xxs": Kind(18, 256, 98),
    "iq3_s": Kind(21, 256, 110),
    "tq1_0": Kind(34, 256, 54),
    "tq2_0": Kind(35, 256, 66),
}

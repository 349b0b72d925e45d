"""Safetensors files: the place of each tensor, rows read from it, and experts that are stored one by one.

Experts become the stacks of matrices that transformers makes of them, as its conversion_mapping.py says of these
families, for the names that their published files have.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specengine.errors import (
    CheckpointError,
    UnsupportedModelError,
    require_intact,
    require_supported,
    restating,
)
from specengine.files import safetensors_files

WEIGHT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


class StoredTensor(NamedTuple):
    """The place of a tensor in a safetensors file."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def flat(self) -> Self:
        """Return a stack of matrices as one, of all their rows."""
        return (
            self._replace(shape=(math.prod(self.shape[:-1]), self.shape[-1]))
            if len(self.shape) > 2
            else self
        )

    def read(self, first: int, last: int) -> Tensor:
        """Return rows [first, last). They are read: the pages of a mapped file would count as memory."""
        each = self.nbytes // self.shape[0]
        data = bytearray((last - first) * each)
        with self.file.open("rb") as stream:
            stream.seek(self.offset + first * each)
            require_intact(
                f"{self.file}: became shorter while it was read; load it again",
                stream.readinto(data) == len(data),
            )
        return torch.frombuffer(data, dtype=self.dtype).reshape(last - first, *self.shape[1:])


_FLOATS = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
_STORED_DTYPES = _FLOATS | {  # the others are of quantised matrices
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}


def tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a file's tensors by name; CheckpointError where it is damaged, UnsupportedModelError for other dtypes."""
    with (
        restating(
            OSError, lambda error: UnsupportedModelError(f"{file}: cannot be read ({error})")
        ),
        restating(
            (SafetensorError, ValueError),
            lambda error: CheckpointError(f"{file}: is damaged, fetch it again ({error})"),
        ),
        safe_open(file, framework="pt"),  # which checks the header against the file's size
        file.open("rb") as stream,
    ):
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        shape = tuple(entry["shape"]) or (1,)
        require_supported(f"{file}: {name} has shape {entry['shape']}", 0 not in shape)
        require_supported(
            f"{file}: {name} is stored as {entry['dtype']}", entry["dtype"] in _STORED_DTYPES
        )
        begin, end = entry["data_offsets"]
        yield (
            name,
            StoredTensor(
                file,
                8 + size + begin,
                end - begin,
                _STORED_DTYPES[entry["dtype"]],
                shape,
            ),
        )


def require_files(folder: Path) -> list[Path]:
    files = safetensors_files(folder)
    require_supported(
        f"{folder}: has no safetensors file that transformers would read", bool(files)
    )
    return files


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_GATE_UP, _UP, _DOWN = "gate_up_proj", "up_proj", "down_proj"
_PLACES = {  # of a matrix: the stack that it is in, and its place there in each expert
    "gate_proj": (_GATE_UP, 0),
    "up_proj": (_GATE_UP, 1),
    "down_proj": (_DOWN, 0),
    "w1": (_GATE_UP, 0),
    "w3": (_GATE_UP, 1),
    "w2": (_DOWN, 0),
}


class Stack(NamedTuple):
    """Matrices of one size, each stored alone. shape: [experts, rows of an expert, inputs], or [all rows, inputs]."""

    matrices: tuple[Any, ...]
    shape: tuple[int, ...]

    def flat(self) -> Self:
        """Return the stack as one matrix, of all their rows."""
        return self._replace(shape=(self.shape[0] * self.shape[1], self.shape[2]))

    def read(self, first: int, last: int, kind: str = "") -> Tensor:
        """Return [first, last) of its first dimension; kind: of the blocks that quantised matrices are read as."""
        if len(self.shape) == 3:
            rows = self.flat().read(first * self.shape[1], last * self.shape[1])
            return rows.reshape(last - first, *self.shape[1:])
        each = self.shape[0] // len(self.matrices)
        pieces = []
        for number in range(first // each, -(-last // each)):
            begin, read = number * each, self.matrices[number].read
            low, high = max(first - begin, 0), min(last - begin, each)
            pieces.append(read(low, high, kind) if kind else read(low, high))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def stacked(tensors: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return tensors by transformers' names: experts that are all there and of one size as stacks, others as they are.

    renamed: what stands in the names of these files, and what transformers has instead. UnsupportedModelError for
    codes, which mean nothing without their scales.
    """
    by_name: dict[str, Any] = {}
    stacks: dict[str, dict[tuple[int, int], Any]] = {}
    for stored, tensor in tensors.items():
        if isinstance(tensor, StoredTensor) and tensor.dtype not in _FLOATS.values():
            raise UnsupportedModelError(f"{tensor.file}: {stored} is stored as {tensor.dtype}")
        name = stored
        for old, new in renamed.items():
            name = name.replace(old, new)
        match = _EXPERT.fullmatch(name)
        if match is None or match[3] not in _PLACES:
            by_name[name] = tensor
        else:
            stack, place = _PLACES[match[3]]
            stacks.setdefault(f"{match[1]}.{stack}", {})[int(match[2]), place] = tensor
    for stack_name, of_stack in stacks.items():
        name, matrices = stack_name, of_stack
        if name.endswith(_GATE_UP) and {place for _, place in matrices} == {1}:  # ups alone
            name = name.replace(_GATE_UP, _UP)
            matrices = {(expert, 0): matrix for (expert, _), matrix in matrices.items()}
        places = 2 if name.endswith(_GATE_UP) else 1
        places_of_all = [
            (expert, place) for expert in range(len(matrices) // places) for place in range(places)
        ]
        shapes = {matrix.shape for matrix in matrices.values()}
        if sorted(matrices) == places_of_all and len(shapes) == 1:
            rows, inputs = next(iter(shapes))
            shape = (len(places_of_all) // places, places * rows, inputs)
            by_name[name] = Stack(tuple(matrices[key] for key in places_of_all), shape)
        else:  # no stack: loading says which tensors are not those of the model
            by_name |= {
                f"{name}.{expert}.{place}": matrix for (expert, place), matrix in matrices.items()
            }
    return by_name

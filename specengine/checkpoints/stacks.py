"""Experts that a safetensors file stores one by one, as the stacks of matrices that transformers makes of them.

What transformers' conversion_mapping.py says of these families, for the names that their published files have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

    def flat(self) -> Stack:
        """Return the stack as one matrix, of all their rows."""
        return self._replace(shape=(self.shape[0] * self.shape[1], self.shape[2]))

    def read(self, first: int, last: int) -> Tensor:
        """Return [first, last) of its first dimension."""
        if len(self.shape) == 3:
            rows = self.flat().read(first * self.shape[1], last * self.shape[1])
            return rows.reshape(last - first, *self.shape[1:])
        each = self.shape[0] // len(self.matrices)
        found = []
        for number in range(first // each, -(-last // each)):
            begin = number * each
            found.append(self.matrices[number].read(max(first - begin, 0), min(last - begin, each)))
        return found[0] if len(found) == 1 else torch.cat(found)


def stacked(tensors: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return tensors by transformers' names: experts that are all there and of one size as stacks, others as they are.

    renamed: what stands in the names of these files, and what transformers has instead
    """
    found: dict[str, Any] = {}
    stacks: dict[str, dict[tuple[int, int], Any]] = {}
    for stored, tensor in tensors.items():
        name = stored
        for old, new in renamed.items():
            name = name.replace(old, new)
        match = _EXPERT.fullmatch(name)
        if match is None or match[3] not in _PLACES:
            found[name] = tensor
            continue
        stack, place = _PLACES[match[3]]
        stacks.setdefault(f"{match[1]}.{stack}", {})[int(match[2]), place] = tensor
    for name, matrices in _without_gates(stacks):
        places = 2 if name.endswith(_GATE_UP) else 1
        wanted = [(expert, place) for expert in range(len(matrices) // places) for place in range(places)]
        shapes = {matrix.shape for matrix in matrices.values()}
        if sorted(matrices) == wanted and len(shapes) == 1:
            rows, inputs = next(iter(shapes))
            shape = (len(wanted) // places, places * rows, inputs)
            found[name] = Stack(tuple(matrices[key] for key in wanted), shape)
        else:  # no stack: loading says which tensors are not those of the model
            found |= {f"{name}.{expert}.{place}": matrix for (expert, place), matrix in matrices.items()}
    return found


def _without_gates(
    stacks: Mapping[str, dict[tuple[int, int], Any]],
) -> Iterator[tuple[str, dict[tuple[int, int], Any]]]:
    """Yield the stacks; those of gates and ups that have ups alone are stacks of these."""
    for name, matrices in stacks.items():
        if name.endswith(_GATE_UP) and {place for _, place in matrices} == {1}:
            yield name.replace(_GATE_UP, _UP), {(expert, 0): matrix for (expert, _), matrix in matrices.items()}
        else:
            yield name, matrices

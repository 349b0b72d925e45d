"""Weights of a GGUF file, their blocks as they are, under transformers' names."""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from specengine.checkpoints import gguf
from specengine.models.configs import family_of, layer_template
from specengine.models.native.weights import Source, Weight, upright

_FLOATS = ("f16", "f32")  # of a GGUF file: numbers that bfloat16 does not hold


class GGUFSource(Source):
    """Read a GGUF file, its blocks kept as they are.

    In float32 each weight is the bfloat16 number of its block, or the number itself if it is stored as one.
    """

    def __init__(
        self, file: gguf.GGUFFile, config: PretrainedConfig, dtype: torch.dtype, *, name: str
    ) -> None:
        self.file, self.config = replace(file, metadata={}), config  # a vocabulary may take 40 MB
        self.dtype, self.name = dtype, name
        self._shapes = layer_template(config)
        self._stored = gguf.require_complete(file, config, self._shapes)
        self._suppressed = gguf.suppressed_ids(file, config.vocab_size)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        defaults = GenerationConfig.from_model_config(self.config)
        defaults.suppress_tokens = self._suppressed
        return defaults

    @property
    def rounded(self) -> str:  # type: ignore[override]
        kinds = [tensor.kind for tensor in self.file.tensors.values() if len(tensor.shape) > 1]
        rounded_kinds = [kind for kind in _FLOATS if kind in kinds and self.dtype is torch.bfloat16]
        count = sum(kind in rounded_kinds for kind in kinds)
        return (
            f"{self.name}: {count} matrices stored in {' and '.join(rounded_kinds).upper()} are rounded to bfloat16; "
            "dtype='float32' keeps their numbers"
            if rounded_kinds
            else ""
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        names = {stored[0]: name for name, stored in self._stored.items()}
        return {
            names[stored]: self._shapes[names[stored]]
            for stored in self.file.tensors
            if stored in names
        }

    @cached_property
    def blocks(self) -> frozenset[str]:  # type: ignore[override]
        if self.dtype is not torch.bfloat16:
            return frozenset()
        tensors = [self.file.tensors[stored] for names in self._stored.values() for stored in names]
        matrices = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
        return frozenset(kind for kind in matrices if gguf.KINDS[kind].elements > 1)

    def weights(self, *, blocks: Collection[str] = ()) -> Iterator[Weight]:
        for name, shape in self.shapes().items():
            stored = [self.file.tensors[stored] for stored in self._stored[name]]
            kind = stored[0].kind
            packed = (
                kind in self.blocks
                and kind in blocks
                and len(shape) > 1
                and gguf.column_order(self.config, stored[0].name) is None
                and not (len(stored) > 1 and gguf.is_of_latents(stored[0].name))
                and all(other.kind == kind for other in stored)
            )
            if packed:
                order = self._order(name, stored)
                shape = gguf.turned(self.config, shape)
                yield Weight(
                    name,
                    kind,
                    (math.prod(shape[:-1]), shape[-1]),
                    partial(self._rows, stored),
                    None if order is None else torch.from_numpy(order),
                    self.file.place(stored[0].name) if len(stored) == 1 else None,
                )
            else:
                yield upright(self.config, Weight.of(name, self.tensor(name)))

    def _order(self, name: str, stored: list[gguf.GGUFTensor]) -> np.ndarray | None:
        """Return the row of a file's tensor, or of several in a row, for each row of transformers'."""
        rows = (
            family_of(self.config).orders(self.config).get(name.rpartition(".")[0])
            if len(stored) > 1
            else None
        )
        return (
            gguf.row_order(self.config, stored[0].name)
            if rows is None
            else np.argsort(rows).astype(np.int32)
        )

    def _rows(self, stored: list[gguf.GGUFTensor], first: int, last: int) -> Tensor:
        """Return the blocks of rows of a matrix, or of matrices in stacks, which take turns."""
        name, each = stored[0].name, 0
        if len(stored) > 1 and not gguf.is_stack(name):
            parts, begin = [], 0
            for one in stored:
                bounds = [min(max(row - begin, 0), one.shape[0]) for row in (first, last)]
                parts += (
                    [torch.from_numpy(self.file.read_rows(one.name, *bounds))]
                    if bounds[0] < bounds[1]
                    else []
                )
                begin += one.shape[0]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(stored) > 1:  # rows are asked for of one matrix at a time
            each = stored[0].shape[1]
            place = first // each
            name = stored[place % len(stored)].name
            first, last = (row - (place - place // len(stored)) * each for row in (first, last))
        return torch.from_numpy(self.file.read_rows(name, first, last))

    def tensor(self, name: str) -> Tensor:
        return self.made_of(self._stored[name], name).reshape(self._shapes[name])

    def made_of(self, stored: tuple[str, ...], name: str) -> Tensor:
        """Return what transformers calls `name` of the file's tensors, in `dtype`."""
        parts = [self._tensor(one, exact=self.is_exact(name)) for one in stored]
        if len(parts) == 1:
            joined = parts[0]
        elif gguf.is_of_latents(
            stored[0]
        ):  # of each head the matrix of keys, turned, and that of values
            joined = torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1)
        elif not gguf.is_stack(stored[0]):
            order = self._order(name, [self.file.tensors[one] for one in stored])
            joined = torch.cat(parts)
            joined = joined if order is None else joined[torch.from_numpy(order).long()]
        elif family_of(self.config).alternating:
            joined = torch.stack(parts, dim=2).flatten(1, 2)
        else:
            joined = torch.cat(parts, dim=1)
        turned = joined.ndim > 2 and family_of(self.config).alternating
        return joined.transpose(1, 2).contiguous() if turned else joined

    def _tensor(self, stored: str, *, exact: bool) -> Tensor:
        numbers, order = self.file.numbers(stored), gguf.row_order(self.config, stored)
        if (
            family_of(self.config).one_is_zero
            and stored.endswith("norm.weight")
            and not f".{stored}".endswith(family_of(self.config).plain_norms)
        ):
            numbers = numbers - 1.0  # which the file has as 1 + w
        if stored.endswith(".ssm_a"):  # which the file has as -e^a
            with np.errstate(all="ignore"):  # a damaged file's numbers
                numbers = np.log(-numbers)
        ordered = numbers if order is None else np.ascontiguousarray(numbers[order])
        if (columns := gguf.column_order(self.config, stored)) is not None:
            ordered = np.ascontiguousarray(ordered[:, columns])
        exact = exact or (self.dtype is torch.float32 and self.file.tensors[stored].kind in _FLOATS)
        tensor = torch.from_numpy(ordered)
        return tensor if exact else tensor.to(torch.bfloat16).to(self.dtype)

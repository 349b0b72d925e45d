"""Recurrent mixers, which stand in the place of attention in layers of a family, and the cache that goes with them.

csrc/cpu/recurrent.hpp says what is kept of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specengine.models.families import Name, Part, Place, Shape
from specengine.models.kv_cache import KVCache
from specengine.ops import Nodes

GATED_NORM = "linear_attn.norm"  # multiplies by its weights whatever a family's other norms do
_IN = Name("conv.in_proj", "shortconv.in_proj")


@dataclass(frozen=True)
class Mixer:
    """A mixer whose state follows from all tokens before; the rows of a tree go on from their parents'."""

    def place(self, config: Any, layer: int) -> Place:
        """Return how a layer of this config sees positions: not at all."""
        return Place(None, None)

    @property
    def refused(self) -> str:
        """Return why csrc/cpu has no mixer of these sizes; empty where it has."""
        return ""

    def parts(self, shape: Shape) -> Iterator[Part]:
        """Yield its modules."""
        raise NotImplementedError

    def recurrence(self, shape: Shape) -> list[int]:
        """Return its sizes in the order of csrc/cpu_binding.cpp."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShortConvolution(Mixer):
    """out(c * convolution(b * x)) of three projections b, c and x; taps: tokens that it reads, a row's own included."""

    taps: int

    def parts(self, shape: Shape) -> Iterator[Part]:
        for native in ("b_proj", "c_proj", "x_proj"):
            yield Part(f"short_conv.{native}", _IN, shape.hidden)
        yield Part("short_conv.conv", Name("conv.conv", "shortconv.conv"), shape.hidden)
        yield Part("short_conv.out_proj", Name("conv.out_proj", "shortconv.out_proj"), shape.hidden)

    def recurrence(self, shape: Shape) -> list[int]:
        return [shape.hidden, self.taps, 0, 0, 0, 0]


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """The gated delta rule over convolved queries, keys and values.

    key_heads, heads      of queries and keys, and of values; the first divide the others among themselves
    key_size, value_size  channels of each, multiples of 16
    """

    taps: int
    key_heads: int
    heads: int
    key_size: int
    value_size: int

    @property
    def refused(self) -> str:
        if self.key_size % 16 == self.value_size % 16 == 0 == self.heads % self.key_heads:
            return ""
        return (
            f"{self.key_heads} and {self.heads} heads of {self.key_size} and {self.value_size} channels in its states, "
            "known are multiples of the former, and of 16"
        )

    def parts(self, shape: Shape) -> Iterator[Part]:
        values = self.heads * self.value_size
        channels = self.recurrence(shape)[0]
        yield Part("linear_attn", Name("linear_attn", "ssm"), self.heads)
        yield Part("linear_attn.in_proj_qkv", Name("linear_attn.in_proj_qkv", "attn_qkv"), channels)
        yield Part("linear_attn.in_proj_z", Name("linear_attn.in_proj_z", "attn_gate"), values)
        yield Part("linear_attn.in_proj_b", Name("linear_attn.in_proj_b", "ssm_beta"), self.heads)
        yield Part("linear_attn.in_proj_a", Name("linear_attn.in_proj_a", "ssm_alpha"), self.heads)
        yield Part("linear_attn.conv1d", Name("linear_attn.conv1d", "ssm_conv1d"), channels)
        yield Part(GATED_NORM, Name("linear_attn.norm", "ssm_norm"), self.value_size)
        yield Part("linear_attn.out_proj", Name("linear_attn.out_proj", "ssm_out"), shape.hidden)

    def recurrence(self, shape: Shape) -> list[int]:
        channels = 2 * self.key_heads * self.key_size + self.heads * self.value_size
        return [channels, self.taps, self.key_heads, self.heads, self.key_size, self.value_size]


class HybridCache(KVCache):
    """Keys and values of the layers that have attention, and `memory`, the states of the others.

    A state cannot be taken back by a token. So a crop keeps what it can, which `reach` tells: slots behind the last
    forward's root, or those up to the last `mark`, or none.
    """

    def __init__(
        self, layers: int, heads: int, head_size: int, capacity: int, *, dtype: torch.dtype, memory: Any
    ) -> None:
        """layers: those with attention; memory: of the decoder that runs over this cache."""
        super().__init__(layers, heads, head_size, capacity, dtype=dtype)
        self.memory = memory

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(self.memory.bytes)

    def reach(self, length: int) -> int:
        return int(self.memory.reach(length))

    def mark(self) -> None:
        self.memory.mark()

    def crop(self, length: int) -> None:
        """Forget everything from slot `reach(length)` on."""
        kept = self.reach(length)
        super().crop(length)
        self.memory.crop(length)
        self.length = kept

    def keep(self, path: Nodes) -> None:
        self.memory.keep(self.length, path.ids, int(path.live))
        super().keep(path)

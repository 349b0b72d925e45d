"""Numbers, counts and nodes: what ops take and rules compute with, on every device."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def describe(*tensors: Tensor) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)


def are_counts(*tensors: Tensor) -> bool:
    """Whether each is a count: int32 [1]."""
    for tensor in tensors:  # noqa: SIM110  a generator takes longer than what it checks
        if tensor.dtype is not torch.int32 or tensor.shape != (1,):
            return False
    return True


FREE = "cpu"  # the kind of device whose numbers are read without waiting for it


def is_free(tensor: Tensor) -> bool:
    """Whether the host reads this tensor without waiting for a device."""
    return ("cpu" if type(tensor) is Tensor and tensor.is_cpu else tensor.device.type) == FREE


Number = Any  # Python's, or a tensor of one element on a device: what rules compute with alike
Flag = Any  # a bool, or one such tensor


def number(tensor: Tensor) -> Number:
    """A tensor of one element as what a rule computes with: a number of Python where reading it is free, else a tensor,
    float64 as Python's floats are. On single elements torch takes ten times as long as Python does."""
    kind = "cpu" if type(tensor) is Tensor and tensor.is_cpu else tensor.device.type  # device.type is slow
    if kind == FREE:
        return tensor.item()
    return tensor.double() if tensor.is_floating_point() else tensor


def held(given: Number, dtype: torch.dtype = torch.int32) -> Tensor:
    """What a rule has computed, as the tensor of one element that an op takes, to be read alone."""
    return given if isinstance(given, Tensor) else _constant(given, dtype)


@lru_cache(maxsize=1024)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device="cpu")


def where(flag: Flag, one: Number, other: Number) -> Number:
    """One of two numbers."""
    return torch.where(flag, one, other) if isinstance(flag, Tensor) else one if flag else other


def row_of(values: Tensor, index: Tensor) -> Tensor:
    """One row, [1, ...], where reading its index, int64 [1], is free as a view."""
    at = number(index)
    return values.index_select(0, at.to(values.device)) if isinstance(at, Tensor) else values[at : at + 1]


def at_most(given: Number, most: float) -> Number:
    return given.clamp(max=most) if isinstance(given, Tensor) else min(given, most)


def insist(holds: Tensor, message: str) -> None:
    """InputError where a bool [] does not hold; on another device than a CPU an asynchronous assertion."""
    if is_free(holds):
        if not holds:
            raise InputError(message)
    else:
        torch._assert_async(holds, message)  # the same without making the host wait


WORD_BITS = 64

Arrays = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Nodes(NamedTuple):
    """Some nodes, or indices of other things. ids: int64 [width]; those from `live`, int32 [1], on are padding: any
    that exist."""

    ids: Tensor
    live: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Nodes:
        """These, without padding."""
        return cls(ids, torch.full((1,), ids.shape[0], dtype=torch.int32, device=ids.device))

    def alive(self) -> Tensor:
        """int64 [live]; waits for a device."""
        live = int(self.live)
        return self.ids if live == self.ids.shape[0] else self.ids[:live]

    def where(self, flag: Flag) -> Nodes:
        """These, or none where the flag is down."""
        if isinstance(flag, Tensor):
            flag = number(flag)
        if isinstance(flag, Tensor):
            return Nodes(self.ids, self.live * flag)
        return self if flag else Nodes(self.ids, torch.zeros_like(self.live))

    def unless(self, flag: Flag) -> Nodes:
        """These, or none where the flag is up."""
        return self.where(~flag if isinstance(flag, Tensor) else not flag)

    def masked(self, values: Tensor, filler: float) -> Tensor:
        """These nodes' values, [width], with the filler for padding."""
        live = number(self.live)
        if not isinstance(live, Tensor) and live >= values.shape[0]:
            return values
        return values.masked_fill(self.padding(), filler)

    def padding(self) -> Tensor:
        """bool [width]"""
        return torch.arange(self.ids.shape[0], device=self.ids.device, dtype=torch.int64) >= self.live


@cache  # for good: captured graphs read them
def own_bits(capacity: int, device: torch.device) -> Tensor:
    """Word rows in which node i has bit i alone: int64 [capacity, ceil(capacity / 64)]."""
    node = torch.arange(capacity, device=device, dtype=torch.int64)
    words = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
    words[node, node // WORD_BITS] = torch.ones_like(node) << (node % WORD_BITS)
    return words


HAS_NAN = "contains NaN"


def order_keys(values: Tensor) -> Tensor:
    """int64 keys of the order (value descending, index along the last axis ascending): larger is better, none equal.

    values: float32 without NaN. topk itself leaves open which of two equal values it takes.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, its equal
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (
        0xFFFFFFFF - torch.arange(values.shape[-1], device=values.device, dtype=torch.int64)
    )


def padded(values: Tensor, size: int) -> Tensor:
    """Filled up with 0 at the end."""
    return pad(values, (0, size - values.shape[0]))

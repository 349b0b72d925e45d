"""Parts that the torch meanings of ops share."""

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.errors import InputError, kind_of

WORD_BITS = 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HAS_NAN = "scores: contains NaN"


TENSOR = re.compile(r"([^;:]+): (\w+) \[(.*?)\]")  # name, dtype and sizes, in a signature


@cache
def _parsed(signature: str) -> list[tuple[Any, ...]]:
    return [
        (
            name.strip(),
            kind,
            FLOATS if kind == "floating" else (getattr(torch, kind),),
            sizes.split(", "),
        )
        for name, kind, sizes in TENSOR.findall(signature)
    ]


def require(signature: str, *tensors: Tensor | None) -> None:
    """Raise InputError where a tensor has another dtype or another shape than the op takes.

    signature: "NAME: DTYPE [SIZES]" of each tensor, in their order, separated by semicolons. A size is a number, or a
    name that stands for one size throughout; `floating` is float32, bfloat16 or float16. None is taken.
    """
    known = dict[str, int]()
    for (name, kind, dtypes, sizes), tensor in zip(_parsed(signature), tensors, strict=True):
        if tensor is None:
            continue
        fits = tensor.dtype in dtypes and tensor.dim() == len(sizes)
        for size, count in zip(sizes, tensor.shape, strict=False):
            fits = fits and known.setdefault(size, int(size) if size.isdigit() else count) == count
        if not fits:
            shape = ", ".join(str(known.get(size, size)) for size in sizes)
            raise InputError(f"{name}: got {describe(tensor)}, accepted {kind} [{shape}]")


def refuse_unless(holds: bool, name: str, accepted: str, *values: object) -> None:
    """Raise InputError with the values, of tensors dtype and shape, unless `holds`. accepted: in words."""
    if not holds:
        raise InputError(f"{name}: got {describe(*values)}, accepted {accepted}")


def describe(*values: object) -> str:
    return ", ".join(
        kind_of(value) if isinstance(value, Tensor) else repr(value) for value in values
    )


NO_FLOAT64 = ("mps",)  # kinds of device


def doubled(values: Tensor) -> Tensor:
    """Return the values in float64, or in float32 on a device that has no float64."""
    return values.to(precision(values.device))


@cache
def precision(device: torch.device) -> torch.dtype:
    """Return the dtype of the most digits on a device."""
    lacks = device.type in NO_FLOAT64 or (
        device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64
    )
    return torch.float32 if lacks else torch.float64


@cache  # for good: captured graphs read them
def own_bits(capacity: int, device: torch.device) -> Tensor:
    """Return word rows in which node i has bit i alone: int64 [capacity, ceil(capacity / 64)]."""
    node = torch.arange(capacity, device=device, dtype=torch.int64)
    words = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
    words[node, node // WORD_BITS] = torch.ones_like(node) << (node % WORD_BITS)
    return words


def order_keys(values: Tensor) -> Tensor:
    """Return int64 keys of the order (value descending, index along the last axis ascending).

    values: float32 without NaN. A larger key is better, and none are equal. topk itself leaves open which of two equal
    values it takes.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, its equal
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (
        0xFFFFFFFF - torch.arange(values.shape[-1], device=values.device, dtype=torch.int64)
    )


def padded(values: Tensor, size: int) -> Tensor:
    """Return the first `size` values, padded with zeros."""
    missing = size - values.shape[0]
    return pad(values, (0, missing)) if missing > 0 else values[:size]

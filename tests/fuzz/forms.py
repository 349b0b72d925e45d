"""Weights that are no plain tensors: each form takes a weight and gives one that says the same, or nearly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from tests.fuzz.changes import linear, parameter


class Quantized(torch.Tensor):
    """int8 with a scale for each row, without a storage of its own; what is done with it is done with its numbers."""

    rounded: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)  # type: ignore[return-value]

    def __init__(self, weight: Tensor) -> None:
        self.scales = weight.detach().float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        self.rounded = (weight.detach().float() / self.scales).round().to(torch.int8)

    def numbers(self) -> Tensor:
        return (self.rounded.float() * self.scales).to(self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Quantized({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
            return Quantized(args[0].numbers())
        plain = tree_map(
            lambda given: given.numbers() if isinstance(given, Quantized) else given,
            (args, kwargs or {}),
        )
        return func(*plain[0], **plain[1])


class Marked(torch.Tensor):
    """A subclass with the storage of any other tensor."""


class Renamed(nn.Parameter):
    """A parameter of another class."""


class Doubling(torch.Tensor):
    """A tensor whose storage holds half of the values that are computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            plain = [
                given.as_subclass(torch.Tensor) if isinstance(given, Doubling) else given
                for given in args
            ]
            return 2 * func(*plain, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def _quantized(weight: Tensor) -> Tensor:
    return Quantized(weight)


def _marked(weight: Tensor) -> Tensor:
    return weight.detach().clone().as_subclass(Marked)


def _doubling(weight: Tensor) -> Tensor:
    return (weight.detach() / 2).as_subclass(Doubling)


def _csr(weight: Tensor) -> Tensor:
    return weight.detach().to_sparse_csr()


def _coo(weight: Tensor) -> Tensor:
    return weight.detach().to_sparse()


def _meta(weight: Tensor) -> Tensor:
    return weight.detach().to("meta")


def _mkldnn(weight: Tensor) -> Tensor:
    return weight.detach().float().to_mkldnn()


def _quantized_by_torch(weight: Tensor) -> Tensor:
    return torch.quantize_per_tensor(weight.detach().float(), 0.02, 0, torch.qint8)


def _negated_view(weight: Tensor) -> Tensor:
    """Its storage holds the numbers' negatives."""
    return torch._neg_view(-weight.detach())


def _transposed(weight: Tensor) -> Tensor:
    return weight.detach().T.contiguous().T


def _strided(weight: Tensor) -> Tensor:
    wide = torch.full((*weight.shape[:-1], weight.shape[-1] * 2), float("nan"), dtype=weight.dtype)
    wide[..., ::2] = weight.detach()
    return wide[..., ::2]


def _expanded(weight: Tensor) -> Tensor:
    """Repeat one row for all rows, stored once in memory."""
    return weight.detach()[:1].clone().expand(weight.shape)


def _offset(weight: Tensor) -> Tensor:
    longer = torch.cat(
        [torch.full((3,), float("nan"), dtype=weight.dtype), weight.detach().flatten()]
    )
    return longer[3:].view(weight.shape)


def _other_dtype(weight: Tensor) -> Tensor:
    return weight.detach().double()


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    form.__name__.strip("_"): form
    for form in (
        _quantized, _marked, _doubling, _csr, _coo, _meta, _mkldnn, _quantized_by_torch, _negated_view, _transposed,
        _strided, _expanded, _offset, _other_dtype,
    )
}  # fmt: skip


def put(model: PreTrainedModel, name: str, made: Tensor, pick: random.Random) -> None:
    """Replace the weight of this name by a parameter, a parameter of another class, or a buffer."""
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    how = pick.random()
    delattr(module, last)
    if how < 0.8 and (made.is_floating_point() or made.is_quantized):
        module.register_parameter(last, nn.Parameter(made, requires_grad=False))
    elif how < 0.9 and type(made) is torch.Tensor and not made.is_sparse:
        module.register_parameter(last, Renamed(made, requires_grad=False))
    else:
        module.register_buffer(last, made)


def change(model: PreTrainedModel, pick: random.Random, form: str) -> None:
    """Give one weight of the model, those of one layer, or all linear ones this form."""
    chosen = pick.randrange(3)
    if chosen == 0:
        names = [parameter(model, pick)[0]]
    elif chosen == 1:
        names = [f"{linear(model, pick)[0]}.weight"]
    else:
        names = [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
    weights = dict(model.named_parameters())
    for name in names:
        if name in weights and weights[name].ndim == 2:
            put(model, name, FORMS[form](weights[name]), pick)

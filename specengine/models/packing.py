"""Packing: bfloat16 linear layers in oneDNN's own weight layout, for CPUs.

Torch re-orders a bfloat16 weight for oneDNN at every call; re-ordering it once leaves the arithmetic as it was (the
results are bit-equal) and about halves the time of a few rows. The packed weights live in a twin of the model:
a second tree of modules that shares every parameter but those of the packed layers. The model itself is untouched,
at the price of a second copy of these weights in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from specengine.models.loaded import is_plain
from specengine.models.twins import twin

MEMORY_SHARE = 0.5  # of the free memory that packed weights may take when nobody decided


class PackedLinear(nn.Module):
    """nn.Linear with a bfloat16 weight in oneDNN's layout; the same results, bit for bit."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.no_grad():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


class Packed:
    """A model's packed twin; `model()` gives it, packed again if a weight has been changed since."""

    def __init__(self, model: nn.Module) -> None:
        self._original = model
        self._state: Any = None
        self._layers: dict[int, PackedLinear] = {}
        self._twin = model

    def model(self, state: Any = None) -> nn.Module:
        """state: a value that changes with the weights; by default their addresses and versions, which writes through
        `.data` leave as they are."""
        if state is None:
            state = [(linear.weight.data_ptr(), _version(linear.weight)) for linear in packable(self._original)]
        if state != self._state:
            self._layers = {}
            self.copy_again()
            self._state = state
        return self._twin

    def copy_again(self) -> None:
        """Take in what was changed on the modules themselves (hooks, say); packed weights are kept."""
        self._twin = twin(self._original, lambda module: _packed(module, self._layers))


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def worth_packing(model: nn.Module) -> bool:
    """Whether packing speeds this model up here, and its second copy of the weights fits well into memory."""
    weights = [linear.weight for linear in packable(model)]
    if not weights or not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return sum(weight.nbytes for weight in weights) <= MEMORY_SHARE * _free_memory()


def packable(model: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers that can be packed: plain ones, in bfloat16, on the CPU."""
    for module in model.modules():
        if _is_packable(module):
            yield cast(nn.Linear, module)


def _packed(module: nn.Module, done: dict[int, PackedLinear]) -> PackedLinear | None:
    if not _is_packable(module):
        return None
    if id(module) not in done:
        done[id(module)] = PackedLinear(cast(nn.Linear, module))
    return done[id(module)]


def _is_packable(module: nn.Module) -> bool:
    # exactly nn.Linear: a subclass may compute something else; hooks expect to be called with the layer itself
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    plain = is_plain(weight) and (module.bias is None or is_plain(module.bias))
    return plain and weight.dtype is torch.bfloat16 and not hasattr(module, "parametrizations")


def _free_memory() -> float:
    """Free memory in bytes; infinite where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return float("inf")

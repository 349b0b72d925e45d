"""The compiled forward for CPUs, specengine._cpu, where it is built from these sources, and the threads it runs on."""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from specengine.errors import BackendError

INTERFACE = 18  # as in csrc/cpu_binding.cpp
try:
    _extension: Any = importlib.import_module("specengine._cpu")
except ImportError:  # no compiler was there at installation
    _extension = None
if getattr(_extension, "INTERFACE", 1) != INTERFACE:  # other sources were compiled
    _extension = None

NOT_BUILT = (
    "the extension specengine._cpu is not built: install a C++17 compiler, then `pip install -e .`"
)


def is_built() -> bool:
    """Return whether specengine._cpu is built from these sources."""
    return _extension is not None


def extension() -> Any:
    """Return specengine._cpu; BackendError where it is not built."""
    if _extension is None:
        raise BackendError(f"native: {NOT_BUILT}")
    return _extension


def is_plain(tensor: Tensor) -> bool:
    """Return whether this is memory of the CPU, with nothing to be known of it but dtype, shape and strides."""
    exact = type(tensor) in (Tensor, nn.Parameter) and not (
        tensor.is_quantized or tensor.is_neg() or tensor.is_conj()
    )
    return exact and tensor.layout is torch.strided and tensor.device.type == "cpu"


team: ContextVar[int | None] = ContextVar(
    "team", default=None
)  # threads of a forward inside `one_torch_thread`


def thread_count() -> int:
    """Return the number of threads of a forward: torch's, outside `one_torch_thread`."""
    return team.get() or torch.get_num_threads()

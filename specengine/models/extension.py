"""The compiled forward for CPUs, specengine._cpu, where it is built from these sources, and the threads it runs on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from specengine.errors import BackendError

INTERFACE = 5  # as in csrc/cpu_binding.cpp
try:
    _extension: Any = importlib.import_module("specengine._cpu")
except ImportError:  # no compiler was there at installation
    _extension = None
if getattr(_extension, "INTERFACE", 1) != INTERFACE:  # other sources were compiled
    _extension = None

NOT_BUILT = "the extension specengine._cpu is not built: install a C++17 compiler, then `pip install -e .`"


def is_built() -> bool:
    return _extension is not None


def extension() -> Any:
    """Return specengine._cpu; BackendError where it is not built."""
    if _extension is None:
        raise BackendError(f"native: {NOT_BUILT}")
    return _extension


_given: ContextVar[int | None] = ContextVar("threads", default=None)
_before: list[int] = []  # what torch had in the threads that are in `one_torch_thread`


def thread_count() -> int:
    """As many as torch has outside `one_torch_thread`."""
    return _given.get() or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch runs on one thread inside.

    After an operation on several threads OpenMP's wait for the next one, spinning for some milliseconds on the cores
    that the forward needs; the tensors between two forwards are too small to gain from them.
    """
    # torch gives a thread that is begun meanwhile the one that is set here
    before = max([torch.get_num_threads(), *_before])
    mark = _given.set(_given.get() or before)
    _before.append(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _before.remove(before)
        _given.reset(mark)

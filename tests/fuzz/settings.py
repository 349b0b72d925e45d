"""Process-wide settings of torch: context managers that set and restore them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


@contextlib.contextmanager
def _set(value: Any, setter: Callable[[Any], Any], before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(dtype, torch.set_default_dtype, torch.get_default_dtype())


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _threads(count: int) -> AbstractContextManager[None]:
    return _set(count, torch.set_num_threads, torch.get_num_threads())


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default dtype float16": lambda: _default_dtype(torch.float16),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default device meta": lambda: _default_device("meta"),
    "default device cpu": lambda: _default_device("cpu"),
    "with torch.device('meta')": lambda: torch.device("meta"),
    "deterministic algorithms": lambda: _set(True, torch.use_deterministic_algorithms, False),
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "no inference mode": lambda: torch.inference_mode(False),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "1 thread": lambda: _threads(1),
    "3 threads": lambda: _threads(3),
    "flushed denormals": lambda: _set(True, torch.set_flush_denormal, False),
    "medium precision": lambda: _set("medium", torch.set_float32_matmul_precision, "highest"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "warnings are errors": _warnings_are_errors,
}

"""A method for a kernel's work, and whether it can run here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Unavailable(Exception):
    """Raised if a method cannot run the case here."""


@dataclass(frozen=True)
class Way:
    """`prepare(case, inputs)` does what is done once and not timed and returns the call; its result is `result`'s."""

    kind: str
    name: str
    prepare: Callable[[Any, Any], Callable[[], Any]]
    result: Callable[[Any, Any], Tensor]
    needs: str = "torch"  # a module
    captured: bool = True


def installed(way: Way) -> bool:
    return importlib.util.find_spec(way.needs) is not None


def kernel(name: str) -> Any:
    """Load a module of kernels/ when a case runs: it needs Triton, --dry-run does not."""
    return importlib.import_module(f"specengine_kernels.{name}")

"""Which implementation runs an op on which device: the torch meaning, or what a backend attaches to it."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from specengine.errors import BackendError, InputError

VARIABLE = "SPECENGINE_BACKEND"
REFERENCE = "reference"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS: dict[str, Callable[..., Any]] = {}

Op = TypeVar("Op", bound=Callable[..., Any])


def op(function: Op) -> Op:
    """Makes a function an op: it checks what it is given, asks for what is `attached` to it, and else goes on in torch.

    So signature, checks and meaning stand once. Shapes and dtypes are checked by comparisons of attributes alone, as
    most ops run several times per cycle.
    """
    OPS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Backend:
    """What runs an op: the backend `name` taken, the `reason`, and all that are `available` for it, best first."""

    name: str
    reason: str
    available: tuple[str, ...]


@dataclass(frozen=True)
class _Provider:
    """A set of implementations: on which device types (empty: all), in which module (importing it raises ImportError
    where something is missing), how to build it.

    interpreted: on CPU tensors as well, where TRITON_INTERPRET=1 lets Triton run its kernels there.
    """

    devices: tuple[str, ...]
    module: str
    build: str
    interpreted: bool = False


_PROVIDERS = {  # best first; a new backend is a new entry
    "cpp": _Provider(("cpu",), "cpp", "pip install -e ."),
    REFERENCE: _Provider((), "", ""),
    # behind the reference, so on request alone: they have not been run on a device yet
    "triton": _Provider(("cuda",), "triton", "pip install -e '.[kernels]'", interpreted=True),
    "cuda": _Provider(("cuda",), "cuda", "SPECENGINE_CUDA=1 pip install -e ."),
}


def backends(device: torch.device | str = "cpu") -> dict[str, Backend]:
    """Which backend runs each op on `device`, and why; BackendError as for the ops themselves."""
    kind, asked = torch.device(device).type, os.environ.get(VARIABLE, "")
    return {name: _choose(name, kind, asked) for name in OPS}


class _Meaning(threading.local):
    alone = False


_meaning = _Meaning()


@contextmanager
def meaning() -> Iterator[None]:
    """Within it, ops of this thread are what they mean in torch: for tests, and for what a kernel does not take."""
    before, _meaning.alone = _meaning.alone, True
    try:
        yield
    finally:
        _meaning.alone = before


def by_meaning(function: Callable[..., Any], *given: Any) -> Any:
    """What the op means in torch for what it is given."""
    with meaning():
        return function(*given)


def attached(name: str, tensor: Tensor) -> Callable[..., Any] | None:
    """What runs the op on that tensor's device; None where that is its meaning."""
    if _meaning.alone:
        return None
    return _resolve(name, tensor.device.type, os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=256)
def _resolve(name: str, kind: str, asked: str) -> Callable[..., Any] | None:
    backend = _choose(name, kind, asked).name
    return None if backend == REFERENCE else _loaded(backend)[name]


def _choose(name: str, kind: str, asked: str) -> Backend:
    able = tuple(key for key, provider in _PROVIDERS.items() if _serves(provider, kind) and name in _loaded(key))
    if asked in ("", "auto"):
        better = list(_PROVIDERS)[: list(_PROVIDERS).index(able[0])]
        reason = "; ".join(_why_not(key, name, kind) for key in better)
        return Backend(able[0], reason or f"first choice on {kind}", able)
    names = asked.split(",")
    if not set(names) <= set(_PROVIDERS):
        raise BackendError(f"{VARIABLE}={asked}: unknown, accepted are auto, {', '.join(_PROVIDERS)}")
    missing = [key for key in names if not _loaded(key)]
    if missing:
        raise BackendError(f"{VARIABLE}={asked}: {_not_built(missing[0])}")
    taken = next((key for key in names if key in able), None)
    if taken is not None:
        return Backend(taken, f"{VARIABLE}={asked}", able)
    return Backend(REFERENCE, "; ".join(_why_not(key, name, kind) for key in names), able)


def _why_not(name: str, op_name: str, kind: str) -> str:
    if _serves(_PROVIDERS[name], kind) and not _loaded(name):
        return _not_built(name)
    return f"{name} has no {op_name} on {kind}"


def _not_built(name: str) -> str:
    return f"{name} is not built ({_load(name)[1]}); build it with: {_PROVIDERS[name].build}"


def _serves(provider: _Provider, kind: str) -> bool:
    interpreted = provider.interpreted and kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return not provider.devices or kind in provider.devices or interpreted


@cache
def _load(name: str) -> tuple[dict[str, Callable[..., Any]], str]:
    if name == REFERENCE:
        return OPS, ""
    try:
        return importlib.import_module(f"specengine.ops.{_PROVIDERS[name].module}").implementations(), ""
    except ImportError as error:
        return {}, str(error)


def _loaded(name: str) -> dict[str, Callable[..., Any]]:
    return _load(name)[0]


def describe(*tensors: Tensor) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)


def are_counts(*tensors: Tensor) -> bool:
    """Whether each is a count: int32 [1]."""
    return all(tensor.dtype is torch.int32 and tensor.shape == (1,) for tensor in tensors)


FREE = "cpu"  # the kind of device whose numbers are read without waiting for it


def is_free(tensor: Tensor) -> bool:
    """Whether the host reads this tensor without waiting for a device."""
    return tensor.device.type == FREE


def insist(holds: Tensor, message: str) -> None:
    """InputError where a bool [] does not hold; on another device than a CPU an asynchronous assertion."""
    if is_free(holds):
        if not holds:
            raise InputError(message)
    else:
        torch._assert_async(holds, message)  # the same without making the host wait

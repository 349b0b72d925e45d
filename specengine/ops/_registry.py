"""Which implementation runs an op on which device: the torch meaning, or what a backend attaches to it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from specengine.errors import BackendError

VARIABLE = "SPECENGINE_BACKEND"
REFERENCE = "reference"
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

    interpreted: on CPU tensors as well, where TRITON_INTERPRET=1 lets Triton run its kernels there; on request alone.
    """

    devices: tuple[str, ...]
    module: str
    build: str
    interpreted: bool = False


_PROVIDERS = {  # best first; a new backend is a new entry
    "cpp": _Provider(("cpu",), "cpp", "pip install -e ."),
    "triton": _Provider(("cuda",), "triton", "pip install -e '.[kernels]'", interpreted=True),
    "cuda": _Provider(("cuda",), "cuda", "SPECENGINE_CUDA=1 pip install -e ."),
    REFERENCE: _Provider((), "", ""),
}
_LOADERS = dict[str, Callable[[], Any]]()  # by module, of specengine.ops: they import what imports this
TRIED = ("cuda",)  # kinds of device on which an implementation is compared with its meaning before it is taken


def load_by(loaders: Mapping[str, Callable[[], Any]]) -> None:
    """Load backends, and the trials of them, by these functions; each raises ImportError where something is missing."""
    _LOADERS.update(loaders)


def backends(device: torch.device | str = "cpu") -> dict[str, Backend]:
    """Which backend runs each op on `device`, and why; BackendError as for the ops themselves. On a CUDA device that
    tries those that have not been tried yet."""
    kind, asked = torch.device(device).type, os.environ.get(VARIABLE, "")
    return {name: _choose(name, kind, asked) for name in OPS}


class _Meaning(threading.local):
    only: Mapping[str, Callable[..., Any]] | None = None


_meaning = _Meaning()


@contextmanager
def meaning(but: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """Within it, ops of this thread are what they mean in torch: for tests, and for what a kernel does not take.

    but: implementations of some ops, which run these all the same.
    """
    before, _meaning.only = _meaning.only, but or {}
    try:
        yield
    finally:
        _meaning.only = before


def by_meaning(function: Callable[..., Any], *given: Any) -> Any:
    """What the op means in torch for what it is given."""
    with meaning():
        return function(*given)


def attached(name: str, tensor: Tensor) -> Callable[..., Any] | None:
    """What runs the op on that tensor's device; None where that is its meaning."""
    if _meaning.only is not None:
        return _meaning.only.get(name)
    asked = _environment.get(_KEY)
    kind = "cpu" if type(tensor) is Tensor and tensor.is_cpu else tensor.device.type  # device.type is slow
    return _resolve(name, kind, os.environ.decodevalue(asked) if asked else "")


# What os.environ keeps: os.environ itself costs as much per call as a small op, as it raises where a name is missing.
_environment: Mapping[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_KEY: Any = os.environ.encodekey(VARIABLE)


@lru_cache(maxsize=256)
def _resolve(name: str, kind: str, asked: str) -> Callable[..., Any] | None:
    backend = _choose(name, kind, asked).name
    return None if backend == REFERENCE else _loaded(backend)[name]


def _choose(name: str, kind: str, asked: str) -> Backend:
    able = tuple(key for key, provider in _PROVIDERS.items() if _serves(provider, kind) and name in _loaded(key))
    if asked in ("", "auto"):
        return _best(name, kind, able)
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


def _best(name: str, kind: str, able: tuple[str, ...]) -> Backend:
    """The first that is made for this kind of device and, where they are tried, gives what the op means."""
    reasons = list[str]()
    for key in (key for key, provider in _PROVIDERS.items() if kind in provider.devices):
        fault = _why_not(key, name, kind)
        if key in able:
            fault = _fault(name, key, kind) if kind in TRIED else ""
            if not fault:
                return Backend(key, "; ".join(reasons) or f"first choice on {kind}", able)
        reasons.append(fault)
    return Backend(REFERENCE, "; ".join(reasons) or f"first choice on {kind}", able)


@cache
def _fault(name: str, key: str, kind: str) -> str:
    """Why this implementation is not taken, which is said once; empty where it gives what the op means."""
    if not _is_there(kind):
        return f"{key} cannot be tried without a {kind} device"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        # warm-ups run before every capture, so this is a mistake of whoever captures
        raise BackendError(f"{name}: {key} has not been tried, and a capture is no time to; run it before")
    trial = _LOADERS["_trial"]()  # it calls the ops
    fault = trial.differs(trial.needed(name), _loaded(key), _present(kind))
    if fault:
        warnings.warn(
            f"{name} on {kind} runs in torch from now on, as {key} is wrong there: {fault}",
            RuntimeWarning,
            stacklevel=2,
        )
        return f"{key} is wrong on {kind}: {fault}"
    return ""


def _is_there(kind: str) -> bool:
    return kind not in TRIED or torch.cuda.is_available()


def _present(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


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
        return _LOADERS[_PROVIDERS[name].module]().implementations(), ""
    except ImportError as error:
        return {}, str(error)


def _loaded(name: str) -> dict[str, Callable[..., Any]]:
    return _load(name)[0]

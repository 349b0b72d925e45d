"""The implementation of an op on a device: the torch meaning, or one that a backend attaches by the op's name."""

import importlib
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from specengine.errors import BackendError, require_or

VARIABLE = "SPECENGINE_BACKEND"
REFERENCE = "reference"
INTERFACE = 22  # as in csrc/ops_binding.cpp
OPS: dict[str, Callable[..., Any]] = {}

Implementation = Callable[..., Any]
Op = TypeVar("Op", bound=Implementation)


class _Bound(dict[torch.device, Implementation | None]):
    """Implementations of one op by device, None where torch runs it. Bound when the op first meets a device."""

    def __init__(self, name: str, checks: bool) -> None:
        self.name, self.checks = name, checks

    def __missing__(self, device: torch.device) -> Implementation | None:
        backend = _choose(self.name, device, os.environ.get(VARIABLE, "")).name
        run = self[device] = (
            _loaded(backend)[self.name]
            if backend != REFERENCE and _PROVIDERS[backend].checks is self.checks
            else None
        )
        return run


class _Native(threading.local):
    """Implementations by op and device that check their arguments: `native.walk[tokens.device]`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Mapping[torch.device, Implementation | None]: ...


class _Kernels(_Native):
    """Implementations by op and device that rely on arguments as the op has checked them."""


# Attributes of the classes are the process's, those of the objects a thread's own, within `meaning`.
native, kernels = _Native(), _Kernels()


def op(function: Op) -> Op:
    """Register a function as an op, under its name.

    Its body asks `native` for an implementation that takes arguments as they come, checks them, asks `kernels` for an
    implementation that takes checked ones, and goes on in torch. A line for which no backend has the op is left out.
    """
    name = function.__name__
    OPS[name] = function
    setattr(_Native, name, _Bound(name, checks=True))
    setattr(_Kernels, name, _Bound(name, checks=False))
    return function


@dataclass(frozen=True)
class Backend:
    """The backend `name` that runs an op, the `reason`, and all that are `available` for it, best first."""

    name: str
    reason: str
    available: tuple[str, ...]


@dataclass(frozen=True)
class _Provider:
    """A set of implementations.

    devices      types of device that it serves; empty: all
    build        how to build it
    checks       it checks its arguments itself
    interpreted  it serves CPU tensors as well, on request, where TRITON_INTERPRET=1 lets Triton run its kernels there
    """

    devices: tuple[str, ...]
    build: str
    checks: bool = False
    interpreted: bool = False


_PROVIDERS = {  # best first; a new backend is a new entry
    "cpp": _Provider(("cpu",), "pip install -e .", checks=True),
    "triton": _Provider(("cuda",), "pip install -e '.[kernels]'", interpreted=True),
    "cuda": _Provider(("cuda",), "pip install nvidia-cuda-nvrtc"),
    REFERENCE: _Provider((), ""),
}
_LOADERS: dict[str, Callable[[], Any]] = {  # each raises ImportError where something is missing
    name: partial(importlib.import_module, f"specengine.ops.{name}")
    for name in ("cuda", "triton", "_trial")  # which import this module
}
TRIED = (
    "cuda",
)  # kinds of device on which an implementation is compared with its meaning before it is taken


def bind() -> None:
    """Forget what is bound, so that SPECENGINE_BACKEND is read again."""
    for name in OPS:
        for table in (_Native, _Kernels):
            getattr(table, name).clear()


def backends(device: torch.device | str = "cpu") -> dict[str, Backend]:
    """Return the backend that runs each op on `device`, and why.

    On a CUDA device, try those that have not been tried yet. Raises BackendError as the ops themselves do.
    """
    device, requested = torch.device(device), os.environ.get(VARIABLE, "")
    return {name: _choose(name, device, requested) for name in OPS}


def is_served(names: Iterable[str], device: torch.device) -> bool:
    """Return whether a backend runs all of these ops on the device, rather than torch; tries those not tried yet."""
    return all(
        (getattr(native, name)[device] or getattr(kernels, name)[device]) is not None
        for name in names
    )


def attached(kind: str) -> list[str]:
    """Return the backends that are built and serve a kind of device, best first. Tries none of them."""
    return [
        key for key, provider in _PROVIDERS.items() if kind in provider.devices and _loaded(key)
    ]


@contextmanager
def meaning(but: Mapping[str, Implementation] | None = None) -> Iterator[None]:
    """Run the ops of this thread in torch within the context: for tests, and for inputs that a kernel refuses.

    but: implementations of some ops, which run these all the same.
    """
    before = dict(native.__dict__), dict(kernels.__dict__)
    native.__dict__.update({name: defaultdict(lambda: None) for name in OPS})
    kernels.__dict__.update({name: defaultdict(partial((but or {}).get, name)) for name in OPS})
    try:
        yield
    finally:
        for table, attributes in zip((native, kernels), before, strict=True):
            table.__dict__.clear()
            table.__dict__.update(attributes)


def by_meaning(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a function whose ops run in torch."""
    with meaning():
        return function(*arguments, **named)


def taken_where(takes: Callable[..., object]) -> Callable[[Op], Op]:
    """Return a decorator of an op's implementation, which runs the op's meaning for arguments that are not taken.

    takes: whether they are, of the same arguments, in the op's order
    """

    def decorated(implementation: Op) -> Op:
        function = OPS[implementation.__name__]
        names = tuple(signature(function).parameters)

        @wraps(implementation)
        def run(*arguments: Any) -> Any:
            if takes(*arguments):
                return implementation(*arguments)
            return by_meaning(function, **dict(zip(names, arguments, strict=False)))

        return cast(Op, run)

    return decorated


def is_tried(device: torch.device) -> bool:
    """Return True where implementations are compared with their meaning before they are taken."""
    return device.type in TRIED and os.environ.get(VARIABLE, "") in ("", "auto")


def _choose(name: str, device: torch.device, requested: str) -> Backend:
    kind = device.type
    able = tuple(
        key
        for key, provider in _PROVIDERS.items()
        if _serves(provider, kind) and name in _loaded(key)
    )
    if requested in ("", "auto"):
        return _best(name, device, able)
    names = requested.split(",")
    require_or(
        BackendError,
        f"{VARIABLE}={requested}: unknown, accepted: auto, {', '.join(_PROVIDERS)}",
        set(names) <= set(_PROVIDERS),
    )
    missing = [key for key in names if not _loaded(key)]
    if missing:
        raise BackendError(f"{VARIABLE}={requested}: {_not_built(missing[0])}")
    taken = next((key for key in names if key in able), None)
    return (
        Backend(REFERENCE, "; ".join(_why_not(key, name, kind) for key in names), able)
        if taken is None
        else Backend(taken, f"{VARIABLE}={requested}", able)
    )


def _best(name: str, device: torch.device, able: tuple[str, ...]) -> Backend:
    """Return the first backend for this kind of device whose result, if backends are tried, equals the reference's."""
    reasons, kind = list[str](), device.type
    # two cards in one machine may be of different models
    numbered = (
        torch.device("cuda", torch.cuda.current_device())
        if device == torch.device("cuda") and torch.cuda.is_available()
        else device
    )
    for key in (key for key, provider in _PROVIDERS.items() if kind in provider.devices):
        fault = _why_not(key, name, kind)
        if key in able:
            fault = _fault(name, key, numbered) if kind in TRIED else ""
            if not fault:
                return Backend(key, "; ".join(reasons) or f"first choice on {kind}", able)
        reasons.append(fault)
    return Backend(REFERENCE, "; ".join(reasons) or f"first choice on {kind}", able)


@cache
def _fault(name: str, key: str, device: torch.device) -> str:
    """Warn and return why this implementation is not taken; empty if its results equal the reference's."""
    kind = device.type
    if not _is_there(kind):
        return f"{key} cannot be tried without a {kind} device"
    trial = _LOADERS["_trial"]()  # it calls the ops
    tried = trial.needed(name, _loaded(key))
    if name not in tried:
        return _fault(tried[-1], key, device) if tried else ""
    refuse_in_captures(name, key)
    _compiled(key, device)
    fault = trial.differs(tried, _loaded(key), device)
    if fault:
        warn_of_fault(f"{name} on {kind}", f"{key} is wrong there: {fault}")
        return f"{key} is wrong on {kind}: {fault}"
    return ""


@cache
def _compiled(key: str, device: torch.device) -> None:
    """Compile the trials of all ops of a backend side by side; one after the other they take some 20 s."""
    if torch.cuda.is_initialized():
        _LOADERS["_trial"]().run_all(_loaded(key), device)


def refuse_in_captures(name: str, key: str) -> None:
    """Raise BackendError within a capture: warm-ups run before, so this is the capturing code's mistake."""
    require_or(
        BackendError,
        f"{name}: {key} was not tried before the capture; run it once first",
        not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()),
    )


def warn_of_fault(op_name: str, reason: str) -> None:
    """Warn that an op runs in torch, and why."""
    warnings.warn(f"{op_name} runs in torch from now on, as {reason}", RuntimeWarning, stacklevel=3)


def _is_there(kind: str) -> bool:
    return kind not in TRIED or torch.cuda.is_available()


def _why_not(name: str, op_name: str, kind: str) -> str:
    return (
        _not_built(name)
        if _serves(_PROVIDERS[name], kind) and not _loaded(name)
        else f"{name} has no {op_name} on {kind}"
    )


def _not_built(name: str) -> str:
    return f"{name} is not built ({_load(name)[1]}); build it with: {_PROVIDERS[name].build}"


def _serves(provider: _Provider, kind: str) -> bool:
    return (
        not provider.devices
        or kind in provider.devices
        or (provider.interpreted and kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    )


@cache
def _load(name: str) -> tuple[dict[str, Implementation], str]:
    if name == REFERENCE:
        return OPS, ""
    try:
        return _extension() if name == "cpp" else _LOADERS[name]().implementations(), ""
    except ImportError as error:
        return {}, str(error)


def _loaded(name: str) -> dict[str, Implementation]:
    return _load(name)[0]


def _extension() -> dict[str, Implementation]:
    """Return the functions of specengine._ops. ImportError if it is not built, or from other sources."""
    module = importlib.import_module("specengine._ops")
    require_or(
        ImportError, "specengine._ops was built from other sources", module.INTERFACE == INTERFACE
    )
    return {name: function for name, function in vars(module).items() if callable(function)}

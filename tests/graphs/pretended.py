"""A CUDA device on which graphs can be captured, without one: tensors say `cuda`, their numbers stand in CPU memory.

Within `cuda()` all of torch runs through a dispatch mode. A capture records every operation that would be a kernel, and
undoes what it wrote, as a capture runs nothing. A replay runs those operations on the memory that they were recorded
with, after all memory that the graph made has been filled with garbage. So it shows

a number of the host        it is what it was at the capture
a read by the host, a copy  Refused while capturing; so are operations across devices
memory that is not kept     Refused by the replay, where it was made outside and has been freed since

What a backend attaches to an op is one operation, whatever is inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from specengine.ops import _registry

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
GARBAGE = 0x7F  # of every byte: no float that is right by chance, an index far out of bounds
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "bincount", "repeat_interleave")
FUSED = ("scaled_dot_product_attention", "rms_norm")  # a kernel each on a device, several operations here
CHOICE = "_fused_sdp_choice"
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided")


class Refused(RuntimeError):
    """What CUDA would not do."""


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        place = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        # of the host for C++, whose guards would look for a driver
        made = Tensor._make_wrapper_subclass(cls, held.size(), **place, dtype=held.dtype, device=HOST)
        made.held = held
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the pretended device")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def cpu(self) -> Tensor:
        return torch.ops.aten._to_copy(self, device=HOST)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        like = [part for part in given if isinstance(part, Tensor)]
        places = [torch.device(part) for part in given if isinstance(part, str | torch.device)]
        kinds = [part for part in given if isinstance(part, torch.dtype)] + [part.dtype for part in like]
        lazy, copy = kwargs.get("non_blocking", False), kwargs.get("copy", False)
        place = (places + [part.device for part in like] + [CUDA])[0]
        asked: dict[str, Any] = {} if place.type == CUDA.type else {"device": place}
        if kinds and kinds[0] is not self.dtype:
            asked["dtype"] = kinds[0]
        return torch.ops.aten._to_copy(self, non_blocking=lazy, **asked) if asked or copy else self

    def new_tensor(self, data: Any, **given: Any) -> Tensor:
        return torch.tensor(data, **({"dtype": self.dtype, "device": CUDA} | given))

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"


def held(tree: Any) -> Any:
    return tree_map_only(OnDevice, lambda part: part.held, tree)


# ---- graphs


class Kept:
    """A tensor as a graph has it: a place in memory that is the graph's own, or that others must keep."""

    def __init__(self, tensor: Tensor, graph: Graph) -> None:
        storage = tensor.untyped_storage()
        self.own = storage if graph.owns(storage) else None
        self.weak, self.dtype = StorageWeakRef(storage), tensor.dtype
        self.place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def tensor(self) -> Tensor:
        storage = self.own
        if storage is None and self.weak.expired():
            raise Refused("a graph reads memory that has been freed since its capture")
        if storage is None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


def whole(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass
class Graph:
    """As torch.cuda.CUDAGraph. launches: kernels by name, of one replay."""

    keep_graph: bool = False
    launches: Counter[str] = field(default_factory=Counter)
    _steps: list[tuple[Callable[..., Any], Any, list[Kept]]] = field(default_factory=list)
    _own: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _before: dict[int, tuple[torch.UntypedStorage, Tensor]] = field(default_factory=dict)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own

    def writes(self, tensor: Tensor) -> None:
        """This will be written to; a capture leaves it as it was."""
        storage = tensor.untyped_storage()
        if not self.owns(storage) and storage._cdata not in self._before:
            self._before[storage._cdata] = storage, whole(storage).clone()

    def record(self, name: str, function: Callable[..., Any], given: Any, made: list[Tensor]) -> None:
        numbers = tree_map_only(Tensor, lambda part: part if isinstance(part, OnDevice) else part.clone(), given)
        steps = tree_map_only(OnDevice, lambda part: Kept(part.held, self), numbers)
        for tensor in made:
            self._own[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        if name not in UNWRITTEN:
            self.launches[name] += 1
            self._steps.append((function, steps, [Kept(tensor, self) for tensor in made]))

    def undo(self) -> None:
        for storage, before in self._before.values():
            whole(storage).copy_(before)
        self._before.clear()

    def replay(self) -> None:
        with _aside():
            for storage in self._own.values():
                whole(storage).fill_(GARBAGE)
            for function, given, made in self._steps:
                args, kwargs = tree_map(lambda part: part.tensor() if isinstance(part, Kept) else part, given)
                found = function(*args, **kwargs)
                for into, values in zip(made, fresh(found, (args, kwargs)) if made else (), strict=True):
                    into.tensor().copy_(values)


def fresh(found: Any, given: Any) -> list[Tensor]:
    """What of the results is no tensor that was given."""
    known = {id(part) for part in tree_leaves(given)}
    return [part for part in tree_leaves(found) if isinstance(part, Tensor) and id(part) not in known]


# ---- the device


class Device(TorchDispatchMode):
    """Runs what is asked of `cuda` on what its tensors hold; capturing: the graph that records, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.capturing: Graph | None = None
        self.waits = 0  # of the host, for the device

    def wait(self, what: str) -> None:
        self.waits += 1
        if self.capturing is not None:
            raise Refused(f"operation not permitted when stream is capturing: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        name, asked = func.overloadpacket.__name__, kwargs.get("device")
        leaves = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        there = [part for part in leaves if isinstance(part, OnDevice)]
        on = bool(there) if asked is None else asked.type == CUDA.type
        if not there and not on:
            with _normal():
                return func(*args, **kwargs)
        if name == CHOICE:
            return 0
        if name not in FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        self._check(name, args, kwargs, [part for part in leaves if not isinstance(part, OnDevice)], on)
        if asked is not None:
            kwargs["device"] = HOST
        with _normal():
            return self.run(name, func, args, kwargs, on)

    def _check(self, name: str, args: Any, kwargs: Any, off: list[Tensor], on: bool) -> None:
        if name.startswith(READS):
            self.wait(name)
        if name in ("copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            into = isinstance(args[0], OnDevice) if name == "copy_" else on
            if isinstance(source, OnDevice) is not into:
                lazy = kwargs.get("non_blocking") or len(args) > 2 and args[2]
                if not lazy or self.capturing is not None:
                    self.wait(f"{name} across devices")
        elif name.startswith(("index", "_index", "_unsafe_index")) and isinstance(args[1], list | tuple):
            places = [part for part in args[1] if part is not None]
            if any(part.dtype is torch.bool for part in places):
                self.wait("a mask as an index")
            if any(part.dim() and not isinstance(part, OnDevice) for part in places):
                self.wait("an index of the host")
        elif on and any(part.dim() for part in off) and not name.endswith("_like"):
            raise Refused(f"{name}: tensors on cuda and on the host")

    def run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, on: bool, *, opaque: bool = False) -> Any:
        """The operation on what is held; recorded where a graph is captured. opaque: any tensor may be written to."""
        given, graph = held((args, kwargs)), self.capturing
        known = {id(part.held): part for part in tree_leaves((args, kwargs)) if isinstance(part, OnDevice)}
        if graph is not None:
            for part in tree_leaves((args, kwargs)) if opaque else written(function, args, kwargs):
                if isinstance(part, OnDevice):
                    graph.writes(part.held)
        found = function(*given[0], **given[1])
        made = fresh(found, given) if on else []
        inside = {part.untyped_storage()._cdata for part in tree_leaves(given) if isinstance(part, Tensor)}
        views = bool(made) and all(part.untyped_storage()._cdata in inside for part in made)
        if graph is not None and (not views or opaque):
            graph.record(name, function, (args, kwargs), made)
        wrap = lambda part: known.get(id(part)) if id(part) in known else OnDevice(part)  # noqa: E731
        return tree_map_only(Tensor, wrap, found) if on else found


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Of an operation's arguments those that it writes to."""
    spec = {argument.name: argument for argument in func._schema.arguments}
    pairs = [*zip(spec.values(), args, strict=False), *((spec[name], value) for name, value in kwargs.items())]
    return tree_leaves([value for one, value in pairs if one.alias_info is not None and one.alias_info.is_write])


@contextmanager
def _normal() -> Iterator[None]:
    """Held tensors are no inference tensors, which nothing could write to outside."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _aside() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes(), _normal():
        yield


class Stream:
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.device.wait("an event")


@contextmanager
def cuda() -> Iterator[Device]:
    """Everything within runs with a pretended CUDA device; modules go there by `moved`."""
    torch._C._ensureCUDADeviceGuardSet()
    device, made, resolve = Device(), torch.tensor, _registry._resolve

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        values = made(data, dtype=dtype)
        return values if device is None or torch.device(device).type == HOST.type else values.to(CUDA)

    def resolved(name: str, kind: str, asked: str) -> Any:
        run = resolve(name, kind, asked)
        return run if run is None or kind != CUDA.type else lambda *given: attached(name, run, given)

    def attached(name: str, run: Callable[..., Any], given: Any) -> Any:
        def alone(*inner: Any) -> Any:
            with _aside():
                return run(*inner)

        with _normal():
            return device.run(f"kernel {name}", alone, given, {}, True, opaque=True)

    @contextmanager
    def graph(into: Graph, **_: Any) -> Iterator[None]:
        device.capturing = into
        try:
            yield
        finally:
            device.capturing = None
            with _aside():
                into.undo()

    stands_for = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "memory_reserved": lambda *_: 0,
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "synchronize": lambda *_: device.wait("the device"),
        "Stream": Stream,
        "Event": lambda **_: Event(device),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stands_for.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(_registry, "_resolve", resolved)
        with device:
            yield device


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module, its parameters and buffers on the pretended device."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(OnDevice(value.detach()), requires_grad=False)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = OnDevice(value)
    return module

"""A CUDA device on which graphs can be captured, without one: tensors say `cuda`, their numbers stand in CPU memory.

Within `cuda()` all of torch runs through a dispatch mode. A capture records every operation that would be a kernel, and
undoes what it wrote, as a capture runs nothing. A replay runs those operations on the memory that they were recorded
with, after all memory that the graph made has been filled with garbage, and what nobody holds of its pool's other
graphs: a later capture may have been given that. So it shows

a number of the host        it is what it was at the capture
an order that is not kept   of streams that did not wait for each other the later one runs first
a read by the host, a copy  Refused while capturing; so are operations across devices
memory that is not kept     Refused by the replay, where it was made outside, or by another graph, and freed since

Under a `Clock` time passes by what the device is given to do, for the host and for events alike.

What a backend attaches to an op is one operation, whatever is inside.
"""

from __future__ import annotations

import heapq
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from specengine.ops import _registry

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
GARBAGE = 0x7F  # of every byte: no float that is right by chance, an index far out of bounds
READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "bincount",
    "repeat_interleave",
)
# a kernel each on a device, several operations here
FUSED = "scaled_dot_product_attention", "rms_norm"
CHOICE = "_fused_sdp_choice"
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided")
SEQUENCES, NESTED = (list, tuple), (list, tuple, dict)


class Refused(RuntimeError):
    """Raised for an operation that CUDA would refuse."""


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        place = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        # of the host for C++, whose guards would look for a driver
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), **place, dtype=held.dtype, device=HOST
        )
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
        kinds = [part for part in given if isinstance(part, torch.dtype)] + [
            part.dtype for part in like
        ]
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


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Map a function over a tree as torch's tree_map does, in a fraction of its time."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    if isinstance(tree, SEQUENCES):
        parts = [
            mapped(function, part) if isinstance(part, NESTED) else function(part) for part in tree
        ]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)


def held(tree: Any) -> Any:
    return mapped(lambda part: part.held if isinstance(part, OnDevice) else part, tree)


def of_class(kind: Any, tree: Any) -> list[Any]:
    """Return the leaves of a tree that are of this class."""
    leaves: list[Any] = []
    _gather(kind, (tree,), leaves)
    return leaves


def _gather(kind: Any, parts: Any, leaves: list[Any]) -> None:
    for part in parts:
        if isinstance(part, SEQUENCES):
            _gather(kind, part, leaves)
        elif isinstance(part, kind):
            leaves.append(part)
        elif isinstance(part, dict):
            _gather(kind, part.values(), leaves)


# ---- graphs


class Kept:
    """A tensor as a graph has it: a place in memory that is the graph's own, or that others must keep."""

    def __init__(self, tensor: Tensor, graph: Graph) -> None:
        storage = tensor.untyped_storage()
        self._weak, self._dtype = StorageWeakRef(storage), tensor.dtype
        self._place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self._own = self._at(storage) if graph.owns(storage) else None
        if self._own is not None:
            graph.uses[storage._cdata] += 1
        self._lender = graph.pool.owner(storage)

    def _at(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)

    def tensor(self) -> Tensor:
        if self._own is not None:
            return self._own
        lender = None if self._lender is None else self._lender()
        if self._weak.expired() or (lender is not None and not lender.is_held(self._weak.cdata)):
            raise Refused("a graph reads memory that has been freed since its capture")
        return self._at(torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata))


def whole(tensor: Tensor) -> Tensor:
    """Return all bytes of the storage that the tensor is part of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Pool:
    """Memory that graphs share. torch gives it up with the last of them."""

    def __init__(self) -> None:
        self.graphs = weakref.WeakSet[Graph]()
        self.used = False

    def add(self, graph: Graph) -> None:
        if self.used and not self.graphs:
            raise Refused("use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool are gone")
        self.graphs.add(graph)
        self.used = True

    def owner(self, storage: torch.UntypedStorage) -> weakref.ref[Graph] | None:
        return next((weakref.ref(graph) for graph in self.graphs if graph.owns(storage)), None)

    def replayed(self, graph: Graph) -> None:
        """Fill what its other graphs may have lent it."""
        for other in self.graphs:
            if other is not graph and other.fresh:
                other.fresh = False
                other.poison()


@dataclass(eq=False)
class Graph:
    """A stand-in for torch.cuda.CUDAGraph. launches: kernels of one replay by name; chain: those that wait for each
    other, at most; weight: of the next one, if it stands for several; fresh: none of its pool's others has been
    replayed since; clock: that a replay lets pass; ends: by stream, what comes next there waits for these steps."""

    keep_graph: bool = False
    clock: Clock | None = None
    launches: Counter[str] = field(default_factory=Counter)
    weight: int = 1
    ends: dict[Any, frozenset[int]] = field(default_factory=dict)
    pool: Pool = field(default_factory=Pool)
    fresh: bool = True
    uses: Counter[int] = field(default_factory=Counter)  # of memory, by its address
    _steps: list[tuple[Callable[..., Any], Any, list[Kept]] | Part] = field(default_factory=list)
    _own: dict[int, Tensor] = field(default_factory=dict)
    _before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _outer: list[list[Any]] = field(default_factory=list)  # steps around the part under way
    _waits: list[tuple[frozenset[int], int]] = field(
        default_factory=list
    )  # of each step, and its weight

    @property
    def chain(self) -> int:
        lengths: list[int] = []
        for before, weight in self._waits:
            lengths.append(weight + max((lengths[step] for step in before), default=0))
        return max(lengths, default=0)

    def order(self, stream: Any) -> None:
        """Run the steps in another order than that of the capture, as far as they wait for no other.

        stream: of the capture, which must have waited for all others.
        """
        waited = self.ends.get(stream, frozenset()).union(*(before for before, _ in self._waits))
        if len(waited) < len(self._waits):
            raise Refused("capturing stream has unjoined work")
        if len(self.ends) < 2:
            return
        followers: dict[int, list[int]] = {}
        missing = [len(before) for before, _ in self._waits]
        for step, (before, _) in enumerate(self._waits):
            for one in before:
                followers.setdefault(one, []).append(step)
        ready = [-step for step, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        ordered = []
        while ready:
            step = -heapq.heappop(ready)
            ordered.append(self._steps[step])
            for one in followers.get(step, ()):
                missing[one] -= 1
                if not missing[one]:
                    heapq.heappush(ready, -one)
        self._steps = ordered

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own

    def is_held(self, address: int) -> bool:
        """Return whether anyone outside holds this memory."""
        # in Python it counts as well, as does `_own`
        storage = self._own[address].untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > 2 + self.uses[address]

    def poison(self) -> None:
        """Fill what only this graph holds."""
        for at, bytes_ in self._own.items():
            if not self.is_held(at):
                bytes_.fill_(GARBAGE)

    def writes(self, tensor: Tensor) -> None:
        """This will be written to; a capture leaves it as it was."""
        if address(tensor) not in self._own and address(tensor) not in self._before:
            self._before[address(tensor)] = whole(tensor), whole(tensor).clone()

    def record(
        self,
        name: str,
        function: Callable[..., Any],
        given: Any,
        made: list[Tensor],
        stream: Any,
    ) -> None:
        def frozen(part: Any) -> Any:
            if isinstance(part, OnDevice):
                return Kept(part.held, self)
            return part.clone() if isinstance(part, Tensor) else part

        step = mapped(frozen, given)
        for tensor in made:
            self._own[address(tensor)] = whole(tensor)
        if name not in UNWRITTEN:
            self.launches[name] += 1
            self._waits.append((self.ends.get(stream, frozenset()), self.weight))
            self.ends[stream] = frozenset([len(self._waits) - 1])
            self.weight = 1
            self._steps.append((function, step, [Kept(tensor, self) for tensor in made]))

    def undo(self) -> None:
        for bytes_, before in self._before.values():
            bytes_.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        if self.clock is not None:
            self.clock.launch()
        with _aside():
            self.pool.replayed(self)
            self.fresh = True
            for bytes_ in self._own.values():
                bytes_.fill_(GARBAGE)
            self._run(self._steps)

    def _run(self, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, Part):
                self._run(step.steps if bool(step.flag.tensor()) else [])
                continue
            if self.clock is not None:
                self.clock.busy += self.clock.node
            function, given, made = step
            args, kwargs = mapped(
                lambda part: part.tensor() if isinstance(part, Kept) else part, given
            )
            found = function(*args, **kwargs)
            if not made:
                continue
            one = len(made) == 1 and isinstance(found, Tensor)
            for into, values in zip(
                made, [found] if one else fresh(found, (args, kwargs)), strict=True
            ):
                into.tensor().copy_(values)


class Part(NamedTuple):
    """Steps that are run under a condition."""

    flag: Kept
    steps: list[Any]


class Branching(Graph):
    """The same with parts under a condition, as torch's graphs have them from 2.13 on."""

    capturing: ClassVar[Branching | None] = None

    @classmethod
    def get_currently_capturing_graph(cls) -> Branching | None:
        return cls.capturing

    def begin_capture_to_if_node(self, flag: Any) -> None:
        assert isinstance(flag, OnDevice)
        assert (flag.dim(), flag.dtype) == (0, torch.bool)
        part = Part(Kept(flag.held, self), [])
        self._steps.append(part)
        self._outer.append(self._steps)
        self._steps = part.steps

    def end_capture_to_conditional_node(self) -> None:
        self._steps = self._outer.pop()


def fresh(found: Any, given: Any) -> list[Tensor]:
    """Return the results that are not among the arguments."""
    known = {id(part) for part in of_class(Tensor, given)}
    return [part for part in of_class(Tensor, found) if id(part) not in known]


# ---- the device


@dataclass
class Clock:
    """Time that passes as the host launches and waits, and the device works off what it was given; in seconds.

    node: of a kernel on the device; eager, graph: of the host, to launch an operation or a graph; wake: of the host, to
    notice that the device has come to where it waited for; compiling: of the host, for attention over a new shape
    """

    node: float = 1e-4
    eager: float = 4e-4
    graph: float = 2e-5
    wake: float = 5e-5
    compiling: float = 1.5
    now: float = 0.0
    busy: float = 0.0  # until then the device is
    _met: set[Any] = field(default_factory=set)

    def perf_counter(self) -> float:
        self.now += 1e-7
        return self.now

    def launch(self) -> None:
        """A graph, whose kernels follow."""
        self.now += self.graph
        self.busy = max(self.busy, self.now)

    def run(self, name: str, given: list[Tensor]) -> None:
        """An operation that is no part of a graph."""
        if name.startswith(READS):
            return  # the wait for it has passed
        shapes = name, tuple(tuple(part.shape) for part in given)
        if name in FUSED and shapes not in self._met:
            self._met.add(shapes)
            self.now += self.compiling
        self.now += self.eager
        self.busy = max(self.busy, self.now) + self.node

    def wait(self, until: float | None = None) -> None:
        self.now = max(self.now, self.busy if until is None else until) + self.wake


class Device(TorchDispatchMode):
    """Runs what is asked of `cuda` on what its tensors hold; capturing: the graph that records, if any."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.clock = clock
        self.capturing: Graph | None = None
        self.waits = 0  # of the host, for the device
        self.sync_debug_mode: Any = 0
        self.stream = Stream()  # the current one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled within, and to keep Dynamo out costs as much as many an operation."""
        return False

    def wait(self, what: str) -> None:
        self.waits += 1
        if self.capturing is not None:
            raise Refused(f"operation not permitted when stream is capturing: {what}")
        if self.sync_debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        elif self.sync_debug_mode == "error":
            raise Refused("called a synchronizing CUDA operation")
        if self.clock is not None:
            self.clock.wait()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        name, asked = func.overloadpacket.__name__, kwargs.get("device")
        tensors = of_class(Tensor, (args, kwargs))
        there = [part for part in tensors if isinstance(part, OnDevice)]
        on = bool(there) if asked is None else asked.type == CUDA.type
        if not there and not on:
            with _normal():
                return func(*args, **kwargs)
        if name == CHOICE:
            return 0
        if name not in FUSED and composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        self._check(
            name, args, kwargs, [part for part in tensors if not isinstance(part, OnDevice)], on
        )
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
                lazy = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
                if not lazy or self.capturing is not None:
                    self.wait(f"{name} across devices")
        elif name.startswith(("index", "_index", "_unsafe_index")) and isinstance(
            args[1], list | tuple
        ):
            places = [part for part in args[1] if part is not None]
            if any(part.dtype is torch.bool for part in places):
                self.wait("a mask as an index")
            if any(part.dim() and not isinstance(part, OnDevice) for part in places):
                self.wait("an index of the host")
        elif on and any(part.dim() for part in off) and not name.endswith("_like"):
            raise Refused(f"{name}: tensors on cuda and on the host")

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        on: bool,
        *,
        opaque: bool = False,
    ) -> Any:
        """The operation on what is held; recorded where a graph is captured. opaque: any tensor may be written to."""
        given, graph = held((args, kwargs)), self.capturing
        known = {id(part.held): part for part in of_class(OnDevice, (args, kwargs))}
        if graph is not None:
            for part in of_class(
                OnDevice, (args, kwargs) if opaque else written(function, args, kwargs)
            ):
                graph.writes(part.held)
        found = function(*given[0], **given[1])
        if graph is None and self.clock is not None:
            self.clock.run(name, of_class(Tensor, given))
        if graph is not None:
            results = fresh(found, given) if on else []
            inside = {address(part) for part in of_class(Tensor, given)}
            views = bool(results) and all(address(part) in inside for part in results)
            if opaque or not views:
                graph.record(name, function, (args, kwargs), results, self.stream)

        def there(part: Any) -> Any:
            if not on or not isinstance(part, Tensor):
                return part
            return known[id(part)] if id(part) in known else OnDevice(part)

        return mapped(there, found)


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    spec = {argument.name: argument for argument in func._schema.arguments}
    pairs = [
        *zip(spec.values(), args, strict=False),
        *((spec[name], value) for name, value in kwargs.items()),
    ]
    return [value for one, value in pairs if one.alias_info is not None and one.alias_info.is_write]


@cache
def composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


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

    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Stream) -> None:
        if (graph := Branching.capturing) is not None:
            both = (graph.ends.get(stream, frozenset()) for stream in (self, other))
            graph.ends[self] = frozenset().union(*both)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        clock = self.device.clock
        self.at = time.perf_counter() if clock is None else max(clock.now, clock.busy)

    def synchronize(self) -> None:
        if (clock := self.device.clock) is None:
            self.device.wait("an event")
        else:
            self.device.waits += 1
            clock.wait(self.at)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


@contextmanager
def cuda(clock: Clock | None = None, *, branches: bool = False) -> Iterator[Device]:
    """Everything within runs with a pretended CUDA device; modules go there by `moved`. branches: of graphs."""
    _device_constructors()  # torch lists them once: the list must not hold the stand-in of torch.tensor
    device, made, loaded = Device(clock), torch.tensor, _registry._loaded

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        values = made(data, dtype=dtype)
        return (
            values if device is None or torch.device(device).type == HOST.type else values.to(CUDA)
        )

    def kernels(key: str) -> Any:
        return (
            loaded(key)
            if key == _registry.REFERENCE
            else {name: kernel(name, f) for name, f in loaded(key).items()}
        )

    def kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*given: Any) -> Any:
            with _aside():
                return function(*given)

        def run(*given: Any) -> Any:
            if not of_class(OnDevice, given):
                return function(*given)
            with _normal():
                found = device.run(f"kernel {name}", alone, given, {}, True, opaque=True)
            if of_class(int | float, found):
                device.wait(f"a number from {name}")
            return found

        return run

    def forget() -> None:
        _registry.bind()
        _registry._fault.cache_clear()

    @contextmanager
    def graph(into: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        into.pool, into.clock = pool or into.pool, clock
        into.pool.add(into)
        before, device.stream = device.stream, stream or Stream()
        device.capturing = Branching.capturing = into  # type: ignore[assignment]
        try:
            yield
        except BaseException as error:  # as torch does: the stream stays entered
            raise Refused("operation failed due to a previous error during capture") from error
        else:
            into.order(device.stream)
            device.stream = before
        finally:
            device.capturing = Branching.capturing = None
            with _aside():
                into.undo()

    @contextmanager
    def entered(stream: Any) -> Iterator[None]:
        before, device.stream = device.stream, stream
        try:
            yield
        finally:
            device.stream = before

    stands_for = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "memory_reserved": lambda *_: 0,
        "empty_cache": lambda: None,
        "graph_pool_handle": Pool,
        "get_sync_debug_mode": lambda: device.sync_debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(device, "sync_debug_mode", mode),
        "current_stream": lambda *_: device.stream,
        "stream": entered,
        "device": lambda _: nullcontext(),
        "synchronize": lambda *_: device.wait("the device"),
        "Stream": Stream,
        "Event": lambda **_: Event(device),
        "CUDAGraph": Branching if branches else Graph,
        "graph": graph,
    }
    with pytest.MonkeyPatch.context() as patch:
        if clock is not None:
            patch.setattr(time, "perf_counter", clock.perf_counter)
        for name, stand_in in stands_for.items():
            patch.setattr(torch.cuda, name, stand_in)
        if branches:
            patch.setenv("SPECENGINE_TREE_GRAPH", "1")
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        patch.setattr(_registry, "_loaded", kernels)
        forget()
        try:
            with device:
                yield device
        finally:
            forget()


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module, its parameters and buffers on the pretended device."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(
                    OnDevice(value.detach()), requires_grad=False
                )
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = OnDevice(value)
    return module

"""Graphs: functions over buffers of fixed addresses, captured once on a CUDA device and replayed from then on.

Elsewhere than on CUDA the same functions are called over the same buffers, without a capture.
"""

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from specengine.errors import InputError, SpecEngineError, UnsupportedModelError

T = TypeVar("T")
MIN_SLOTS = 1024  # of a cache
WARM_UPS = 2  # runs before a capture: kernels are loaded and compiled, workspaces allocated


class CaptureError(UnsupportedModelError):
    """Raised if a function cannot be captured as a graph. The process and its device stay usable."""


class GraphMemoryError(CaptureError, InputError):
    """Raised if a capture found no memory. Later ones may find some."""


def room(slots: int, limit: int | None = None) -> int:
    """Return the capacity of a cache for these slots: up to an eighth more, as every growth means new captures.

    limit: the slots that any text needs; None: unknown.
    """
    step = (1 << max(slots, MIN_SLOTS).bit_length()) // 16
    capacity = max(MIN_SLOTS, -(-slots // step) * step)
    return capacity if limit is None else max(slots, min(capacity, limit))


@dataclass
class _Captured:
    signature: tuple[Any, ...]
    outputs: Any
    graph: Any = None


@dataclass
class Graphs:
    """Captured functions of one engine part; all share one pool of memory, so they run one after the other.

    captures: how often each function was captured, by its name; seconds: spent on that; bytes: of device memory that
    the graphs took. The workspace that cuBLAS keeps for a stream is made anew within each capture and forgotten behind
    it: it stands in the pool, and neither a graph that is dropped nor whoever clears all workspaces frees it.
    """

    device: torch.device
    captures: dict[Hashable, int] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0
    _captured: dict[Hashable, _Captured] = field(default_factory=dict, repr=False)
    _weights: list[int] = field(default_factory=list, repr=False)
    _pool: Any = field(default=None, repr=False)
    _stream: Any = field(default=None, repr=False)

    def run(self, name: Hashable, reads: Sequence[Tensor], function: Callable[[], T]) -> T:
        """Return the result of `function` for the present contents of `reads`; on CUDA always the same tensors.

        reads: every tensor that may be replaced by another one between calls; where one was, the function is captured
        again. CaptureError where it cannot be captured.
        """
        if not self.has(name, reads):
            self._captured.pop(name, None)  # frees its graph
            self._captured[name] = self._capture(name, _signature(reads), function)
            self.captures[name] = self.captures.get(name, 0) + 1
        known = self._captured[name]
        if known.graph is None:
            return function()
        known.graph.replay()
        return known.outputs

    def has(self, name: Hashable, reads: Sequence[Tensor]) -> bool:
        """Return whether `run` would only replay. A capture runs the function several times, which not all bear."""
        known = self._captured.get(name)
        return known is not None and known.signature == _signature(reads)

    def drop(self, *names: Hashable) -> None:
        """Give up captured functions, if they are there."""
        for name in names:
            self._captured.pop(name, None)
            self.captures.pop(name, None)

    def require_same(self, *models: torch.nn.Module) -> bool:
        """Drop all captures if a weight or a buffer of these models has moved since the last call; return whether one
        has."""
        held = chain.from_iterable(chain(model.parameters(), model.buffers()) for model in models)
        addresses = [tensor.data_ptr() for tensor in held]
        moved = addresses != self._weights
        if moved:
            self._captured.clear()
            self._weights = addresses
        return moved

    def _capture(
        self, name: Hashable, signature: tuple[Any, ...], function: Callable[[], Any]
    ) -> _Captured:
        if self.device.type != "cuda":
            function()  # a run before, as there: what is made on first use is not part of a graph
            return _Captured(signature, None)
        began = time.perf_counter()
        with turns(self.device).capturing(), torch.cuda.device(self.device):
            self._stream = self._stream or torch.cuda.Stream()
            if (
                self._pool is None or not self._captured
            ):  # torch gives up a pool with its last graph
                self._pool = torch.cuda.graph_pool_handle()
            try:
                graph, outputs = self._record(function)
            except SpecEngineError:
                raise
            except Exception as error:  # of torch, of Triton, or of a model's own code
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                short = isinstance(error, MemoryError) or "out of memory" in reason
                raise (GraphMemoryError if short else CaptureError)(
                    f"graphs: {name} cannot be captured ({reason}); load with graphs=False"
                ) from error
        self.seconds += time.perf_counter() - began
        return _Captured(signature, outputs, graph)

    def _record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        self._warm_up(function)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        clear_workspaces()
        torch.cuda.empty_cache()  # so that what is reserved from here on is the graph's
        before = torch.cuda.memory_reserved()
        failed: list[Exception] = []

        def tried() -> Any:
            try:
                return function()
            except Exception as error:
                failed.append(error)
                raise

        capture = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            # entered here as well: where its capture fails, `graph` leaves the stream entered
            with torch.cuda.stream(self._stream), torch.cuda.graph(graph, **capture):
                outputs = tried()
        except BaseException:
            # torch may go on counting stream and pool as in use: before its pull request 180395 the end of a capture
            # that failed left that out
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)  # noqa: SLF001
            self._stream = self._pool = None
            if failed:  # the end of such a capture fails as well, and says less
                raise failed[0] from None
            raise
        finally:
            clear_workspaces()
        self.bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph, outputs

    def _warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function as often as a capture needs; in the last run it is an error to wait for the device.

        A function that waits cannot be captured. A capture that fails costs more than a run.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for run in range(
                    WARM_UPS
                ):  # the first one may move to the device what is to stay there
                    with refusing_waits() if 0 < run == WARM_UPS - 1 else nullcontext():
                        function()
        finally:
            current.wait_stream(self._stream)


class Mark:
    """A moment in the work of a device's current stream; off CUDA, where a call returns when it is done, of the clock.

    It costs the host a few microseconds and waits for nothing. Seconds between marks are those of the device, with the
    time that it waited for the host in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Self) -> float:
        """Return the seconds since another mark of the device, which has come to both."""
        return (
            self._at - earlier._at
            if self._event is None or earlier._event is None
            else earlier._event.elapsed_time(self._event) / 1e3
        )


def clear_workspaces() -> None:
    """Drop the cuBLAS workspaces of all streams; products make new ones on demand."""
    # missing in torch's builds for a CPU
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def branches(device: torch.device) -> bool:
    """Return whether graphs on this device are to have parts that are run under a condition, from torch 2.13 on.

    Only where SPECENGINE_TREE_GRAPH=1 asks for it, as no device has run them.
    """
    asked = device.type == "cuda" and os.environ.get("SPECENGINE_TREE_GRAPH") == "1"
    return asked and hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node")


@contextmanager
def only_if(flag: Tensor) -> Iterator[None]:
    """Capture what runs within such that a replay runs it only where the flag, bool [1], is up. May be nested.

    Outside of a capture it runs in any case.
    """
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    graph = cast(Any, torch.cuda.CUDAGraph).get_currently_capturing_graph()
    graph.begin_capture_to_if_node(flag[0])
    try:
        yield
    finally:
        graph.end_capture_to_conditional_node()


def side_by_side(device: torch.device, functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions of which none reads what another one writes, and return their results.

    In a capture each has a stream, so that they become branches, and a replay takes as long as the longest one.
    """
    alone = device.type != "cuda" or len(functions) == 1
    if alone or not torch.cuda.is_current_stream_capturing():
        return [function() for function in functions]
    current, results = torch.cuda.current_stream(), []
    for stream, function in zip(streams(device, len(functions)), functions, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(function())
    for stream in streams(device, len(functions)):
        current.wait_stream(stream)
    return results


@cache
def streams(device: torch.device, count: int) -> list[Any]:
    """Return streams of the device for `side_by_side`, always the same ones, as each has memory of its own."""
    return [torch.cuda.Stream(device) for _ in range(count)]


def _signature(reads: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in reads)


# ---- threads


_WAITS = "called a synchronizing CUDA operation"  # what torch says
_refusing = threading.RLock()  # torch's mode and Python's warnings are those of all threads


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Make it a RuntimeError of this thread to wait for a device; one thread at a time.

    torch's own mode for that raises in all threads of the process, such as one that loads a model meanwhile. Here torch
    warns, and the warning is an error in this thread and nothing in others.
    """
    thread, shown = threading.get_ident(), warnings.showwarning

    def show(message: Warning | str, *given: Any, **named: Any) -> None:
        if _WAITS not in str(message):
            shown(message, *given, **named)
        elif threading.get_ident() == thread:
            raise RuntimeError(_WAITS)

    with _refusing, warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WAITS}")
        warnings.showwarning = show
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class Turns:
    """The turns of threads on one device: any number of them run cycles at once, or one captures.

    torch captures once at a time, and what a capture does before it begins, waiting for the whole device and freeing
    memory, ends one that is under way in another thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = Counter[int]()  # by thread, how often it is within `running`
        self._waiting = 0  # to capture
        self._captures: int | None = None  # the thread that does

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run cycles within this; waits while another thread captures or is about to. May be nested."""
        thread = threading.get_ident()
        with self._changed:
            if thread not in self._running and self._captures != thread:
                self._changed.wait_for(lambda: self._captures is None and not self._waiting)
            self._running[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= Counter((thread,))  # which leaves out counts of 0
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture within this, alone on the device. A thread that runs cycles lets others capture before it does."""
        thread = threading.get_ident()
        with self._changed:
            held = self._running.pop(thread, 0)
            self._waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._captures is None and not self._running)
                self._captures = thread
            finally:
                self._waiting -= 1
                if self._captures != thread:  # interrupted
                    self._go_on(thread, held)
        try:
            yield
        finally:
            with self._changed:
                self._captures = None
                self._go_on(thread, held)

    def _go_on(self, thread: int, held: int) -> None:
        if held:
            self._running[thread] = held
        self._changed.notify_all()


@cache
def turns(device: torch.device) -> Turns:
    """Return the turns of the threads of this process on a device."""
    return Turns()


def sharing(
    device: torch.device, running: Callable[[], AbstractContextManager[None]]
) -> Callable[[], AbstractContextManager[None]]:
    """Return `running` such that on a CUDA device no other thread captures within."""
    if device.type != "cuda":
        return running

    @contextmanager
    def shared() -> Iterator[None]:
        with turns(device).running(), running():
            yield

    return shared

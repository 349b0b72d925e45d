"""Graphs: functions over buffers of fixed addresses, captured once on a CUDA device and replayed from then on.

Elsewhere than on CUDA the same functions are called over the same buffers, without a capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from specengine.errors import UnsupportedModelError

T = TypeVar("T")
FEWEST_SLOTS = 1024  # of a cache; it grows by doubling, as every growth means new captures
WARM_UPS = 2  # runs before a capture: kernels are loaded and compiled, workspaces allocated


def room(slots: int) -> int:
    """Return the capacity of a cache for so many slots."""
    return max(FEWEST_SLOTS, 1 << (slots - 1).bit_length())


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
        again. UnsupportedModelError where it cannot be captured.
        """
        signature = _signature(reads)
        known = self._captured.get(name)
        if known is None or known.signature != signature:
            self._captured.pop(name, None)
            self.captures[name] = self.captures.get(name, 0) + 1
            known = self._captured[name] = self._capture(name, signature, function)
        if known.graph is None:
            return function()
        known.graph.replay()
        return known.outputs

    def has(self, name: Hashable, reads: Sequence[Tensor]) -> bool:
        """Return whether `run` would only replay. A capture runs the function several times, which not all bear."""
        known = self._captured.get(name)
        return known is not None and known.signature == _signature(reads)

    def require_same(self, *models: torch.nn.Module) -> bool:
        """Drop all captures if a weight of these models has moved since the last call; return whether it has."""
        addresses = [parameter.data_ptr() for model in models for parameter in model.parameters()]
        moved = addresses != self._weights
        if moved:
            self._captured.clear()
            self._weights = addresses
        return moved

    def _capture(self, name: Hashable, signature: tuple[Any, ...], function: Callable[[], Any]) -> _Captured:
        if self.device.type != "cuda":
            function()  # a run before, as there: what is made on first use is not part of a graph
            return _Captured(signature, None)
        began = time.perf_counter()
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            try:
                graph, outputs = self._record(function)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise UnsupportedModelError(
                    f"graphs: {name} cannot be captured ({reason}); load without graphs=True"
                ) from error
        self.seconds += time.perf_counter() - began
        return _Captured(signature, outputs, graph)

    def _record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        clear_workspaces()
        torch.cuda.empty_cache()  # so that what is reserved from here on is the graph's
        before = torch.cuda.memory_reserved()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            clear_workspaces()
        self.bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph, outputs


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

    def since(self, earlier: Mark) -> float:
        """Return the seconds since another mark of the device, which has come to both."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1e3


def clear_workspaces() -> None:
    """Drop the cuBLAS workspaces of all streams; products make new ones on demand."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # missing in torch's builds for a CPU
    if clear is not None:
        clear()


def _signature(reads: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in reads)

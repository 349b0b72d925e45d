"""Graphs: forwards over buffers of fixed addresses, captured once per shape on a CUDA device and replayed from then on.

Rows are padded to a few sizes (`bucket`), everything that changes from call to call stands in one buffer (`RowBuffer`)
that a single copy brings to the device, and lengths are read there. So one graph serves every length and every tree of
its size. Elsewhere than on CUDA the same functions are called over the same buffers, without a capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine import ops
from specengine.errors import UnsupportedModelError
from specengine.ops import WORD_BITS, Paths

T = TypeVar("T")
SMALLEST_BUCKET = 8  # of more than one row
FEWEST_SLOTS = 1024  # of a cache; it grows by doubling, as every growth means new captures
WARM_UPS = 2  # runs before a capture: kernels are loaded and compiled, workspaces allocated


def bucket(rows: int) -> int:
    """The padded number of rows: 1, or a power of two from 8."""
    return 1 if rows == 1 else max(SMALLEST_BUCKET, 1 << (rows - 1).bit_length())


def buckets(most: int) -> list[int]:
    """All sizes that up to `most` rows are padded to, the largest first: the smaller graphs fit into its memory."""
    sizes = [1] if most == 1 else [1, SMALLEST_BUCKET]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes[::-1]


def room(slots: int) -> int:
    """The capacity of a cache for so many slots."""
    return max(FEWEST_SLOTS, 1 << (slots - 1).bit_length())


@dataclass(eq=False)
class Rows:
    """The padded rows of one forward, on the device (see RowBuffer). paths: given where their attention is strict."""

    rows: int
    tokens: Tensor
    positions: Tensor
    words: Tensor
    slots: Tensor
    prefix: Tensor
    live: Tensor
    seen: Tensor
    paths: Paths | None = None


class RowBuffer(Rows):
    """Rows of a forward over a cache, padded: filled on the host, read on the device.

    rows, words: how many, and how many visibility words each has. On the device:

    tokens, positions    int64 [rows]
    sources, targets     int64 [rows], whatever rows are read from and written to
    words                int64 [rows, words], bit j: the row sees slot prefix + j
    slots                int64 [1], the cache slot of the first row
    prefix, live, seen   int32 [1] each: slots that every row sees, rows that are not padding, slots behind the prefix

    Padding has token 0 at position 0 and sees nothing; its keys and values go to the slots behind those of the rows.
    """

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        self.rows, self.paths = rows, None
        pinned = device.type == "cuda"
        self._sent = torch.cuda.Event() if pinned else None
        self._host = torch.zeros(4 + rows * (4 + words), dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device)
        self._filled = self._split(self._host, words)
        numbers, self.tokens, self.positions, self.sources, self.targets, self.words = self._split(self._device, words)
        self.slots = numbers[3:]
        self.prefix, self.live, self.seen = (numbers[i : i + 1].view(torch.int32)[:1] for i in range(3))

    def _split(self, buffer: Tensor, words: int) -> tuple[Tensor, ...]:
        numbers, *lists, bits = buffer.split([4, *[self.rows] * 4, self.rows * words])
        return (numbers, *lists, bits.view(self.rows, words))

    def fill(
        self,
        tokens: Tensor | Sequence[int],
        positions: Tensor,
        words: Tensor,
        *,
        slot: int,
        prefix: int,
        seen: int,
        sources: Tensor | None = None,
        targets: Tensor | None = None,
        spare: int = 0,
    ) -> None:
        """Bring these rows to the device, all given on the host; `spare` is the source and target of padding."""
        if self._sent is not None:
            self._sent.synchronize()  # the copy before may still be under way
        numbers, *lists, bits = self._filled
        n = len(tokens)
        for number, value in enumerate((prefix, n, seen, slot)):
            numbers[number] = value
        given = (torch.as_tensor(tokens), positions, sources, targets)
        for into, values, padding in zip(lists, given, (0, 0, spare, spare), strict=True):
            into[n:] = padding
            into[:n] = padding if values is None else values
        bits.zero_()
        known = min(words.shape[1], bits.shape[1])
        bits[:n, :known] = words[:, :known]
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def write(
        self,
        tokens: Tensor,
        positions: Tensor,
        words: Tensor,
        *,
        slot: Tensor,
        prefix: Tensor,
        live: Tensor,
        seen: Tensor,
        sources: Tensor | None = None,
        targets: Tensor | None = None,
        spare: int = 0,
    ) -> None:
        """As `fill`, with all of it on the device: up to `rows` rows, of which the first `live` are no padding."""
        padding = torch.arange(self.rows, device=live.device) >= live
        given = (self.tokens, tokens, 0), (self.positions, positions, 0), (self.sources, sources, spare)
        for into, values, rest in (*given, (self.targets, targets, spare)):
            if values is not None:
                into.copy_(pad(values, (0, self.rows - len(values))).masked_fill(padding, rest))
        self.words.copy_(pad(words, (0, self.words.shape[1] - words.shape[1], 0, self.rows - len(words))))
        for number, value in ((self.slots, slot), (self.prefix, prefix), (self.live, live), (self.seen, seen)):
            number.copy_(value)

    def strict_pieces(self, rows: int) -> Iterator[Rows]:
        """Forwards of `rows` rows each, to be run in this order, whose attention is strict."""
        for first in range(0, self.rows, rows):
            part = slice(first, first + rows)
            live, paths = (self.live - first).clamp(0, rows), ops.order_paths(self.words[part])
            given = self.tokens[part], self.positions[part], self.words[part], self.slots + first
            yield Rows(rows, *given, self.prefix, live, self.seen.clamp(max=first + rows), paths)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a graph reads."""
        return (self._device,)


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
        """What `function` returns for the present contents of `reads`; on CUDA always the same tensors.

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
            # a replay gives the same tensors each time, and so does this
            known.outputs = _renewed(known.outputs, function())
            return known.outputs
        known.graph.replay()
        return known.outputs

    def has(self, name: Hashable, reads: Sequence[Tensor]) -> bool:
        """Whether `run` would capture nothing. A capture runs the function several times, which not all may be."""
        known = self._captured.get(name)
        return known is not None and known.signature == _signature(reads)

    def capture(self, name: Hashable, function: Callable[[], Any]) -> Any:
        """The graph of `function` alone, to be put into another one; on CUDA only. Nothing of it is kept here."""
        self.captures[name] = self.captures.get(name, 0) + 1
        return self._capture(name, (), function, keep=True).graph

    def require_same(self, *models: torch.nn.Module) -> bool:
        """Drop all captures if a weight of these models, which they read, has moved since the last call; whether so."""
        addresses = [parameter.data_ptr() for model in models for parameter in model.parameters()]
        moved = addresses != self._weights
        if moved:
            self._captured.clear()
            self._weights = addresses
        return moved

    def _capture(
        self, name: Hashable, signature: tuple[Any, ...], function: Callable[[], Any], *, keep: bool = False
    ) -> _Captured:
        if self.device.type != "cuda":
            function()  # a run before, as there: what is made on first use is not part of a graph
            return _Captured(signature, None)
        began = time.perf_counter()
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            try:
                graph, outputs = self._record(function, keep)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise UnsupportedModelError(
                    f"graphs: {name} cannot be captured ({reason}); load without graphs=True"
                ) from error
        self.seconds += time.perf_counter() - began
        return _Captured(signature, outputs, graph)

    def _record(self, function: Callable[[], Any], keep: bool) -> tuple[Any, Any]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph(keep_graph=keep)
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


def clear_workspaces() -> None:
    """Let cuBLAS forget its workspaces, of all streams: each product makes its own again where there is none."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # missing in torch's builds for a CPU
    if clear is not None:
        clear()


def _signature(reads: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in reads)


def _renewed(before: Any, now: Any) -> Any:
    """`now`, in the tensors of `before` where there are some."""
    if isinstance(now, tuple):
        return tuple(_renewed(a, b) for a, b in zip(before or [None] * len(now), now, strict=True))
    return now if before is None else before.copy_(now)


class SlotWords:
    """Which slots of a draft's scratch its nodes see: their ancestors' that were drafted from, and their own."""

    def __init__(self) -> None:
        self.used = 0
        self._by_node = torch.zeros(0, 1, dtype=torch.int64)

    def start(self, capacity: int, root_slots: int) -> None:
        """A new tree of up to `capacity` nodes, whose root takes the first `root_slots` (0 or 1) of the scratch."""
        self._by_node = torch.zeros(capacity, words_for(capacity), dtype=torch.int64)
        self._by_node[0, 0] = root_slots
        self.used = root_slots

    def add(self, parents: Tensor, nodes: Tensor) -> Tensor:
        """Give `nodes`, whose parents were given theirs, the next slots; their words, int64 [rows, words]."""
        slots = torch.arange(self.used, self.used + len(nodes))
        words = self._by_node[parents]
        words[torch.arange(len(nodes)), slots // WORD_BITS] |= torch.ones_like(slots) << (slots % WORD_BITS)
        self._by_node[nodes] = words
        self.used += len(nodes)
        return words


def words_for(slots: int) -> int:
    return -(-slots // WORD_BITS)


def causal_words(rows: int) -> Tensor:
    """Words of consecutive tokens: each sees those before and itself. int64 [rows, 1]; up to 64 rows."""
    bits = torch.ones(rows, dtype=torch.int64) << torch.arange(rows)
    return bits.cumsum(0)[:, None]  # bits are distinct, so the sum is their union

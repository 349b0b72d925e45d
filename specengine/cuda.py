"""The kernels of csrc/*.cu: ops for CUDA tensors, and the same without a host read for captured graphs.

They stand in specengine/_cuda.so, a plain shared library behind a C interface (csrc/spec/device_abi.hpp), which is
loaded on first use. BackendError where it is missing or stale, names the build command; where there is no driver or
a call fails, the CUDA error. Calls run on torch's current stream of the tensors' device; call each once before a
capture, so that its kernel is loaded. What they check is type, dtype, shape and contiguity; contents are the caller's
promise, as reading them would make the host wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine import reference
from specengine.errors import BackendError, InputError
from specengine.reference import HAS_NAN, Popped

LIBRARY = Path(__file__).with_name("_cuda.so")
BUILD = "SPECENGINE_CUDA=1 pip install -e ."
ABI_VERSION = 1  # as in csrc/spec/device_abi.hpp
CAPACITY = 256  # largest budget of a best-first queue
MOST_WALKED = 1024  # largest tree of a walk
DEVICE = "cuda"  # whose addresses the library takes

_P, _I, _L, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
SIGNATURES: dict[str, tuple[Any, ...]] = {  # of functions that return 0 or a CUDA error code
    "spec_driver_version": (_P,),
    "spec_queues_start": (_P, _I, _I, _I, _P, _P),
    "spec_queues_push": (_P, _P, _P, _P, _P, _P, _P, _P, _I, _P, _P, _P),
    "spec_queues_draw": (_P, _I, _D, _P, _P, _P, _P, _P, _P, _P, _P, _P),
    "spec_tree_append": (*(_P,) * 7, _I, _I, *(_P,) * 6, _I, *(_P,) * 5),
    "spec_walk": (_P, _P, _P, _P, _I, _P, _P, _P, _P),
    "spec_compact_kv": (_P, _L, _L, _L, _P, _P, _P, _P),
    "spec_loop_create": (_P, _P, _P, _P, _P, _I, _P),
    "spec_loop_launch": (_P, _P),
    "spec_loop_destroy": (_P,),
}


# ---- the library


def library() -> ctypes.CDLL:
    """The loaded library; BackendError, with the build command, where it is missing, damaged or of other sources."""
    return _open(LIBRARY)


@cache
def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise BackendError(f"{path} is not built; build it, with nvcc of CUDA 12.4 or later, by: {BUILD}")
    try:
        opened = ctypes.CDLL(str(path))
        version = opened.spec_abi_version()
    except (OSError, AttributeError) as error:
        raise BackendError(f"{path} cannot be loaded ({error}); build it again by: {BUILD}") from error
    if version != ABI_VERSION:
        raise BackendError(f"{path} has interface {version}, {ABI_VERSION} is needed; build it again by: {BUILD}")
    opened.spec_error.restype, opened.spec_error.argtypes = ctypes.c_char_p, (_I,)
    opened.spec_queues_bytes.restype = _L
    for name, arguments in SIGNATURES.items():
        getattr(opened, name).argtypes = arguments
    return opened


def check(code: int) -> None:
    """BackendError where `code`, of a call into the library, is a CUDA error."""
    if code == 0:
        return
    driver = driver_version()
    hint = f"driver of CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no NVIDIA driver was found"
    raise BackendError(f"CUDA error {code}: {library().spec_error(code).decode()} ({hint})")


def driver_version() -> int:
    """1000 * major + 10 * minor of the CUDA version that the driver knows; 0 without a driver."""
    version = ctypes.c_int(0)
    library().spec_driver_version(ctypes.byref(version))
    return version.value


def implementations() -> dict[str, Callable[..., Any]]:
    """What `ops` finds here; ImportError where the library cannot be used."""
    try:
        library()
    except BackendError as error:
        raise ImportError(str(error).partition(";")[0]) from error  # ops adds the build command
    return {"best_first": best_first, "walk": walk, "compact_kv": compact_kv}


def _run(function: str, device: torch.device, *arguments: Any) -> None:
    run = getattr(library(), function)
    with torch.cuda.device(device):
        check(run(*arguments, torch.cuda.current_stream(device).cuda_stream))


def _address(name: str, tensor: Tensor, dtype: torch.dtype, least: int = 1) -> int:
    """The address of a contiguous CUDA tensor of `dtype` that has `least` elements or more."""
    if tensor.device.type != DEVICE or tensor.dtype is not dtype or tensor.numel() < least:
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"{name}: {kind} [{least}] on {DEVICE} is needed, got {given}")
    if not tensor.is_contiguous():
        raise InputError(f"{name}: a contiguous tensor is needed, got strides {tensor.stride()}")
    return tensor.data_ptr()


# ---- best-first queues


class Drawn(NamedTuple):
    """What a draw writes, at fixed addresses; entries from the counts on are undefined.

    parents, tokens: int64 [256]; log_probs: float32 [256]; expand: int64 [256], indices into the nodes of those to
    draft from; nodes, expanded: int32 [1], how many; mass: float64 [1]; alive: int32 [1], whether some are to be
    drafted from and their mass reaches the threshold.
    """

    parents: Tensor
    tokens: Tensor
    log_probs: Tensor
    expand: Tensor
    nodes: Tensor
    expanded: Tensor
    mass: Tensor
    alive: Tensor


class Queues:
    """The queues of `ops.BestFirst` in device memory; nothing here makes the host wait.

    budget: 1 to 256. bound: float32 [1], as ops.BestFirst.bound. refused: int32 [1], 1 once a score was NaN; whoever
    reads it sets it back.
    """

    def __init__(self, budget: int, batch: int, max_depth: int, device: torch.device | str = "cuda") -> None:
        if not 1 <= budget <= CAPACITY or batch < 1 or max_depth < 1:
            raise InputError(
                f"budget, batch, max_depth: got {budget}, {batch}, {max_depth}, accepted 1 to {CAPACITY}, 1 or more"
            )
        self._shape = budget, batch, max_depth
        self._state = torch.empty(library().spec_queues_bytes(), dtype=torch.uint8, device=device)
        self.device = self._state.device
        self.bound = torch.empty(1, dtype=torch.float32, device=device)
        self.refused = torch.zeros(1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)  # of `drawn`, together: one read
        whole, numbers = torch.empty(3, CAPACITY, dtype=torch.int64, device=device), self.counts.view(torch.int32)
        self.drawn = Drawn(
            parents=whole[0],
            tokens=whole[1],
            log_probs=torch.empty(CAPACITY, dtype=torch.float32, device=device),
            expand=whole[2],
            nodes=numbers[0:1],
            expanded=numbers[1:2],
            mass=self.counts.view(torch.float64)[2:3],
            alive=numbers[2:3],
        )
        self.start()

    def start(self) -> None:
        """Forget everything but the root."""
        _run("spec_queues_start", self.device, self._state.data_ptr(), *self._shape, self.bound.data_ptr())

    def push(
        self,
        nodes: Tensor,
        depths_of_nodes: Tensor,
        tokens: Tensor,
        log_probs: Tensor,
        scores: Tensor,
        *,
        rows: Tensor | None = None,
        count: Tensor | None = None,
    ) -> None:
        """Add the first `count` candidates, in order of creation, as ops.BestFirst.push does.

        tokens: int64 [m]; log_probs, scores: float32 [m] (edge, path). nodes, depths_of_nodes: int64 [m], the parents;
        with rows, int64 [m], the frontier: rows[i] is candidate i's place in it. count: int32 [1]; none: all.
        """
        most = scores.shape[0]
        parents = most if rows is None else 0
        _run(
            "spec_queues_push",
            self.device,
            self._state.data_ptr(),
            None if rows is None else _address("rows", rows, torch.int64, most),
            _address("nodes", nodes, torch.int64, parents),
            _address("depths_of_nodes", depths_of_nodes, torch.int64, parents),
            _address("tokens", tokens, torch.int64, most),
            _address("log_probs", log_probs, torch.float32, most),
            _address("scores", scores, torch.float32, most),
            None if count is None else _address("count", count, torch.int32),
            most,
            self.bound.data_ptr(),
            self.refused.data_ptr(),
        )

    def draw(self, expands: bool = True, threshold: float = 0.0) -> Drawn:
        """ops.BestFirst.pop, or where not `expands` ops.BestFirst.fill, into `drawn`."""
        out = self.drawn
        lists = out.parents, out.tokens, out.log_probs, out.nodes, out.expand, out.expanded, out.mass, out.alive
        addresses = [tensor.data_ptr() for tensor in lists]
        _run("spec_queues_draw", self.device, self._state.data_ptr(), int(expands), threshold, *addresses)
        return out


def best_first(budget: int, batch: int, max_depth: int, device: torch.device | str) -> Any:
    if budget > CAPACITY:
        return reference.BestFirst(budget, batch, max_depth, device)
    return BestFirst(budget, batch, max_depth, device)


class BestFirst:
    """As ops.BestFirst says, over Queues; each call but the first waits for the device once."""

    __slots__ = ("_queues",)

    def __init__(self, budget: int, batch: int, max_depth: int, device: torch.device | str) -> None:
        self._queues = Queues(budget, batch, max_depth, device)

    @property
    def bound(self) -> float:
        return float(self._queues.bound)

    def push(
        self, parents: Tensor, depth_of_parents: Tensor, tokens: Tensor, log_probs: Tensor, scores: Tensor
    ) -> None:
        given = parents, depth_of_parents, tokens, log_probs, scores
        self._queues.push(*(tensor.contiguous() for tensor in given))
        if bool(self._queues.refused):
            self._queues.refused.zero_()
            raise InputError("scores: " + HAS_NAN)

    def pop(self) -> Popped:
        return self._draw(True)

    def fill(self) -> Popped:
        return self._draw(False)

    def _draw(self, expands: bool) -> Popped:
        out = self._queues.draw(expands)
        counts = self._queues.counts.cpu()
        nodes, expanded = counts.view(torch.int32)[:2].tolist()
        return Popped(
            out.parents[:nodes].clone(),
            out.tokens[:nodes].clone(),
            out.log_probs[:nodes].clone(),
            out.expand[:expanded].clone(),
            float(counts.view(torch.float64)[2]),
        )


# ---- the tree


class TreeArrays(NamedTuple):
    """A tree in device memory, as TokenTree has it. int64 [capacity] x 3, float32 [capacity] x 2, int64 [capacity,
    words]; size: int32 [1]."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    path_log_probs: Tensor
    ancestors: Tensor
    size: Tensor


class Frontier(NamedTuple):
    """Nodes to draft from, padded with node 0 and a score of -inf. nodes, depths: int64 [width]; scores: float32
    [width], of the paths."""

    nodes: Tensor
    depths: Tensor
    scores: Tensor


def append_nodes(tree: TreeArrays, drawn: Drawn, refused: Tensor, frontier: Frontier | None = None) -> None:
    """Hang what was drawn under nodes that the tree has, and write those to draft from into `frontier`.

    Where the capacity would be exceeded nothing is appended, and refused (int32 [1]) becomes 1.
    """
    capacity, words = tree.ancestors.shape
    width = 0
    into: list[int | None] = [None] * 3
    if frontier is not None:
        width = frontier.nodes.shape[0]
        into = [
            _address("frontier.nodes", frontier.nodes, torch.int64, width),
            _address("frontier.depths", frontier.depths, torch.int64, width),
            _address("frontier.scores", frontier.scores, torch.float32, width),
        ]
    _run(
        "spec_tree_append",
        tree.tokens.device,
        _address("tree.tokens", tree.tokens, torch.int64, capacity),
        _address("tree.parents", tree.parents, torch.int64, capacity),
        _address("tree.depths", tree.depths, torch.int64, capacity),
        _address("tree.log_probs", tree.log_probs, torch.float32, capacity),
        _address("tree.path_log_probs", tree.path_log_probs, torch.float32, capacity),
        _address("tree.ancestors", tree.ancestors, torch.int64),
        _address("tree.size", tree.size, torch.int32),
        capacity,
        words,
        _address("drawn.parents", drawn.parents, torch.int64),
        _address("drawn.tokens", drawn.tokens, torch.int64),
        _address("drawn.log_probs", drawn.log_probs, torch.float32),
        _address("drawn.nodes", drawn.nodes, torch.int32),
        _address("drawn.expand", drawn.expand, torch.int64),
        _address("drawn.expanded", drawn.expanded, torch.int32),
        width,
        *into,
        _address("refused", refused, torch.int32),
    )


def walk_into(
    tokens: Tensor,
    parents: Tensor,
    chosen: Tensor,
    path: Tensor,
    count: Tensor,
    bonus: Tensor,
    size: Tensor | None = None,
) -> None:
    """ops.walk of the first `size` nodes, on the device: path int64 [n], count int32 [1], bonus int64 [1].

    tokens, parents, chosen: int64 [n], 1 <= n <= 1024; size: int32 [1]; none: n.
    """
    n = tokens.shape[0]
    if not 1 <= n <= MOST_WALKED:
        raise InputError(f"tokens: got {n}, accepted 1 to {MOST_WALKED}")
    _run(
        "spec_walk",
        tokens.device,
        _address("tokens", tokens, torch.int64, n),
        _address("parents", parents, torch.int64, n),
        _address("chosen", chosen, torch.int64, n),
        None if size is None else _address("size", size, torch.int32),
        n,
        _address("path", path, torch.int64, n),
        _address("count", count, torch.int32),
        _address("bonus", bonus, torch.int64),
    )


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    n = tokens.shape[0]
    if n > MOST_WALKED:
        return reference.walk(tokens, parents, chosen)
    out = torch.zeros(n + 2, dtype=torch.int64, device=tokens.device)  # path, bonus, count: one read
    walk_into(
        tokens.contiguous(),
        parents.contiguous(),
        chosen.contiguous(),
        out[:n],
        out[n + 1 :].view(torch.int32),
        out[n : n + 1],
    )
    values = out.tolist()
    return values[: values[n + 1]]


# ---- key-value rows


def compact_rows(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    """ops.compact_kv with what it moves on the device: path int64 [n], count and prefix int32 [1]. slab: contiguous."""
    if slab.dim() != 5:
        raise InputError(f"slab: [layers, 2, KV heads, capacity, head size] is needed, got {list(slab.shape)}")
    layers, two, heads, capacity, size = slab.shape
    _run(
        "spec_compact_kv",
        slab.device,
        _address("slab", slab, slab.dtype),
        layers * two * heads,
        capacity,
        size * slab.element_size(),
        _address("path", path, torch.int64),
        _address("count", count, torch.int32),
        _address("prefix", prefix, torch.int32),
    )


def compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    if not slab.is_contiguous():
        return reference.compact_kv(slab, prefix, path)
    n = len(path)
    if path[-1] == n - 1:  # all of them stand right
        return None
    given = torch.tensor([*path, n | prefix << 32], device=slab.device)  # one copy
    count, start = given[n:].view(torch.int32).split(1)
    return compact_rows(slab, given[:n], count, start)


# ---- captured loop


class Loop:
    """One launch: `before`; then `body` while `flag` is not 0, at most `limit` times; then `after`.

    The graphs are captured with torch.cuda.CUDAGraph(keep_graph=True), hold no host function and no random numbers of
    torch, and are kept alive here, as they own the memory that their kernels use. flag, rounds: int32 [1] on the
    device; `before` or a round sets the flag, `rounds` says afterwards how many there were. Needs a driver of CUDA 12.4
    or later.
    """

    def __init__(
        self,
        body: torch.cuda.CUDAGraph,
        flag: Tensor,
        rounds: Tensor,
        limit: int,
        before: torch.cuda.CUDAGraph | None = None,
        after: torch.cuda.CUDAGraph | None = None,
    ) -> None:
        if limit < 1:
            raise InputError(f"limit: got {limit}, accepted 1 or more")
        addresses = _address("flag", flag, torch.int32), _address("rounds", rounds, torch.int32)
        self._kept = body, flag, rounds, before, after
        self._device = flag.device
        self._loop = ctypes.c_void_p()
        graphs = [graph and graph.raw_cuda_graph() for graph in (before, body, after)]
        with torch.cuda.device(self._device):
            check(library().spec_loop_create(*graphs, *addresses, limit, ctypes.byref(self._loop)))

    def launch(self) -> None:
        _run("spec_loop_launch", self._device, self._loop)

    def __del__(self) -> None:
        if getattr(self, "_loop", None):  # none where the construction failed
            library().spec_loop_destroy(self._loop)

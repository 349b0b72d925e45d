"""The kernels of csrc/*.cu: SALF's queue and auto's rule for CUDA tensors.

NVRTC, which torch's CUDA wheels bring, compiles a source once per process and kind of device, in about a second; the
sources are installed next to specengine (specengine_csrc). The driver's interface launches kernels on torch's current
stream of the tensors' device; call each once before a capture, so that its kernel is loaded. BackendError where the
sources are refused or the driver reports an error. Contents of tensors are the caller's promise, as reading them would
make the host wait.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.errors import BackendError, require_or
from specengine.ops import worth
from specengine.ops._meanings import WORD_BITS
from specengine.ops._registry import by_meaning, taken_where
from specengine.ops.queue import Drawn, Queues, Search
from specengine.ops.select import Candidates, Drafted, top_children
from specengine.ops.tree import Arrays, Counters, Nodes
from specengine.ops.worth import MEMORY, PLACES, Limits, SearchState, Source


class Kernel(NamedTuple):
    """A kernel of one block: its source below csrc/, its name, and the lanes of the block."""

    source: str
    name: str
    lanes: int


STEP = Kernel("best_first.cu", "step_kernel", 256)  # kCapacity of csrc/spec/device_best_first.hpp
LEVEL, KEEP, EXTRACT, OUTCOME = (  # kRuleLanes of csrc/spec/device_worth.hpp
    Kernel("worth.cu", name, 512)
    for name in ("level_kernel", "keep_kernel", "extract_kernel", "outcome_kernel")
)
PLAIN_SHARED = 48 * 1024  # bytes of a block's memory that a launch has without asking
ASKS_FOR_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc")  # that hold lib/libnvrtc.so, of CUDA 13 and of 12
HEADERS = {  # in place of a standard library, which NVRTC has not
    "cmath": "#define INFINITY __builtin_bit_cast(float, 0x7f800000)\n"
    "#define NAN __builtin_bit_cast(float, 0x7fc00000)\n",
    "cstdint": "using int32_t = int;\nusing int64_t = long long;\nusing uint8_t = unsigned char;\n"
    "using uint16_t = unsigned short;\nusing uint32_t = unsigned;\nusing uint64_t = unsigned long long;\n",
}

_P, _L, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class BestFirstStep(ctypes.Structure):
    """spec::Step of csrc/spec/device_best_first.hpp, member by member."""

    _fields_ = (
        ("queues", _P * 7),
        ("budget", _L),
        ("found", _P * 4),
        ("most", _L),
        ("frontier", _P * 3),  # nodes, depths, token ids
        ("batch", _L),
        ("max_depth", _L),
        ("threshold", _D),
        ("fill", ctypes.c_bool),
        ("out", _P * 6),
    )


class LevelArgs(ctypes.Structure):
    """spec::LevelArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 6),
        ("words", _L),
        ("capacity", _L),
        ("counters", _P * 3),  # size, passes, overflow
        ("frontier", _P * 2),
        ("rows", _L),
        ("children", _P * 2),  # stated, columns
        ("places", _L),
        ("ids_and_marks", _P * 2),
        ("stride", _L),
        ("counts", _P * 3),  # table, profile, group
        ("notes", _P * 5),
        ("seconds", _P * 2),  # drafting, of passes
        ("prices", _P * 2),
        ("nodes", _L),
        ("width", _L),
        ("widths", _P),
        ("tried", _L),
        ("least", _D),
        ("most", _L),
        ("rounds", _L),
        ("max_passes", _L),
        ("out", _P * 2),
        ("skipped", _P),
        ("patience", _L),
    )


class KeepArgs(ctypes.Structure):
    """spec::KeepArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 2),
        ("capacity", _L),
        ("price", _P),
        ("nodes", _L),
        ("most", _L),
        ("out", _P * 3),
    )


class ExtractArgs(ctypes.Structure):
    """spec::ExtractArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 6),
        ("words", _L),
        ("nodes", _P * 2),  # and how many are live
        ("rows", _L),
        ("out", _P * 6),
        ("words_out", _L),
    )


class OutcomeArgs(ctypes.Structure):
    """spec::OutcomeArgs of csrc/spec/device_worth.hpp, member by member."""

    _fields_ = (
        ("tree", _P * 4),  # tokens, parents, edges, size
        ("capacity", _L),
        ("path", _P * 3),  # nodes, chosen, live
        ("width", _L),
        ("counts", _P * 6),
        ("notes", _P * 4),  # without those that wait
        ("throughput", _P * 5),  # verify, draft, their prices, recent
        ("verified", _L),
        ("drafted", _L),
        ("cycle", _P * 3),  # drafting, overhead, verified
        ("memory", _D),
    )


def find() -> Path | None:
    """Return NVRTC's library, if this environment has one and the sources are installed."""
    if sources() is None:
        return None
    folders = [
        *(Path(place) / "lib" for package in PACKAGES for place in _places(package)),
        Path(torch.__file__).parent / "lib",  # of wheels that bring their own
    ]
    libraries = (file for folder in folders for file in sorted(folder.glob("libnvrtc*.so*")))
    return next(
        (file for file in libraries if "builtins" not in file.name and ".alt." not in file.name),
        None,
    )


def sources() -> Path | None:
    """Return the folder of csrc/ as it is installed, or of the repository."""
    places = [
        *(Path(place) for place in _places("specengine_csrc")),
        Path(__file__).parents[2] / "csrc",
    ]
    return next((place for place in places if (place / STEP.source).exists()), None)


def _places(package: str) -> Iterator[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        return
    yield from (spec and spec.submodule_search_locations) or ()


@cache
def compile_source(source: str, target: str) -> bytes:
    """Return the cubin for sm_80, sm_90 and so on; needs no device."""
    path, folder = find(), sources()
    if path is None or folder is None:
        raise BackendError(f"NVRTC or csrc/{source} was not found")
    for builtins in path.parent.glob(
        "libnvrtc-builtins.so*"
    ):  # which NVRTC asks for by name, wherever it lies itself
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (folder / source).read_bytes()
    insist = partial(_insist, source=source)
    insist(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            text,
            source.encode(),
            len(HEADERS),
            _strings(HEADERS.values()),
            _strings(HEADERS),
        ),
        "create",
    )
    try:
        options = [
            f"--gpu-architecture={target}",
            "--std=c++17",
            "--fmad=false",
            f"--include-path={folder}",
        ]
        if code := nvrtc.nvrtcCompileProgram(program, len(options), _strings(options)):
            insist(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "log")
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendError(
                f"NVRTC error {code} of {source} for {target}: {log.value.decode()[:2000]}"
            )
        insist(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
        cubin = ctypes.create_string_buffer(size.value)
        insist(nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _strings(texts: Collection[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def launch(kernel: Kernel, values: tuple[Any, ...], device: torch.device, shared: int = 0) -> None:
    """Run a kernel. values: its arguments, structures and addresses; shared: bytes of memory that its block needs."""
    with torch.cuda.device(device):
        function = _function(kernel, torch.cuda.current_device())
        if shared > PLAIN_SHARED:
            _insist(
                _driver().cuFuncSetAttribute(function, ASKS_FOR_SHARED, shared),
                "give memory to",
                kernel.source,
            )
        start(kernel, function, values, torch.cuda.current_stream(device).cuda_stream, shared)


def start(
    kernel: Kernel, function: ctypes.c_void_p, values: tuple[Any, ...], stream: int, shared: int
) -> None:
    arguments = [
        value if isinstance(value, ctypes.Structure) else ctypes.c_void_p(value) for value in values
    ]
    addresses = (ctypes.c_void_p * len(arguments))(
        *(ctypes.addressof(value) for value in arguments)
    )
    _insist(
        _driver().cuLaunchKernel(
            function, 1, 1, 1, kernel.lanes, 1, 1, shared, ctypes.c_void_p(stream), addresses, None
        ),
        "run",
        kernel.source,
    )


@cache
def _function(kernel: Kernel, index: int) -> ctypes.c_void_p:
    """Return the kernel in the context of the current device, which must be that one."""
    function = ctypes.c_void_p()
    _insist(
        _driver().cuModuleGetFunction(
            ctypes.byref(function), _module(kernel.source, index), kernel.name.encode()
        ),
        "find",
        kernel.source,
    )
    return function


@cache
def _module(source: str, index: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(index)
    module = ctypes.c_void_p()
    _insist(
        _driver().cuModuleLoadData(
            ctypes.byref(module), compile_source(source, f"sm_{major}{minor}")
        ),
        "load",
        source,
    )
    return module


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _insist(code: int, what: str, source: str) -> None:
    require_or(
        BackendError, f"error {code} of the CUDA compiler or driver: {what} {source}", not code
    )


CAPACITY = 256  # largest budget of a best-first queue, as in csrc/spec/device_best_first.hpp
MAX_SHARED = 96 * 1024  # bytes of a block's memory, as in csrc/spec/device_worth.hpp


def implementations() -> dict[str, Callable[..., Any]]:
    """Return the ops that are here; raises ImportError where NVRTC or the sources are missing."""
    require_or(ImportError, "NVRTC, of torch's CUDA wheels, was not found", find() is not None)
    return {
        run.__name__: run
        for run in (step_queues, extract, start_search, grow_likely, keep_likely, count_outcomes)
    }


# ---- best-first queues


@taken_where(
    lambda queues, *_: (
        len(queues.scores) <= CAPACITY and all(part.is_contiguous() for part in queues)
    )
)
def step_queues(
    queues: Queues,
    found: Candidates,
    frontier: Nodes,
    depths: Tensor,
    token_ids: Tensor | None,
    passes: Tensor,
    search: Search,
) -> Drawn:
    """Run in one launch. A score of NaN is passed over as -inf is: to report it would take further launches."""
    budget, device = queues.scores.shape[0], passes.device
    width = min(search.batch, budget)
    found = Candidates(*(part.contiguous() for part in found))
    nodes, depths = frontier.ids.contiguous(), depths.contiguous()
    token_ids = None if token_ids is None else token_ids.contiguous()
    parents, tokens, expand = torch.empty(
        2 * budget + width, dtype=torch.int64, device=device
    ).split([budget, budget, width])
    log_probs = torch.empty(budget, device=device, dtype=torch.float32)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    drawn = Drawn(parents, tokens, log_probs, counts[:1], Nodes(expand, counts[1:]))
    step = BestFirstStep(
        _addresses(*queues),
        budget,
        _addresses(*found[:4]),
        found.scores.shape[0],
        _addresses(nodes, depths, token_ids),
        *search,
        _addresses(parents, tokens, log_probs, drawn.live, expand, drawn.expand.live),
    )
    launch(
        STEP,
        (step, found.live.data_ptr(), frontier.live.data_ptr(), passes.data_ptr()),
        device,
    )
    return drawn


# ---- a search that weighs worth against costs


def start_search(
    tree: Arrays,
    size: Tensor,
    state: SearchState,
    rounds: int,
    free: Source,
    asked: tuple[int, float],
    skipped: Tensor,
    patience: int,
) -> Tensor:
    args = _level(tree, (size, size, size), state, Limits(0.0, 0, rounds, 1))
    if args is None:
        return by_meaning(
            worth.start_search, tree, size, state, rounds, free, asked, skipped, patience
        )
    ids, drafts = _nodes(args.width, size.device)
    args.out, args.skipped = _addresses(ids, drafts), skipped.data_ptr()
    args.patience = patience
    launch(LEVEL, (args,), size.device, level_bytes(args))
    return drafts


def grow_likely(
    tree: Arrays,
    counters: Counters,
    frontier: Nodes,
    drafted: Drafted,
    state: SearchState,
    limits: Limits,
) -> Nodes:
    """Run in one launch after those of the best children; a path of NaN is passed over."""
    logits, token_ids, normalized, marks = drafted[:4]
    args = _level(tree, counters, state, limits, (len(logits), min(PLACES, logits.shape[1])))
    if args is None or (marks is not None and marks.stride(1) != 1):
        return by_meaning(worth.grow_likely, tree, counters, frontier, drafted, state, limits)
    device = frontier.ids.device
    stated, columns = (part.contiguous() for part in top_children(logits, PLACES, normalized))
    nodes = frontier.ids.contiguous()
    token_ids = None if token_ids is None else token_ids.contiguous()
    stands = 1 < len(nodes) == args.width and frontier.ids.is_contiguous()
    nodes_out = frontier if stands else _nodes(args.width, device)
    args.frontier, args.children = _addresses(nodes, frontier.live), _addresses(stated, columns)
    args.ids_and_marks, args.out = _addresses(token_ids, marks), _addresses(*nodes_out)
    args.stride = 0 if marks is None else marks.stride(0)
    launch(LEVEL, (args,), device, level_bytes(args))
    return nodes_out


def _level(
    tree: Arrays,
    counters: Counters,
    state: SearchState,
    limits: Limits,
    entries: tuple[int, int] = (0, PLACES),
) -> LevelArgs | None:
    """Return what a level is given, without its frontier; None where the kernel does not take it."""
    counts, notes, throughput = state.counts, state.notes, state.throughput
    prices, books = throughput.prices, (throughput.drafting, throughput.draft)
    if not all(part.is_contiguous() for part in (*tree, *counts, *notes, *books, *prices)):
        return None
    args = LevelArgs(
        tree=_addresses(*tree),
        words=tree[5].shape[1],
        capacity=tree[0].shape[0],
        counters=_addresses(*counters),
        rows=entries[0],
        places=entries[1],
        counts=_addresses(counts.table, counts.profile, counts.group),
        notes=_addresses(*notes),
        seconds=_addresses(*books),
        prices=_addresses(prices.verify, prices.draft),
        nodes=len(prices.verify) - 1,
        width=len(prices.draft) - 1,
        widths=prices.widths.data_ptr(),
        tried=len(prices.widths),
        least=limits.least,
        most=limits.budget,
        rounds=limits.rounds,
        max_passes=limits.max_passes,
    )
    return args if level_bytes(args) <= MAX_SHARED and args.tried < LEVEL.lanes else None


def keep_likely(
    tree: Arrays,
    size: Tensor,
    state: SearchState,
    free: Source,
    asked: tuple[int, int, float],
    most: int,
) -> Nodes:
    throughput = state.throughput
    paths, price, capacity = tree[4], throughput.prices.verify, tree[4].shape[0]
    shared = keep_bytes(capacity, min(most, len(price) - 1, capacity))
    if shared > MAX_SHARED or not (paths.is_contiguous() and price.is_contiguous()):
        return by_meaning(worth.keep_likely, tree, size, state, free, asked, most)
    nodes_out = _nodes(most, size.device)
    args = KeepArgs(
        tree=_addresses(paths, size),
        capacity=capacity,
        price=price.data_ptr(),
        nodes=len(price) - 1,
        most=most,
        out=_addresses(*nodes_out, throughput.verified),
    )
    launch(KEEP, (args,), size.device, shared)
    return nodes_out


@taken_where(
    lambda arrays, nodes, live: len(nodes) and all(part.is_contiguous() for part in arrays)
)
def extract(arrays: Arrays, nodes: Tensor, live: Tensor) -> Arrays:
    rows, device = nodes.shape[0], nodes.device
    nodes = nodes.contiguous()
    tokens, parents, depths = torch.empty(3, rows, dtype=torch.int64, device=device).unbind()
    edges, paths = torch.empty(2, rows, dtype=torch.float32, device=device).unbind()
    words = torch.empty(rows, -(-rows // WORD_BITS), dtype=torch.int64, device=device)
    args = ExtractArgs(
        tree=_addresses(*arrays),
        words=arrays[5].shape[1],
        nodes=_addresses(nodes, live),
        rows=rows,
        out=_addresses(tokens, parents, depths, edges, paths, words),
        words_out=words.shape[1],
    )
    launch(EXTRACT, (args,), device, _whole(4 * rows))
    return tokens, parents, depths, edges, paths, words


def count_outcomes(
    tree: Arrays,
    size: Tensor,
    path: Nodes,
    chosen: Tensor,
    state: SearchState,
) -> None:
    capacity, counts, notes = tree[0].shape[0], state.counts, state.notes
    verify, draft, prices, recent, drafting, verified, overhead, _ = state.throughput
    changed = *counts, *notes, *tree[:4], verify, draft, *prices, recent
    shared = outcome_bytes(capacity)
    if shared > MAX_SHARED or not all(part.is_contiguous() for part in changed):
        return by_meaning(worth.count_outcomes, tree, size, path, chosen, state)
    nodes, chosen = path.ids.contiguous(), chosen.contiguous()
    args = OutcomeArgs(
        tree=_addresses(tree[0], tree[1], tree[3], size),
        capacity=capacity,
        path=_addresses(nodes, chosen, path.live),
        width=len(nodes),
        counts=_addresses(*counts[:6]),
        notes=_addresses(notes.stated, notes.cells, notes.places, notes.drafted),
        throughput=_addresses(verify, draft, prices.verify, prices.draft, recent),
        verified=len(verify),
        drafted=len(draft),
        cycle=_addresses(drafting, overhead, verified),
        memory=MEMORY,
    )
    launch(OUTCOME, (args,), size.device, shared)
    return None


def _nodes(width: int, device: torch.device) -> Nodes:
    return Nodes(
        torch.empty(width, dtype=torch.int64, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )


def _addresses(*tensors: Tensor | None) -> Any:
    return (_P * len(tensors))(*(None if part is None else part.data_ptr() for part in tensors))


# What the blocks need, in bytes: `lay_out` of csrc/spec/device_worth.hpp.


def level_bytes(args: LevelArgs) -> int:
    entries, tried, nodes, room = (
        args.rows * args.places,
        args.tried,
        args.nodes,
        args.width * args.rounds,
    )
    children = 16, *[4 * entries] * 3, *_flags(entries)
    tree = *[4 * args.capacity] * 2, 8 * nodes, 8 * room, *[4 * room] * 2
    played = (
        16 * tried * nodes,
        16 * tried * room,
        8 * tried * room,
        8 * tried * args.width * PLACES,
    )
    return _whole(*children, *tree, *played, 8 * tried, 8 * (tried + 1))


def keep_bytes(capacity: int, considered: int) -> int:
    return _whole(4 * capacity, 8 * considered, 8, *_flags(capacity))


def outcome_bytes(capacity: int) -> int:
    return _whole(*[4 * capacity] * 4, *[capacity] * 3, *_flags(capacity))


def _flags(count: int) -> tuple[int, int]:
    return count, 4 * -(-count // 32)


def _whole(*sizes: int) -> int:
    return sum(-(-size // 8) * 8 for size in sizes)

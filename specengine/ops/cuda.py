"""The kernels of csrc/*.cu: SALF's queue and auto's rule for CUDA tensors.

NVRTC compiles them on first use (_nvrtc.py), and they run on torch's current stream of the tensors' device; call each
once before a capture, so that its kernel is loaded. Contents of tensors are the caller's promise, as reading them would
make the host wait.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specengine.ops import _nvrtc, queue, worth
from specengine.ops._meanings import WORD_BITS
from specengine.ops._registry import by_meaning
from specengine.ops.queue import Drawn, Queues, Search
from specengine.ops.select import Candidates, Drafted, top_children
from specengine.ops.tree import Arrays, Counters, Nodes
from specengine.ops.tree import extract as extract_op
from specengine.ops.worth import MEMORY, PLACES, Limits, SearchState, Source

CAPACITY = 256  # largest budget of a best-first queue, as in csrc/spec/device_best_first.hpp
MAX_SHARED = 96 * 1024  # bytes of a block's memory, as in csrc/spec/device_worth.hpp
_P = ctypes.c_void_p


def implementations() -> dict[str, Callable[..., Any]]:
    """Return the ops that are here; raises ImportError where NVRTC or the sources are missing."""
    if _nvrtc.find() is None:
        raise ImportError("NVRTC, of torch's CUDA wheels, was not found")
    ops = (step_queues, extract, start_search, grow_likely, keep_likely, count_outcomes)
    return {run.__name__: run for run in ops}


# ---- best-first queues


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
    if budget > CAPACITY or not all(part.is_contiguous() for part in queues):
        return by_meaning(
            queue.step_queues, queues, found, frontier, depths, token_ids, passes, search
        )
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
    lists = [part.data_ptr() for part in queues], [part.data_ptr() for part in found[:4]]
    out = [
        part.data_ptr()
        for part in (parents, tokens, log_probs, drawn.live, expand, drawn.expand.live)
    ]
    most = found.scores.shape[0]
    step = _nvrtc.BestFirstStep(
        (_P * 7)(*lists[0]),
        budget,
        (_P * 4)(*lists[1]),
        most,
        _addresses(nodes, depths, token_ids),
        *search,
        (_P * 6)(*out),
    )
    _nvrtc.launch(
        _nvrtc.STEP,
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
) -> Tensor:
    args = _level(tree, (size, size, size), state, Limits(0.0, 0, rounds, 1))
    if args is None:
        return by_meaning(worth.start_search, tree, size, state, rounds, free, asked)
    ids, pays = _nodes(args.width, size.device)
    args.begins, args.out = 1, (_P * 2)(ids.data_ptr(), pays.data_ptr())
    _nvrtc.launch(_nvrtc.LEVEL, (args,), size.device, level_bytes(args))
    return pays


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
    nodes_out = _nodes(args.width, device)
    args.frontier, args.children = _addresses(nodes, frontier.live), _addresses(stated, columns)
    args.ids_and_marks, args.out = _addresses(token_ids, marks), _addresses(*nodes_out)
    args.stride = 0 if marks is None else marks.stride(0)
    _nvrtc.launch(_nvrtc.LEVEL, (args,), device, level_bytes(args))
    return nodes_out


def _level(
    tree: Arrays,
    counters: Counters,
    state: SearchState,
    limits: Limits,
    entries: tuple[int, int] = (0, PLACES),
) -> _nvrtc.LevelArgs | None:
    """Return what a level is given, without its frontier; None where the kernel does not take it."""
    counts, notes, throughput = state.counts, state.notes, state.throughput
    prices, books = throughput.prices, (throughput.drafting, throughput.draft)
    if not all(part.is_contiguous() for part in (*tree, *counts, *notes, *books, *prices)):
        return None
    args = _nvrtc.LevelArgs(
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
    return args if level_bytes(args) <= MAX_SHARED and args.tried < _nvrtc.LEVEL.lanes else None


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
    args = _nvrtc.KeepArgs(
        tree=_addresses(paths, size),
        capacity=capacity,
        price=price.data_ptr(),
        nodes=len(price) - 1,
        most=most,
        out=_addresses(*nodes_out, throughput.verified),
    )
    _nvrtc.launch(_nvrtc.KEEP, (args,), size.device, shared)
    return nodes_out


def extract(arrays: Arrays, nodes: Tensor, live: Tensor) -> Arrays:
    rows, device = nodes.shape[0], nodes.device
    if not rows or not all(part.is_contiguous() for part in arrays):
        return by_meaning(extract_op, arrays, nodes, live)
    nodes = nodes.contiguous()
    tokens, parents, depths = torch.empty(3, rows, dtype=torch.int64, device=device).unbind()
    edges, paths = torch.empty(2, rows, dtype=torch.float32, device=device).unbind()
    words = torch.empty(rows, -(-rows // WORD_BITS), dtype=torch.int64, device=device)
    args = _nvrtc.ExtractArgs(
        tree=_addresses(*arrays),
        words=arrays[5].shape[1],
        nodes=_addresses(nodes, live),
        rows=rows,
        out=_addresses(tokens, parents, depths, edges, paths, words),
        words_out=words.shape[1],
    )
    _nvrtc.launch(_nvrtc.EXTRACT, (args,), device, _whole(4 * rows))
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
    args = _nvrtc.OutcomeArgs(
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
    _nvrtc.launch(_nvrtc.OUTCOME, (args,), size.device, shared)
    return None


def _nodes(width: int, device: torch.device) -> Nodes:
    ids = torch.empty(width, dtype=torch.int64, device=device)
    return Nodes(ids, torch.empty(1, dtype=torch.int32, device=device))


def _addresses(*tensors: Tensor | None) -> Any:
    return (_P * len(tensors))(*(None if part is None else part.data_ptr() for part in tensors))


# What the blocks need, in bytes: `lay_out` of csrc/spec/device_worth.hpp.


def level_bytes(args: _nvrtc.LevelArgs) -> int:
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

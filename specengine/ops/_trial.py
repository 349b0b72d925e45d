"""Trials of implementations for a device: small inputs of each op, on which they are compared with its meaning."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.ops import attention, queue, select, worth
from specengine.ops._registry import OPS, meaning
from specengine.ops.tree import Nodes, ancestor_words
from specengine.ops.worth import KNOTS, LEVELS, PLACES, Counts, Notes, Prices, Throughput

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # of float32, whose sums have another order; integers must be equal
HALF = 2e-2  # both, of bfloat16

ROWS, COLUMNS, HEADS, SLOTS, SIZE = 5, 300, 4, 70, 32
PACKED_ROWS, LONG = (16, 32, 64), 200  # most of a kind of tiles, before the largest; a prefix that is split
MOST_THREADS = 8

Implementations = dict[str, Callable[..., Any]]
Inputs = list[tuple[Any, ...]]


class Heads(NamedTuple):
    """Heads of a model: channels, query heads per key-value head, dtype."""

    size: int
    groups: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"heads of {self.size} channels, {self.groups} to a key-value head, {self.dtype}"


def differs(names: tuple[str, ...], run: Implementations, device: torch.device, inputs: Inputs | None = None) -> str:
    """Return the fault of `run`, implementations of these ops, of which the last is called; empty where there is none.

    A fault is an exception, or a result that differs from the meaning's. inputs: to try, instead of those of the op.
    """
    if inputs is None and names[-1] not in INPUTS:
        return "it has no inputs to try it on"
    for number, given in enumerate(INPUTS[names[-1]](device) if inputs is None else inputs):
        theirs, means = _copied(given), _copied(given)
        with meaning():
            wanted = _called(names, means)
        try:
            with meaning({name: run[name] for name in names}):
                found = _called(names, theirs)
            reason = _difference(_counted((found, theirs)), _counted((wanted, means)))
        except Exception as error:  # whatever a compiler or a driver says
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if reason:
            return f"{reason} (input {number})"
    return ""


def run_all(run: Implementations, device: torch.device) -> None:
    """Run each op once, side by side, so that programs are compiled in threads; what fails is left to `differs`."""
    tried = {needed(name) for name in run}
    side_by_side(
        [(names, run, given) for names in tried if names[-1] in INPUTS for given in INPUTS[names[-1]](device)], device
    )


def side_by_side(jobs: list[tuple[tuple[str, ...], Implementations, tuple[Any, ...]]], device: torch.device) -> None:
    """Call ops, each with its implementations and inputs, in threads; results and exceptions are dropped."""

    @torch.inference_mode()
    def one(job: tuple[tuple[str, ...], Implementations, tuple[Any, ...]]) -> None:
        names, run, given = job
        with contextlib.suppress(Exception), _current(device), meaning({name: run[name] for name in names}):
            _called(names, given)

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # threads have a stream of their own, and the inputs come from this one's
    for job in jobs[:1]:
        one(job)  # loads the driver
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(one, jobs[1:]))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _called(names: tuple[str, ...], given: tuple[Any, ...]) -> Any:
    if names == PACKED:
        query, key, value, mask, prefix = given
        packed = attention.pack_mask(mask, query.shape[0] // key.shape[0], query.dtype, prefix)
        return attention.tree_attention(query, key, value, packed, SIZE**-0.5)
    return OPS[names[-1]](*given)


def _copied(given: Any) -> Any:
    if isinstance(given, tuple):
        parts = [_copied(part) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given.clone() if isinstance(given, Tensor) else given


def _counted(value: Any) -> list[Any]:
    """Return the values of a result, or of a changed argument, without padding, which notes have behind the nodes."""
    if isinstance(value, Notes):
        return [part[:-1] for part in value]
    if isinstance(value, queue.Queues):
        waiting = int((value.scores > -math.inf).sum())
        kept = ("accepted", "scores", "bound")
        return [part if name in kept else part[:waiting] for name, part in value._asdict().items()]
    if isinstance(value, tuple):
        live: Any = getattr(value, "live", None)
        cut = isinstance(live, Tensor)
        parts = zip(getattr(value, "_fields", value), value, strict=True)
        whole = ("live", "bonus", "expand")
        return [
            one
            for name, part in parts
            for one in _counted(part[: int(live)] if cut and not (isinstance(name, str) and name in whole) else part)
        ]
    return [value]


def _difference(found: list[Any], wanted: list[Any]) -> str:
    for ours, theirs in zip(found, wanted, strict=True):
        if not isinstance(theirs, Tensor):
            if ours != theirs:
                return f"{ours} instead of {theirs}"
            continue
        if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
            return f"{ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
        if not theirs.is_floating_point():
            off = ours != theirs
        else:
            close = HALF if theirs.dtype is not torch.float32 else None
            bounds = {"rtol": close or RELATIVE, "atol": close or ABSOLUTE, "equal_nan": True}
            off = ~torch.isclose(ours, theirs, **bounds)  # type: ignore[arg-type]
        if off.any():
            a, b = ours[off].flatten()[0].item(), theirs[off].flatten()[0].item()
            return f"{a} instead of {b}, {int(off.sum())} of {off.numel()} numbers differ"
    return ""


# ---- inputs, without a generator: the device's own would not be the host's


def _wave(device: torch.device, *shape: int, phase: float = 0.0) -> Tensor:
    """Return numbers between -3 and 3, none equal."""
    place = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return ((place * 0.7310585 + phase).sin() * 3).float().view(shape).to(device)


def _whole(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _count(device: torch.device, value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def _real(device: torch.device, value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


def _tree(device: torch.device, capacity: int) -> tuple[Tensor, ...]:
    """Return the arrays of a tree of 5 nodes."""
    parents = [-1, 0, 0, 1, 3]
    room = [0] * (capacity - 5)
    words = ancestor_words(torch.tensor(parents, dtype=torch.int64, device="cpu"))
    return (
        _whole(device, 7, 8, 9, 10, 11, *room),
        _whole(device, *parents, *room),
        _whole(device, 0, 1, 1, 2, 3, *room),
        _wave(device, capacity).abs().neg(),
        _wave(device, capacity, phase=1.0).abs().neg(),
        torch.nn.functional.pad(words, (0, -(-capacity // 64) - 1, 0, capacity - 5)).to(device),
    )


def _append_nodes(device: torch.device) -> list[tuple[Any, ...]]:
    new = _whole(device, 4, 2, 4, 0), _whole(device, 1, 2, 3, 4), _wave(device, 4)
    return [
        (_tree(device, capacity), _count(device, 5), *new, _count(device, 3), _count(device, 0)) for capacity in (7, 70)
    ]


def _logits(device: torch.device) -> list[Tensor]:
    logits = _wave(device, ROWS, COLUMNS)
    logits[0, :9], logits[1, 3], logits[2, 5:] = 2.5, math.inf, -math.inf  # ties, and values that are not finite
    return [logits, logits.bfloat16()]


def _best_candidates(device: torch.device) -> list[tuple[Any, ...]]:
    scores = _wave(device, ROWS, phase=2.0).abs().neg()
    return [(logits, scores, _count(device, 4), 12) for logits in _logits(device)]


def _choose_tokens(device: torch.device) -> list[tuple[Any, ...]]:
    drawn = (
        torch.arange(ROWS, device=device, dtype=torch.int64) * 2**33,
        _whole(device, -(2**61) + 5),
        _real(device, 0.7),
    )
    return [(logits, *how) for logits in _logits(device) for how in ((), drawn)]


def _couple(device: torch.device) -> list[tuple[Any, ...]]:
    positions, seed, scale = (
        torch.arange(ROWS, device=device, dtype=torch.int64) * 2**33,
        _whole(device, -(2**61) + 5),
        _real(device, 0.7),
    )
    some = torch.arange(COLUMNS, device=device, dtype=torch.int64) * 7 + 3
    return [(logits, ids, positions, seed, scale) for logits in _logits(device) for ids in (None, some)]


def _walk(device: torch.device) -> list[tuple[Any, ...]]:
    tokens, parents = (part[:7] for part in _tree(device, 7)[:2])
    paths = _whole(device, 8, 10, 1, 11, 5, 9, 9), _whole(device, 3, *[9] * 6), _whole(device, -1, *[9] * 6)
    return [(tokens, parents, chosen, _count(device, 5)) for chosen in paths]


def _compact_kv(device: torch.device) -> list[tuple[Any, ...]]:
    slab = _wave(device, 2, 2, 2, 20, 8)
    return [(slab, _whole(device, 0, 2, 5, 6), _count(device, live), _count(device, 9)) for live in (4, 2)]


def _gather_rows(device: torch.device) -> list[tuple[Any, ...]]:
    given = _wave(device, 6, SIZE), _whole(device, 5, 0, 3), _wave(device, 9, SIZE, phase=1.0), _whole(device, 8, 8, 1)
    return [given]


def _rows(device: torch.device, slots: int = SLOTS) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (HEADS, ROWS, SIZE), (HEADS // 2, slots, SIZE), (HEADS // 2, slots, SIZE)
    query, key, value = (_wave(device, *shape, phase=float(n)) for n, shape in enumerate(shapes))
    return query, key, value


def _cached_attention(device: torch.device) -> list[tuple[Any, ...]]:
    words = _tree(device, 5)[5]
    lengths = _count(device, 60), _count(device, 4), _count(device, 5)
    return [(*_rows(device), words, *lengths, SIZE**-0.5)]  # in half precision as `attention_of` has it


def attention_of(heads: Heads, device: torch.device) -> Inputs:
    """Return inputs of `cached_attention` with these heads: a tree for each kind of tiles, behind a split prefix."""
    found = []
    counts = [*(max(1, packed // heads.groups) for packed in PACKED_ROWS), PACKED_ROWS[-1] // heads.groups + 1]
    for rows in dict.fromkeys(counts):
        parents = torch.tensor(
            [(node - 1) // 2 if node else -1 for node in range(rows)], dtype=torch.int64, device="cpu"
        )
        words = ancestor_words(parents).view(rows, -1).to(device)
        lengths = _count(device, LONG), _count(device, rows), _count(device, rows)
        found.append((*_wide_rows(heads, rows, device), words, *lengths, heads.size**-0.5))
    return found


def strict_attention_of(heads: Heads, device: torch.device) -> Inputs:
    """Return an input of `strict_cached_attention` with these heads."""
    with meaning():
        paths = attention.order_paths(_tree(device, 5)[5])
    return [(*_wide_rows(heads, ROWS, device), paths, _count(device, LONG), _count(device, 4), heads.size**-0.5)]


def _wide_rows(heads: Heads, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    shapes = (2 * heads.groups, rows, heads.size), *[(2, LONG + rows + 3, heads.size)] * 2
    query, key, value = (_wave(device, *shape, phase=float(n)).to(heads.dtype) for n, shape in enumerate(shapes))
    return query / 4, key, value  # no weight is near 1, so that rounding stays small


OF_HEADS = {"cached_attention": attention_of, "strict_cached_attention": strict_attention_of}


def _strict(device: torch.device) -> list[tuple[Any, ...]]:
    with meaning():
        paths = attention.order_paths(_tree(device, 5)[5])
    return [(*_rows(device), paths, _count(device, 60), _count(device, 4), SIZE**-0.5)]


def _tree_attention(device: torch.device) -> list[tuple[Any, ...]]:
    mask = torch.ones(ROWS, SLOTS, dtype=torch.bool, device=device).tril(SLOTS - ROWS)
    return [(*_rows(device), mask, 60)]


def _rope_store(device: torch.device) -> list[tuple[Any, ...]]:
    rows, positions = _rows(device, ROWS), _whole(device, 3, 4, 4, 5, 6)
    tables = _wave(device, 9, SIZE // 2), _wave(device, 9, SIZE // 2, phase=1.5)
    slab, slot, live = _wave(device, 2, HEADS // 2, 20, SIZE), _whole(device, 7), _count(device, ROWS)
    weights = _wave(device, SIZE, phase=2.0), _wave(device, SIZE, phase=3.0)
    found = list[tuple[Any, ...]]()
    for kind, ways in ((torch.float32, (False, True)), (torch.bfloat16, (False,)), (torch.float16, (True,))):
        query, key, value, cache, first, second = (part.to(kind) for part in (*rows, slab, *weights))
        for stepwise in ways:
            turn = attention.Rotation(*tables, first, second, 1e-6, stepwise=True) if stepwise else tables
            found.append((query, key, value, positions, turn, cache, slot, live))
    return found


def _layer(device: torch.device, *shapes: tuple[int, ...]) -> list[list[Tensor]]:
    parts = [_wave(device, *shape, phase=float(n)) for n, shape in enumerate(shapes)]
    return [[part.to(kind) for part in parts] for kind in (torch.float32, torch.bfloat16)]


def _add_rms_norm(device: torch.device) -> list[tuple[Any, ...]]:
    parts = _layer(device, (ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,))
    return [(states, before, weight, 1e-6) for states, some, weight in parts for before in (None, some)]


def _step_queues(device: torch.device) -> list[tuple[Any, ...]]:
    queues = queue.Queues.start(8, device)
    scores = torch.tensor([-0.1, -0.4, -0.4, -2.0], device=device, dtype=torch.float32)
    rows, columns = _whole(device, 0, 0, 0, 0), _whole(device, 4, 2, 9, 1)
    found = select.Candidates(rows, columns, scores, scores, _count(device, 4))
    frontier = Nodes(_whole(device, 0), _count(device, 1))
    search = queue.Search(2, 3, 0.0, True)
    return [(queues, found, frontier, _whole(device, *[0] * 9), None, _count(device, 1), search)]


def _search(device: torch.device, capacity: int = 20) -> tuple[Any, ...]:
    """Return a tree of 5 nodes and the books of a search over it, in which passes pay."""
    cells = worth.SOURCES * worth.DEPTHS * worth.RANKS
    tries, table = _wave(device, cells, KNOTS).abs() + 2, _wave(device, cells, KNOTS, phase=1.0).sigmoid()
    passes = _wave(device, LEVELS).abs() + 58
    profile = _wave(device, LEVELS, PLACES).sigmoid().sort(1, descending=True).values
    group, gains = _whole(device, 0), passes[:, None] * profile
    counts = Counts(tries * table, tries, table, gains, passes, profile, group)
    cell, place = _whole(device, *[7] * (capacity + 1)), _whole(device, *[1] * (capacity + 1))
    waiting, drafted = (cell < 0) | (_wave(device, capacity + 1) > 0), _wave(device, capacity + 1, phase=2.0) > 0
    notes = Notes(_wave(device, capacity + 1).abs().neg(), cell, place, waiting, drafted)
    verify, draft = _wave(device, 9).abs() / 100 + 0.1, _wave(device, 4).abs() / 100
    prices = Prices(verify / 10, draft / 10, _whole(device, 1, 2, 3))
    recent, numbers = _wave(device, 2).abs() + 1, (_real(device, 0.25), _count(device, 3), _real(device, 0.5))
    throughput = Throughput(verify, draft, prices, recent, *numbers, verify.new_zeros(0))
    return _tree(device, capacity), _count(device, 5), counts, notes, throughput


def _start_search(device: torch.device) -> list[tuple[Any, ...]]:
    return [(*_search(device), 2, None, (8, -1.0))]


def _grow_likely(device: torch.device) -> list[tuple[Any, ...]]:
    tree, size, *books = _search(device)
    frontier, logits = Nodes(_whole(device, 1, 2, 4), _count(device, 3)), _wave(device, 3, COLUMNS)
    ids = torch.arange(COLUMNS, device=device, dtype=torch.int64) * 3
    marks = (_wave(device, 3, COLUMNS, phase=1.0) > 0).to(torch.uint8)
    counters, limits = (size, _count(device, 2), _count(device, 0)), worth.Limits(-20.0, 12, 2, 9)
    both = select.Drafted(logits, ids, False, marks), select.Drafted(logits.log_softmax(1), None, True, None)
    return [(tree, counters, frontier, drafted, *books, limits) for drafted in both]


def _keep_likely(device: torch.device) -> list[tuple[Any, ...]]:
    return [(*_search(device), None, (12, 20, -3.0), most) for most in (3, 8)]


def _count_outcomes(device: torch.device) -> list[tuple[Any, ...]]:
    tree, size, *books = _search(device)
    path = Nodes(_whole(device, 0, 1, 3), _count(device, 3))
    return [(tree, size, path, _whole(device, 8, 10, 99), *books)]


def _extract(device: torch.device) -> list[tuple[Any, ...]]:
    return [(_tree(device, capacity), _whole(device, 0, 1, 3, 0), _count(device, 3)) for capacity in (5, 70)]


PACKED = ("pack_mask", "tree_attention")  # the first has a meaning only together with the second
INPUTS: dict[str, Callable[[torch.device], list[tuple[Any, ...]]]] = {
    "add_rms_norm": _add_rms_norm,
    "append_nodes": _append_nodes,
    "best_candidates": _best_candidates,
    "cached_attention": _cached_attention,
    "choose_tokens": _choose_tokens,
    "compact_kv": _compact_kv,
    "count_outcomes": _count_outcomes,
    "couple": _couple,
    "extract": _extract,
    "gather_rows": _gather_rows,
    "grow_likely": _grow_likely,
    "keep_likely": _keep_likely,
    "keyed_gumbel_argmax": lambda device: [(_wave(device, COLUMNS), 5, 2**40)],
    "rope_store": _rope_store,
    "silu_mul": lambda device: [tuple(parts) for parts in _layer(device, (ROWS, COLUMNS), (ROWS, COLUMNS))],
    "start_search": _start_search,
    "step_queues": _step_queues,
    "strict_cached_attention": _strict,
    "top_children": lambda device: [(logits, 7) for logits in _logits(device)],
    "top_entropy": lambda device: [(logits, 7) for logits in _logits(device)],
    "tree_attention": _tree_attention,
    "walk": _walk,
}


def needed(name: str) -> tuple[str, ...]:
    """Return the ops that are tried together with this one; the last of them is called."""
    return PACKED if name in PACKED else (name,)

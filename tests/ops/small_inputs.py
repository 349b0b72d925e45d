"""Small inputs of the ops that a device takes untried, as `specengine.ops._trial` has them of those that it tries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.ops import _trial, attention, queue, select, worth
from specengine.ops._trial import (
    COLUMNS,
    HEADS,
    ROWS,
    SIZE,
    _count,
    _logits,
    _rows,
    _tree,
    _wave,
    _whole,
)
from specengine.ops.tree import Nodes, Walked
from specengine.ops.worth import (
    KNOTS,
    LEVELS,
    PLACES,
    Counts,
    Notes,
    Prices,
    SearchState,
    Throughput,
)


def _real(device: torch.device, value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


def differs(name: str, run: dict[str, Callable[..., Any]], device: torch.device) -> str:
    """Return the fault of an op's implementation, as `_trial.differs`, whether a device would try it or not."""
    names = _trial.PACKED if name in _trial.PACKED else (name,)
    inputs = {**_trial.INPUTS, **INPUTS}[names[-1]](device)
    counted = _trial._counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_trial, "_counted", lambda value: counted(_without_padding(value)))
        return _trial.differs(names, run, device, inputs)


def _without_padding(value: Any) -> Any:
    """Return a result without what notes have behind the nodes, and queues behind those that wait."""
    if isinstance(value, Notes):
        return tuple(part[:-1] for part in value)
    if isinstance(value, queue.Queues):
        waiting = int((value.scores > -math.inf).sum())
        whole = ("accepted", "scores", "bound")
        return tuple(
            part if name in whole else part[:waiting] for name, part in value._asdict().items()
        )
    if isinstance(value, tuple):
        parts = map(_without_padding, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _append_nodes(device: torch.device) -> list[tuple[Any, ...]]:
    parents, tokens = _whole(device, 4, 2, 4, 0), _whole(device, 1, 2, 3, 4)
    return [
        (
            _tree(device, room),
            _count(device, 5),
            parents,
            tokens,
            _wave(device, 4),
            _count(device, 3),
            _count(device, 0),
        )
        for room in (7, 70)
    ]


def _best_candidates(device: torch.device) -> list[tuple[Any, ...]]:
    scores = _wave(device, ROWS, phase=2.0).abs().neg()
    return [(logits, scores, _count(device, 4), 12) for logits in _logits(device)]


def _couple(device: torch.device) -> list[tuple[Any, ...]]:
    positions, seed, scale = (
        torch.arange(ROWS, device=device, dtype=torch.int64) * 2**33,
        _whole(device, -(2**61) + 5),
        _real(device, 0.7),
    )
    some = torch.arange(COLUMNS, device=device, dtype=torch.int64) * 7 + 3
    return [
        (logits, ids, positions, seed, scale) for logits in _logits(device) for ids in (None, some)
    ]


def _extract(device: torch.device) -> list[tuple[Any, ...]]:
    return [
        (_tree(device, capacity), _whole(device, 0, 1, 3, 0), _count(device, 3))
        for capacity in (5, 70)
    ]


def _gather_rows(device: torch.device) -> list[tuple[Any, ...]]:
    given = (
        _wave(device, 6, SIZE),
        _whole(device, 5, 0, 3),
        _wave(device, 9, SIZE, phase=1.0),
        _whole(device, 8, 8, 1),
    )
    return [given]


def _level_rows(device: torch.device) -> list[tuple[Any, ...]]:
    frontier = Nodes(_whole(device, 3, 2, 0), _count(device, 2))
    counts = _count(device, 9), _count(device, 4)
    seen = torch.zeros(71, 2, dtype=torch.int64, device=device)
    factors = _wave(device, 2)
    known = (_tree(device, 70), _count(device, 5), frontier, *counts, seen)
    return [(*known, numbers, _count(device, 1)) for numbers in (None, factors)]


def _gather_norms(device: torch.device) -> list[tuple[Any, ...]]:
    gathered = _gather_rows(device)[0]
    weights = _wave(device, SIZE, phase=2.0), _wave(device, SIZE, phase=3.0)
    return [(*gathered, weights, 1e-5)]


def _record_walk(device: torch.device) -> list[tuple[Any, ...]]:
    tree = tuple(part[:5].contiguous() for part in _tree(device, 5))
    nodes = Nodes(_whole(device, 0, 1, 2, 5, 8), _count(device, 5))
    counts = tuple(_count(device, value) for value in (9, 3, 40, 0))
    blank = _whole(device, *[-1] * (7 + 2 * 4 + 5 * 6))
    walks = (_whole(device, 0, 1, 3, 0, 0), 3, 77), (_whole(device, *[0] * 5), 0, -1)
    return [
        (
            tree,
            Walked(path, _count(device, live), _whole(device, bonus)),
            nodes,
            counts,
            _whole(device, 5, 5),
            blank,
            4,
        )
        for path, live, bonus in walks
    ]


def _rope_store(device: torch.device) -> list[tuple[Any, ...]]:
    rows, positions = _rows(device, slots=ROWS), _whole(device, 3, 4, 4, 5, 6)
    tables = _wave(device, 9, SIZE // 2), _wave(device, 9, SIZE // 2, phase=1.5)
    slab, slot, live = (
        _wave(device, 2, HEADS // 2, 20, SIZE),
        _whole(device, 7),
        _count(device, ROWS),
    )
    weights = _wave(device, SIZE, phase=2.0), _wave(device, SIZE, phase=3.0)
    found = list[tuple[Any, ...]]()
    for kind, ways in (
        (torch.float32, (False, True)),
        (torch.bfloat16, (False,)),
        (torch.float16, (True,)),
    ):
        query, key, value, cache, first, second = (
            part.to(kind) for part in (*rows, slab, *weights)
        )
        for stepwise in ways:
            turn = (
                attention.Rotation(*tables, first, second, 1e-6, stepwise=True)
                if stepwise
                else tables
            )
            found.append((query, key, value, positions, turn, cache, slot, live))
    return found


def _layer(device: torch.device, *shapes: tuple[int, ...]) -> list[list[Tensor]]:
    parts = [_wave(device, *shape, phase=float(n)) for n, shape in enumerate(shapes)]
    return [[part.to(kind) for part in parts] for kind in (torch.float32, torch.bfloat16)]


def _add_rms_norm(device: torch.device) -> list[tuple[Any, ...]]:
    parts = _layer(device, (ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,))
    return [
        (states, before, weight, 1e-6) for states, some, weight in parts for before in (None, some)
    ]


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
    tries, table = (
        _wave(device, cells, KNOTS).abs() + 2,
        _wave(device, cells, KNOTS, phase=1.0).sigmoid(),
    )
    passes = _wave(device, LEVELS).abs() + 58
    profile = _wave(device, LEVELS, PLACES).sigmoid().sort(1, descending=True).values
    group, gains = _whole(device, 0), passes[:, None] * profile
    counts = Counts(tries * table, tries, table, gains, passes, profile, group)
    cell, place = _whole(device, *[7] * (capacity + 1)), _whole(device, *[1] * (capacity + 1))
    waiting, drafted = (
        (cell < 0) | (_wave(device, capacity + 1) > 0),
        _wave(device, capacity + 1, phase=2.0) > 0,
    )
    notes = Notes(_wave(device, capacity + 1).abs().neg(), cell, place, waiting, drafted)
    verify, draft = _wave(device, 9).abs() / 100 + 0.1, _wave(device, 4).abs() / 100
    prices = Prices(verify / 10, draft / 10, _whole(device, 1, 2, 3))
    recent, numbers = (
        _wave(device, 2).abs() + 1,
        (_real(device, 0.25), _count(device, 3), _real(device, 0.5)),
    )
    throughput = Throughput(verify, draft, prices, recent, *numbers, verify.new_zeros(0))
    return _tree(device, capacity), _count(device, 5), SearchState(counts, notes, throughput)


def _start_search(device: torch.device) -> list[tuple[Any, ...]]:
    searched = *_search(device), 2, None, (8, -1.0)
    return [(*searched, _count(device, skipped), 3) for skipped in (2, 3)]


def _grow_likely(device: torch.device) -> list[tuple[Any, ...]]:
    tree, size, state = _search(device)
    frontier, logits = Nodes(_whole(device, 1, 2, 4), _count(device, 3)), _wave(device, 3, COLUMNS)
    ids = torch.arange(COLUMNS, device=device, dtype=torch.int64) * 3
    marks = (_wave(device, 3, COLUMNS, phase=1.0) > 0).to(torch.uint8)
    counters, limits = (size, _count(device, 2), _count(device, 0)), worth.Limits(-20.0, 12, 2, 9)
    both = (
        select.Drafted(logits, ids, False, marks),
        select.Drafted(logits.log_softmax(1), None, True, None),
    )
    return [(tree, counters, frontier, drafted, state, limits) for drafted in both]


def _keep_likely(device: torch.device) -> list[tuple[Any, ...]]:
    return [(*_search(device), None, (12, 20, -3.0), most) for most in (3, 8)]


def _count_outcomes(device: torch.device) -> list[tuple[Any, ...]]:
    tree, size, state = _search(device)
    path = Nodes(_whole(device, 0, 1, 3), _count(device, 3))
    return [(tree, size, path, _whole(device, 8, 10, 99), state)]


INPUTS: dict[str, Callable[[torch.device], list[tuple[Any, ...]]]] = {
    "add_rms_norm": _add_rms_norm,
    "append_nodes": _append_nodes,
    "best_candidates": _best_candidates,
    "count_outcomes": _count_outcomes,
    "couple": _couple,
    "extract": _extract,
    "gather_norms": _gather_norms,
    "gather_rows": _gather_rows,
    "grow_likely": _grow_likely,
    "keep_likely": _keep_likely,
    "level_rows": _level_rows,
    "record_walk": _record_walk,
    "rope_store": _rope_store,
    "silu_mul": lambda device: [
        tuple(parts) for parts in _layer(device, (ROWS, COLUMNS), (ROWS, COLUMNS))
    ],
    "start_search": _start_search,
    "step_queues": _step_queues,
    "top_children": lambda device: [(logits, 7) for logits in _logits(device)],
    "top_entropy": lambda device: [(logits, 7) for logits in _logits(device)],
}

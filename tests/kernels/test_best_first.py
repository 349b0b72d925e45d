"""step_queues against sorted lists and against the torch queues of ops, a whole search at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install 'specengine[kernels]'")
from specengine_kernels import best_first as kernel

from specengine import reference_resident, triton_resident
from specengine.ops import resident as resident_ops
from tests.graphs.engines import PROMPT, engine_of
from tests.kernels.searches import number, poisoned, poisoned_queues, random_level, same

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEVELS = 3


def bits(tensors: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.cpu().numpy().tobytes() for tensor in tensors]


def check_search(
    budget: int, batch: int, max_depth: int, threshold: float, rows: int, counts: list[int], values: int, seed: int
) -> None:
    queues, drawn = poisoned_queues(budget, DEVICE), kernel.drawn_for(budget, min(batch, budget), DEVICE)
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(seed)).to(DEVICE) if seed % 2 else None
    options = {"batch": batch, "max_depth": max_depth, "threshold": threshold, "target_ids": ids}
    for level, count in enumerate(counts, 1):
        nodes, depths, candidates = random_level(seed + level, rows, count, values, DEVICE)
        wanted = kernel.reference(queues, candidates, nodes, depths, level=level, **options)
        at, live = number(level, DEVICE), number(rows, DEVICE)
        given = candidates, nodes, depths
        twin = reference_resident.Queues(*(part.clone() for part in queues))
        poisoned(drawn)
        if level == 2:
            before = bits(queues)
            kernel.step_queues(queues, *given, number(0, DEVICE), at, out=drawn, **options)
            assert bits(queues) == before, "an empty frontier changes nothing"
            assert (int(drawn.count), int(drawn.expanded)) == (0, 0)
            assert not drawn.expand.any()
            again = kernel.Queues(*(part.clone() for part in queues))
            kernel.step_queues(again, *given, live, at, out=drawn, **options)
            same(again, drawn, wanted)  # and below into what this one left
        kernel.step_queues(queues, *given, live, at, out=drawn, **options)
        same(queues, drawn, wanted)

        there = torch.arange(candidates.rows.shape[0], device=DEVICE) < count
        whole = (part * there for part in candidates[:2])  # padding of the torch queues is an index all the same
        found = reference_resident.Selection(*whole, *candidates[2:])
        frontier = reference_resident.Frontier(nodes, depths, torch.zeros(rows, device=DEVICE), live)
        other = reference_resident.step_queues(twin, found, frontier, ids, at, batch, max_depth, threshold)
        same(kernel.Queues(*twin), kernel.Drawn(*other[:4], *other.expand), wanted)

        filled, expected = kernel.fill_queues(queues), reference_resident.fill_queues(twin)
        assert int(filled.count) == int(expected.live) == min(budget - len(wanted.accepted), len(wanted.queue))
        assert (int(filled.expanded), int(filled.expand)) == (0, 0)
        assert filled.tokens is queues.tokens


@settings(max_examples=20 if DEVICE == "cpu" else 150, deadline=None)
@given(
    budget=st.one_of(st.integers(1, 14), st.sampled_from([31, 32, 33, 60, 64, 65])),
    batch=st.one_of(st.integers(1, 5), st.just(100)),
    max_depth=st.one_of(st.integers(1, 3), st.just(100)),
    threshold=st.sampled_from([0.0, 0.02, 0.6]),
    rows=st.integers(1, 5),
    counts=st.lists(st.integers(0, 70), min_size=LEVELS, max_size=LEVELS),
    values=st.sampled_from([2, 7, 4000]),
    seed=st.integers(0, 10**6),
)
def test_searches(
    budget: int, batch: int, max_depth: int, threshold: float, rows: int, counts: list[int], values: int, seed: int
) -> None:
    check_search(budget, batch, max_depth, threshold, rows, counts, values, seed)


@pytest.mark.parametrize("budget", [1, 2, 256, 300])
@pytest.mark.parametrize("values", [2, 10**6])
def test_the_least_and_the_largest_budgets(budget: int, values: int) -> None:
    for batch in (1, budget):
        check_search(budget, batch, budget, 0.0, 4, [budget, budget, 0], values, 7)


def test_of_equal_scores_the_first_ones_stay() -> None:
    """G before Q before the candidates, each in its own order; what only equals the worst of a full G is no parent."""
    queues = poisoned_queues(3, DEVICE)
    nodes, depths, candidates = random_level(0, 1, 4, 2, DEVICE)
    candidates.columns[:4] = torch.arange(4)
    candidates.scores[:4] = 0.0  # as the root
    given = queues, candidates, nodes, depths, number(1, DEVICE)
    options = {"max_depth": 9, "threshold": 0.0}
    drawn = kernel.step_queues(*given, number(1, DEVICE), batch=1, **options)
    assert (drawn.tokens[:1].tolist(), int(drawn.count), int(drawn.expanded)) == ([0], 1, 1)
    assert queues.tokens[:2].tolist() == [1, 2], "the fourth one found no room"
    candidates.columns[:4] += 10
    drawn = kernel.step_queues(*given, number(2, DEVICE), batch=2, **options)
    assert (drawn.tokens[:1].tolist(), int(drawn.count), int(drawn.expanded)) == ([1], 1, 0)
    assert queues.tokens[:1].tolist() == [10]
    assert queues.scores.tolist() == [0.0, -math.inf, -math.inf]


def test_resident_cycles_have_the_eager_engines_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues by the kernels, all else as ever: they are too slow here."""
    taken, calls = resident_ops.implementation, []

    def implementation(op: str, kind: str) -> Any:
        if op not in ("step_queues", "fill_queues"):
            return taken(op, kind)
        calls.append(op)
        return getattr(triton_resident, op)

    monkeypatch.setattr(resident_ops, "implementation", implementation)
    answers = []
    for padded, loop in ((True, "read"), (False, "auto")):
        stream = engine_of("eagle3", "salf", padded=padded, loop=loop).stream(PROMPT, max_new_tokens=12)
        cycles = [piece.cycle for piece in stream]
        answers.append([(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.tokens) for cycle in cycles])
    assert answers[0] == answers[1]
    assert set(calls) == {"step_queues", "fill_queues"}


def test_the_threshold_is_compared_in_float64() -> None:
    nodes, depths, candidates = random_level(0, 1, 1, 2, DEVICE)
    candidates.scores[0] = math.log(0.6)
    mass = math.exp(float(candidates.scores[0]))
    for threshold, expanded in ((mass * (1 - 1e-12), 1), (mass * (1 + 1e-12), 0)):
        given = poisoned_queues(4, DEVICE), candidates, nodes, depths, number(1, DEVICE), number(1, DEVICE)
        assert int(kernel.step_queues(*given, batch=2, max_depth=9, threshold=threshold).expanded) == expanded


def test_wrong_arguments_are_refused() -> None:
    queues, (nodes, depths, candidates) = poisoned_queues(4, DEVICE), random_level(0, 2, 3, 5, DEVICE)
    one, options = number(1, DEVICE), {"batch": 1, "max_depth": 1, "threshold": 0.0}
    with pytest.raises(ValueError, match="budget of 1025"):
        kernel.fill_queues(poisoned_queues(1025, DEVICE))
    with pytest.raises(ValueError, match="queues: float32"):
        kernel.fill_queues(queues._replace(accepted=queues.accepted.double()))
    with pytest.raises(ValueError, match="candidates"):
        kernel.step_queues(queues, candidates._replace(rows=nodes), nodes, depths, one, one, **options)
    with pytest.raises(ValueError, match="nodes, depths"):
        kernel.step_queues(queues, candidates, nodes, depths, one.long(), one, **options)
    with pytest.raises(ValueError, match="batch, max_depth"):
        kernel.step_queues(queues, candidates, nodes, depths, one, one, **options | {"batch": 0})

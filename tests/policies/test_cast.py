"""CAST against its Algorithm 1, its stop, and the theorem that makes EAGLE-2's beam a case of it."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import policies
from specengine.costs import PassCosts, interpolated
from specengine.errors import InputError
from specengine.policies.baselines.cast import Cast, last_best
from specengine.policies.baselines.eagle import Eagle
from tests.examples import examples
from tests.policies import slow
from tests.policies.test_smart import COSTS


def algorithm_1(utility: Sequence[float], costs: Sequence[float], threshold: float) -> int:
    """The greatest index, from 1, whose utility over cost, since the one taken before, reaches the threshold."""
    taken = 0
    for index in range(1, len(utility)):
        if utility[index] - utility[taken] >= threshold * (costs[index] - costs[taken]):
            taken = index
    return taken + 1


RISES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=20)


@examples(300)
@given(RISES, st.integers(0, 4), st.integers(0, 5))
def test_the_last_maximum_is_what_algorithm_1_finds(
    rises: list[tuple[int, int]], threshold: int, padding: int
) -> None:
    """Whole numbers, so that nothing is rounded; utility need not be concave."""
    utility, costs = (np.cumsum([pair[i] for pair in rises]).tolist() for i in range(2))
    worth = torch.tensor(
        [u - threshold * c for u, c in zip(utility, costs, strict=True)] + [1e9] * padding
    )
    found = int(last_best(worth.double(), torch.tensor([len(rises)], dtype=torch.int32)))
    assert found == algorithm_1(utility, costs, threshold)


class SlowCast:
    """The rule on paths; `falls` goes on from tree to tree."""

    def __init__(self, policy: Cast) -> None:
        assert isinstance(policy.costs, PassCosts)
        self.policy, self.costs = policy, policy.costs
        self.falls = deque([1.0], maxlen=policy.recent)
        self.margin = math.inf

    def grow(self, draft: Any) -> tuple[int, list[int], set[slow.Path]]:
        """The number of nodes grown, the widths of the passes, and the paths verified."""
        policy, plain = self.policy, self.costs.plain
        grown: slow.Layer = {(): np.float32(0.0)}
        frontier, widths, last = dict(grown), list[int](), 0.0
        while True:
            widths.append(len(frontier))
            layer: slow.Layer = {}
            for path, score in frontier.items():
                layer |= dict(slow.ranked(draft, {path: score})[: policy.children])
            grown |= layer
            if not layer:
                break
            order = sorted(layer, key=lambda path: -layer[path])[: policy.width]
            utility = np.cumsum([math.exp(layer[path]) for path in order]).tolist()
            spent = [interpolated(self.costs.draft, n) / plain for n in range(1, len(order) + 1)]
            count = self._count(utility, spent, policy.breadth)
            if len(widths) > 1:
                self.falls.append(utility[count - 1] / last)
            last = utility[count - 1]
            worth = sum(self.falls) / len(self.falls) * last - policy.deeper * spent[count - 1]
            self.margin = min(self.margin, abs(worth))
            if worth < 0 or len(widths) == policy.passes:
                break
            frontier = {path: score for path, score in layer.items() if path in order[:count]}
        best = sorted(grown, key=lambda path: -grown[path])[: policy.budget]
        utility = np.cumsum([math.exp(grown[path]) for path in best]).tolist()
        spent = [interpolated(self.costs.verify, n) / plain for n in range(1, len(best) + 1)]
        return len(grown), widths, set(best[: self._count(utility, spent, policy.verified)])

    def _count(self, utility: list[float], costs: list[float], threshold: float) -> int:
        worth = [u - threshold * c for u, c in zip(utility, costs, strict=True)]
        self.margin = min([self.margin, *(abs(max(worth) - one) or math.inf for one in worth)])
        return algorithm_1(utility, costs, threshold)


@examples(200)
@given(
    st.lists(slow.DRAFTS, min_size=1, max_size=4),
    st.builds(
        Cast,
        budget=st.integers(1, 16),
        children=st.integers(1, 4),
        width=st.integers(1, 4),
        passes=st.integers(1, 4),
        breadth=st.floats(0, 5),
        deeper=st.floats(0, 5),
        verified=st.floats(0, 5),
        recent=st.integers(1, 3),
        costs=COSTS,
    ),
)
def test_shapes_trees_as_the_rule_does(drafts: list[dict[str, Any]], policy: Cast) -> None:
    rule = SlowCast(policy)
    for draft in drafts:
        expected = rule.grow(slow.drafter(**draft | {"exact": 0.0}))
        source = slow.drafter(**draft | {"exact": 0.0})
        tree = slow.grow(policy, source)
        if rule.margin < 1e-6:
            return
        assert [len(step) for step in source.stepped] == expected[1]
        assert set(slow.paths(tree)) == expected[2]


@examples(50)
@given(slow.DRAFTS, st.integers(1, 4), st.integers(2, 20))
def test_without_thresholds_it_is_eagles_beam(
    draft: dict[str, Any], width: int, budget: int
) -> None:
    costs = PassCosts("toy", {1: 1.0, 20: 2.0}, {1: 0.1, 4: 0.2})
    free = Cast(budget, width, width, 4, breadth=0.0, deeper=0.0, verified=0.0, costs=costs)
    assert slow.paths(slow.grow(free, slow.drafter(**draft))) == slow.paths(
        slow.grow(Eagle(width, 3, budget), slow.drafter(**draft))
    )


@examples(100)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6, unique=True),
    st.integers(1, 6),
    st.floats(0.001, 1.0),
)
def test_linear_costs_and_a_threshold_of_the_last_node_give_the_top_k(
    confidences: list[float], k: int, slope: float
) -> None:
    """Theorem 4.1. The threshold is a trifle less, as the last node would else be a tie that rounding decides."""
    values = sorted(confidences, reverse=True)
    threshold = values[k - 1] * (1 - 1e-9) / slope
    worth = [sum(values[:n]) - threshold * (slope * n + 0.3) for n in range(1, 7)]
    if min(more - less for more, less in pairwise(values)) > 1e-6:
        assert int(last_best(torch.tensor(worth, dtype=torch.float64), torch.tensor([6]))) == k


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, r"budget: got 0, accepted 1 or more"),
        ({"recent": 0}, r"recent: got 0, accepted 1 or more"),
        ({"breadth": -1.0}, r"breadth: got -1.0, accepted 0 or more"),
        ({"verified": math.inf}, r"verified: got inf, accepted 0 or more"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"policy cast\." + message):
        policies.make("cast", **options)

"""CaDDTree against brute force over all budgets, and against the paper's greedy stop where costs are convex."""

import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specengine import policies
from specengine.costs import PassCosts, interpolated
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.policies.baselines.caddtree import CaDDTree
from specengine.policies.baselines.ddtree import DDTree
from tests.examples import examples
from tests.policies import slow
from tests.policies.test_ddtree import best_products, block_drafter

CLOSE = 1e-7  # of two ratios, by which float32 paths may differ
STEPS = st.lists(st.floats(0, 0.3), min_size=15, max_size=15)


def verification(steps: list[float]) -> dict[int, float]:
    return dict(enumerate(accumulate(steps, initial=1.0), 1))


def ratios(scores: list[float], costs: PassCosts, spent: float) -> list[float]:
    """Expected tokens over time of 1, 2 and so on nodes, by the log-probabilities of all but the root."""
    tokens = accumulate((math.exp(score) for score in scores), initial=1.0)
    return [count / (spent + interpolated(costs.verify, n)) for n, count in enumerate(tokens, 1)]


def sizes_near(values: list[float], best: float) -> set[int]:
    return {n for n, value in enumerate(values, 1) if value >= best - CLOSE}


@examples(300)
@given(
    slow.DRAFTS, STEPS, st.integers(2, 16), st.integers(1, 5), st.floats(0, 0.5), st.floats(0, 0.5)
)
def test_verifies_the_budget_of_most_tokens_per_time(
    draft: dict[str, Any], steps: list[float], budget: int, block: int, cost: float, overhead: float
) -> None:
    """Of a draft that gives the block in one pass; the curve is any that does not fall."""
    costs = PassCosts("toy", verification(steps), {1: cost}, overhead=overhead)
    source = block_drafter(block=block, **draft)
    found = best_products(
        [source.marginal(position).tolist() for position in range(block)], budget - 1
    )
    values = ratios([score for score, _ in found], costs, cost + overhead)
    tree = slow.grow(CaDDTree(budget, block, costs=costs), source)
    assert len(tree) in sizes_near(values, max(values))
    assert int(tree.passes) == 1
    kept = slow.paths(
        slow.grow(DDTree(max(len(tree), 2), block), block_drafter(block=block, **draft))
    )
    if len(tree) > 1:
        assert sorted(slow.paths(tree).values()) == sorted(kept.values())


@examples(200)
@given(slow.DRAFTS, STEPS, st.integers(2, 16), st.floats(0, 0.5))
def test_is_the_greedy_stop_where_costs_are_convex(
    draft: dict[str, Any], steps: list[float], budget: int, cost: float
) -> None:
    costs = PassCosts("toy", verification(sorted(steps)), {1: cost})
    source = block_drafter(block=3, **draft)
    found = best_products([source.marginal(position).tolist() for position in range(3)], budget - 1)
    values = ratios([score for score, _ in found], costs, cost)
    stopped = next((n for n in range(1, len(values)) if values[n] <= values[n - 1]), len(values))
    assert math.isclose(
        values[stopped - 1], max(values), rel_tol=1e-9
    )  # it has one maximum, the paper's theorem
    tree = slow.grow(CaDDTree(budget, 3, costs=costs), source)
    assert len(tree) == stopped or abs(values[len(tree) - 1] - values[stopped - 1]) < CLOSE


def slow_passes(policy: CaDDTree, source: Any) -> tuple[list[int], list[float], float]:
    """The widths of the passes, all scores grown, and the least distance of a comparison; width above 1."""
    costs = policy.costs
    assert isinstance(costs, PassCosts)
    frontier: slow.Layer = {(): 0.0}  # type: ignore[dict-item]
    widths, scores, margin, spent = list[int](), list[float](), math.inf, costs.overhead
    while True:
        widths.append(len(frontier))
        spent += interpolated(costs.draft, len(frontier))
        layer = slow.ranked(source, frontier)[: policy.budget - 1]
        scores = sorted([*scores, *(float(score) for _, score in layer)], reverse=True)
        values = ratios(scores[: policy.budget - 1], costs, spent)
        if not layer or len(widths) == policy.block:
            return widths, scores, margin
        best = values.index(max(values)) + 1
        before = math.fsum(math.exp(score) for score in frontier.values())
        frontier = dict(layer[: policy.width])
        at = min(best, policy.budget - 1)
        more = interpolated(costs.verify, at + 1) - interpolated(costs.verify, at)
        brings = math.fsum(math.exp(score) for score in frontier.values()) ** 2 / before
        price = max(values) * (interpolated(costs.draft, len(frontier)) + more)
        margin = min(margin, abs(brings - price), *(max(values) - v or math.inf for v in values))
        if brings <= price:
            return widths, scores, margin


@examples(200)
@given(
    slow.DRAFTS, STEPS, st.integers(2, 16), st.integers(1, 4), st.integers(2, 4), st.floats(0, 0.5)
)
def test_further_passes_are_run_while_they_are_expected_to_pay(
    draft: dict[str, Any], steps: list[float], budget: int, block: int, width: int, cost: float
) -> None:
    costs = PassCosts("toy", verification(steps), {1: cost, 4: cost + 0.1}, overhead=0.1)
    policy = CaDDTree(budget, block, width, costs)
    widths, scores, margin = slow_passes(policy, slow.drafter(**draft))
    source = slow.drafter(**draft)
    tree = slow.grow(policy, source)
    if margin < 1e-5:
        return
    assert [len(step) for step in source.stepped] == widths
    spent = costs.overhead + sum(interpolated(costs.draft, n) for n in widths)
    values = ratios(scores[: budget - 1], costs, spent)
    assert len(tree) in sizes_near(values, max(values))


def test_prices_follow_the_costs_of_the_engine_and_its_context() -> None:
    cheap, dear = (
        PassCosts("cheap", {1: 1.0}, {1: 0.0}),
        PassCosts("dear", {1: 1.0, 2: 5.0}, {1: 0.0}),
    )
    growing = PassCosts("growing", {1: 1.0}, {1: 0.0}, verify_growth={1: 0.0, 2: 1.0})

    def size(tokens: int, costs: PassCosts) -> int:
        policy.begin(tokens, costs=lambda: costs)
        return len(tree_of(policy))

    def tree_of(policy: CaDDTree) -> TokenTree:
        return slow.grow(policy, slow.drafter(5, 1))

    policy = CaDDTree(9, 2)
    assert [size(0, cheap), size(0, dear), size(0, growing), size(100, growing)] == [9, 1, 9, 1]
    assert policy.plan().reads_costs
    assert not CaDDTree(9, 2, costs=cheap).plan().reads_costs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, r"width: got 0, accepted 1 or more"),
        ({"budget": 1}, r"budget: got 1, accepted 2 or more"),
        ({"costs": "nowhere"}, r"nowhere is neither one of"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        policies.make("caddtree", **options)

"""SMART against its rule, candidate by candidate, and what the rule promises."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specengine import policies
from specengine.costs import PassCosts, interpolated
from specengine.errors import InputError
from specengine.policies.baselines.smart import Smart
from tests.examples import examples
from tests.policies import slow

CLOSE = 1e-9  # sides of a comparison that rounding could swap


def costs_of(verify: list[float], draft: list[float], overhead: float) -> PassCosts:
    """Costs that rise by these for each node more; a pass of one node and a verification of one cost 0.1 and 1 more."""
    columns = [
        {n: base + sum(steps[: n - 1]) for n in range(1, len(steps) + 2)}
        for base, steps in ((1.0, verify), (0.1, draft))
    ]
    return PassCosts("toy", *columns, overhead=overhead)


STEPS = st.lists(st.floats(0, 0.2), min_size=16, max_size=16)
COSTS = st.builds(costs_of, STEPS, STEPS, st.floats(0, 0.3))
POLICIES = st.builds(
    Smart,
    budget=st.integers(1, 16),
    children=st.integers(1, 6),
    width=st.integers(1, 6),
    passes=st.integers(1, 5),
    discount=st.sampled_from([0.3, 0.8, 1.0]),
    costs=COSTS,
)


class Choice(NamedTuple):
    """A candidate: what it adds, and the tree before it: tokens and time."""

    gain: float
    price: float
    tokens: float
    time: float
    taken: bool


def slow_smart(policy: Smart, draft: Any) -> tuple[slow.Layer, list[Choice], int]:
    """The tree as paths, all that was asked, and the passes; every candidate is asked, whatever became of others."""
    costs = policy.costs
    assert isinstance(costs, PassCosts)
    tree: slow.Layer = {(): np.float32(0.0)}
    active: slow.Layer = dict(tree)
    asked, passes, spent = list[Choice](), 0, costs.overhead
    while active and passes < policy.passes and len(tree) < max(policy.budget, 2):
        passes += 1
        spent += interpolated(costs.draft, len(active))
        more, layer = passes < policy.passes, {}
        best = {
            path: {name for name, _ in slow.ranked(draft, {path: score})[: policy.children]}
            for path, score in active.items()
        }
        for path, score in slow.ranked(draft, active):
            if (
                path not in best[path[:-1]]
                or len(layer) == policy.width
                or len(tree) == policy.budget
            ):
                continue

            def time(nodes: int, width: int, more: bool = more, spent: float = spent) -> float:
                return (
                    spent
                    + interpolated(costs.verify, nodes)
                    + (interpolated(costs.draft, width) if more and width else 0)
                )

            before, after = time(len(tree), len(layer)), time(len(tree) + 1, len(layer) + 1)
            tokens = math.fsum(math.exp(value) for value in tree.values())
            gain = policy.discount * math.exp(score)
            taken = gain * before > tokens * (after - before)
            asked.append(Choice(gain, after - before, tokens, before, taken))
            if taken:
                tree[path] = layer[path] = score
        active = layer
    return tree, asked, passes


@examples(300)
@given(slow.DRAFTS, POLICIES)
def test_takes_what_the_rule_takes(draft: dict[str, Any], policy: Smart) -> None:
    expected, asked, passes = slow_smart(policy, slow.drafter(**draft))
    found = slow.grow(policy, slow.drafter(**draft))
    if all(abs(one.gain * one.time - one.tokens * one.price) > CLOSE for one in asked):
        assert set(slow.paths(found)) == set(expected)
        assert int(found.passes) == passes


@examples(100)
@given(slow.DRAFTS, POLICIES)
def test_each_node_raises_the_speedup_of_the_tree(draft: dict[str, Any], policy: Smart) -> None:
    _, asked, _ = slow_smart(policy, slow.drafter(**draft))
    for one in asked:
        if one.taken and one.price > CLOSE:
            assert one.gain / one.price >= one.tokens / one.time
            assert (one.tokens + one.gain) / (one.time + one.price) >= one.tokens / one.time - CLOSE


def test_dear_nodes_are_left_out_and_free_ones_taken() -> None:
    draft = {"vocabulary": 5, "seed": 3, "concentration": 0.3}
    dear = Smart(costs=PassCosts("dear", {1: 1.0, 2: 9.0}, {1: 0.1}))
    free = Smart(
        budget=9, children=3, width=3, passes=4, costs=PassCosts("free", {1: 1.0}, {1: 0.0})
    )
    assert len(slow.grow(dear, slow.drafter(**draft))) == 1
    tree = slow.grow(free, slow.drafter(**draft))
    assert (len(tree), int(tree.passes)) == (9, 3)


def test_the_first_node_of_a_layer_pays_for_the_next_pass() -> None:
    """So a tree ends where the likeliest node cannot."""
    chain = {"vocabulary": 9, "seed": 0, "concentration": 2.0}
    heights = [
        int(
            slow.grow(
                Smart(costs=PassCosts("toy", {1: 1.0}, {1: cost})), slow.drafter(**chain)
            ).passes
        )
        for cost in (0.01, 0.1, 0.5)
    ]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[-1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, r"budget: got 0, accepted 1 or more"),
        ({"passes": 0}, r"passes: got 0, accepted 1 or more"),
        ({"discount": 0.0}, r"discount: got 0.0, accepted above 0, up to 1"),
        ({"costs": "nowhere"}, r"nowhere is neither one of"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        policies.make("smart", **options)

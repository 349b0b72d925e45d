"""OPT-Tree against brute force, and its stop (P3)."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specengine import policies
from specengine.errors import InputError
from specengine.policies.baselines.opt_tree import OptTree
from specengine.policies.salf import Salf
from tests.examples import examples
from tests.policies import slow


@examples(500)
@given(slow.DRAFTS, st.integers(1, 16), st.sampled_from([1, 2, 5, 20]))
def test_finds_the_optimal_tree_of_its_height(
    draft: dict[str, Any], nodes: int, max_depth: int
) -> None:
    tree = slow.grow(OptTree(nodes, threshold=0.0, max_depth=max_depth), slow.drafter(**draft))
    expected = slow.best_value(slow.drafter(**draft), nodes, max_depth)
    assert math.isclose(slow.value(tree), expected, rel_tol=1e-5, abs_tol=1e-6)


@examples(500)
@given(slow.DRAFTS, st.integers(1, 16), st.integers(1, 8))
def test_agrees_with_best_first_search(draft: dict[str, Any], nodes: int, batch: int) -> None:
    layered = slow.grow(OptTree(nodes, threshold=0.0, max_depth=nodes), slow.drafter(**draft))
    searched = slow.grow(Salf(nodes + 1, batch, threshold=0.0), slow.drafter(**draft))
    assert math.isclose(slow.value(layered), slow.value(searched), rel_tol=1e-5, abs_tol=1e-6)


def slow_opt_tree(policy: OptTree, draft: Any) -> tuple[int, list[float]]:
    """Passes and the values of the trees after each, with the same stop."""
    layers: list[slow.Layer] = [{(): np.float32(0.0)}]
    values: list[float] = []
    while True:
        layers.append(dict(slow.ranked(draft, layers[-1])[: policy.nodes]))
        counted = layers[1 : len(layers) - policy.lag]
        scores = sorted((score for layer in counted for score in layer.values()), reverse=True)[
            : policy.nodes
        ]
        values.append(math.fsum(math.exp(score) for score in scores))
        compared = len(values) - policy.lag >= 2
        gained = not compared or values[-1] - values[-2] > policy.threshold
        if len(values) == policy.max_depth or not gained or not layers[-1]:
            return len(values), values


@examples(500)
@given(
    slow.DRAFTS,
    st.integers(1, 12),
    st.sampled_from([0.03, 0.2, 0.5]),
    st.integers(2, 8),
    st.booleans(),
)
def test_stops_where_a_layer_gains_too_little(
    draft: dict[str, Any], nodes: int, threshold: float, max_depth: int, lag: bool
) -> None:
    policy = OptTree(nodes, threshold, max_depth, lag)
    tree = slow.grow(policy, slow.drafter(**draft))
    passes, values = slow_opt_tree(policy, slow.drafter(**draft))
    gains = [later - earlier for earlier, later in pairwise(values)]
    assert all(gain >= -1e-6 for gain in gains)
    if min((abs(gain - threshold) for gain in gains), default=1.0) > 1e-5:
        assert int(tree.passes) == passes
        assert math.isclose(slow.value(tree), values[-1], rel_tol=1e-5, abs_tol=1e-6)
    assert len(tree) <= nodes + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, r"nodes: got 0, accepted 1 or more"),
        ({"threshold": -1.0}, r"threshold: got -1.0, accepted 0 or more"),
        ({"threshold": math.nan}, r"threshold: got nan, accepted 0 or more"),
        ({"max_depth": 0}, r"max_depth: got 0, accepted 1 or more"),
        ({"max_depth": 1, "lag": True}, r"max_depth: got 1, accepted 2 or more"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"policy opt_tree\." + message):
        policies.make("opt_tree", **options)

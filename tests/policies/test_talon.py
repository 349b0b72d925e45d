"""TALON against Algorithm 2 written out over whole layers, and its promises (P5)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import policies
from specengine.errors import InputError
from specengine.policies.talon import Talon
from tests.examples import examples
from tests.policies import slow

OPTIONS = slow.options(
    budget=st.integers(1, 40),
    width=st.integers(1, 12),
    mu=st.sampled_from([0.01, 0.03, 0.2, 0.7, 1.0]),
    robust_layers=st.integers(0, 3),
    max_depth=st.sampled_from([None, 1, 3, 6]),
)


def slow_talon(policy: Talon, draft: Any) -> list[slow.Layer]:
    """Algorithm 2: layers of the tree, the root's first."""
    found: list[slow.Layer] = [{(): np.float32(0.0)}]
    room, passes = policy.budget - 1, 0
    while room and found[-1] and passes != policy.max_depth:
        candidates = slow.ranked(draft, found[-1])
        passes += 1
        if passes <= policy.robust_layers:
            taken = candidates[: policy.width]
        else:
            anchor = max((score for _, score in candidates), default=np.float32(0.0))
            taken = [
                (path, score)
                for path, score in candidates
                if score >= anchor + np.float32(math.log(policy.mu))
            ]
        found.append(dict(taken[:room]))
        room -= len(found[-1])
    return [layer for layer in found if layer]


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_is_algorithm_2(draft: dict[str, Any], options: dict[str, Any]) -> None:
    source, policy = slow.drafter(**draft), Talon(**options)
    tree = slow.grow(policy, source)
    expected = slow_talon(policy, source)
    found = slow.layers(tree)
    assert [list(layer) for layer in found] == [list(layer) for layer in expected]
    assert [list(layer.values()) for layer in found] == [list(layer.values()) for layer in expected]


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_promises(draft: dict[str, Any], options: dict[str, Any]) -> None:
    source, policy = slow.drafter(**draft), Talon(**options)
    tree = slow.grow(policy, source)
    found = slow.layers(tree)
    positive = draft["exact"] == 0.0
    ended = policy.max_depth is not None and len(found) - 1 == policy.max_depth
    assert len(tree) == policy.budget or ended or not positive
    if positive:
        full = min(policy.width, draft["vocabulary"], policy.budget - 1)
        assert len(found) - 1 <= max(1, policy.budget - (full if policy.robust_layers else 1))
        if policy.robust_layers and policy.budget > 1:
            assert len(found[1]) == full
    for depth in range(policy.robust_layers + 1, len(found)):
        layer = found[depth]
        best = max(layer.values())
        assert all(score >= best + np.float32(math.log(policy.mu)) for score in layer.values())
        parents = sum(math.exp(score) for score in found[depth - 1].values())
        assert len(layer) <= parents / (policy.mu * math.exp(best)) * (1 + 1e-5)


@examples(500)
@given(slow.DRAFTS, st.integers(2, 20))
def test_a_gate_of_one_grows_a_chain_below_level_1(draft: dict[str, Any], budget: int) -> None:
    source = slow.drafter(**{**draft, "exact": 0.0})
    found = slow.layers(slow.grow(Talon(budget=budget, width=2, mu=1.0), source))
    tied = [layer for layer in found[2:] if len(layer) > 1]
    assert all(len(set(layer.values())) == 1 for layer in tied)


@examples(500)
@given(slow.DRAFTS, st.integers(2, 30))
def test_an_open_gate_fills_the_budget_with_the_best_of_each_layer(
    draft: dict[str, Any], budget: int
) -> None:
    source = slow.drafter(**{**draft, "exact": 0.0})
    found = slow.layers(slow.grow(Talon(budget=budget, width=4, mu=1e-30), source))
    for depth in range(2, len(found) - 1):
        assert len(found[depth]) == len(found[depth - 1]) * draft["vocabulary"]


def test_a_certain_draft_gives_one_long_chain_and_max_depth_cuts_it() -> None:
    source = slow.drafter(5, 0)
    source.tables.logits = lambda context: torch.tensor([0.0, -20.0, -20.0, -20.0, -20.0])  # type: ignore[method-assign]
    tree = slow.grow(Talon(budget=20, width=3), source)
    assert int(tree.depths.max()) == 20 - 3 == int(tree.passes)
    assert slow.grow(Talon(budget=20, width=3, max_depth=4), source).passes == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", 0),
        ("width", 0),
        ("mu", 0.0),
        ("mu", 1.5),
        ("mu", math.nan),
        ("robust_layers", -1),
        ("max_depth", 0),
    ],
)
def test_options_out_of_range(field: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"policy talon\.{field}: got {value}, accepted"):
        policies.make("talon", **{field: value})

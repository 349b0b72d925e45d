"""SALF against brute force, Theorem 1, and what its stop and its fill promise (P3, P4)."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from specengine import policies
from specengine.errors import InputError
from specengine.policies.salf import Salf
from tests.examples import examples
from tests.policies import slow

OPTIONS = slow.options(
    budget=st.integers(1, 24),
    batch=st.integers(1, 24),
    threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9]),
    fill=st.booleans(),
    max_depth=st.sampled_from([None, None, 1, 4]),
)


class Recorded(Salf):
    """Notes the batches: their mass, and whether each node is better than the worst of a full tree."""

    def grow(self, tree: Any, frontier: Any, step: Any) -> Any:
        if int(tree.passes) == 1:
            self.masses: list[float] = []
        nodes = super().grow(tree, frontier, step)
        drafted = nodes.alive()
        if len(drafted):
            self.masses.append(math.fsum(tree.path_log_probs[drafted].double().exp().tolist()))
            kept = tree.path_log_probs[self.keep(tree).alive()]
            assert len(kept) < self.budget or bool(
                (tree.path_log_probs[drafted] > kept.min()).all()
            )
            assert len(drafted) <= self.batch
        return nodes


def searched(draft: dict[str, Any], **options: Any) -> tuple[Recorded, Any]:
    policy = Recorded(**options)
    return policy, slow.grow(policy, slow.drafter(**draft))


@examples(500)
@given(slow.DRAFTS, st.integers(1, 24), st.integers(1, 24), st.sampled_from([None, None, 2, 5]))
def test_without_a_threshold_it_finds_the_optimal_tree(
    draft: dict[str, Any], budget: int, batch: int, max_depth: int | None
) -> None:
    _, tree = searched(draft, budget=budget, batch=batch, threshold=0.0, max_depth=max_depth)
    expected = slow.best_value(slow.drafter(**draft), budget - 1, max_depth)
    assert math.isclose(slow.value(tree), expected, rel_tol=1e-5, abs_tol=1e-6)
    assert max_depth is None or int(tree.depths.max()) <= max_depth


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_the_mass_of_the_batches_never_grows(
    draft: dict[str, Any], options: dict[str, Any]
) -> None:
    """Theorem 1; strictly falling where every token has a probability and the batch is smaller than the vocabulary."""
    policy, tree = searched(draft, **options)
    assert len(tree) <= policy.budget
    assert len(policy.masses) == int(tree.passes) - 1
    slack = 1e-5
    for earlier, later in pairwise(policy.masses):
        assert later <= earlier * (1 + slack)
    assert all(mass >= policy.threshold - slack for mass in policy.masses)


@examples(500)
@given(slow.DRAFTS, st.integers(2, 24), st.integers(1, 8))
def test_the_mass_falls_strictly_under_the_theorems_conditions(
    draft: dict[str, Any], budget: int, batch: int
) -> None:
    draft = {**draft, "exact": 0.0, "concentration": 2.0}
    policy, tree = searched(
        draft, budget=budget, batch=min(batch, draft["vocabulary"] - 1), threshold=0.0
    )
    # a token so sure leaves the others no mass that float32 sees
    assume(not bool((tree.log_probs[1:] > -1e-3).any()))
    # of two equal paths one may be taken after the other
    assume(len(tree.path_log_probs.unique()) == len(tree))
    assert all(later < earlier for earlier, later in pairwise([1.0, *policy.masses]))


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_a_lower_threshold_costs_passes_and_gains_probability(
    draft: dict[str, Any], options: dict[str, Any]
) -> None:
    found = [
        searched(draft, **{**options, "threshold": threshold})[1]
        for threshold in (0.0, 0.2, 0.5, 0.8)
    ]
    for lower, higher in pairwise(found):
        assert lower.passes >= higher.passes
        assert slow.value(lower) >= slow.value(higher) - 1e-5


@examples(500)
@given(slow.DRAFTS, OPTIONS)
def test_fill_adds_scored_nodes_and_no_passes(
    draft: dict[str, Any], options: dict[str, Any]
) -> None:
    _, bare = searched(draft, **{**options, "fill": False})
    _, filled = searched(draft, **{**options, "fill": True})
    assert bare.passes == filled.passes
    assert set(slow.paths(bare)) <= set(slow.paths(filled))
    if draft["exact"] == 0.0:  # every row has as many children as there are tokens
        scored = 1 + draft["vocabulary"]
        assert len(filled) >= min(options["budget"], scored)


def test_a_tree_does_not_depend_on_the_one_before() -> None:
    """Whose queues were full of better nodes: those of a certain draft bound nothing in a tree of an unsure one."""
    policy, unsure = (
        policies.make("salf", budget=8, batch=2),
        {"vocabulary": 9, "concentration": 2.0},
    )
    for seed in range(4):
        expected = slow.paths(
            slow.grow(policies.make("salf", budget=8, batch=2), slow.drafter(seed=seed, **unsure))
        )
        slow.grow(policy, slow.drafter(9, seed, concentration=0.05))
        assert slow.paths(slow.grow(policy, slow.drafter(seed=seed, **unsure))) == expected


@pytest.mark.parametrize(
    ("budget", "batch"), [(1, 1), (1, 9), (2, 1), (9, 9), (9, 64), (60, 10), (256, 256)]
)
def test_ends_at_the_corners(budget: int, batch: int) -> None:
    for exact in (0.0, 1.0):
        _, tree = searched(
            {"vocabulary": 3, "seed": 1, "exact": exact}, budget=budget, batch=batch, threshold=0.0
        )
        assert 1 <= len(tree) <= budget
        assert int(tree.passes) <= budget


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", 0),
        ("batch", 0),
        ("threshold", 1.0),
        ("threshold", -0.1),
        ("threshold", math.nan),
        ("max_depth", 0),
    ],
)
def test_options_out_of_range(field: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"policy salf\.{field}: got {value}, accepted"):
        policies.make("salf", **{field: value})

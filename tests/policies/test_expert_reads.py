"""Experts that trees read: what is predicted against what the native forward counts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch

from specengine.models.native import NativeTarget, from_model
from specengine.ops.tree import TokenTree
from specengine.ops.worth import RELATIONS
from specengine.policies.auto.costs import COUNTED_ROWS, ExpertReads, relations
from tests.models.native_engines import needs_extension
from tests.models.native_variants import PROMPT
from tests.toy import VOCABULARY, random_tree, tiny

MANY = {"num_experts": 24, "num_experts_per_tok": 4}
MODELS = {
    "qwen3_moe": {**MANY, "mlp_only_layers": []},
    "olmoe": MANY,
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 2},
}
FEW = 6  # tokens of the trees whose rows are alike


def trees(count: int, tokens: int) -> list[TokenTree]:
    """Trees of up to 40 nodes with so many tokens, siblings among which may carry the same one."""
    found = [random_tree(seed, 2 + seed * 7 % 39, VOCABULARY, root=3) for seed in range(count)]
    for tree in found:
        tree.tokens.remainder_(tokens)
    return found


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest) -> NativeTarget:
    found = NativeTarget(from_model(tiny(request.param, **MODELS[request.param])))
    with torch.inference_mode():
        found.prefill(PROMPT)
    return found


@torch.inference_mode()
def counted(target: NativeTarget, tree: TokenTree) -> list[int]:
    target.choose(tree)
    assert target.experts is not None
    return target.experts.tolist()


def shape(tree: TokenTree) -> tuple[list[int], list[int]]:
    return tree.parents.tolist(), tree.depths.tolist()


def predicted(reads: ExpertReads, parents: Sequence[int], depths: Sequence[int]) -> list[float]:
    """Return how many experts each node of a tree adds, the root first."""
    ratios = reads.ratios()
    return reads._added(ratios[relation] for relation in relations(parents, depths))


def errors(target: NativeTarget, reads: ExpertReads, asked: list[TokenTree]) -> list[float]:
    """How far the predicted distinct experts of each tree are from those counted, as a share of these."""
    found = [(sum(predicted(reads, *shape(tree))), sum(counted(target, tree))) for tree in asked]
    return [abs(expected - true) / true for expected, true in found]


@needs_extension
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tokens", [VOCABULARY, FEW])
def test_predicted_experts_are_those_counted_nearly(target: NativeTarget, tokens: int) -> None:
    """Check within 10 % of the unseen trees on average, 15 % where rows are the same few; the prior is worse."""
    seen = trees(60, tokens)
    reads, fresh = (ExpertReads(target.lm.routes.each, target.lm.routes.all) for _ in range(2))
    for tree in seen[:40]:
        reads.learn(*shape(tree), counted(target, tree))
    learnt, begun = (errors(target, one, seen[40:]) for one in (reads, fresh))
    assert statistics.fmean(learnt) < (0.15 if tokens == FEW else 0.1)
    assert statistics.fmean(begun) > statistics.fmean(learnt)
    if tokens == FEW:
        assert statistics.fmean(begun) > 0.25


def test_independent_rows_before_anything_is_counted() -> None:
    reads = ExpertReads(8, 64)
    assert sum(reads.least(32)) == pytest.approx(64 * (1 - (1 - 8 / 64) ** 32))
    assert reads.ratios() == [1.0] * RELATIONS
    assert ExpertReads(4, 4).least(5) == [4, 0, 0, 0, 0]


def test_relations_are_told_apart() -> None:
    """A first child uses its parent's experts, a later one none that were used."""
    parents, depths = [0, 0, 0, 1, 1], [0, 1, 1, 2, 2]
    assert relations(parents, depths) == [0, 1, 2, 3]
    reads = ExpertReads(8, 64)
    for _ in range(300):
        reads.learn(parents, depths, [8, 0, 8, 0, 8])
    ratios = reads.ratios()
    assert max(ratios[0::2]) < 0.1 < 0.9 < min(ratios[1::2])  # of depths that were never met too
    assert predicted(reads, parents, depths) == pytest.approx([8, 0, 8, 0, 8], abs=0.2)
    assert sum(reads.least(5)) == pytest.approx(8, abs=0.3)


def test_old_trees_are_forgotten() -> None:
    reads = ExpertReads(8, 64)
    for added, wanted in (([8, 0], 0.0), ([8, 7], 1.0)):
        for _ in range(5 * int(COUNTED_ROWS)):
            reads.learn([0, 0], [0, 1], added)
        assert reads.ratios()[0] == pytest.approx(wanted, abs=0.02)

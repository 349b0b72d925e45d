"""DDTree against a search with a heap and against all paths; drafts that give a block in one pass."""

import heapq
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import policies
from specengine.costs import PassCosts
from specengine.drafters._wrappers import Coupled
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies.baselines.ddtree import DDTree
from tests.examples import examples
from tests.policies import slow
from tests.toy import Tables, ToyDrafter, ToyTarget, nodes_of, policy_for


class BlockDrafter(ToyDrafter):
    """Gives the positions of a block at once; each is drawn on its own, whatever stands before it."""

    def __init__(self, tables: Tables, block: int) -> None:
        super().__init__(tables, normalized=True)
        self.block = block

    def marginal(self, position: int) -> torch.Tensor:
        return self.tables.logits([len(self.tokens), position])

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        step = super().step(tree, frontier)
        rows = torch.stack(
            [self.marginal(int(tree.depths[node])) for node in frontier.alive().tolist()]
        )
        given = replace(step, logits=rows)
        if self.block == 1:
            return given
        first = int(tree.depths[frontier.ids[0]]) + 1
        return replace(
            given, further=torch.stack([self.marginal(first + i) for i in range(self.block - 1)])
        )


def block_drafter(
    vocabulary: int, seed: int, block: int, *, concentration: float = 0.3, exact: float = 0.0
) -> Any:
    draft = BlockDrafter(Tables(vocabulary, seed, concentration=concentration, exact=exact), block)
    draft.begin([seed % vocabulary])
    return draft


def best_products(rows: list[list[float]], count: int) -> list[tuple[float, tuple[int, ...]]]:
    """The best paths by summed log-probability, as a heap of prefixes finds them."""
    heap = [(-row, (token,)) for token, row in enumerate(rows[0]) if row > -math.inf]
    heapq.heapify(heap)
    found = []
    while heap and len(found) < count:
        score, path = heapq.heappop(heap)
        found.append((-score, path))
        if len(path) < len(rows):
            for token, edge in enumerate(rows[len(path)]):
                if edge > -math.inf:
                    heapq.heappush(heap, (score - edge, (*path, token)))
    return found


@examples(300)
@given(slow.DRAFTS, st.integers(2, 16), st.integers(1, 5), st.sampled_from([1, 2, 5]))
def test_keeps_the_best_path_products(
    draft: dict[str, Any], budget: int, block: int, given: int
) -> None:
    source = block_drafter(block=given, **draft)
    rows = [source.marginal(position).tolist() for position in range(block)]
    tree = slow.grow(DDTree(budget, block), source)
    expected = best_products(rows, budget - 1)
    assert len(tree) - 1 == len(expected)
    assert tree.path_log_probs[1:].sort(descending=True).values.tolist() == pytest.approx(
        [score for score, _ in expected], abs=1e-4
    )
    for path, score in slow.paths(tree).items():
        assert float(score) == pytest.approx(
            sum(rows[i][token] for i, token in enumerate(path)), abs=1e-4
        )
    assert int(tree.passes) == -(-block // given)


@examples(50)
@given(st.integers(0, 10_000), st.integers(2, 14))
def test_agrees_with_all_paths(seed: int, budget: int) -> None:
    source = block_drafter(4, seed, 3)
    rows = [source.marginal(position).tolist() for position in range(3)]
    paths = [path for length in (1, 2, 3) for path in product(range(4), repeat=length)]
    scores = sorted(
        (math.fsum(rows[i][token] for i, token in enumerate(path)) for path in paths), reverse=True
    )
    tree = slow.grow(DDTree(budget, 3), source)
    assert tree.path_log_probs[1:].sort(descending=True).values.tolist() == pytest.approx(
        scores[: budget - 1], abs=1e-4
    )


@examples(50)
@given(slow.DRAFTS, st.integers(2, 12), st.integers(1, 4))
def test_a_draft_of_one_position_per_pass_is_asked_along_its_likeliest_path(
    draft: dict[str, Any], budget: int, block: int
) -> None:
    source, path = slow.drafter(**draft), list[int]()
    tree = slow.grow(DDTree(budget, block), source)
    for step in source.paths:
        assert step == [path]
        row = source.tables.logits([*source.tokens, 0, *path])
        path = [*path, int(row.argmax())]
    assert int(tree.passes) == len(source.paths) == block


class ConditionedDrafter(ToyDrafter):
    """Gives each node its own distribution, as a block does whose positions a token corrects."""

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        return replace(super().step(tree, frontier), conditioned=True)


def best_paths(draft: ToyDrafter, budget: int, block: int) -> list[float]:
    """Log-probabilities of the best paths below the root 0, by their products of conditional chances, best first."""
    paths: list[tuple[float, list[int]]] = [(0.0, [])]
    scores: list[float] = []
    for _ in range(block):
        paths = [
            (score + float(edge), [*path, token])
            for score, path in paths
            for token, edge in enumerate(
                draft.tables.logits([*draft.tokens, 0, *path]).log_softmax(-1)
            )
        ]
        scores += [score for score, _ in paths]
    return sorted(scores, reverse=True)[: budget - 1]


@examples(60)
@given(st.integers(0, 10_000), st.integers(2, 20), st.integers(1, 3))
def test_a_conditioned_draft_gives_the_best_products_of_conditional_chances(
    seed: int, budget: int, block: int
) -> None:
    source = ConditionedDrafter(Tables(5, seed, concentration=0.4, exact=0.0))
    source.begin([seed % 5])
    rule = DDTree(budget, block)
    tree = slow.grow(rule, source)
    kept = tree.path_log_probs[rule.keep(tree).alive()][1:].sort(descending=True).values
    assert kept.tolist() == pytest.approx(best_paths(source, budget, block), abs=1e-4)
    assert int(tree.passes) <= block


@examples(30)
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_caddtree_takes_the_same_tree_where_passes_cost_nothing(seed: int, budget: int) -> None:
    source = ConditionedDrafter(Tables(5, seed, concentration=0.4, exact=0.0))
    source.begin([seed % 5])
    costs = PassCosts("of verification", {1: 1.0, budget: 1.0}, {1: 0.0, 64: 0.0})
    rule = policies.make("caddtree", budget=budget, block=2, costs=costs)
    tree = slow.grow(rule, source)
    kept = tree.path_log_probs[rule.keep(tree).alive()][1:].sort(descending=True).values
    assert kept.tolist() == pytest.approx(best_paths(source, budget, 2), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", ["ddtree", "caddtree"])
def test_answers_of_drafts_that_give_blocks_are_those_of_plain_decoding(
    name: str, options: dict[str, Any]
) -> None:
    tables = Tables(8, 5)
    source = BlockDrafter(Tables(8, 6, like=tables, share=0.6), 4)
    engine = Engine(ToyTarget(tables), source, policy_for(name))
    found = engine.generate([1, 2], max_new_tokens=32, **options)
    assert (
        found.token_ids
        == engine.generate([1, 2], max_new_tokens=32, policy="plain", **options).token_ids
    )
    assert found.stats.num_spec_steps < 32


def test_the_noise_of_a_sampled_answer_is_that_of_each_position() -> None:
    """Also where a later pass would have drafted it."""
    seed, scale = torch.tensor([7]), torch.tensor([0.5])
    tree = TokenTree.root(0, 4)
    tree.add(torch.tensor([0]), torch.tensor([1]), torch.zeros(1))
    for normalized in (False, True):
        source = block_drafter(5, 2, 2)
        source.normalized = normalized
        coupled = Coupled(source, seed, scale, lambda: 9)
        whole, later = (coupled.step(tree, nodes_of([node])) for node in (0, 1))
        assert whole.further is not None
        assert torch.equal(whole.further, later.logits)
        assert not torch.allclose(whole.further[0], source.marginal(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1}, r"budget: got 1, accepted 2 or more"),
        ({"block": 0}, r"block: got 0, accepted 1 or more"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"policy ddtree\." + message):
        policies.make("ddtree", **options)

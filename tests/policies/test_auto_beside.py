"""auto beside other texts: one budget over all of them, against each text deciding alone and the best of all trees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from specengine.costs import MEASURED, PassCosts
from specengine.ops.tree import TokenTree
from specengine.ops.worth import LEVELS
from specengine.policies.auto.auto import Auto
from specengine.records import Cycle, Outcome, Seconds
from tests.policies.lawful import ELSEWHERE, Lawful, Rows, World, all_ways, drafted, level
from tests.policies.test_auto import HELD, auto, state_of

SHAPE = {"budget": 5, "width": 1}
PASSES, CYCLES = 4, 160
EASY, MIDDLING, HARD = ([list(row)] * LEVELS for row in (HELD[:1], (HELD[2], HELD[5]), HELD[4:]))
FEW_ARE_CHEAP = PassCosts("few rows are cheap", {1: 1.0, 4: 1.1, 8: 1.6, 16: 3.0}, {1: 0.05})
NONE_IS_CHEAP = PassCosts("none is cheap", {1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5, 16: 8.5}, {1: 0.05})
ALL_ARE_CHEAP = PassCosts("all are cheap", {1: 1.0, 16: 1.2}, {1: 0.02})


def best_rate(laws: Sequence[Rows], given: PassCosts) -> float:
    """Return the most tokens per time that trees of all texts can bring, verified in one forward."""
    # a verification's time says how many
    by_rows = PassCosts("rows", {1: 1000.0, 64: 64000.0}, given.draft)
    ways = []
    for law in laws:
        found = dict[tuple[int, float], float]()
        for way in all_ways(law, by_rows, passes=PASSES, **SHAPE):
            rows = int(way.time // 1000)
            key = rows, round(way.time - 1000 * rows, 6)
            found[key] = max(found.get(key, 0.0), way.tokens)
        ways.append(found.items())
    verify = given.table(SHAPE["budget"] * len(laws), 1, 0).verify.tolist()
    return max(
        sum(tokens for _, tokens in chosen)
        / (verify[sum(rows for (rows, _), _ in chosen)] + sum(spent for (_, spent), _ in chosen))
        for chosen in itertools.product(*ways)
    )


def texts(laws: Sequence[Rows], costs: PassCosts) -> list[World]:
    def world(law: Rows, seed: int) -> World:
        def truth(tree: TokenTree, node: int) -> float:
            parent = int(tree.parents[node])
            return law[level(math.exp(tree.log_probs[parent])) if parent else 0][
                int(tree.tokens[node])
            ]

        return World(auto(costs, max_passes=PASSES, **SHAPE), Lawful(law), truth, seed)

    return [world(law, seed) for seed, law in enumerate(laws)]


def rate(worlds: Sequence[World], given: PassCosts) -> float:
    """Return the tokens per time of cycles of all texts, each of one forward, once they have learnt."""
    tables = given.table(SHAPE["budget"] * len(worlds), 1, 0)
    verify, passes = (table.tolist() for table in tables)
    tokens = spent = 0.0
    for cycle in range(CYCLES):
        found = [world.cycle() for world in worlds]
        if cycle >= CYCLES // 2:
            tokens += sum(
                world.expected(draft.tree) for world, draft in zip(worlds, found, strict=True)
            )
            spent += verify[sum(len(draft.tree) for draft in found)]
            spent += sum(passes[1] * int(draft.grown.passes) for draft in found)
    return tokens / spent


def together(laws: Sequence[Rows], given: PassCosts) -> list[World]:
    worlds = texts(laws, given.beside(len(laws) - 1))
    first, *others = (world.policy for world in worlds)
    for other in others:
        assert isinstance(first, Auto)
        assert isinstance(other, Auto)
        other.learn_with(first)
    return worlds


@pytest.mark.parametrize(
    "given", [FEW_ARE_CHEAP, NONE_IS_CHEAP, ALL_ARE_CHEAP], ids=lambda given: str(given.name)
)
@pytest.mark.parametrize(
    "laws", [(EASY, HARD), (EASY, MIDDLING), (HARD, HARD)], ids=["far", "near", "hard"]
)
def test_one_budget_comes_near_the_best_trees_of_all_texts(
    laws: tuple[Rows, ...], given: PassCosts
) -> None:
    best = best_rate(laws, given)
    assert 0.88 * best <= rate(together(laws, given), given) <= 1.001 * best


def test_one_budget_brings_more_than_texts_that_decide_alone() -> None:
    laws = EASY, HARD
    best = best_rate(laws, FEW_ARE_CHEAP)
    alone, shared = (
        rate(texts(laws, FEW_ARE_CHEAP), FEW_ARE_CHEAP),
        rate(together(laws, FEW_ARE_CHEAP), FEW_ARE_CHEAP),
    )
    assert alone < 0.93 * best  # the rows that one text takes are no longer cheap for the other one
    assert shared > 0.97 * best


def test_what_is_counted_together_and_what_is_a_texts_own() -> None:
    first, second = auto(FEW_ARE_CHEAP), auto(FEW_ARE_CHEAP)
    second.learn_with(first)
    one, other = state_of(first), state_of(second)
    for name in ("hits", "tries", "table"):
        assert getattr(other.bound.counts, name) is getattr(one.bound.counts, name)
    assert other.bound.throughput.recent is one.bound.throughput.recent
    for name in ("gains", "passes", "profile", "group"):
        assert getattr(other.bound.counts, name) is not getattr(one.bound.counts, name)
    assert other.bound.throughput.verify is not one.bound.throughput.verify
    first.begin(10, sampled=True)
    second.begin(10)
    assert (int(one.bound.counts.group), int(other.bound.counts.group)) == (1, 0)
    assert torch.equal(other.bound.counts.hits, one.bound.counts.hits)


def test_forwards_of_all_texts_correct_the_price_of_their_rows() -> None:
    """Not the time of a text's own verification, which waits for others; and what one text learns all know."""
    thought = PassCosts("thought", {1: 0.01, 64: 0.64}, {1: 0.001}, measured=True)
    forwards = list[tuple[int, float]]()
    shared = thought.beside(2, forward=lambda: forwards.pop() if forwards else None)
    first, second = auto(MEASURED), auto(MEASURED)
    second.learn_with(first)
    first.begin(0, costs=lambda: shared)
    tree = drafted(first, Lawful([[0.5]] * LEVELS)).tree
    waited = Cycle(tree, [0], [ELSEWHERE], Seconds(verify=5.0, total=5.0), 1)
    for _ in range(20):
        first.learn(Outcome.of(waited))
    assert first._costs.predicted.rows[8] <= thought.verify[1] * 8 * 1.01
    for _ in range(100):
        forwards.append((8, 0.02))
        first.learn(Outcome.of(waited))
    second.begin(0, costs=lambda: shared)
    rows = second._costs.predicted.rows
    assert rows[8] == pytest.approx(0.02, rel=0.05)
    price = state_of(second).bound.throughput.verify
    assert float(price[6]) == pytest.approx(rows[3] + 3 * (rows[8] - rows[3]))

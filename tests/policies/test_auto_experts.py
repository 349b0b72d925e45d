"""auto on targets with experts: its trees against the best of all, and against trees priced by rows alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specengine import ops, policies
from specengine.costs import PassCosts
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.policies.auto import Auto
from specengine.policies.auto.costs import ExpertReads, relations
from specengine.records import Cycle, Outcome, Seconds
from tests.ops.test_worth import fresh, throughput_of
from tests.policies.lawful import Lawful, Rows, World, drafted
from tests.policies.test_expert_reads import predicted
from tests.toy import random_tree

ALL, EACH, EXPERT = 64, 8, 0.03
PASS = 0.02  # seconds of a draft pass
POINTS = (1, 2, 4, 8, 16, 32, 64)


class Router:
    """Draws experts of a tree's rows: a first child takes each of its parent's with this chance, others at random."""

    def __init__(self, from_parent: float, seed: int) -> None:
        self.from_parent, self.random = from_parent, np.random.default_rng(seed)

    def added(self, parents: Sequence[int]) -> list[int]:
        rows, seen, found, first = list[set[int]](), set[int](), list[int](), set[int]()
        for node, parent in enumerate(parents):
            row = set[int]()
            if node and parent not in first:
                row = {expert for expert in rows[parent] if self.random.random() < self.from_parent}
                first.add(parent)
            others = [
                expert for expert in self.random.permutation(ALL).tolist() if expert not in row
            ]
            row |= set(others[: EACH - len(row)])
            found.append(len(row - seen))
            rows.append(row)
            seen |= row
        return found


def learnt(from_parent: float, trees: int = 300) -> ExpertReads:
    reads, router = ExpertReads(EACH, ALL), Router(from_parent, 1)
    for seed in range(trees):
        tree = random_tree(seed, 2 + seed % 12, 60)
        reads.learn(
            tree.parents.tolist(), tree.depths.tolist(), router.added(tree.parents.tolist())
        )
    return reads


# ---- one tree


def worth_of(
    tree: TokenTree, nodes: Sequence[int], reads: ExpertReads, row: float, expert: float
) -> float:
    """Expected tokens of verifying these nodes, less the price of rows and of the experts that they add."""
    place = {node: i for i, node in enumerate(nodes)}
    parents = [0, *(place[int(tree.parents[node])] for node in nodes[1:])]
    added = predicted(reads, parents, [int(tree.depths[node]) for node in nodes])
    return (
        float(tree.path_log_probs[list(nodes)].exp().sum()) - row * len(nodes) - expert * sum(added)
    )


def best_of_all(tree: TokenTree, *prices: Any) -> float:
    found = list[float]()
    for kept in itertools.product((False, True), repeat=len(tree) - 1):
        nodes = [0, *(node for node, there in enumerate(kept, 1) if there)]
        if all(int(tree.parents[node]) in nodes for node in nodes[1:]):
            found.append(worth_of(tree, nodes, *prices))
    return max(found)


def chosen(
    tree: TokenTree, reads: ExpertReads, row: float, expert: float, *, related: bool
) -> list[int]:
    """What `keep_likely` keeps at a rate of one token per second."""
    size, (counts, notes) = len(tree), fresh()
    books = throughput_of(nodes=size)
    least = reads.least(size) if related else by_rows(reads, size)
    price = row * torch.arange(size + 1) + expert * torch.tensor(
        [0.0, *itertools.accumulate(least)]
    )
    books.verify.copy_(price)
    books.prices.verify.copy_(price)
    if related:
        books = books._replace(experts=torch.tensor([expert * EACH, EACH / ALL, *reads.ratios()]))
    notes = ops.Notes(*(part.new_zeros(tree.capacity + 1) for part in notes))
    state = ops.SearchState(counts, notes, books)
    kept = ops.keep_likely(tree.arrays, tree.size, state, None, (1, 1, -1.0), size)
    assert int(books.verified) == int(kept.live)
    return kept.alive().tolist()


def by_rows(reads: ExpertReads, nodes: int) -> list[float]:
    """Experts that a node adds on average over these trees, whatever its relation."""
    found = list[list[float]]()
    for seed in range(40):
        tree = random_tree(seed, nodes, 60)
        found.append(predicted(reads, tree.parents.tolist(), tree.depths.tolist()))
    return [statistics.fmean(column) for column in zip(*found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("from_parent", [0.0, 0.9])
def test_trees_are_nearly_the_best_of_all(from_parent: float) -> None:
    """Of all sets of nodes. What prices leave out which go by rows alone is seen where rows share experts."""
    reads, left = learnt(from_parent), {True: list[float](), False: list[float]()}
    for seed in range(60):
        tree = random_tree(seed, 9, 60)
        for size in range(1, len(tree)):  # chances that fall more slowly than random ones
            tree.path_log_probs[size] = (
                tree.path_log_probs[tree.parents[size]] + tree.log_probs[size] / 4
            )
        prices = reads, 0.01, (0.01, 0.03, 0.06)[seed % 3]
        best = best_of_all(tree, *prices)
        for related in left:
            nodes = chosen(tree, *prices, related=related)
            assert all(int(tree.parents[node]) in nodes for node in nodes[1:])
            left[related].append(best - worth_of(tree, nodes, *prices))
    assert min(left[True]) > -1e-5
    assert statistics.fmean(left[True]) < 0.02
    assert max(left[True]) < 0.25
    if from_parent:
        assert statistics.fmean(left[False]) > 3 * statistics.fmean(left[True])


def test_without_extra_prices_the_trees_are_those_priced_by_rows() -> None:
    reads = ExpertReads(EACH, ALL)
    for seed in range(30):
        tree = random_tree(seed, 12, 60)
        rows, experts = (
            chosen(tree, reads, 0.02, 0.01, related=related) for related in (False, True)
        )
        assert rows == experts


# ---- a policy


def independent(rows: int) -> float:
    return ALL * (1 - (1 - EACH / ALL) ** rows)


def costs(*, counted: bool, expert: float = EXPERT) -> PassCosts:
    """Costs as measured on rows whose experts are independent."""
    experts = {rows: independent(rows) for rows in POINTS}
    verify = {rows: seconds(rows, read, expert) for rows, read in experts.items()}
    more: dict[str, Any] = (
        {"experts": experts, "all_experts": ALL, "expert": expert} if counted else {}
    )
    return PassCosts("made up", verify, {1: PASS}, **more)


def seconds(rows: int, experts: float, expert: float = EXPERT) -> float:
    return 0.3 + 0.002 * rows + expert * experts


def run(
    law: Rows,
    from_parent: float,
    *,
    counted: bool,
    cycles: int = 120,
    seeds: int = 1,
    **options: Any,
) -> float:
    """Return the tokens per second of cycles in worlds whose law the draft states, after the first third."""
    tokens = spent = 0.0
    for seed in range(seeds):
        policy = policies.make("auto", costs=costs(counted=counted), **options)
        assert isinstance(policy, Auto)
        drafter, router = Lawful(law), Router(from_parent, seed)
        world = World(policy, drafter, lambda tree, node: law[0][int(tree.tokens[node])], seed)
        for cycle in range(cycles):
            draft = drafted(policy, drafter)
            tree, added = draft.tree, router.added(draft.tree.parents.tolist())
            path, chosen_tokens = world.walk(tree)
            record = Cycle(
                tree, path, chosen_tokens, Seconds(), experts=torch.tensor(added, dtype=torch.int32)
            )
            assert draft.kept is not None
            kept = Nodes.of(draft.kept[torch.tensor(path)])
            policy.learn(Outcome(draft.grown, kept, torch.tensor(chosen_tokens), record))
            if 3 * cycle >= cycles:
                tokens += world.expected(tree)
                spent += seconds(len(tree), sum(added)) + PASS * int(draft.grown.passes)
    return tokens / spent


def best_rate(row: Sequence[float], from_parent: float, nodes: int) -> float:
    """Return the most tokens per second of all trees of so many nodes or fewer, each level of which is a pass."""
    router, rates = Router(from_parent, 9), [0.0]

    def extend(parents: list[int], depths: list[int], chances: list[float]) -> None:
        read = statistics.fmean(sum(router.added(parents)) for _ in range(60))
        rates.append(sum(chances) / (seconds(len(parents), read) + PASS * max(depths)))
        if len(parents) == nodes:
            return
        for parent in range(parents[-1], len(parents)):  # each shape once, level by level
            rank = sum(other == parent for other in parents[1:])
            if rank < len(row):
                below = chances[parent] * row[rank]
                extend([*parents, parent], [*depths, depths[parent] + 1], [*chances, below])

    extend([0], [0], [1.0])
    return max(rates)


SURE, WIDE = [0.85, 0.08, 0.04], [0.65, 0.2, 0.1]


@pytest.mark.parametrize(("row", "from_parent"), [(SURE, 0.9), (WIDE, 0.9), (WIDE, 0.0)])
def test_it_comes_near_the_rate_of_the_best_tree_of_all(
    row: list[float], from_parent: float
) -> None:
    best = best_rate(row, from_parent, 6)
    assert 0.95 * best < run([row] * 8, from_parent, counted=True, seeds=3, budget=6) < 1.03 * best


def test_where_children_share_experts_it_gains_over_prices_by_rows() -> None:
    by_rows, by_experts = (run([WIDE] * 8, 0.9, counted=counted) for counted in (False, True))
    assert by_experts > 1.1 * by_rows


def test_where_experts_are_as_measured_it_loses_nothing() -> None:
    by_rows, by_experts = (
        run([WIDE] * 8, 0.0, counted=counted, seeds=3) for counted in (False, True)
    )
    assert by_experts > 0.98 * by_rows


def test_costs_without_experts_leave_it_as_it_was() -> None:
    policy = policies.make("auto", costs=PassCosts("dense", {1: 1.0, 64: 2.0}, {1: 0.1}))
    assert isinstance(policy, Auto)
    drafted(policy, Lawful([[0.6, 0.2]] * 8))
    assert policy._costs.experts is None
    assert [state.bound.throughput.experts.numel() for state in policy._state.values()] == [0]


def test_relations_are_those_of_the_rule() -> None:
    tree = random_tree(3, 20, 60)
    seen, found = set[int](), list[int]()
    for node in range(1, 20):
        parent = int(tree.parents[node])
        found.append(ops.worth.relation_of(int(tree.depths[node]), parent in seen))
        seen.add(parent)
    assert relations(tree.parents.tolist(), tree.depths.tolist()) == found

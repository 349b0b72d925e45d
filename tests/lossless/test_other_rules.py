"""The power of the test: it rejects two wrong rules of acceptance and passes a right one."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from specengine.ops.tree import TokenTree
from tests.lossless.worlds import LENGTH, PROMPT, WORLDS, World, holm_rejects, identifier, p_value

Rule = Callable[[np.random.Generator, TokenTree, list[np.ndarray]], list[int]]


def children_of(tree: TokenTree) -> list[list[tuple[int, int]]]:
    """Return each node's children as (node, token), in creation order."""
    children: list[list[tuple[int, int]]] = [[] for _ in range(len(tree))]
    for node, (parent, token) in enumerate(
        zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ):
        if node:
            children[parent].append((node, token))
    return children


def eagle_rule(random: np.random.Generator, tree: TokenTree, rows: list[np.ndarray]) -> list[int]:
    """Walk by EAGLE's lossless rule: accept a child with its probability in what the rejected ones left."""
    children, tokens, node = children_of(tree), [], 0
    while True:
        left, moved = rows[node].copy(), False
        for child, token in children[node]:
            if random.random() < left[token]:
                tokens.append(token)
                node, moved = child, True
                break
            left[token] = 0.0
            left /= left.sum()
        if not moved:
            return [*tokens, int(random.choice(len(left), p=left))]


def biased_rule(random: np.random.Generator, tree: TokenTree, rows: list[np.ndarray]) -> list[int]:
    """The common mistake: min(1, p / q) with the draft's q, for children that were not drawn from q."""
    children, tokens, node = children_of(tree), [], 0
    edges = tree.log_probs.exp().tolist()
    while True:
        left, moved = rows[node].copy(), False
        for child, token in children[node]:
            if random.random() < left[token] / edges[child]:
                tokens.append(token)
                node, moved = child, True
                break
            left[token] = max(0.0, left[token] - edges[child])
            left /= left.sum()
        if not moved:
            return [*tokens, int(random.choice(len(left), p=left))]


def typical_rule(random: np.random.Generator, tree: TokenTree, rows: list[np.ndarray]) -> list[int]:
    """Medusa's typical acceptance (epsilon 0.09, delta 0.3): whatever is likely enough passes."""
    children, tokens, node = children_of(tree), [], 0
    while True:
        row = rows[node]
        entropy = -sum(p * math.log(p) for p in row if p > 0)
        passing = [
            (child, token)
            for child, token in children[node]
            if row[token] > min(0.09, 0.3 * math.exp(-entropy))
        ]
        if not passing:
            return [*tokens, int(random.choice(len(row), p=row))]
        node, token = passing[0]
        tokens.append(token)


def simulate_rule(rule: Rule, world: World, runs: int) -> dict[tuple[int, ...], int]:
    random = np.random.default_rng(7)
    counts: dict[tuple[int, ...], int] = {}
    rows: dict[tuple[int, ...], list[np.ndarray]] = {}
    for _ in range(runs):
        context = PROMPT
        while len(context) < len(PROMPT) + LENGTH:
            tree, _ = world.cycle(context)
            if context not in rows:
                paths = [tree.path_tokens(node) for node in range(len(tree))]
                rows[context] = [world.probabilities((*context, *path)) for path in paths]
            context = (*context, *rule(random, tree, rows[context]))
        tokens = context[len(PROMPT) : len(PROMPT) + LENGTH]
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts


@pytest.mark.sliced(1)
@pytest.mark.parametrize("world", WORLDS[:4], ids=identifier)
def test_the_same_test_rejects_wrong_rules_and_passes_a_right_one(world: World) -> None:
    values = [
        p_value(simulate_rule(rule, world, 6000), world.law())
        for rule in (eagle_rule, biased_rule, typical_rule)
    ]
    assert holm_rejects(values) == [False, True, True], values


def test_holm_is_no_stricter_than_bonferroni_and_no_laxer_than_alpha() -> None:
    assert holm_rejects([0.02, 0.03, 0.5], alpha=0.05) == [False, False, False]
    assert holm_rejects([0.01, 0.025, 0.04], alpha=0.05) == [True, True, True]
    assert holm_rejects([0.04, 0.01, 0.06], alpha=0.05) == [False, True, False]

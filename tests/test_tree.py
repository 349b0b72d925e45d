"""TokenTree: flat arrays, ancestor bits across word boundaries, subtrees."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine import ops
from specengine.tree import WORD_BITS, TokenTree
from tests.toy import random_tree

SIZES = (1, 2, 5, 63, 64, 65, 128, 130)
shapes = st.tuples(st.integers(0, 10_000), st.one_of(st.sampled_from(SIZES), st.integers(1, 140)))


def ancestors_or_self(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


def bits(row: torch.Tensor) -> set[int]:
    return {
        WORD_BITS * number + bit
        for number, word in enumerate(row.tolist())
        for bit in range(WORD_BITS)
        if word >> bit & 1
    }


def check_structure(tree: TokenTree) -> None:
    """Everything that the class promises of its arrays, recomputed from `parents` and `log_probs`."""
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert (parents[0], depths[0], float(tree.path_log_probs[0])) == (-1, 0, 0.0)
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert tree.ancestors.shape[1] == -(-tree.capacity // WORD_BITS)
    siblings = list(zip(parents, tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    mask = ops.tree_mask(tree.ancestors, len(tree))
    for node in range(len(tree)):
        line = ancestors_or_self(parents, node)
        assert bits(tree.ancestors[node]) == line == set(torch.nonzero(mask[node]).reshape(-1).tolist())
        assert depths[node] == len(line) - 1
        edges = [float(tree.log_probs[ancestor]) for ancestor in line]
        assert math.isclose(float(tree.path_log_probs[node]), math.fsum(edges), rel_tol=1e-5, abs_tol=1e-5)
        path = [int(tree.tokens[ancestor]) for ancestor in sorted(line)[1:]]
        assert tree.path_tokens(node) == path


@settings(deadline=None, max_examples=40)
@given(shapes)
def test_structure_of_random_trees(shape: tuple[int, int]) -> None:
    seed, size = shape
    check_structure(random_tree(seed, size, vocabulary=200))


@pytest.mark.parametrize("size", SIZES)
def test_a_chain_sees_all_before_it(size: int) -> None:
    tree = TokenTree.root(7, size)
    for node in range(size - 1):
        tree.add(torch.tensor([node]), torch.tensor([node]), torch.tensor([-0.25]))
    assert torch.equal(ops.tree_mask(tree.ancestors, size), torch.ones(size, size, dtype=torch.bool).tril())
    assert torch.equal(tree.ancestors, ops.ancestor_words(tree.parents))
    assert tree.path_log_probs.tolist() == [-0.25 * depth for depth in range(size)]


@settings(deadline=None, max_examples=40)
@given(shapes, st.data())
def test_subtree_is_the_tree_of_its_nodes(shape: tuple[int, int], data: st.DataObject) -> None:
    seed, size = shape
    tree = random_tree(seed, size, vocabulary=200)
    tree.passes = 3
    wanted = data.draw(st.sets(st.integers(0, size - 1), max_size=6))
    nodes = sorted({0}.union(*(ancestors_or_self(tree.parents.tolist(), node) for node in wanted)))
    part = tree.subtree(torch.tensor(nodes))
    check_structure(part)
    assert (part.size, part.passes) == (len(nodes), 3)
    for name in ("tokens", "depths", "log_probs", "path_log_probs"):
        assert torch.equal(getattr(part, name), getattr(tree, name)[nodes])
    assert [part.path_tokens(node) for node in range(part.size)] == [tree.path_tokens(node) for node in nodes]


@settings(deadline=None, max_examples=40)
@given(shapes, st.data())
def test_subtree_refuses_a_missing_parent(shape: tuple[int, int], data: st.DataObject) -> None:
    seed, size = shape
    tree = random_tree(seed, size + 3, vocabulary=200)
    missing = data.draw(st.sampled_from(sorted(set(tree.parents.tolist()) - {-1})))
    nodes = torch.tensor([node for node in range(len(tree)) if node != missing])
    with pytest.raises(ValueError, match="contain every node's parent"):
        tree.subtree(nodes)


@pytest.mark.parametrize("nodes", [[0, 2, 1], [0, 1, 1], [1, 2]])
def test_subtree_refuses_another_order(nodes: list[int]) -> None:
    tree = TokenTree.root(0, 8)
    tree.add(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3]), torch.zeros(3))
    with pytest.raises(ValueError, match="ascending, start with the root"):
        tree.subtree(torch.tensor(nodes))


def test_the_whole_of_a_full_tree_is_checked_like_any_other_subtree() -> None:
    tree = random_tree(0, 9, vocabulary=20)
    whole = tree.subtree(torch.arange(9))
    for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors"):
        assert torch.equal(getattr(whole, name), getattr(tree, name))
    with pytest.raises(ValueError, match="ascending"):
        tree.subtree(torch.tensor([0, 1, 1, 2, 3, 4, 5, 6, 7]))


def test_capacity_is_an_error_not_a_truncation() -> None:
    tree = TokenTree.root(0, 3)
    nodes = tree.add(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.zeros(2))
    assert nodes.tolist() == [1, 2]
    with pytest.raises(ValueError, match="capacity 3 cannot take 1 nodes more than 3"):
        tree.add(torch.tensor([1]), torch.tensor([3]), torch.zeros(1))
    assert len(tree) == len(tree) == 3
    with pytest.raises(ValueError, match="at least 1 node"):
        TokenTree.root(0, 0)


def test_adding_nothing_adds_nothing() -> None:
    tree = TokenTree.root(5)
    empty = torch.empty(0, dtype=torch.int64)
    assert tree.add(empty, empty, torch.empty(0)).tolist() == []
    assert tree.tokens.tolist() == [5]
    assert tree.subtree(torch.tensor([0])).tokens.tolist() == [5]

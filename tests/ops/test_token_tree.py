"""TokenTree: flat arrays, ancestor bits across word boundaries, subtrees."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.ops import WORD_BITS, Nodes
from specengine.ops.tree import TokenTree, is_down
from tests.examples import examples
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


def check_structure(tree: TokenTree, room: int = 0) -> None:
    """Everything that the class promises of its arrays, recomputed from `parents` and `log_probs`.

    room: trimmed off the tree, whose words of ancestors stay as wide as they were.
    """
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert (parents[0], depths[0], float(tree.path_log_probs[0])) == (-1, 0, 0.0)
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert tree.ancestors.shape[1] == -(-(tree.capacity + room) // WORD_BITS)
    siblings = list(zip(parents, tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    mask = ops.tree_mask(tree.ancestors, len(tree))
    for node in range(len(tree)):
        line = ancestors_or_self(parents, node)
        assert (
            bits(tree.ancestors[node])
            == line
            == set(torch.nonzero(mask[node]).reshape(-1).tolist())
        )
        assert depths[node] == len(line) - 1
        edges = [float(tree.log_probs[ancestor]) for ancestor in line]
        assert math.isclose(
            float(tree.path_log_probs[node]), math.fsum(edges), rel_tol=1e-5, abs_tol=1e-5
        )
        path = [int(tree.tokens[ancestor]) for ancestor in sorted(line)[1:]]
        assert tree.path_tokens(node) == path


@examples(40)
@given(shapes)
def test_structure_of_random_trees(shape: tuple[int, int]) -> None:
    seed, size = shape
    check_structure(random_tree(seed, size, vocabulary=200))


@pytest.mark.parametrize("size", SIZES)
def test_a_chain_sees_all_before_it(size: int) -> None:
    tree = TokenTree.root(7, size)
    for node in range(size - 1):
        tree.add(torch.tensor([node]), torch.tensor([node]), torch.tensor([-0.25]))
    assert torch.equal(
        ops.tree_mask(tree.ancestors, size), torch.ones(size, size, dtype=torch.bool).tril()
    )
    assert torch.equal(tree.ancestors, ops.ancestor_words(tree.parents))
    assert tree.path_log_probs.tolist() == [-0.25 * depth for depth in range(size)]


@examples(40)
@given(shapes, st.data())
def test_a_graft_is_what_adding_one_by_one_gives(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    seed, size = shape
    whole, before = random_tree(seed, size, vocabulary=200), data.draw(st.integers(1, size))
    tree = TokenTree.root(int(whole.tokens[0]), size)
    tree.ancestors.fill_(-1)  # what stands there is undefined
    tree.ancestors[0], tree.ancestors[0, 0] = 0, 1
    for part in (slice(1, before), slice(before, size)):
        entries = [
            getattr(whole, name)[part].tolist() for name in ("parents", "tokens", "log_probs")
        ]
        assert tree.graft(*entries).alive().tolist() == list(range(part.start, part.stop))
    check_structure(tree)  # path log-probabilities too, against sums in float64
    for name in ("tokens", "parents", "depths", "log_probs", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(whole, name))
    with pytest.raises(
        ValueError, match=rf"room for {size} nodes, .* has {size} and cannot take 1 more"
    ):
        tree.graft([0], [999], [-1.0])


@examples(40)
@given(shapes, st.data())
def test_subtree_is_the_tree_of_its_nodes(shape: tuple[int, int], data: st.DataObject) -> None:
    seed, size = shape
    tree = random_tree(seed, size, vocabulary=200)
    tree.passes.fill_(3)
    wanted = data.draw(st.sets(st.integers(0, size - 1), max_size=6))
    nodes = sorted({0}.union(*(ancestors_or_self(tree.parents.tolist(), node) for node in wanted)))
    padding = data.draw(st.integers(0, 70))
    padded = Nodes(
        torch.tensor(nodes + [0] * padding), torch.tensor([len(nodes)], dtype=torch.int32)
    )
    for part in (tree.subtree(Nodes.of(torch.tensor(nodes))), tree.subtree(padded)):
        assert (len(part), int(part.passes), int(part.overflow)) == (len(nodes), 3, 0)
        assert part.capacity in (len(nodes), len(nodes) + padding)
        assert part.parents[len(nodes) :].tolist() == [-1] * (part.capacity - len(nodes))
        assert not part.ancestors[len(nodes) :].any()
        room, part = part.capacity - len(nodes), part.trimmed()
        check_structure(part, room)
        for name in ("tokens", "depths", "log_probs", "path_log_probs"):
            assert torch.equal(getattr(part, name), getattr(tree, name)[nodes])
        assert [part.path_tokens(node) for node in range(len(part))] == [
            tree.path_tokens(node) for node in nodes
        ]


@examples(40)
@given(shapes, st.data())
def test_subtree_refuses_a_missing_parent(shape: tuple[int, int], data: st.DataObject) -> None:
    seed, size = shape
    tree = random_tree(seed, size + 3, vocabulary=200)
    missing = data.draw(st.sampled_from(sorted(set(tree.parents.tolist()) - {-1})))
    nodes = torch.tensor([node for node in range(len(tree)) if node != missing])
    with pytest.raises(ValueError, match="contain every node's parent"):
        tree.subtree(Nodes.of(nodes))


@pytest.mark.parametrize("nodes", [[0, 2, 1], [0, 1, 1], [1, 2]])
def test_subtree_refuses_another_order(nodes: list[int]) -> None:
    tree = TokenTree.root(0, 8)
    tree.add(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.zeros(2))
    tree.add(torch.tensor([1]), torch.tensor([3]), torch.zeros(1))
    with pytest.raises(ValueError, match="ascending, start with the root"):
        tree.subtree(Nodes.of(torch.tensor(nodes)))


def test_the_whole_of_a_full_tree_is_checked_like_any_other_subtree() -> None:
    tree = random_tree(0, 9, vocabulary=20)
    whole = tree.subtree(Nodes.of(torch.arange(9)))
    for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors"):
        assert torch.equal(getattr(whole, name), getattr(tree, name))
    with pytest.raises(ValueError, match="ascending"):
        tree.subtree(Nodes.of(torch.tensor([0, 1, 1, 2, 3, 4, 5, 6, 7])))


def test_capacity_is_an_error_not_a_truncation() -> None:
    tree = TokenTree.root(0, 3)
    nodes = tree.add(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.zeros(2))
    assert nodes.ids.tolist() == nodes.alive().tolist() == [1, 2]
    before = everything(tree)
    with pytest.raises(ValueError, match=r"room for 3 nodes, .* has 3 and cannot take 1 more"):
        tree.add(torch.tensor([1]), torch.tensor([3]), torch.zeros(1))
    assert everything(tree) == before
    assert (len(tree), tree.capacity, int(tree.overflow)) == (3, 3, 0)
    with pytest.raises(ValueError, match="at least 1 node"):
        TokenTree.root(0, 0)


def everything(tree: TokenTree) -> list[list]:
    return [part.tolist() for part in (*tree.arrays, *tree.counters)]


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def test_only_as_many_are_added_as_are_counted() -> None:
    """Padding takes no room, and what it holds does not matter."""
    tree, other = TokenTree.root(0, 4), TokenTree.root(0, 4)
    parents, tokens = torch.tensor([0, 1, 2**62, -5]), torch.tensor([5, 6, 2**62, 7])
    edges = torch.tensor([-1.0, -0.5, math.nan, math.inf])
    found = tree.add(parents[:1], tokens[:1] + 9, edges[:1])
    assert (found.ids.tolist(), int(found.live)) == ([1], 1)
    found = tree.add(parents, tokens, edges, number(2))
    assert (found.ids.tolist(), int(found.live)) == ([2, 3, 0, 0], 2)
    assert found.alive().tolist() == [2, 3]
    other.add(parents[:1], tokens[:1] + 9, edges[:1])
    other.add(parents[:2], tokens[:2], edges[:2])
    check_structure(tree)
    assert everything(tree) == everything(other)
    assert tree.add(parents, tokens, edges, number(0)).alive().tolist() == []
    assert everything(tree) == everything(other)
    with pytest.raises(ValueError, match="among the nodes that are there"):
        TokenTree.root(0, 4).add(parents, tokens, edges, number(2))


def test_adding_nothing_adds_nothing() -> None:
    tree = TokenTree.root(5)
    empty = torch.empty(0, dtype=torch.int64)
    nodes = tree.add(empty, empty, torch.empty(0))
    assert (nodes.ids.tolist(), int(nodes.live)) == ([], 0)
    assert tree.tokens.tolist() == [5]
    assert tree.subtree(Nodes.of(torch.tensor([0]))).tokens.tolist() == [5]


def test_nodes() -> None:
    nodes = Nodes.of(torch.tensor([4, 0, 7]))
    assert (nodes.live.tolist(), nodes.live.dtype) == ([3], torch.int32)
    assert nodes.alive().tolist() == [4, 0, 7]
    assert not nodes.padding().any()
    padded = nodes._replace(live=number(1))
    assert padded.alive().tolist() == [4]
    assert padded.padding().tolist() == [False, True, True]
    assert padded.where(torch.tensor([True])).alive().tolist() == [4]
    none = padded.where(torch.tensor([False]))
    assert (none.alive().tolist(), none.live.dtype) == ([], torch.int32)


def with_room(tree: TokenTree, room: int) -> TokenTree:
    """The same nodes; what stands behind them may be anything."""
    larger = TokenTree(tree.capacity + room)
    for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors"):
        getattr(larger, name).fill_(math.nan if "log" in name else 2**62)
    larger.ancestors[: len(tree)] = 0
    larger.ancestors[: len(tree), : tree.ancestors.shape[1]] = tree.ancestors
    for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs"):
        getattr(larger, name)[: len(tree)] = getattr(tree, name)
    larger.size.fill_(len(tree))
    return larger


@examples(40)
@given(shapes, st.integers(0, 70), st.integers(0, 150), st.one_of(st.none(), st.integers(-2, 150)))
def test_the_best_of_all_are_closed_under_parent(
    shape: tuple[int, int], room: int, most: int, limit: int | None
) -> None:
    seed, size = shape
    tree = with_room(random_tree(seed, size, vocabulary=200), room)
    found = tree.best_of_all(most, None if limit is None else number(limit))
    paths = tree.path_log_probs[:size].tolist()
    wanted = most if limit is None else max(0, min(most, limit))
    expected = sorted(sorted(range(size), key=lambda node: (-paths[node], node))[:wanted])
    assert found.alive().tolist() == expected
    assert found.ids.tolist() == expected + [0] * (most - len(expected))
    if expected:
        assert len(tree.subtree(found)) == len(expected)


@examples(40)
@given(shapes, st.data(), st.integers(0, 12))
def test_scores_and_the_best_of_some_nodes(
    shape: tuple[int, int], data: st.DataObject, most: int
) -> None:
    """In the order in which they are given; padding counts for nothing."""
    seed, size = shape
    tree = with_room(random_tree(seed, size, vocabulary=200), 3)
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=9, unique=True))
    padding = data.draw(st.integers(0, 4))
    nodes = Nodes(torch.tensor(ids + [0] * padding, dtype=torch.int64), number(len(ids)))
    paths = [float(tree.path_log_probs[node]) for node in ids]
    assert tree.scores(nodes).tolist() == paths + [-math.inf] * padding
    places = sorted(sorted(range(len(ids)), key=lambda place: (-paths[place], place))[:most])
    found = tree.best(nodes, most)
    assert found.ids.shape == (most,)
    assert found.alive().tolist() == [ids[place] for place in places]
    assert bool(((found.ids >= 0) & (found.ids < size)).all())


def test_trimmed_is_the_tree_without_its_room() -> None:
    tree = random_tree(3, 70, vocabulary=200)
    assert tree.trimmed() is tree
    larger = with_room(tree, 60)
    trimmed = larger.trimmed()
    assert (trimmed.capacity, len(trimmed)) == (70, 70)
    for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs"):
        assert torch.equal(getattr(trimmed, name), getattr(tree, name))
        assert getattr(trimmed, name).data_ptr() == getattr(larger, name).data_ptr()
    assert torch.equal(trimmed.ancestors[:, :2], tree.ancestors)


def test_a_tree_of_given_arrays() -> None:
    grown = random_tree(5, 66, vocabulary=200)
    arrays = grown.tokens, grown.parents, grown.depths, grown.log_probs, grown.path_log_probs
    tree = TokenTree.of(*arrays, passes=6)
    check_structure(tree)
    assert (len(tree), tree.capacity, int(tree.passes), int(tree.overflow)) == (66, 66, 6, 0)
    assert all(
        number.dtype is torch.int32 and number.shape == (1,) for number in (tree.size, tree.passes)
    )
    with pytest.raises(ValueError, match="earlier node"):
        TokenTree.of(arrays[0], arrays[1] + 1, *arrays[2:])


def test_a_flag_is_known_to_be_down_on_a_cpu() -> None:
    assert is_down(torch.tensor([False]))
    assert not is_down(torch.tensor([True]))
    assert not is_down(torch.tensor([False], device="meta")), (
        "elsewhere nothing is known without waiting"
    )

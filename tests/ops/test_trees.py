"""Trees as words of ancestors, their masks and parts, the walk through them and the rows that it keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.inputs import ancestors_or_self, quick, random_parents, thorough, trees

pytestmark = pytest.mark.usefixtures("backend")

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 256]


class TestAncestorWordsAndTreeMask:
    @given(trees())
    @quick
    def test_against_climbing(self, parents):
        self.check(parents)

    @pytest.mark.parametrize("size", SIZES)
    def test_word_boundaries(self, size):
        for parents in (random_parents(size, 3), list(range(-1, size - 1)), [-1] + [0] * (size - 1)):
            self.check(parents)

    def check(self, parents):
        size = len(parents)
        words = ops.ancestor_words(torch.tensor(parents))
        assert words.dtype == torch.int64
        assert words.shape == (size, -(-size // 64))
        unsigned = [[int(word) & ops.MASK64 for word in row] for row in words]
        mask = ops.tree_mask(words, size)
        assert mask.dtype == torch.bool
        for node in range(size):
            expected = ancestors_or_self(parents, node)
            bits = sum(word << (64 * position) for position, word in enumerate(unsigned[node]))
            assert bits == sum(1 << ancestor for ancestor in expected)
            assert set(mask[node].nonzero()[:, 0].tolist()) == expected

    @given(trees(max_size=70), st.data())
    @quick
    def test_fewer_and_more_columns_than_nodes(self, parents, data):
        words = ops.ancestor_words(torch.tensor(parents))
        columns = data.draw(st.integers(0, 64 * words.shape[1]))
        mask = ops.tree_mask(words, columns)
        square = ops.tree_mask(words, 64 * words.shape[1])
        assert mask.shape == (len(parents), columns)
        assert torch.equal(mask, square[:, :columns])
        assert not square[:, len(parents) :].any()

    def test_strided_inputs(self):
        parents = random_parents(70, 5)
        spread = torch.stack([torch.tensor(parents), torch.full((70,), 99)], 1)[:, 0]
        words = ops.ancestor_words(spread)
        assert torch.equal(words, ops.ancestor_words(torch.tensor(parents)))
        assert torch.equal(ops.tree_mask(words[::3], 70), ops.tree_mask(words, 70)[::3])

    @pytest.mark.parametrize("parents", [[0], [-1, -1], [-1, 1], [-1, 0, 5], [-1, -2], [-2]])
    def test_refuses_what_is_no_tree(self, parents):
        with pytest.raises(InputError, match="parents"):
            ops.ancestor_words(torch.tensor(parents))

    def test_refuses_other_dtypes_and_widths(self):
        with pytest.raises(InputError, match="int64"):
            ops.ancestor_words(torch.tensor([-1, 0], dtype=torch.int32))
        with pytest.raises(InputError, match="int64"):
            ops.tree_mask(torch.zeros(2, 1), 2)
        for columns in (65, -1):
            with pytest.raises(InputError, match="columns"):
                ops.tree_mask(torch.zeros(2, 1, dtype=torch.int64), columns)


class TestAppendNodes:
    @staticmethod
    def tree(capacity):
        words = torch.zeros(capacity, -(-capacity // 64), dtype=torch.int64)
        words[0, 0] = 1
        whole, floats = torch.zeros(3, capacity, dtype=torch.int64), torch.zeros(2, capacity)
        whole[1, 0] = -1
        return (*whole, *floats, words)

    @given(trees(), st.integers(0, 80))
    @thorough
    def test_against_ancestors(self, parents, spare):
        """Level by level, as a level's parents must be there before it."""
        arrays, order, depth = self.tree(len(parents) + spare), [0], {0: 0}
        edges = torch.rand(len(parents), generator=torch.Generator().manual_seed(len(parents)))
        while len(order) < len(parents):
            level = [node for node, parent in enumerate(parents) if parent in depth and node not in depth]
            depth |= {node: depth[parents[node]] + 1 for node in level}
            places = torch.tensor([order.index(parents[node]) for node in level])
            ops.append_nodes(arrays, len(order), places, torch.tensor(level), edges[level])
            order += level
        tokens, _, depths, log_probs, paths, words = (array[: len(order)] for array in arrays)
        assert tokens[1:].tolist() == order[1:]
        assert depths.tolist() == [depth[node] for node in order]
        assert torch.equal(log_probs[1:], edges[order[1:]])
        mask = ops.tree_mask(words, len(parents))
        for place, node in enumerate(order):
            above = sorted(ancestors_or_self(parents, node))
            assert {order[column] for column in mask[place].nonzero()[:, 0].tolist()} == set(above)
            assert float(paths[place]) == pytest.approx(float(edges[above[1:]].sum()), rel=1e-5)

    def test_strided_inputs(self):
        given = torch.tensor([[0, 9], [0, 9]])[:, 0], torch.tensor([[5, 9], [6, 9]])[:, 0], torch.zeros(2, 2)[:, 1]
        arrays = self.tree(3)
        ops.append_nodes(arrays, 1, *given)
        assert arrays[0].tolist() == [0, 5, 6]

    def test_refuses(self, backend):
        arrays, one = self.tree(3), torch.zeros(1, dtype=torch.int64)
        for parents, tokens, edges in ((one, one, torch.zeros(2)), (one, one.int(), torch.zeros(1))):
            with pytest.raises(InputError, match="parents, tokens, log_probs"):
                ops.append_nodes(arrays, 1, parents, tokens, edges)
        with pytest.raises(InputError, match="up to 0 is needed"):
            ops.append_nodes(arrays, 3, one, one, torch.zeros(1))
        if backend == "cpp":
            for wrong in (one - 1, one + 1):
                with pytest.raises(InputError, match="not all among the 1 nodes"):
                    ops.append_nodes(arrays, 1, wrong, one, torch.zeros(1))


class TestSubtree:
    @given(trees(), st.data())
    @thorough
    def test_against_ancestors_among_the_nodes(self, parents, data):
        size = len(parents)
        leaves = data.draw(st.sets(st.integers(0, size - 1), max_size=8))
        nodes = sorted({0}.union(*(ancestors_or_self(parents, leaf) for leaf in leaves)))
        new_parents, words = ops.subtree(torch.tensor(parents), torch.tensor(nodes))
        assert new_parents.dtype == words.dtype == torch.int64
        assert words.shape == (len(nodes), -(-len(nodes) // 64))
        assert new_parents.tolist() == [-1, *(nodes.index(parents[node]) for node in nodes[1:])]
        mask = ops.tree_mask(words, 64 * words.shape[1])
        for place, node in enumerate(nodes):
            seen = {nodes[column] for column in mask[place].nonzero()[:, 0].tolist()}
            assert seen == ancestors_or_self(parents, node)

    @given(trees(max_size=20), st.lists(st.integers(-2, 22), max_size=8))
    @thorough
    def test_refuses_exactly_what_is_no_subtree(self, parents, nodes):
        closed = nodes[:1] == [0] and sorted(set(nodes)) == nodes and nodes[-1] < len(parents)
        if closed and all(parents[node] in nodes for node in nodes[1:]):
            assert len(ops.subtree(torch.tensor(parents), torch.tensor(nodes))[0]) == len(nodes)
        else:
            with pytest.raises(InputError, match="nodes: must be ascending, start with the root and contain every"):
                ops.subtree(torch.tensor(parents), torch.tensor(nodes, dtype=torch.int64))

    def test_strided_inputs(self):
        parents = torch.stack([torch.tensor(random_parents(70, 5)), torch.full((70,), 99)], 1)[:, 0]
        nodes = torch.stack([torch.arange(40), torch.full((40,), 99)], 1)[:, 0]
        expected = ops.subtree(parents.contiguous(), nodes.contiguous())
        assert all(map(torch.equal, ops.subtree(parents, nodes), expected))

    def test_refuses_other_dtypes_and_shapes(self):
        whole = torch.tensor([-1, 0])
        for parents, nodes in ((whole.int(), whole), (whole, whole.int()), (whole[None], whole), (whole, whole[None])):
            with pytest.raises(InputError, match="parents, nodes"):
                ops.subtree(parents, nodes)


class TestWalk:
    @given(trees(), st.data())
    @quick
    def test_against_children_of_each_node(self, parents, data):
        size = len(parents)
        tokens = torch.arange(size) * 3 % 101 + 101 * torch.arange(size)  # distinct
        children = [[node for node in range(size) if parents[node] == parent] for parent in range(size)]
        chosen = torch.full((size,), -1)
        for node in range(size):  # most nodes choose one of their children
            if children[node] and data.draw(st.integers(0, 5)):
                chosen[node] = tokens[data.draw(st.sampled_from(children[node]))]
        path = [0]
        while True:
            following = [node for node in children[path[-1]] if tokens[node] == chosen[path[-1]]]
            if not following:
                break
            path.append(following[0])
        assert ops.walk(tokens, torch.tensor(parents), chosen) == path

    def test_same_token_in_other_branches(self):
        tokens, parents = torch.tensor([9, 5, 6, 6, 5, 6]), torch.tensor([-1, 0, 0, 1, 2, 4])
        assert ops.walk(tokens, parents, torch.tensor([6, 6, 5, 1, 6, 7])) == [0, 2, 4, 5]
        assert ops.walk(tokens, parents, torch.tensor([5, 6, 5, 1, 6, 7])) == [0, 1, 3]
        assert ops.walk(tokens, parents, torch.tensor([9, 6, 5, 1, 6, 7])) == [0]

    def test_root_alone(self):
        assert ops.walk(torch.tensor([4]), torch.tensor([-1]), torch.tensor([4])) == [0]

    def test_refuses(self):
        one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for inputs in ((one, one, two), (one.int(), one, one), (one[:0], one[:0], one[:0])):
            with pytest.raises(InputError, match="tokens, parents, chosen"):
                ops.walk(*inputs)


class TestCompactKV:
    @quick
    @given(
        st.lists(st.integers(1, 30), max_size=8, unique=True),
        st.integers(0, 9),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.booleans(),
    )
    def test_against_a_copy(self, rest, prefix, dtype, contiguous):
        path = [0, *sorted(rest)]
        slab = torch.randn(2, 2, 3, 40, 5).to(dtype)
        if not contiguous:
            slab = slab.transpose(0, 2)
        before = slab.clone()
        ops.compact_kv(slab, prefix, path)
        for slot in range(40):
            inside = 0 <= slot - prefix < len(path)
            source = prefix + path[slot - prefix] if inside else slot
            assert torch.equal(slab[:, :, :, slot], before[:, :, :, source])

    def test_last_slot_of_the_slab(self):
        slab = torch.randn(1, 2, 1, 8, 2)
        expected = slab[:, :, :, 7].clone()
        ops.compact_kv(slab, 4, [0, 3])
        assert torch.equal(slab[:, :, :, 5], expected)

    @pytest.mark.parametrize("path", [[], [1], [0, 2, 2], [0, 3, 1], [0, 40], [0, 35]])
    def test_refuses(self, path):
        slab = torch.randn(1, 2, 1, 40, 2)
        before = slab.clone()
        with pytest.raises(InputError, match="path"):
            ops.compact_kv(slab, 5, path)
        assert torch.equal(slab, before)

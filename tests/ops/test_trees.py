"""Trees as words of ancestors, their masks, how they grow, and their parts."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from specengine.ops import Nodes
from tests.ops.inputs import (
    HUGE,
    NAN,
    ancestors_or_self,
    count,
    poisoned,
    quick,
    random_parents,
    thorough,
    trees,
)

pytestmark = pytest.mark.usefixtures("backend")

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 256]


class TestAncestorWordsAndTreeMask:
    @given(trees())
    @quick
    def test_against_climbing(self, parents):
        self.check(parents)

    @pytest.mark.parametrize("size", SIZES)
    def test_word_boundaries(self, size):
        for parents in (
            random_parents(size, 3),
            list(range(-1, size - 1)),
            [-1] + [0] * (size - 1),
        ):
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


class Arrays(NamedTuple):
    """A tree's arrays, huge or NaN behind the root, with its size and the flag of its overflow."""

    arrays: tuple
    size: torch.Tensor
    overflow: torch.Tensor

    @classmethod
    def root(cls, capacity):
        words = torch.full((capacity, -(-capacity // 64)), HUGE)
        words[0] = 0
        words[0, 0] = 1
        whole, floats = torch.full((3, capacity), HUGE), torch.full((2, capacity), NAN)
        whole[:, 0], floats[:, 0] = torch.tensor([0, -1, 0]), 0.0
        return cls((*whole, *floats, words), count(1), count(0))

    @property
    def counters(self):
        return self.size, count(0), self.overflow

    def append(self, parents, tokens, edges, live):
        return ops.append_nodes(
            self.arrays, self.size, parents, tokens, edges, count(live), self.overflow
        )

    def state(self):
        return [
            array.view(torch.int32).tolist() for array in (*self.arrays, self.size, self.overflow)
        ]


class TestAppendNodes:
    @given(trees(), st.integers(0, 80), st.integers(0, 3))
    @thorough
    def test_against_ancestors(self, parents, spare, padding):
        """Level by level, as a level's parents must be there before it; padding is not read."""
        tree, order, depth = Arrays.root(len(parents) + spare), [0], {0: 0}
        edges = torch.rand(len(parents), generator=torch.Generator().manual_seed(len(parents)))
        while len(order) < len(parents):
            level = [
                node for node, parent in enumerate(parents) if parent in depth and node not in depth
            ]
            depth |= {node: depth[parents[node]] + 1 for node in level}
            places = torch.tensor([order.index(parents[node]) for node in level])
            given = (
                poisoned(part, padding) for part in (places, torch.tensor(level), edges[level])
            )
            ids = tree.append(*given, len(level))
            assert ids.dtype == torch.int64
            assert ids.tolist() == [*range(len(order), len(order) + len(level)), *[0] * padding]
            order += level
            assert (int(tree.size), int(tree.overflow)) == (len(order), 0)
        tokens, above, depths, log_probs, paths, words = (
            array[: len(order)] for array in tree.arrays
        )
        assert tokens[1:].tolist() == order[1:]
        assert above.tolist() == [-1, *(order.index(parents[node]) for node in order[1:])]
        assert depths.tolist() == [depth[node] for node in order]
        assert torch.equal(log_probs[1:], edges[order[1:]])
        mask = ops.tree_mask(words, 64 * words.shape[1])
        for place, node in enumerate(order):
            line = sorted(ancestors_or_self(parents, node))
            assert sorted(mask[place].nonzero()[:, 0].tolist()) == sorted(map(order.index, line))
            assert float(paths[place]) == pytest.approx(float(edges[line[1:]].sum()), rel=1e-5)
        behind = [array[len(order) :].view(torch.int32).tolist() for array in tree.arrays]
        untouched = Arrays.root(len(parents) + spare).arrays
        assert behind == [array[len(order) :].view(torch.int32).tolist() for array in untouched], (
            "nothing behind them"
        )

    @given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 9), st.integers(0, 9))
    @thorough
    def test_overflow(self, capacity, size, padding, beyond):
        """Refused as a whole, which the flag says; what fits comes in, also where padding would not."""
        size = min(size, capacity)
        tree, room = Arrays.root(capacity), capacity - size
        first = torch.zeros(size - 1, dtype=torch.int64)
        tree.append(first, first, torch.zeros(size - 1), size - 1)
        before, found = tree.state(), room + beyond
        given = torch.zeros(found, dtype=torch.int64), torch.arange(found), -torch.ones(found)
        ids = tree.append(*(poisoned(part, padding) for part in given), found)
        if not beyond:
            assert ids.tolist() == [*range(size, capacity), *[0] * padding]
            assert (int(tree.size), int(tree.overflow)) == (capacity, 0)
            return
        assert ids.tolist() == [0] * (found + padding)
        assert int(tree.overflow) == 1
        tree.overflow.zero_()
        assert tree.state() == before
        tree.overflow.fill_(1)
        tree.append(*(part[:0] for part in given), 0)
        assert int(tree.overflow) == 1, "what was refused before is not forgotten"

    def test_words_beyond_the_first(self):
        tree = Arrays.root(200)
        for node in range(199):
            tree.append(torch.tensor([node]), torch.tensor([node]), torch.zeros(1), 1)
        assert torch.equal(tree.arrays[-1], ops.ancestor_words(tree.arrays[1]))

    def test_nothing(self):
        tree = Arrays.root(3)
        before = tree.state()
        assert tree.append(*(torch.zeros(0, dtype=torch.int64),) * 2, torch.zeros(0), 0).shape == (
            0,
        )
        for padding in (1, 5):  # of all kinds, and more than the room
            nothing = torch.full((padding,), HUGE)
            assert (
                tree.append(nothing, nothing, torch.full((padding,), NAN), 0).tolist()
                == [0] * padding
            )
        assert tree.state() == before

    def test_strided_inputs(self):
        given = (
            torch.tensor([[0, 9], [0, 9]])[:, 0],
            torch.tensor([[5, 9], [6, 9]])[:, 0],
            torch.zeros(2, 2)[:, 1],
        )
        tree = Arrays.root(3)
        assert tree.append(*given, 2).tolist() == [1, 2]
        assert tree.arrays[0].tolist() == [0, 5, 6]

    def test_refuses(self):
        tree, one = Arrays.root(3), torch.zeros(1, dtype=torch.int64)
        for parents, tokens, edges in (
            (one, one, torch.zeros(2)),
            (one, one.int(), torch.zeros(1)),
            (one, one, torch.zeros(1).double()),
            (one[None], one[None], torch.zeros(1, 1)),
        ):
            with pytest.raises(InputError, match=r"^(parents|tokens|log_probs): got"):
                tree.append(parents, tokens, edges, 1)
        for name in ("size", "overflow"):
            with pytest.raises(InputError, match=f"^{name}: got"):
                tree._replace(**{name: one}).append(one, one, torch.zeros(1), 1)
        before = tree.state()
        for wrong in (-1, 1, 2, HUGE):
            with pytest.raises(InputError, match="parents: must be among the nodes that are there"):
                tree.append(torch.tensor([0, wrong]), torch.tensor([1, 2]), torch.zeros(2), 2)
            assert tree.state() == before


class TestAppendChildren:
    def hang(self, tree, frontier, **options):
        """Two children each, of the tokens 10, 11, 12 and so on."""
        tokens = 10 + torch.arange(2 * len(frontier.ids)).view(-1, 2)
        found = ops.append_children(
            tree.arrays, tree.counters, frontier, tokens, -tokens.float() / 8, **options
        )
        size = int(tree.size)
        return found, list(
            zip(tree.arrays[1][1:size].tolist(), tree.arrays[0][1:size].tolist(), strict=True)
        )

    def test_parent_by_parent_and_of_the_chosen_the_first(self, backend):
        frontier = Nodes(torch.tensor([0, 0, HUGE]), count(2))
        chosen = torch.tensor([[False, True], [True, True], [True, True]])
        for options, tokens in (
            ({}, [10, 11, 12, 13]),
            ({"chosen": chosen}, [11, 12, 13]),
            ({"chosen": chosen, "most": 2}, [11, 12]),
            ({"chosen": chosen, "limit": count(1)}, [11]),
            ({"most": 3}, [10, 11, 12]),
            ({"limit": count(-1)}, []),
        ):
            tree = Arrays.root(9)
            found, nodes = self.hang(tree, frontier, **options)
            assert nodes == [(0, token) for token in tokens]
            assert found.ids.tolist() == [
                *range(1, 1 + len(tokens)),
                *[0] * (options.get("most", 6) - len(tokens)),
            ]
            assert int(found.live) == len(tokens)
            assert tree.arrays[3][1 : 1 + len(tokens)].tolist() == [-token / 8 for token in tokens]

    def test_where_there_is_no_room_nothing_is_written_and_the_count_says_what_was_found(
        self, backend
    ):
        tree = Arrays.root(2)
        found, nodes = self.hang(tree, Nodes.of(torch.zeros(1, dtype=torch.int64)))
        assert (int(found.live), nodes, int(tree.overflow), int(tree.size)) == (2, [], 1, 1)

    def test_refuses_parents_that_are_not_there_and_other_shapes(self, backend):
        with pytest.raises(InputError, match="among the nodes"):
            self.hang(Arrays.root(9), Nodes.of(torch.ones(1, dtype=torch.int64)))
        tree, one = Arrays.root(9), torch.zeros(1, dtype=torch.int64)
        with pytest.raises(InputError, match=r"^tokens: got"):
            ops.append_children(tree.arrays, tree.counters, Nodes.of(one), one, one.float())
        with pytest.raises(InputError, match="chosen"):
            self.hang(
                Arrays.root(9),
                Nodes.of(torch.zeros(1, dtype=torch.int64)),
                chosen=torch.ones(1, 3) > 0,
            )


class TestSubtree:
    @given(trees(), st.data())
    @thorough
    def test_against_ancestors_among_the_nodes(self, parents, data):
        size = len(parents)
        leaves = data.draw(st.sets(st.integers(0, size - 1), max_size=8))
        nodes = sorted({0}.union(*(ancestors_or_self(parents, leaf) for leaf in leaves)))
        padding = data.draw(st.one_of(st.just(0), st.integers(0, 70)).map(lambda n: [size - 1] * n))
        known = ops.ancestor_words(torch.tensor(parents))
        behind = data.draw(st.sampled_from([0, 1, 70]))
        above, words = poisoned(torch.tensor(parents), behind), poisoned(known, behind)
        new_parents, words = ops.subtree(
            above, words, torch.tensor(nodes + padding), count(len(nodes))
        )
        assert new_parents.dtype == words.dtype == torch.int64
        assert words.shape == (len(nodes) + len(padding), -(-(len(nodes) + len(padding)) // 64))
        places = [-1, *(nodes.index(parents[node]) for node in nodes[1:])]
        assert new_parents.tolist() == places + [-1] * len(padding)
        mask = ops.tree_mask(words, 64 * words.shape[1])
        for place, node in enumerate(nodes):
            seen = {nodes[column] for column in mask[place].nonzero()[:, 0].tolist()}
            assert seen == ancestors_or_self(parents, node)
        assert not mask[len(nodes) :].any()

    @given(trees(max_size=20), st.lists(st.integers(-2, 22), max_size=8), st.integers(0, 2))
    @thorough
    def test_refuses_exactly_what_is_no_subtree(self, parents, nodes, padding):
        closed = nodes[:1] == [0] and sorted(set(nodes)) == nodes and nodes[-1] < len(parents)
        above = torch.tensor(parents)
        wanted = torch.tensor(nodes + [0] * padding, dtype=torch.int64)
        given = above, ops.ancestor_words(above), wanted, count(len(nodes))
        if closed and all(parents[node] in nodes for node in nodes[1:]):
            assert len(ops.subtree(*given)[0]) == len(wanted)
        else:
            with pytest.raises(
                InputError, match="nodes: must be ascending, start with the root and contain every"
            ):
                ops.subtree(*given)

    def test_strided_inputs(self):
        parents = torch.stack([torch.tensor(random_parents(70, 5)), torch.full((70,), 99)], 1)[:, 0]
        nodes = torch.stack([torch.arange(40), torch.full((40,), 99)], 1)[:, 0]
        words = ops.ancestor_words(parents)
        expected = ops.subtree(parents.contiguous(), words, nodes.contiguous(), count(40))
        spread = torch.stack([words, words], 2)[..., 0]
        assert all(map(torch.equal, ops.subtree(parents, spread, nodes, count(40)), expected))

    def test_refuses_other_dtypes_and_shapes(self):
        whole, live = torch.tensor([-1, 0]), count(1)
        words = torch.zeros(2, 1, dtype=torch.int64)
        for wrong in (
            (whole.int(), words, whole, live),
            (whole, words.int(), whole, live),
            (whole, words, whole.int(), live),
            (whole, words, whole[None], live),
            (whole[None], words, whole, live),
            (whole, whole, whole, live),
            (whole, words, whole, live.long()),
        ):
            with pytest.raises(InputError, match=r"^(parents|ancestors|nodes|live): got"):
                ops.subtree(*wrong)

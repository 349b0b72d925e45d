"""The way down a tree that the target's choices take, and what is kept of the rows on it and gathered for the next."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.inputs import count, poisoned, quick, thorough, trees

pytestmark = pytest.mark.usefixtures("backend")


@st.composite
def choices(draw):
    """Tokens, parents and what was chosen after each node: mostly a child, at times nothing, or what none carries."""
    parents = draw(trees())
    size = len(parents)
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    tokens = torch.full((size,), 0)
    for parent in range(size):  # siblings differ, cousins need not
        children = [node for node in range(size) if parents[node] == parent]
        tokens[children] = torch.from_numpy(random.permutation(len(children) + 2)[: len(children)])
    chosen = torch.from_numpy(random.integers(0, 4, size))
    for node in range(1, size):
        if random.random() < 0.7:
            chosen[parents[node]] = tokens[node]
    chosen[torch.from_numpy(random.random(size) < draw(st.sampled_from([0.0, 0.0, 0.1])))] = -1
    return tokens, torch.tensor(parents), chosen


def way_down(tokens, parents, chosen):
    """The path, and the token chosen at its end."""
    tokens, parents, chosen = tokens.tolist(), parents.tolist(), chosen.tolist()
    if chosen[0] < 0:
        return [], -1
    path = [0]
    while True:
        following = [
            node
            for node, parent in enumerate(parents)
            if parent == path[-1] and tokens[node] == chosen[path[-1]] and chosen[node] >= 0
        ]
        if not following:
            return path, chosen[path[-1]]
        path += following


class TestWalk:
    @given(choices(), st.integers(0, 70))
    @thorough
    def test_against_children_of_each_node(self, given, padding):
        path, bonus = way_down(*given)
        tokens, parents, chosen = given
        padded = (
            poisoned(tokens, padding),
            torch.cat([parents, torch.full((padding,), -1)]),
            poisoned(chosen, padding),
        )
        found = ops.walk(*padded, count(len(tokens)))
        assert [part.dtype for part in found] == [torch.int64, torch.int32, torch.int64]
        assert found.nodes.tolist() == path + [0] * (len(tokens) + padding - len(path))
        assert (found.live.tolist(), found.bonus.tolist()) == ([len(path)], [bonus])

    def test_children_in_padding_are_not_entered(self):
        tokens, parents, chosen = (
            torch.tensor([9, 5, 6]),
            torch.tensor([-1, 0, 1]),
            torch.tensor([5, 6, 7]),
        )
        for size, path, bonus in ((1, [0], 5), (2, [0, 1], 6), (3, [0, 1, 2], 7)):
            found = ops.walk(tokens, parents, chosen, count(size))
            assert found.nodes[:size].tolist() == path
            assert (int(found.live), int(found.bonus)) == (size, bonus)

    def test_same_token_in_other_branches(self):
        tokens, parents = torch.tensor([9, 5, 6, 6, 5, 6]), torch.tensor([-1, 0, 0, 1, 2, 4])
        for chosen, path in (
            ([6, 6, 5, 1, 6, 7], [0, 2, 4, 5]),
            ([5, 6, 5, 1, 6, 7], [0, 1, 3]),
            ([9] * 6, [0]),
        ):
            assert ops.walk(tokens, parents, torch.tensor(chosen), count(6)).nodes.tolist()[
                : len(path) + 1
            ] == [
                *path,
                *[0] * (len(path) < 6),
            ]

    def test_strided_inputs(self):
        wide = torch.tensor([[9, -1, 5], [5, 0, 6], [6, 1, 7]])
        found = ops.walk(*wide.unbind(1), count(3))
        assert (found.nodes.tolist(), int(found.bonus)) == ([0, 1, 2], 7)

    def test_refuses(self):
        one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for inputs in (
            (one, one, two, count(1)),
            (one, one, one, one),
            (one[None], one[None], one[None], count(1)),
        ):
            with pytest.raises(InputError, match=r"^(tokens|parents|chosen|size): got"):
                ops.walk(*inputs)


class TestCompactKV:
    @thorough
    @given(
        st.integers(0, 10),
        st.lists(st.integers(1, 30), max_size=8, unique=True),
        st.integers(0, 9),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.booleans(),
        st.booleans(),
    )
    def test_against_a_copy(self, padding, rest, prefix, dtype, contiguous, nothing):
        """What stands behind the path, as far as the padding goes, is scratch."""
        path = [] if nothing else [0, *sorted(rest)]
        slab = torch.randn(2, 2, 3, 50, 5).to(dtype)
        if not contiguous:
            slab = slab.transpose(0, 2)
        before = slab.clone()
        ops.compact_kv(
            slab,
            poisoned(torch.tensor(path, dtype=torch.int64), padding),
            count(len(path)),
            count(prefix),
        )
        for slot in {*range(50)} - {*range(prefix + len(path), prefix + len(path) + padding)}:
            inside = 0 <= slot - prefix < len(path)
            source = prefix + path[slot - prefix] if inside else slot
            assert torch.equal(slab[:, :, :, slot], before[:, :, :, source])

    def test_last_slot_of_the_slab(self):
        slab = torch.randn(1, 2, 1, 8, 2)
        expected = slab[:, :, :, 7].clone()
        ops.compact_kv(slab, torch.tensor([0, 3]), count(2), count(4))
        assert torch.equal(slab[:, :, :, 5], expected)

    @pytest.mark.parametrize("path", [[1], [0, 2, 2], [0, 3, 1], [0, 40], [0, 35]])
    def test_refuses_other_paths(self, path):
        slab = torch.randn(1, 2, 1, 40, 2)
        before = slab.clone()
        with pytest.raises(InputError, match="path"):
            ops.compact_kv(slab, torch.tensor(path), count(len(path)), count(5))
        assert torch.equal(slab, before)

    def test_refuses(self):
        slab, path = torch.zeros(1, 2, 1, 8, 2), torch.zeros(2, dtype=torch.int64)
        for wrong in (
            (slab[0], path, count(1), count(1)),
            (slab, path.int(), count(1), count(1)),
            (slab, path[None], count(1), count(1)),
            (slab, path, path[:1], count(1)),
            (slab, path, count(1), path[:1]),
        ):
            with pytest.raises(InputError, match=r"^(slab|path|count|prefix): got"):
                ops.compact_kv(*wrong)


class TestGatherRows:
    @quick
    @given(
        st.integers(0, 9),
        st.integers(1, 20),
        st.integers(1, 20),
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def test_against_indexing(self, rows, channels, own, dtype):
        random = torch.Generator().manual_seed(rows)
        states, table = (
            torch.randn(n, 2 * c, generator=random).to(dtype)[:, ::2]
            for n, c in ((7, channels), (11, own))
        )
        sources, tokens = (torch.randint(n, (rows,), generator=random) for n in (7, 11))
        found = ops.gather_rows(states, sources, table, tokens)
        assert [part.shape for part in found] == [(rows, channels), (rows, own)]
        for row, (source, token) in enumerate(zip(sources.tolist(), tokens.tolist(), strict=True)):
            assert torch.equal(found[0][row], states[source])
            assert torch.equal(found[1][row], table[token])

    def test_refuses(self):
        rows, one, two = (
            torch.zeros(3, 4),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
        )
        for sources, tokens in (
            (one, two),
            (one.int(), one),
            (one, one.int()),
            (one[None], one[None]),
        ):
            with pytest.raises(InputError, match=r"^(sources|tokens): got"):
                ops.gather_rows(rows, sources, rows, tokens)

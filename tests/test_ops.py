"""Each op: every backend against brute force written out in Python or float64."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from specengine import ops
from specengine.errors import BackendError, InputError

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 256]
NAN, INF = math.nan, math.inf

quick = settings(deadline=None, max_examples=60, derandomize=True)
thorough = settings(quick, max_examples=150)


def built() -> bool:
    return "cpp" in ops.backends("cpu")["walk"].available


@pytest.fixture(scope="module", params=["reference", "cpp"], autouse=True)
def backend(request):
    if request.param == "cpp" and not built():
        pytest.skip("specengine._expander is not built (pip install -e .)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.VARIABLE, request.param)
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def poisoned_buffers():
    """Fresh tensors hold NaN or the largest integer, so that an output that is not written shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@st.composite
def trees(draw, max_size=140):
    size = draw(st.one_of(st.integers(1, 12), st.integers(60, 70), st.integers(1, max_size)))
    kind = draw(st.sampled_from(["random", "chain", "star"]))
    if kind == "chain":
        return list(range(-1, size - 1))
    if kind == "star":
        return [-1] + [0] * (size - 1)
    seed = draw(st.integers(0, 10**6))
    return random_parents(size, seed)


def random_parents(size, seed):
    generator = np.random.default_rng(seed)
    return [-1] + [int(generator.integers(0, node)) for node in range(1, size)]


def ancestors_or_self(parents, node):
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


# Values that tie often, and the special ones.
scores = st.one_of(st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, -INF]), st.floats(-30, 0, width=32))
any_scores = st.one_of(scores, st.sampled_from([NAN, INF, -INF, 3.4e38, -3.4e38]), st.floats(-60, 60, width=32))


def test_fresh_buffers_are_poisoned():
    assert torch.empty(4).isnan().all()


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


class TestSelectBest:
    @given(st.lists(scores, max_size=90), st.integers(0, 100))
    @quick
    def test_against_sorting(self, values, count):
        order = sorted((i for i in range(len(values)) if values[i] > -INF), key=lambda i: (-values[i], i))
        selected = ops.select_best(torch.tensor(values, dtype=torch.float32), count)
        assert selected.dtype == torch.int64
        assert selected.tolist() == sorted(order[:count])

    @given(trees(), st.integers(1, 140), st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
    @quick
    def test_path_log_probs_are_closed_under_parent(self, parents, count, seed, coarseness):
        edges = -np.random.default_rng(seed).exponential(size=len(parents)).astype(np.float32)
        if coarseness:
            edges = np.round(edges) * np.float32(coarseness)  # edges of 0: children tie with their parents
        path = np.zeros(len(parents), dtype=np.float32)
        for node in range(1, len(parents)):
            path[node] = path[parents[node]] + edges[node]
        selected = ops.select_best(torch.from_numpy(path), count).tolist()
        assert selected[0] == 0
        assert all(parents[node] in selected for node in selected[1:])

    def test_equal_values_are_taken_in_order(self):
        """The reason for the op: of equal values, topk keeps whichever it likes."""
        assert ops.select_best(torch.zeros(700), 60).tolist() == list(range(60))

    def test_refuses(self):
        with pytest.raises(InputError, match="NaN"):
            ops.select_best(torch.tensor([0.0, NAN]), 1)
        with pytest.raises(InputError, match="count"):
            ops.select_best(torch.zeros(2), -1)
        with pytest.raises(InputError, match="float32"):
            ops.select_best(torch.zeros(2, dtype=torch.float64), 1)


def brute_top_children(row, k, normalized):
    """Columns and float64 log-probabilities of the k best of one row of float32 values."""
    values = [-INF if math.isnan(value) else min(value, float(np.float32(3e38))) for value in row]
    columns = sorted(range(len(values)), key=lambda column: (-values[column], column))[:k]
    if normalized or values[columns[0]] == -INF:
        return columns, [values[column] for column in columns]
    peak = values[columns[0]]
    log_sum = math.log(math.fsum(math.exp(value - peak) for value in values))
    return columns, [values[column] - peak - log_sum for column in columns]


class TestTopChildren:
    @given(st.data(), st.integers(1, 3), st.integers(1, 12), st.booleans())
    @thorough
    def test_against_sorting(self, data, rows, k, normalized):
        columns = data.draw(st.integers(1, 40))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
        row = st.lists(any_scores, min_size=columns, max_size=columns)
        self.check(torch.tensor([data.draw(row) for _ in range(rows)]).to(dtype), k, normalized)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("columns", [255, 256, 257, 4099, 49157])
    @pytest.mark.parametrize("normalized", [False, True])
    def test_long_rows(self, dtype, columns, normalized):
        logits = 3 * torch.randn(2, columns, generator=torch.Generator().manual_seed(columns))
        logits[0, ::7] = -INF
        logits[1] = logits[1].round()  # thousands of ties
        logits[1, ::11] = NAN
        for k in (1, 10, 200):
            self.check(logits.to(dtype), k, normalized)

    @pytest.mark.parametrize("value", [0.0, -1e30, 80.0, -INF, NAN, INF])
    def test_constant_rows_give_the_first_columns(self, value):
        self.check(torch.full((2, 1000), value), 10, False)

    def test_winners_in_the_last_partial_block(self):
        logits = torch.zeros(1, 2 * 256 + 3)
        logits[0, -3:] = torch.tensor([5.0, 7.0, 5.0])
        assert ops.top_children(logits, 3)[1].tolist() == [[513, 512, 514]]

    def test_strided_rows_and_columns(self):
        wide = torch.randn(6, 600, generator=torch.Generator().manual_seed(0))
        for view in (wide[:, 17:400], wide[::2], wide.T, wide.half().T, wide.bfloat16()[1::2, 5:]):
            log_probs, columns = ops.top_children(view, 5)
            expected_log_probs, expected_columns = ops.top_children(view.contiguous(), 5)
            assert torch.equal(columns, expected_columns)
            torch.testing.assert_close(log_probs, expected_log_probs)  # torch sums strided rows in another order

    def test_k_is_clipped_and_no_rows_are_fine(self):
        log_probs, columns = ops.top_children(torch.zeros(2, 3), 10)
        assert columns.tolist() == [[0, 1, 2]] * 2
        torch.testing.assert_close(log_probs, torch.full((2, 3), -math.log(3)))
        assert ops.top_children(torch.zeros(0, 3), 2)[1].shape == (0, 2)

    def test_refuses(self):
        for logits, k in ((torch.zeros(2, 3), 0), (torch.zeros(2, 0), 1)):
            with pytest.raises(InputError, match="k: got"):
                ops.top_children(logits, k)
        with pytest.raises(InputError, match="logits"):
            ops.top_children(torch.zeros(3), 1)
        with pytest.raises(InputError, match="logits"):
            ops.top_children(torch.zeros(2, 3, dtype=torch.float64), 1)

    def check(self, logits, k, normalized):
        log_probs, columns = ops.top_children(logits, k, normalized=normalized)
        k = min(k, logits.shape[1])
        assert log_probs.dtype == torch.float32
        assert log_probs.shape == columns.shape == (logits.shape[0], k)
        for row, got_log_probs, got_columns in zip(
            logits.float().tolist(), log_probs.tolist(), columns.tolist(), strict=True
        ):
            expected_columns, expected = brute_top_children(row, k, normalized)
            assert got_columns == expected_columns
            expected = torch.tensor(expected, dtype=torch.float64).float().tolist()  # -inf where it leaves float32
            assert got_log_probs == pytest.approx(expected, rel=1e-6, abs=2e-6)


def plain_philox(counter, key):
    """Philox4x32-10 in Python integers, written from the paper's definition."""
    counter, key, low = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & low, (first >> 32) ^ counter[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def plain_gumbel_sums(values, seed, position):
    sums = []
    for i, value in enumerate(values):
        counter = (i // 4, position & 0xFFFFFFFF, position >> 32, 0)
        uniform = (plain_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[i % 4] + 0.5) / 2**32
        value = -INF if math.isnan(value) else min(float(np.float32(value)), float(np.float32(3e38)))
        sums.append(value - math.log(-math.log(uniform)))
    return sums


words64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "words"),
        [  # known answers that come with Random123
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_known_answers(self, counter, key, words):
        assert plain_philox(counter, key) == words
        got = ops.philox4x32(tuple(torch.tensor([word]) for word in counter), tuple(key))
        assert [int(word) for word in got] == words

    @given(words64, words64, st.integers(0, 30))
    @quick
    def test_uniforms(self, seed, position, count):
        expected = []
        for i in range(count):
            counter = (i // 4, position & 0xFFFFFFFF, position >> 32, 0)
            expected.append((plain_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[i % 4] + 0.5) / 2**32)
        uniforms = ops.philox_uniform(seed, position, count)
        assert uniforms.dtype == torch.float64
        assert uniforms.tolist() == expected


class TestKeyedGumbelArgmax:
    @given(st.lists(any_scores, min_size=1, max_size=70), words64, words64)
    @thorough
    def test_against_plain_python(self, values, seed, position):
        sums = plain_gumbel_sums(values, seed, position)
        if max(sums) == -INF:
            with pytest.raises(InputError, match="none is finite"):
                ops.keyed_gumbel_argmax(torch.tensor(values), seed, position)
        else:
            assert ops.keyed_gumbel_argmax(torch.tensor(values), seed, position) == sums.index(max(sums))

    @pytest.mark.parametrize("size", [255, 256, 257, 1023, 5003])
    @pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 40.0, 1e6])
    def test_long_rows(self, size, spread):
        generator = torch.Generator().manual_seed(size)
        for position in range(4):
            values = spread * torch.randn(size, generator=generator)
            values[::5] = -INF
            noise = -(-ops.philox_uniform(7, position, size).log()).log()
            assert ops.keyed_gumbel_argmax(values, 7, position) == int((values.double() + noise).argmax())

    def test_seed_and_position_are_taken_modulo_two_to_the_64(self):
        values = torch.zeros(500)
        draw = ops.keyed_gumbel_argmax(values, 5, 9)
        assert ops.keyed_gumbel_argmax(values, 5 - 2**64, 9 + 2**64) == draw
        others = {ops.keyed_gumbel_argmax(values, 5 + (1 << 32), 9), ops.keyed_gumbel_argmax(values, 5, 9 + (1 << 32))}
        assert draw not in others

    def test_strided_scores(self):
        wide = torch.randn(300, 2, generator=torch.Generator().manual_seed(2))
        assert ops.keyed_gumbel_argmax(wide[:, 1], 1, 1) == ops.keyed_gumbel_argmax(wide[:, 1].contiguous(), 1, 1)

    def test_infinite_scores(self):
        assert ops.keyed_gumbel_argmax(torch.tensor([0.0, INF, NAN, INF]), 1, 1) == 1
        assert ops.keyed_gumbel_argmax(torch.tensor([-INF, NAN, -9e9, -INF]), 1, 1) == 2

    def test_draws_follow_the_softmax(self):
        values = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -INF, 0.5])
        assert chi_square_p_value(values, values) > 1e-3

    def test_the_check_above_sees_another_temperature(self):
        values = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -INF, 0.5])
        assert chi_square_p_value(values, values / 1.15) < 1e-6

    def test_neighbouring_positions_are_independent(self):
        values = torch.zeros(4)
        draws = [ops.keyed_gumbel_argmax(values, 3, position) for position in range(4001)]
        pairs = np.zeros((4, 4))
        np.add.at(pairs, (draws[:-1], draws[1:]), 1)
        statistic = ((pairs - 250) ** 2 / 250).sum()
        assert chi2.sf(statistic, 15) > 1e-3

    def test_refuses(self):
        with pytest.raises(InputError, match="float32"):
            ops.keyed_gumbel_argmax(torch.zeros(2, dtype=torch.float64), 1, 1)
        with pytest.raises(ValueError, match="none is finite"):
            ops.keyed_gumbel_argmax(torch.zeros(0), 1, 1)


def chi_square_p_value(values, expected_values, draws=4000):
    counts = np.bincount(
        [ops.keyed_gumbel_argmax(values, 11, position) for position in range(draws)], minlength=len(values)
    )
    expected = draws * torch.softmax(expected_values.double(), 0).numpy()
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return chi2.sf(statistic, possible.sum() - 1)


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


def exact_attention(query, key, value, mask, scale):
    groups = query.shape[0] // key.shape[0]
    query, key, value = query.double(), key.double().repeat_interleave(groups, 0), value.double()
    weights = query @ key.transpose(1, 2) * scale
    if mask is not None:
        weights = weights.masked_fill(~mask, -INF)
    return torch.softmax(weights, -1).nan_to_num(0.0) @ value.repeat_interleave(groups, 0)


LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative Frobenius norm


class TestTreeAttention:
    @pytest.mark.parametrize("dtype", list(LIMITS))
    @pytest.mark.parametrize(("heads", "groups"), [(3, 3), (2, 1), (1, 4), (2, 7)])
    @pytest.mark.parametrize(("rows", "prefix"), [(1, 0), (1, 300), (2, 5), (16, 333), (65, 0), (64, 129)])
    def test_against_float64(self, dtype, heads, groups, rows, prefix):
        generator = torch.Generator().manual_seed(rows + prefix)
        slots = prefix + rows
        slab = torch.randn(2, heads, slots + 7, 64, generator=generator).to(dtype)
        slab[:, :, slots:] = NAN  # beyond the tree; must not leak
        key, value = slab[0, :, :slots], slab[1, :, :slots]
        query = torch.randn(rows, heads * groups, 64, generator=generator).to(dtype).transpose(0, 1)
        mask = torch.ones(rows, slots, dtype=torch.bool)
        mask[:, prefix:] = ops.tree_mask(ops.ancestor_words(torch.tensor(random_parents(rows, 1))), rows)
        expected = exact_attention(query, key, value, mask, 0.125)
        forms = [mask, mask.repeat(groups, 1), ops.pack_mask(mask, groups, dtype)]
        for form in forms + ([None] if rows == 1 else []):
            out = ops.tree_attention(query, key, value, form, 0.125)
            assert out.shape == query.shape
            assert out.dtype == dtype
            assert (out.double() - expected).norm() <= LIMITS[dtype] * expected.norm()

    def test_the_limit_sees_one_wrong_mask_bit(self):
        query, key = torch.randn(2, 4, 64), torch.randn(1, 40, 64)
        mask = torch.ones(4, 40, dtype=torch.bool)
        wrong = mask.clone()
        wrong[2, 30] = False
        expected = exact_attention(query, key, key, mask, 0.125)
        out = ops.tree_attention(query, key, key, wrong, 0.125)
        assert (out.double() - expected).norm() > LIMITS[torch.float32] * expected.norm()

    @pytest.mark.parametrize("dtype", list(LIMITS))
    def test_a_row_that_sees_nothing_gives_zero(self, dtype):
        query, key = torch.randn(4, 3, 16).to(dtype), torch.randn(2, 9, 16).to(dtype)
        mask = torch.ones(3, 9, dtype=torch.bool)
        mask[1] = False
        for form in (mask, ops.pack_mask(mask, 2, dtype)):
            out = ops.tree_attention(query, key, key, form, 0.25)
            assert not out[:, 1].any()
            assert out.isfinite().all()

    def test_pack_mask(self):
        packed = ops.pack_mask(torch.tensor([[True, False]]), 2, torch.bfloat16)
        assert packed.dtype == torch.bfloat16
        assert packed.tolist() == [[0.0, -INF]] * 2

    def test_refuses(self):
        query, key = torch.zeros(4, 2, 8), torch.zeros(2, 5, 8)
        with pytest.raises(InputError, match="query"):
            ops.tree_attention(query[:3], key, key, None, 1.0)
        with pytest.raises(InputError, match="query"):
            ops.tree_attention(query, key, key[:, :4], None, 1.0)
        for shape in ((2, 4), (3, 5), (8, 5)):
            with pytest.raises(InputError, match="mask"):
                ops.tree_attention(query, key, key, torch.ones(shape, dtype=torch.bool), 1.0)


class TestBackends:
    def test_the_variable_decides(self, backend):
        taken = ops.backends("cpu")
        assert set(taken) >= {"ancestor_words", "select_best", "top_children", "walk", "tree_attention"}
        assert taken["top_children"].name == backend
        assert "reference" in taken["top_children"].available

    def test_an_op_that_the_backend_lacks_falls_back_and_says_so(self, backend):
        attention = ops.backends("cpu")["tree_attention"]
        assert attention.name == "reference"
        if backend == "cpp":
            assert "cpp has no tree_attention" in attention.reason

    def test_devices_that_the_backend_does_not_serve(self, monkeypatch):
        monkeypatch.setenv(ops.VARIABLE, "auto")
        on_gpu = ops.backends("cuda")["walk"]
        assert on_gpu.name == "reference"
        assert on_gpu.reason == "cpp has no walk on cuda"

    @pytest.mark.parametrize("asked", ["", "auto"])
    def test_auto_takes_the_extension(self, monkeypatch, asked):
        monkeypatch.setenv(ops.VARIABLE, asked)
        assert ops.backends("cpu")["walk"].name == ("cpp" if built() else "reference")

    def test_unknown_name(self, monkeypatch):
        monkeypatch.setenv(ops.VARIABLE, "fast")
        with pytest.raises(BackendError, match="SPECENGINE_BACKEND=fast: unknown, accepted are auto, cpp, reference"):
            ops.walk(torch.tensor([4]), torch.tensor([-1]), torch.tensor([4]))

    @pytest.mark.parametrize("backend", ["reference"], indirect=True)
    def test_a_backend_that_is_not_built(self):
        """Without the extension: auto carries on and says why, asking for it raises and names the build command."""
        program = (
            "import sys; sys.modules['specengine._expander'] = None\n"
            "import torch\n"
            "from specengine import ops\n"
            "print(ops.walk(torch.tensor([4]), torch.tensor([-1]), torch.tensor([4])), ops.backends('cpu')['walk'])\n"
            "import os; os.environ[ops.VARIABLE] = 'cpp'\n"
            "ops.walk(torch.tensor([4]), torch.tensor([-1]), torch.tensor([4]))\n"
        )
        environment = {name: value for name, value in os.environ.items() if name != ops.VARIABLE}
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert "[0] Backend(name='reference', reason='cpp is not built" in run.stdout
        assert run.returncode == 1
        assert "BackendError: SPECENGINE_BACKEND=cpp: cpp is not built" in run.stderr
        assert "pip install -e ." in run.stderr

"""select_best and top_children: each backend against sorting."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.inputs import INF, NAN, any_scores, count, poisoned, quick, scores, thorough, trees

pytestmark = pytest.mark.usefixtures("backend")


class TestSelectBest:
    @given(
        st.lists(scores, max_size=90),
        st.integers(0, 100),
        st.integers(0, 9),
        st.one_of(st.none(), st.sampled_from([0, -1, -(2**31), 2**31 - 1]), st.integers(-3, 101)),
    )
    @thorough
    def test_against_sorting(self, values, most, padding, limit):
        order = sorted(
            (i for i in range(len(values)) if values[i] > -INF), key=lambda i: (-values[i], i)
        )
        expected = sorted(order[: most if limit is None else max(0, min(most, limit))])
        given = (
            poisoned(torch.tensor(values, dtype=torch.float32), padding),
            count(len(values)),
            most,
        )
        selected = ops.select_best(*given, None if limit is None else count(limit))
        assert (selected.ids.dtype, selected.live.dtype, selected.live.shape) == (
            torch.int64,
            torch.int32,
            (1,),
        )
        assert selected.ids.tolist() == expected + [0] * (most - len(expected))
        assert int(selected.live) == len(expected)

    @given(
        trees(),
        st.integers(1, 140),
        st.integers(0, 10**6),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.integers(0, 3),
    )
    @quick
    def test_path_log_probs_are_closed_under_parent(self, parents, most, seed, coarseness, padding):
        edges = -np.random.default_rng(seed).exponential(size=len(parents)).astype(np.float32)
        if coarseness:
            # edges of 0: children tie with their parents
            edges = np.round(edges) * np.float32(coarseness)
        path = np.zeros(len(parents), dtype=np.float32)
        for node in range(1, len(parents)):
            path[node] = path[parents[node]] + edges[node]
        found = ops.select_best(
            poisoned(torch.from_numpy(path), padding), count(len(parents)), most
        )
        selected = found.alive().tolist()
        assert selected[0] == 0
        assert all(parents[node] in selected for node in selected[1:])

    def test_equal_values_are_taken_in_order(self):
        """The reason for the op: of equal values, topk keeps whichever it likes."""
        assert ops.select_best(torch.zeros(700), count(700), 60).ids.tolist() == list(range(60))
        assert ops.select_best(torch.zeros(700), count(700), 60, count(7)).alive().tolist() == list(
            range(7)
        )

    def test_zeros_of_either_sign_are_equal(self):
        assert ops.select_best(torch.tensor([-0.0, 0.0, -0.0]), count(3), 2).ids.tolist() == [0, 1]

    @pytest.mark.parametrize(("live", "kept"), [(0, 0), (2, 2), (3, 3), (9, 3)])
    def test_a_count_of_more_than_there_are_is_all(self, live, kept):
        assert ops.select_best(torch.zeros(3), count(live), 9).alive().tolist() == list(range(kept))

    def test_strided_scores(self):
        wide = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        for view in (wide[:, 1], wide[::2, 2]):
            expected = ops.select_best(view.contiguous(), count(20), 7)
            assert torch.equal(ops.select_best(view, count(20), 7).ids, expected.ids)

    def test_refuses(self):
        one = count(1)
        with pytest.raises(InputError, match="NaN"):
            ops.select_best(torch.tensor([0.0, NAN]), count(2), 1)
        with pytest.raises(InputError, match="most"):
            ops.select_best(torch.zeros(2), one, -1)
        for wrong in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)):
            with pytest.raises(InputError, match="float32"):
                ops.select_best(wrong, one, 1)
        for wrong in (one.long(), torch.zeros(2, dtype=torch.int32), one[0]):
            with pytest.raises(InputError, match=r"^live: got"):
                ops.select_best(torch.zeros(2), wrong, 1)
            with pytest.raises(InputError, match=r"^limit: got"):
                ops.select_best(torch.zeros(2), one, 1, wrong)


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

    @pytest.mark.sliced
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
            # torch sums strided rows in another order
            torch.testing.assert_close(log_probs, expected_log_probs)

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
            # -inf where it leaves float32
            expected = torch.tensor(expected, dtype=torch.float64).float().tolist()
            assert got_log_probs == pytest.approx(expected, rel=1e-6, abs=2e-6)

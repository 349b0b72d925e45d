"""top_entropy: each backend against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.backends import each_backend, of_each
from tests.ops.inputs import INF, NAN, exact_log_probs, many, matrices


def brute_entropy(logits, top, normalized):
    """float64 [rows]."""
    log_probs = -np.sort(-exact_log_probs(logits, normalized), axis=1)[:, :top]
    with np.errstate(over="ignore", invalid="ignore"):
        return -np.where(log_probs > -INF, np.exp(log_probs) * log_probs, 0.0).sum(1)


def check_entropy(logits, top, normalized):
    expected = brute_entropy(logits, top, normalized)
    for got in of_each(lambda: ops.top_entropy(logits, top, normalized=normalized)).values():
        assert got.dtype == torch.float32
        assert got.shape == (len(logits),)
        got = got.double().numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            close = np.abs(got - expected) <= 1e-5 + 2e-6 * np.abs(expected)
        assert np.all(close | (got == expected.astype(np.float32)))


class TestTopEntropy:
    @given(
        st.data(),
        st.integers(0, 4),
        st.one_of(st.integers(1, 30), st.sampled_from([255, 256, 300, 5000])),
    )
    @many
    def test_against_float64(self, data, rows, top):
        check_entropy(data.draw(matrices(st.just(rows))), top, False)

    @given(
        st.data(),
        st.integers(0, 4),
        st.one_of(st.integers(1, 30), st.sampled_from([255, 256, 300, 5000])),
    )
    @many
    def test_of_log_probabilities(self, data, rows, top):
        check_entropy(data.draw(matrices(st.just(rows), highest=0.0)), top, True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("columns", [4099, 8192, 49157])
    @pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
    def test_long_rows(self, dtype, columns, spread):
        logits = spread * torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))
        logits[1] = logits[1].round()
        logits[2, 500:] = -INF  # fewer than `top` that count
        for top in (1, 100, 1000, columns - 1, columns):
            check_entropy(logits.to(dtype), top, False)

    @pytest.mark.parametrize("columns", [8192, 8200, 20011])
    def test_rows_that_mislead_a_sample(self, columns):
        """The search for the `top` starts from some columns of each block, so here those are unlike the others."""
        logits = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns))
        sampled = torch.arange(columns) % 256 < 16
        logits[0, sampled] += 20.0
        logits[1, sampled] -= 20.0
        logits[2, ~sampled] = -INF
        logits[3, ~sampled] = 1.0
        logits[4, sampled] = NAN
        logits[5] = torch.arange(columns) * -0.001  # sorted
        for top in (1, 60, 1000, columns - 17, columns - 1):
            check_entropy(logits, top, False)
            check_entropy(logits - logits.nan_to_num(-INF).amax(1, keepdim=True), top, True)

    @each_backend
    def test_known_values(self, backend):
        even = ops.top_entropy(torch.zeros(1, 1024), 2000)
        half = ops.top_entropy(torch.zeros(1, 1024), 512)
        certain = ops.top_entropy(
            torch.tensor([[0.0, -INF, -INF], [-INF, -INF, NAN], [90.0, -90.0, 0.0]]), 2
        )
        alone = ops.top_entropy(torch.tensor([[3.0]]), 1)
        assert even.tolist() == pytest.approx([math.log(1024)], abs=1e-5)
        assert half.tolist() == pytest.approx(
            [math.log(1024) / 2], abs=1e-5
        )  # of p over the whole row
        assert certain.tolist() + alone.tolist() == pytest.approx([0.0] * 4, abs=1e-30)

    @each_backend
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_strided_rows_and_columns(self, backend, dtype):
        wide = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)).to(dtype)
        for view in (
            wide[:6, 17:400],
            wide[::200],
            wide[:, :5].T,
            wide[:6, ::2],
            wide[:1].expand(6, 600),
        ):
            torch.testing.assert_close(
                ops.top_entropy(view, 50), ops.top_entropy(view.contiguous(), 50)
            )

    @each_backend
    def test_refuses(self, backend):
        for logits, top in ((torch.zeros(2, 3), 0), (torch.zeros(2, 0), 1)):
            with pytest.raises(InputError, match="top: got"):
                ops.top_entropy(logits, top)
        for wrong in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.float64)):
            with pytest.raises(InputError, match="logits"):
                ops.top_entropy(wrong, 1)

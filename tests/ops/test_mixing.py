"""mix_rows: each backend against its definition in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specengine import ops
from specengine.errors import InputError
from specengine.ops.select import FAINT
from tests.ops.backends import each_backend, of_each
from tests.ops.inputs import INF, many

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def brute_mix(logits, more, left, gained, normalized):
    """float64 [rows, V + more]; gained: probabilities by row and column."""
    rows = logits.double().numpy()
    log_sums = np.zeros(len(rows)) if normalized else np.logaddexp.reduce(rows, axis=1)
    probabilities = np.exp(rows - log_sums[:, None]) * np.array(left)[:, None]
    wide = np.concatenate([probabilities, np.zeros((len(rows), more))], axis=1)
    if not normalized:
        wide[:, rows.shape[1] :] = (
            np.exp(rows.max(1) + FAINT - log_sums)[:, None] * np.array(left)[:, None]
        )
    for (row, column), probability in gained.items():
        wide[row, column] += probability
    with np.errstate(divide="ignore"):
        return np.log(wide) + (0 if normalized else (log_sums - np.log(left))[:, None])


@st.composite
def mixtures(draw):
    rows, columns, more = (
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 5, 255, 256, 300])),
        draw(st.integers(0, 3)),
    )
    normalized, dtype = draw(st.booleans()), draw(st.sampled_from(list(TOLERANCE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = draw(st.sampled_from([0.5, 4.0])) * torch.randn(rows, columns, generator=generator)
    if normalized:
        logits = -logits.abs()
        logits[draw(st.integers(0, rows - 1)), : draw(st.integers(0, columns))] = -INF
    left = [draw(st.sampled_from([1.0, 0.5, 0.02])) for _ in range(rows)]
    gained = {}
    for row in (row for row in range(rows) if left[row] < 1):
        for column in draw(st.sets(st.integers(0, columns + more - 1), min_size=1, max_size=4)):
            gained[row, column] = (1 - left[row]) / 4
    return logits.to(dtype), more, left, gained, normalized


class TestMixRows:
    @given(mixtures())
    @many
    def test_against_float64(self, given):
        logits, more, left, gained, normalized = given
        before, width = logits.clone(), logits.shape[1] + more
        places = [row * width + column for row, column in gained]
        expected = brute_mix(*given)
        for mixed, raised in of_each(
            lambda: ops.mix_rows(
                logits, more, left, places, list(gained.values()), normalized=normalized
            )
        ).values():
            assert mixed.dtype == logits.dtype
            assert raised.dtype == torch.uint8
            assert raised.nonzero().tolist() == sorted(map(list, gained))
            got = mixed.double().numpy()
            limit = TOLERANCE[logits.dtype] * (
                20 + np.abs(np.where(np.isfinite(expected), expected, 0.0))
            )
            with np.errstate(invalid="ignore"):
                assert np.all((np.abs(got - expected) <= limit) | (got == expected))
            assert torch.equal(logits, before)

    @each_backend
    def test_rows_that_are_not_mixed_keep_their_bits(self, backend):
        logits = torch.randn(3, 300).bfloat16()
        mixed, _ = ops.mix_rows(logits, 2, [1.0, 0.5, 1.0], [302 + 7], [0.5])
        assert torch.equal(mixed[::2, :300], logits[::2])
        assert mixed[:, 300:].tolist() == [
            [row.max().add(FAINT).bfloat16().item()] * 2 for row in logits.float()
        ]

    @each_backend
    def test_rows_may_have_any_stride(self, backend):
        wide = torch.randn(4, 20)
        for logits in (wide[:, 3:12], wide.t()[3:7], wide[::2]):
            mixed, _ = ops.mix_rows(logits, 1, [0.5] * len(logits), [0], [0.5])
            again, _ = ops.mix_rows(logits.contiguous(), 1, [0.5] * len(logits), [0], [0.5])
            assert torch.equal(mixed, again)

    @each_backend
    def test_wrong_inputs(self, backend):
        logits = torch.zeros(2, 4)
        with pytest.raises(InputError, match=r"^left: got 1"):
            ops.mix_rows(logits, 0, [1.0], [], [])
        with pytest.raises(InputError, match=r"^probabilities: got 0"):
            ops.mix_rows(logits, 0, [1.0, 0.5], [4], [])
        for place in (-1, 10):
            with pytest.raises(InputError, match="places: not all of them are in the rows"):
                ops.mix_rows(logits, 1, [0.5, 0.5], [place], [0.5])

    @each_backend
    def test_no_rows(self, backend):
        mixed, raised = ops.mix_rows(torch.zeros(0, 4), 1, [], [], [])
        assert mixed.shape == raised.shape == (0, 5)
        assert math.prod(raised.shape) == 0

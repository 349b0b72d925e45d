"""The interpreter's products: right, and of every row and column the same bits whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
import torch
import triton
import triton.language as tl

from tests.kernels.products import product

SHAPES = [(16, 16, 16), (3, 37, 5), (1, 1, 1), (7, 80, 64)]


@triton.jit
def _multiply(left, right, out, rows: tl.constexpr, inner: tl.constexpr, columns: tl.constexpr):
    row, column, step = (
        tl.arange(0, rows)[:, None],
        tl.arange(0, columns)[None, :],
        tl.arange(0, inner),
    )
    a, b = (
        tl.load(left + row * inner + step[None, :]),
        tl.load(right + step[:, None] * columns + column),
    )
    tl.store(out + row * columns + column, tl.dot(a, b, input_precision="ieee"))


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_right_and_independent(rows: int, inner: int, columns: int, dtype: type) -> None:
    draw = np.random.default_rng(rows)
    left, right = (
        draw.standard_normal(shape).astype(dtype) for shape in ((rows, inner), (inner, columns))
    )
    found, kind = product(left, right, np.dtype(np.float32)), np.dtype(np.float32)
    # each term and each of at most `inner` additions rounds once
    exact, size = (
        left.astype(float) @ right.astype(float),
        np.abs(left.astype(float)) @ np.abs(right.astype(float)),
    )
    assert found.dtype == np.float32
    assert (np.abs(found - exact) <= (inner + 1) * 2.0**-24 * size).all()
    for row in range(rows):
        assert np.array_equal(product(left[row : row + 1], right, kind)[0], found[row])
    assert np.array_equal(product(left, right[:, -1:], kind)[:, 0], found[:, -1])
    both = product(np.stack([left, left]), np.stack([right, right]), kind)
    assert np.array_equal(both, np.stack([found, found]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_kernels_take_them() -> None:
    left, right = (
        torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    right = right.T.contiguous()
    out = torch.empty(16, 16)
    _multiply[(1,)](left, right, out, 16, 64, 16)
    assert np.array_equal(out.numpy(), product(left.numpy(), right.numpy(), np.dtype(np.float32)))

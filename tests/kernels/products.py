"""`tl.dot` in Triton's interpreter with an order of its own, of which no row or column depends on the others.

The interpreter takes numpy's product, which is a BLAS's: a row's bits then hang on how many rows there are, on each
processor in another way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP = 16  # of the inner dimension at once: what fits a processor's cache


def product(left: NDArray[Any], right: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """[..., rows, inner] times [..., inner, columns] in `dtype`: products rounded one by one, then halves added.

    Each number takes the same steps whatever stands beside it.
    """
    left, right = np.moveaxis(left.astype(dtype), -1, 0), np.moveaxis(right.astype(dtype), -2, 0)
    total = np.zeros((*left.shape[1:], right.shape[-1]), dtype)
    for first in range(0, len(left), STEP):
        part = slice(first, first + STEP)
        terms = left[part, ..., None] * right[part, ..., None, :]
        while (count := len(terms)) > 1:
            half = count // 2
            terms[:half] += terms[count - half :]
            terms = terms[: count - half]
        total += terms[0]
    return total


def fix_the_order() -> None:
    """Have the interpreter multiply by `product`, in the accumulator's type; for kernels decorated before or after."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        _: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *__: Any
    ) -> TensorHandle:
        return TensorHandle(product(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot

"""strict_attention: a row is computed as it would be alone, whatever stands beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine import ops, reference
from specengine.errors import InputError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
attentions = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "shape": st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from([4, 20, 64, 96])),
        "rows": st.integers(1, 9),
        "prefix": st.sampled_from([0, 1, 5, 63, 64, 65, 130]),
        "dtype": st.sampled_from(DTYPES),
    }
)


def inputs(seed: int, shape: tuple[int, int, int], rows: int, prefix: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads, groups, size = shape
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(heads * groups, rows, size, generator=draw).to(dtype)
    keys, values = torch.randn(2, heads, prefix + rows, size, generator=draw).to(dtype)
    mask = torch.rand(rows, prefix + rows, generator=draw) > 0.5
    mask[:, :prefix] = True
    return query, keys, values, mask


@pytest.mark.parametrize("name", ["reference", "cpp"])
@settings(deadline=None, max_examples=150)
@given(case=attentions)
def test_a_row_is_what_it_would_be_alone(name: str, case: dict) -> None:
    if name not in ops.backends()["strict_attention"].available:
        pytest.skip("the C++ extension is not built")
    run = reference.strict_attention if name == "reference" else ops.strict_attention
    query, keys, values, mask = inputs(**case)
    out = run(query, keys, values, mask, 0.3)
    for row in range(query.shape[1]):
        seen = mask[row]
        alone = run(query[:, row : row + 1], keys[:, seen], values[:, seen], None, 0.3)
        assert torch.equal(out[:, row : row + 1], alone)


@settings(deadline=None, max_examples=200)
@given(case=attentions)
def test_it_is_attention(case: dict) -> None:
    query, keys, values, mask = inputs(**case)
    heads = keys.shape[0]
    scores = torch.einsum("hgnd,hld->hgnl", query.double().view(heads, -1, *query.shape[1:]), keys.double()) * 0.3
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("hgnl,hld->hgnd", weights, values.double()).reshape(query.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[query.dtype]
    for found in (
        ops.strict_attention(query, keys, values, mask, 0.3),
        reference.strict_attention(query, keys, values, mask, 0.3),
    ):
        assert found.dtype is query.dtype
        assert float((found.double() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def test_what_a_row_does_not_see_cannot_reach_it(backend: str) -> None:
    query, keys, values, mask = inputs(1, (2, 2, 64), 3, 70, torch.float32)
    clean = ops.strict_attention(query, keys, values, mask, 0.1)
    hidden = ~mask.any(0)
    hidden[71] = True
    mask[:, 71] = False
    clean = ops.strict_attention(query, keys, values, mask, 0.1)
    keys[:, hidden], values[:, hidden] = float("nan"), float("inf")
    assert torch.equal(ops.strict_attention(query, keys, values, mask, 0.1), clean)


def test_a_row_that_sees_nothing_gives_zero(backend: str) -> None:
    query, keys, values, mask = inputs(1, (1, 2, 8), 2, 0, torch.float32)
    mask[:] = False
    assert not ops.strict_attention(query, keys, values, mask, 0.1).any()


def test_strided_inputs(backend: str) -> None:
    query, keys, values, mask = inputs(4, (3, 1, 20), 5, 9, torch.bfloat16)
    slab = torch.full((3, 40, 20), float("nan"), dtype=torch.bfloat16)
    slab[:, :14] = keys
    turned = values.transpose(1, 2).contiguous().transpose(1, 2)
    found = ops.strict_attention(query.transpose(0, 1).contiguous().transpose(0, 1), slab[:, :14], turned, mask, 0.2)
    assert torch.equal(found, ops.strict_attention(query, keys, values, mask, 0.2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, m: (q, k, v[:, 1:], m), "query"),
        (lambda q, k, v, m: (q, k.double(), v, m), "query"),
        (lambda q, k, v, m: (q, k, v, m.float()), "mask: bool"),
        (lambda q, k, v, m: (q, k, v, m[:, 1:]), "mask: bool"),
    ],
)
def test_wrong_inputs(change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.strict_attention(*change(*inputs(0, (1, 1, 4), 2, 3, torch.float32)), 1.0)

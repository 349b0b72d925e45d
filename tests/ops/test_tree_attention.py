"""Attention under a tree's mask: each backend against float64."""

import pytest
import torch

from specengine import ops
from specengine.errors import InputError
from specengine.ops import attention
from tests.ops.inputs import INF, NAN, random_parents

pytestmark = pytest.mark.usefixtures("backend")


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
    @pytest.mark.parametrize(
        ("rows", "prefix"), [(1, 0), (1, 300), (2, 5), (16, 333), (65, 0), (64, 129)]
    )
    def test_against_float64(self, dtype, heads, groups, rows, prefix):
        generator = torch.Generator().manual_seed(rows + prefix)
        slots = prefix + rows
        slab = torch.randn(2, heads, slots + 7, 64, generator=generator).to(dtype)
        slab[:, :, slots:] = NAN  # beyond the tree; must not leak
        key, value = slab[0, :, :slots], slab[1, :, :slots]
        query = torch.randn(rows, heads * groups, 64, generator=generator).to(dtype).transpose(0, 1)
        mask = torch.ones(rows, slots, dtype=torch.bool)
        mask[:, prefix:] = ops.tree_mask(
            ops.ancestor_words(torch.tensor(random_parents(rows, 1))), rows
        )
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


def test_a_result_that_is_stored_row_by_row(monkeypatch):
    """On a GPU torch's attention returns a transposed view."""
    attend = attention.scaled_dot_product_attention

    def transposed(*given, **named):
        return attend(*given, **named).transpose(1, 2).contiguous().transpose(1, 2)

    query, key, value = (torch.randn(heads, rows, 8) for heads, rows in ((6, 5), (2, 9), (2, 9)))
    expected = ops.by_meaning(ops.tree_attention, query, key, value, None, 0.3)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", transposed)
    assert torch.equal(ops.by_meaning(ops.tree_attention, query, key, value, None, 0.3), expected)

"""Attention of single rows without a tree: what torch's fused attention gives, and only where nothing is hidden."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as fused

from specengine.models import attention
from specengine.models.attention import ATTENTION, last_row_attention
from tests import toy

counts = st.integers(1, 4)


def states(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


@given(
    counts, counts, counts, st.integers(1, 30), st.sampled_from([None, 0.3]), st.integers(0, 1000)
)
def test_the_fused_attention_of_the_last_row(
    batch: int, kv_heads: int, groups: int, slots: int, scale: float | None, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    query = states(drawn, batch, kv_heads * groups, 1, 8)
    # a cache's buffers, poisoned behind its end
    room = torch.full((2, batch, kv_heads, slots + 3, 8), float("nan"))
    room[:, :, :, :slots] = states(drawn, 2, batch, kv_heads, slots, 8)
    key, value = room[..., :slots, :]
    found = last_row_attention(query, key, value, scale)
    exact = fused(query.double(), key.double(), value.double(), scale=scale, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2).double(), exact, rtol=1e-5, atol=1e-5)
    halves = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    assert (last_row_attention(*halves, scale).float() - found).abs().max() < 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_take_it_where_a_row_sees_everything(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = toy.tiny(family), list[torch.Size]()
    model.set_attn_implementation(ATTENTION)

    def counted(query: Tensor, *others: Tensor | float | None) -> Tensor:
        calls.append(query.shape)
        return last_row_attention(query, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "last_row_attention", counted)
    ids = torch.tensor([[5, 9, 2, 31], [7, 12, 40, 3]])
    with torch.inference_mode():
        whole = model(ids).logits[:, -1]
        assert not calls, "several rows"
        padded = model(
            ids[:, 1:], attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), use_cache=True
        )
        model(
            ids[:, :1],
            attention_mask=torch.tensor([[0, 1, 1, 1], [1] * 4]),
            past_key_values=padded.past_key_values,
        )
        assert not calls, "a hidden token"
        before = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=before).logits[:, -1]
    assert calls
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-5)

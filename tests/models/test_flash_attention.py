"""Prompts through flash-attn: a stand-in that computes what it does, as it runs on CUDA devices alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.models import attention, huggingface
from specengine.models.huggingface import CausalLM
from tests import toy

PROMPT = [5, 9, 2, 31, 7, 12, 40, 41, 42, 3, 8]


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, causal: bool
) -> Tensor:
    """flash_attn_func on [batch, rows, heads, size]: with fewer queries than keys their last ones stand together."""
    assert causal
    rows, slots, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    keys, values = (states.repeat_interleave(groups, 2) for states in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    hidden = torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows).logical_not()
    return torch.einsum(
        "bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values
    )


@torch.inference_mode()
def last_logits(lm: CausalLM) -> Tensor:
    logits, _ = lm.extend(lm.new_cache(16), PROMPT)
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_prompts_in_pieces_give_what_they_gave(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, calls = CausalLM(toy.tiny(family)), list[tuple[int, int]]()

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        calls.append((q.shape[1], k.shape[1]))
        return stand_in(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface, "PREFILL_ROWS", 4)
    expected = last_logits(lm)
    monkeypatch.setattr(attention, "flash_attention", lambda: counted)
    assert torch.equal(last_logits(lm), expected)
    assert not calls, "not on a CPU"
    monkeypatch.setattr(attention, "flash_takes", lambda query: True)
    torch.testing.assert_close(last_logits(lm), expected, rtol=1e-4, atol=1e-5)
    assert sorted(set(calls)) == [(3, 11), (4, 4), (4, 8)]


def test_what_it_takes() -> None:
    assert not attention.flash_takes(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))
    on_device = torch.zeros(1, 2, 3, 64, device="meta")
    assert not attention.flash_takes(on_device)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 70])
def test_flash_attention_itself(before: int) -> None:
    pytest.importorskip("flash_attn")
    q = torch.randn(1, 6, 33, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, before + 33, 64, device="cuda", dtype=torch.bfloat16)
    found = attention.prompt_attention(q, k, v, None)
    assert found is not None
    rows = [states.transpose(1, 2).cpu().float() for states in (q, k, v)]
    expected = stand_in(*rows, softmax_scale=None, causal=True)
    assert (found.cpu().float() - expected).norm() <= 1e-2 * expected.norm()

"""Prompts through flash-attn: a stand-in with its signature, as the package runs on CUDA devices alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from specengine.models import attention, huggingface
from specengine.models.huggingface import CausalLM
from tests import toy

PROMPT = [5, 9, 2, 31, 7, 12, 40, 41, 42, 3, 8]


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """flash_attn_func of flash-attn 2.7 and 2.8, by the names and defaults of its arguments, on a CPU.

    q: [batch, rows, heads, size]. With fewer queries than keys the last ones stand together; a row sees window_size[0]
    positions before its own and window_size[1] after it, -1: all. What is not asked for here is as it is by default.
    """
    unused = (dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs)
    assert unused == (0.0, 0.0, None, False, False)
    assert q.shape[2] % k.shape[2] == 0
    rows, slots, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    keys, values = (states.repeat_interleave(groups, 2) for states in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    ahead = torch.arange(slots) - torch.arange(slots - rows, slots)[:, None]
    before, after = window_size
    hidden = (ahead > after) if after >= 0 else torch.zeros(rows, slots, dtype=torch.bool)
    if before >= 0:
        hidden |= ahead < -before
    if causal:
        hidden |= ahead > 0
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


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("before", [0, 5])
def test_a_row_sees_itself_and_its_window(
    before: int, scale: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is one that the package takes, and its result is attention written out row by row."""
    monkeypatch.setattr(attention, "flash_attention", lambda: stand_in)
    monkeypatch.setattr(attention, "flash_takes", lambda query: True)
    rows, slots = 6, before + 6
    query = torch.randn(1, 4, rows, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, slots, 8, dtype=torch.float64)
    found = attention.prompt_attention(query, key, value, scale, window)
    assert found is not None
    assert found.shape == (1, rows, 4, 8)
    for row in range(rows):
        own = before + row
        first = 0 if window is None else max(0, own - window + 1)
        for head in range(4):
            seen = key[0, head // 2, first : own + 1]
            weights = (seen @ query[0, head, row] * (8**-0.5 if scale is None else scale)).softmax(
                0
            )
            torch.testing.assert_close(
                found[0, row, head], weights @ value[0, head // 2, first : own + 1]
            )


def test_what_it_takes() -> None:
    assert not attention.flash_takes(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))
    on_device = torch.zeros(1, 2, 3, 64, device="meta")
    assert not attention.flash_takes(on_device)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 70])
def test_flash_attention_itself(before: int) -> None:
    package = pytest.importorskip("flash_attn")
    own, theirs = (
        inspect.signature(each).parameters for each in (stand_in, package.flash_attn_func)
    )
    assert [(name, own[name].default) for name in own] == [
        (name, theirs[name].default) for name in list(theirs)[: len(own)]
    ]
    q = torch.randn(1, 6, 33, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, before + 33, 64, device="cuda", dtype=torch.bfloat16)
    found = attention.prompt_attention(q, k, v, None)
    assert found is not None
    rows = [states.transpose(1, 2).cpu().float() for states in (q, k, v)]
    expected = stand_in(*rows, causal=True)
    assert (found.cpu().float() - expected).norm() <= 1e-2 * expected.norm()

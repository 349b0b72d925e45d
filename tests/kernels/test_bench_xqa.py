"""bench.kernels: what XQA is given means what it should, and what is not there ends as a reason."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels import attention, xqa
from bench.kernels.cases import Attention
from bench.kernels.inputs import INPUTS, Tree
from bench.kernels.truth import error_of, truth
from bench.kernels.way import Unavailable

CPU = torch.device("cpu")
WAY = next(way for way in attention.WAYS if way.name == "flashinfer xqa")


def documented(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    kv_layout: str = "NHD",
    q_seq_len: int = 1,
    mask: Tensor | None = None,
) -> None:
    """FlashInfer's documentation of `xqa`, in float64."""
    assert q.dim() == output.dim() == (5 if q_seq_len > 1 else 4)
    assert (page_table.dtype, seq_lens.dtype, kv_layout) == (torch.int32, torch.uint32, "NHD")
    assert semaphores.dtype is torch.uint32
    assert workspace_buffer.dtype is torch.uint8
    assert k_cache.shape[1:3] == (page_size, num_kv_heads)
    assert page_table.shape == (1, len(k_cache))
    length, rows = int(seq_lens[0, 0]), q.reshape(q_seq_len, -1, q.shape[-1]).double()
    k, v = (cache[page_table[0]].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
    k, v = (cache.repeat_interleave(rows.shape[1] // num_kv_heads, 1) for cache in (k, v))
    seen = torch.ones(q_seq_len, length, dtype=torch.bool)
    if q_seq_len > 1:
        assert mask is not None
        assert mask.dtype is torch.uint16
        assert mask.shape == (1, q_seq_len, 2 * -(-q_seq_len // 32))
        bits = (mask[0].int()[:, :, None] >> torch.arange(16)) & 1
        seen[:, length - q_seq_len :] = bits.flatten(1)[:, :q_seq_len] == 1
    scores = torch.einsum("nhd,shd->hns", rows, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    output.copy_(torch.einsum("hns,shd->nhd", weights, v).view_as(output))


def inputs_for(case: Attention) -> Tree:
    return INPUTS["attention"](case, CPU)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a module in the place of flashinfer; workspaces are small."""
    monkeypatch.setattr(xqa, "SCRATCH", 64)
    monkeypatch.setattr(xqa, "SEMAPHORES", 64)
    xqa.shared.cache_clear()
    yield lambda **names: monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**names))
    xqa.shared.cache_clear()


@pytest.mark.parametrize("nodes", [1, 9, 33, 70])
@pytest.mark.parametrize("prefix", [3, 119])  # 119 + 9 fill whole pages
def test_pages_and_mask_are_what_xqa_documents(offer: Any, nodes: int, prefix: int) -> None:
    offer(xqa=documented)
    case = Attention(nodes, prefix, 6, 2, 16)
    tree = inputs_for(case)
    wanted = truth(case, tree)
    assert error_of(case, WAY.result(case, WAY.prepare(case, tree)()), wanted) <= 6e-3


@pytest.mark.parametrize(
    ("names", "size", "reason"),
    [
        ({}, 16, "has no xqa"),
        ({"xqa": lambda q, page_table, semaphores, q_seq_len: None}, 16, "takes no mask"),
        ({"xqa": documented}, 24, "no heads of size 24"),
    ],
)
def test_what_is_not_there_is_a_reason(
    offer: Any, names: dict[str, Any], size: int, reason: str
) -> None:
    offer(**names)
    case = Attention(9, 3, 6, 2, size)
    with pytest.raises(Unavailable, match=reason):
        WAY.prepare(case, inputs_for(case))


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (
            subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no such kernel\n"),
            "RuntimeError: no such",
        ),
        (subprocess.CompletedProcess([], -11, "", ""), "exit status -11"),
        (subprocess.TimeoutExpired([], 600), "more than 600 s"),
        (subprocess.CompletedProcess([], 0, "", "a warning"), ""),
    ],
)
def test_a_trial_that_fails_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, reason: str
) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command[1:])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(xqa.subprocess, "run", run)
    xqa.trial.cache_clear()
    for _ in range(2):  # the second time it is known
        if reason:
            with pytest.raises(Unavailable, match=reason):
                xqa.try_apart(9, 6, 2, 16)
        else:
            xqa.try_apart(9, 6, 2, 16)
    assert commands == [["-m", "bench.kernels.xqa", "9", "6", "2", "16"]]
    xqa.trial.cache_clear()

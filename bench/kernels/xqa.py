"""FlashInfer's XQA for speculative decoding: keys and values in pages, and a mask of the tree alone.

XQA is compiled anew for each number of nodes and each shape of heads, and a fault on the device would end the run: a
process of its own tries each such shape first, behind TRIED slots. What it compiled stays in a cache on disk.

    python -m bench.kernels.xqa NODES HEADS KV_HEADS SIZE
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cases import Attention
from bench.kernels.inputs import Tree, tree_inputs
from bench.kernels.truth import MAX_ERROR, error_of, truth
from bench.kernels.way import Unavailable

PAGE = 64  # of 16, 32, 64 and 128
TRIED, MAX_SECONDS = 4096, 600
SEMAPHORES, SCRATCH = 8 << 20, 128 << 20  # bytes; FlashInfer's own callers give as much


def xqa(case: Attention, tree: Tree) -> Callable[[], Any]:
    """Attend by XQA over pages [page, token, head, size]; paging, packing and compilation are not timed."""
    attend = function_for(case)
    if tree.q.is_cuda:
        try_apart(case.nodes, case.heads, case.kv_heads, case.size)
    return prepared(attend, case, tree)


def function_for(case: Attention) -> Callable[..., Any]:
    attend = getattr(importlib.import_module("flashinfer"), "xqa", None)
    if not callable(attend):
        raise Unavailable("this flashinfer has no xqa")
    missing = {"mask", "q_seq_len", "page_table", "semaphores"} - set(
        inspect.signature(attend).parameters
    )
    if missing:
        raise Unavailable(f"this flashinfer's xqa takes no {', '.join(sorted(missing))}")
    if case.size % 16 or case.size > 256:
        raise Unavailable(f"xqa has no heads of size {case.size}")
    return attend


def prepared(attend: Callable[..., Any], case: Attention, tree: Tree) -> Callable[[], Any]:
    k, v = (pages(cache[0]) for cache in (tree.k, tree.v))
    q = tree.q[:, None]  # a beam of one
    tables, scratch, semaphores = shared(case, tree.q.device)
    given: dict[str, Any] = {"num_kv_heads": case.kv_heads, "page_size": PAGE, "kv_layout": "NHD"}
    if case.nodes > 1:
        given |= {"q_seq_len": case.nodes, "mask": packed(tree.words[0], case.nodes)[None]}
    else:
        q = q[:, :, 0]  # one row is plain decoding: no axis for rows, and no mask
    out = torch.empty_like(q)

    def call() -> Tensor:
        attend(q, k, v, *tables, out, scratch, semaphores, **given)
        return out

    return call


def pages(cache: Tensor) -> Tensor:
    """Return [Hkv, S, D] as pages [pages, PAGE, Hkv, D], the last one padded with zeros."""
    filled = F.pad(cache, (0, 0, 0, -cache.shape[1] % PAGE))
    return filled.transpose(0, 1).reshape(-1, PAGE, cache.shape[0], cache.shape[2]).contiguous()


def packed(words: Tensor, nodes: int) -> Tensor:
    """Pack int64 words as uint16 [N, 2 ceil(N / 32)]: bit j of a row says whether it sees node j."""
    return words.view(torch.int16)[:, : 2 * -(-nodes // 32)].contiguous().view(torch.uint16)


@lru_cache(maxsize=1)  # one for all copies of the inputs; each call leaves the semaphores at zero
def shared(case: Attention, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    slots = case.prefix + case.nodes
    table = torch.arange(-(-slots // PAGE), dtype=torch.int32, device=device)[None]
    # the tree's nodes included
    length = torch.tensor([[slots]], dtype=torch.int32, device=device).view(torch.uint32)
    scratch, semaphores = (
        torch.zeros(size, dtype=torch.uint8, device=device) for size in (SCRATCH, SEMAPHORES)
    )
    return (table, length), scratch, semaphores.view(torch.uint32)


def result(case: Attention, out: Tensor) -> Tensor:
    return out.reshape(case.nodes, case.heads, case.size)


@cache
def trial(*shape: int) -> str:
    """Try XQA on this shape in another process; returns why it cannot run, or an empty text."""
    command = [sys.executable, "-m", __name__, *map(str, shape)]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"xqa: a trial took more than {MAX_SECONDS} s"
    said = done.stderr.strip().splitlines()
    return (
        ""
        if done.returncode == 0
        else f"xqa, tried: {said[-1] if said else f'exit status {done.returncode}'}"
    )


def try_apart(*shape: int) -> None:
    reason = trial(*shape)
    if reason:
        raise Unavailable(reason)


def main(arguments: list[str]) -> None:
    """Fail where XQA does on this shape; whether it is right, the table tells."""
    nodes, heads, kv_heads, size = map(int, arguments)
    case = Attention(nodes, TRIED, heads, kv_heads, size)
    tree = tree_inputs(case, torch.device("cuda"))
    call = prepared(function_for(case), case, tree)
    for _ in range(2):  # the second one finds the semaphores as the first left them
        error = error_of(case, result(case, call()), truth(case, tree))
    print(f"error {error:.1e}, accepted {MAX_ERROR['attention']:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])

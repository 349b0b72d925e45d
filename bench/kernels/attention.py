"""Ways to attend under a tree's mask; results are [N, Hq, D]."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cases import Attention
from bench.kernels.inputs import Tree, pack, random_tree
from bench.kernels.way import Way, kernel
from bench.kernels.xqa import result, xqa


def triton_attention(
    _: Attention, tree: Tree, *, tiles: tuple[int, ...] | None = None, splits: int | None = None
) -> Callable[[], Any]:
    module = kernel("tree_attention")
    cut = {"tiles": module.Tiles(*tiles) if tiles else None, "splits": splits}
    return lambda: module.tree_attention(tree.q, tree.k, tree.v, tree.words, *tree.lengths, **cut)


def sdpa(case: Attention, tree: Tree, *, backend: str) -> Callable[[], Any]:
    """Attend by SDPA with the heads of a group as rows, so that keys are not repeated."""
    groups = case.heads // case.kv_heads
    q = tree.q[0].view(case.nodes, case.kv_heads, groups, case.size).permute(1, 2, 0, 3)
    q = q.reshape(1, case.kv_heads, groups * case.nodes, case.size).contiguous()
    slots = tree.k.shape[2]
    mask = torch.zeros(groups * case.nodes, -(-slots // 16) * 16, dtype=q.dtype, device=q.device)[
        :, :slots
    ]
    # rows padded, as the kernels want them aligned
    mask.masked_fill_(~tree.mask.repeat(groups, 1), -math.inf)
    chosen = getattr(torch.nn.attention.SDPBackend, backend)

    def call() -> Tensor:
        with torch.nn.attention.sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, tree.k, tree.v, mask[None, None])

    return call


def from_folded(case: Attention, out: Tensor) -> Tensor:
    return (
        out.view(case.kv_heads, -1, case.nodes, case.size)
        .permute(2, 0, 1, 3)
        .reshape(case.nodes, case.heads, case.size)
    )


# its own choice first
BLOCKS: tuple[dict[str, int], ...] = {}, {"BLOCK_M": 64}, {"BLOCK_M": 64, "BLOCK_N": 32}


def flex(case: Attention, tree: Tree) -> Callable[[], Any]:
    """Attend by FlexAttention, whose mask function reads the words; compilation and block mask are not timed."""
    compiled, mask = compiled_flex(case, tree.q.device)
    q = tree.q.transpose(1, 2).contiguous()

    def call(options: dict[str, int]) -> Callable[[], Any]:
        return lambda: compiled(
            q, tree.k, tree.v, block_mask=mask, enable_gqa=True, kernel_options=options
        )

    for options in BLOCKS[:-1]:
        try:
            call(options)()
        except Exception:  # whatever a compiler says of tiles that do not fit
            continue
        return call(options)
    return call(BLOCKS[-1])


@lru_cache(
    maxsize=1
)  # one for all copies of the inputs: each new mask function would be compiled anew
def compiled_flex(case: Attention, device: torch.device) -> tuple[Callable[..., Any], Any]:
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    words, prefix = pack(random_tree(case.nodes)).to(device), case.prefix

    def sees(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        node = (slot - prefix).clamp(0)
        return (slot < prefix) | (((words[row, node // 64] >> (node % 64)) & 1) == 1)

    mask = attention.create_block_mask(
        sees, None, None, case.nodes, prefix + case.nodes, device=device
    )
    return torch.compile(attention.flex_attention, dynamic=False), mask


def flashinfer(case: Attention, tree: Tree) -> Callable[[], Any]:
    """Attend by FlashInfer's FA2 prefill with a packed mask; planning and packing are not timed."""
    wrapper = planned_flashinfer(case, tree.q.device)
    k, v = (cache[0].transpose(0, 1).contiguous() for cache in (tree.k, tree.v))
    return lambda: wrapper.run(tree.q[0], k, v)


@lru_cache(maxsize=1)
def planned_flashinfer(case: Attention, device: torch.device) -> Any:
    module, slots = importlib.import_module("flashinfer"), case.prefix + case.nodes
    mask = torch.cat(
        [torch.ones(case.nodes, case.prefix, dtype=torch.bool), random_tree(case.nodes)], 1
    )
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
    ends = [
        torch.tensor([0, size], dtype=torch.int32, device=device) for size in (case.nodes, slots)
    ]
    shape = (case.heads, case.kv_heads, case.size)
    wrapper.plan(*ends, *shape, custom_mask=mask.flatten().to(device), q_data_type=torch.bfloat16)
    return wrapper


def first(_: Attention, out: Tensor) -> Tensor:
    return out[0]


WAYS = [
    Way("attention", "specengine", triton_attention, first, "triton"),
    Way("attention", "specengine, 16 rows, no splits",
        partial(triton_attention, tiles=(16, 64, 4, 3), splits=1), first, "triton"),
    Way("attention", "torch sdpa math", partial(sdpa, backend="MATH"), from_folded),
    Way("attention", "torch sdpa efficient", partial(sdpa, backend="EFFICIENT_ATTENTION"), from_folded),
    Way("attention", "torch sdpa cudnn", partial(sdpa, backend="CUDNN_ATTENTION"), from_folded),
    Way("attention", "torch flex", flex, lambda case, out: out[0].transpose(0, 1), "triton"),
    Way("attention", "flashinfer fa2", flashinfer, lambda case, out: out, "flashinfer"),
    Way("attention", "flashinfer xqa", xqa, result, "flashinfer"),
]  # fmt: skip

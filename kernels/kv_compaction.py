"""KV compaction: keys and values of the accepted path move up behind the prefix, in place, all layers at once.

One program per layer, key or value, and head. The path ascends, so path[j] >= j, and no slot is overwritten before it
was read: a batch of rows is read, then written, and later batches read only further up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # moved at a time
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- meaning


def reference(slab: Tensor, path: Tensor, count: Tensor, prefix_len: Tensor) -> Tensor:
    """Compute `compact_kv` in plain torch; returns a new slab."""
    moved, start = slab.clone(), int(prefix_len)
    moved[..., start : start + int(count), :] = slab[..., start + path[: int(count)].long(), :]
    return moved


# ---- kernel


@triton.jit(
    do_not_specialize=["heads"], do_not_specialize_on_alignment=["path", "count", "prefix_len"]
)
def _compact(
    slab,
    path,
    count,
    prefix_len,
    layer_stride,
    pair_stride,
    head_stride,
    slot_stride,
    heads,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    layer, pair, head = program // (2 * heads), program // heads % 2, program % heads
    slab += (
        layer.to(tl.int64) * layer_stride
        + pair.to(tl.int64) * pair_stride
        + head.to(tl.int64) * head_stride
    )
    slab += tl.load(prefix_len).to(tl.int64) * slot_stride
    dims, kept = tl.arange(0, BLOCK_D), tl.load(count)
    for start in range(0, kept, ROWS):
        place = start + tl.arange(0, ROWS)
        source = tl.load(path + place, mask=place < kept, other=0).to(tl.int32)
        moves = ((place < kept) & (source != place))[:, None] & (dims < HEAD)[None, :]
        rows = tl.load(slab + source[:, None] * slot_stride + dims[None, :], mask=moves)
        tl.debug_barrier()  # a row of this batch may stand where another thread is about to write
        tl.store(slab + place[:, None] * slot_stride + dims[None, :], rows, mask=moves)


# ---- launcher


def compact_kv(slab: Tensor, path: Tensor, count: Tensor, prefix_len: Tensor) -> None:
    """Move slot prefix_len + path[j] to slot prefix_len + j for j < count, in every layer and head, in place.

    slab: [layers, 2, KV heads, capacity, head size], any dtype, head size contiguous. path: int32 or int64, ascending,
    path[0] = 0 where it starts with the root (what stands already right is not touched). count, prefix_len: int32 [1].
    All on one device, contents not checked: prefix_len + path[count - 1] < capacity is the caller's promise.
    Capturable, bit-exact.
    """
    if slab.dim() != 5 or slab.shape[1] != 2 or slab.stride(4) != 1:
        raise ValueError(
            f"slab: [layers, 2, KV heads, capacity, head size] is needed, got {list(slab.shape)}"
        )
    if path.dim() != 1 or path.stride(0) != 1 or path.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"path: int32 or int64 [n] is needed, got {path.dtype} {list(path.shape)}")
    layers, two, heads, _, size = slab.shape
    _compact[(layers * two * heads,)](
        slab.view(_WHOLE[slab.element_size()]),  # bits, whatever they mean
        path,
        count,
        prefix_len,
        *slab.stride()[:4],
        heads,
        HEAD=size,
        BLOCK_D=triton.next_power_of_2(size),
        ROWS=ROWS,
        num_warps=max(
            1, min(8, ROWS * triton.next_power_of_2(size) * slab.element_size() // (16 * 32))
        ),
    )

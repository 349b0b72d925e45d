"""Strict tree attention: a row's bits follow from the keys and values that it sees, in the order of their positions.

Positions are summed in tiles, and tiles in spans, that are cut by absolute position alone. Tiles that lie in the prefix
whole are shared: the rows of all nodes are packed into one program. Behind them every node has programs of its own,
which gather its path into the order of positions and go on with the sums where the shared ones ended. Both are
launches of one compiled kernel with tiles of one shape, so a tile gives the same bits in either. A third launch adds
the spans up, in their order. Hence a node in a tree and the same token decoded plainly go through the same sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specengine_kernels.tree_attention import (
    LOG2_E,
    MERGED_ROWS,
    Tiles,
    _absorb,
    check_caches,
    reference as attention_by_words,
)
from torch import Tensor

SPAN = 512  # positions whose sums one program makes


# ---- meaning


def reference(*inputs: Tensor, scale: float | None = None) -> Tensor:
    """Compute `strict_attention` in plain torch and in the dtype of q; returns [B, Nq, Hq, D]."""
    q, k_cache, v_cache, nodes, counts, prefix_len, n_q = inputs
    words = torch.zeros(
        *nodes.shape[:2], -(-k_cache.shape[2] // 64), dtype=torch.int64, device=q.device
    )
    for column in range(nodes.shape[2]):  # distinct nodes, so their bits add up
        there = column < counts
        ids = torch.where(there, nodes[..., column].long(), 0)
        bits = torch.where(there, torch.ones_like(ids) << ids % 64, 0)
        words.scatter_add_(2, (ids // 64)[..., None], bits[..., None])
    live = torch.arange(nodes.shape[1], device=q.device, dtype=torch.int64) < n_q[:, None]
    last = nodes.gather(2, (counts[..., None].long() - 1).clamp(min=0))[..., 0]
    seen = torch.where(live, last + 1, 0).amax(1)
    return attention_by_words(q, k_cache, v_cache, words, prefix_len, n_q, seen.int(), scale=scale)[
        0
    ]


# ---- kernels


PLACES = ("counts", "prefix_len", "n_q", "peaks", "totals")  # read row by row


@triton.jit(
    do_not_specialize=["kv_heads", "rows", "columns", "shared"],
    do_not_specialize_on_alignment=["nodes", *PLACES],
)
def _attend(
    q,
    k,
    v,
    nodes,
    counts,
    prefix_len,
    n_q,
    state,
    peaks,
    totals,
    q_batch,
    q_node,
    q_head,
    k_batch,
    k_head,
    k_slot,
    v_batch,
    v_head,
    v_slot,
    scale,
    kv_heads,
    rows,
    columns,
    shared,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend over one span for one tile of rows. shared: whole tiles of the prefix, rows packed; else the tiles after
    them, program_id(0) being a node, and a part of its heads where they do not fit into one tile."""
    TILES: tl.constexpr = SPAN // BLOCK_N
    sequence, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    length, live_rows = (
        tl.load(prefix_len + sequence),
        tl.minimum(tl.load(n_q + sequence) * GROUPS, rows),
    )
    full = length // BLOCK_N
    if shared != 0:
        first_row, end_row, end = tl.program_id(0) * BLOCK_M, rows, full * BLOCK_N
        split, first = tl.program_id(2), tl.program_id(2) * TILES
    else:
        own = tl.program_id(0) // PARTS
        first_row, end_row = (
            own * GROUPS + tl.program_id(0) % PARTS * BLOCK_M,
            own * GROUPS + GROUPS,
        )
        end = length + tl.load(counts + sequence * (rows // GROUPS) + own)
        split = full // TILES + tl.program_id(2)
        first = tl.maximum(full, split * TILES)
    last = tl.minimum((split + 1) * TILES, tl.cdiv(end, BLOCK_N))
    if (first < last) & (first_row < live_rows):
        row, places, dims = (
            first_row + tl.arange(0, BLOCK_M),
            tl.arange(0, BLOCK_N),
            tl.arange(0, BLOCK_D),
        )
        node, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
        inside, channels = row < end_row, dims < HEAD
        k += sequence * k_batch + kv_head.to(tl.int64) * k_head
        v += sequence * v_batch + kv_head.to(tl.int64) * v_head
        nodes += (sequence * (rows // GROUPS) + first_row // GROUPS) * columns
        query = tl.load(
            q + sequence * q_batch + (node * q_node + head * q_head)[:, None] + dims[None, :],
            mask=(row < live_rows)[:, None] & channels[None, :],
            other=0.0,
        )
        at = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * rows + row
        sums_at = state + at[:, None] * HEAD + dims[None, :]
        goes_on = inside & (first > split * TILES)  # with what the shared tiles of this span left
        peak = tl.load(peaks + at, mask=goes_on, other=float("-inf"))
        total = tl.load(totals + at, mask=goes_on, other=0.0)
        sums = tl.load(sums_at, mask=goes_on[:, None] & channels[None, :], other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        for tile in tl.range(first, last, num_stages=STAGES):
            position = tile * BLOCK_N + places
            seen = position < end
            behind = position - length
            slot = tl.where(
                behind < 0,
                position,
                length + tl.load(nodes + behind, mask=seen & (behind >= 0), other=0),
            )
            read = seen[:, None] & channels[None, :]
            keys = tl.load(k + slot[:, None] * k_slot + dims[None, :], mask=read, other=0.0)
            values = tl.load(v + slot[:, None] * v_slot + dims[None, :], mask=read, other=0.0)
            if UPCAST:
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            peak, total, sums = _absorb(
                query, keys, values, seen[None, :], peak, total, sums, scale, True, PRECISION
            )
        tl.store(peaks + at, peak, mask=inside)
        tl.store(totals + at, total, mask=inside)
        tl.store(sums_at, sums, mask=inside[:, None] & channels[None, :])


@triton.jit(do_not_specialize=["kv_heads", "rows"], do_not_specialize_on_alignment=PLACES)
def _add_up(
    state,
    peaks,
    totals,
    counts,
    prefix_len,
    n_q,
    out,
    out_batch,
    out_node,
    out_head,
    kv_heads,
    rows,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
):
    sequence, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    row, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    node, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    inside, channels = row < rows, dims < HEAD
    live = row < tl.load(n_q + sequence) * GROUPS
    end = tl.load(prefix_len + sequence) + tl.load(
        counts + sequence * (rows // GROUPS) + node, mask=inside & live, other=0
    )
    step = tl.num_programs(1).to(tl.int64) * rows  # from a span to the next
    at = tl.program_id(1).to(tl.int64) * rows + row
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    spans = tl.cdiv(tl.max(tl.where(inside & live, end, 0), 0), SPAN)
    for span in tl.range(spans):
        there = inside & live & (span * SPAN < end)
        peak = tl.maximum(peak, tl.load(peaks + at + span * step, mask=there, other=float("-inf")))
    total, sums = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for span in tl.range(spans):
        there = inside & live & (span * SPAN < end)
        part = tl.load(peaks + at + span * step, mask=there, other=float("-inf"))
        fade = tl.where(there, tl.exp2(part - tl.where(there, peak, 0.0)), 0.0)
        total += fade * tl.load(totals + at + span * step, mask=there, other=0.0)
        read = there[:, None] & channels[None, :]
        sums += fade[:, None] * tl.load(
            state + (at + span * step)[:, None] * HEAD + dims[None, :], mask=read, other=0.0
        )
    result = tl.where(live[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    to = out + sequence * out_batch + (node * out_node + head * out_head)[:, None] + dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside[:, None] & channels[None, :])


# ---- launcher


def tiles_for(head_size: int, dtype: torch.dtype) -> Tiles:
    """Return the shipped tiles. The number of rows does not change them: their shape is part of the bits."""
    if (
        dtype is torch.float32
    ):  # multiplied in full precision, without tensor cores: larger tiles spill
        return Tiles(32, 32, 8, 2) if head_size <= 64 else Tiles(16, 16, 8, 2)
    return Tiles(64, 64, 4, 2) if head_size <= 128 else Tiles(64, 32, 8, 2)


def spans_for(slots: int) -> int:
    return triton.cdiv(slots, SPAN)


def workspace_for(q: Tensor, slots: int) -> Tensor:
    """Allocate scratch for `strict_attention` over this many slots, float32, uninitialised; all layers can share it."""
    return torch.empty(
        spans_for(slots) * (q.numel() // q.shape[-1]) * (q.shape[-1] + 2),
        dtype=torch.float32,
        device=q.device,
    )


def strict_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    nodes: Tensor,
    counts: Tensor,
    prefix_len: Tensor,
    n_q: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    upcast: bool = False,
) -> Tensor:
    """Attend from Nq rows over the first `prefix_len` slots and, after them, the nodes on each row's path.

    q, k_cache, v_cache, scale, out, upcast: as of `tree_attention`. nodes: int32 [B, Nq, P], contiguous: the j-th node
    of a row's path, the row itself last, has position prefix_len + j and stands in slot prefix_len + nodes[j]; they
    ascend. counts: int32 [B, Nq], of these nodes, 1 or more in rows before n_q. prefix_len, n_q: int32 [B], all on the
    device.
    Rows from n_q on give 0. Neither other rows, nor hidden slots, nor the number of slots change a bit of a row.
    Capturable; allocates nothing where `out` and `workspace` (`workspace_for`) are given.
    """
    batch, n_nodes, heads, size = q.shape
    kv_heads, groups = k_cache.shape[1], heads // k_cache.shape[1]
    check_caches(q, k_cache, v_cache, (prefix_len, n_q), scale)
    if (
        nodes.dtype is not torch.int32
        or nodes.shape[:2] != (batch, n_nodes)
        or not nodes.is_contiguous()
    ):
        raise ValueError(
            f"nodes: contiguous int32 [{batch}, {n_nodes}, P] is needed, got {nodes.dtype} {list(nodes.shape)}"
        )
    if (
        counts.dtype is not torch.int32
        or counts.shape != (batch, n_nodes)
        or not counts.is_contiguous()
    ):
        raise ValueError(
            f"counts: contiguous int32 [{batch}, {n_nodes}] is needed, got {list(counts.shape)}"
        )
    rows, slots, columns = n_nodes * groups, k_cache.shape[2], nodes.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    state = workspace_for(q, slots) if workspace is None else workspace
    parts_of_rows = spans_for(slots) * batch * heads * n_nodes
    peaks = state[parts_of_rows * size :]
    totals = peaks[parts_of_rows:]
    tiles = tiles_for(size, q.dtype)
    parts = triton.cdiv(groups, tiles.rows)
    block_d = max(16, triton.next_power_of_2(size))
    # The last span may begin with shared tiles, and the longest path, which begins within a tile, reaches into others.
    grids = (
        (1, (triton.cdiv(rows, tiles.rows), kv_heads * batch, spans_for(slots))),
        (0, (n_nodes * parts, kv_heads * batch, triton.cdiv(tiles.slots - 1 + columns, SPAN) + 1)),
    )
    for shared, grid in grids:
        _attend[grid](
            q,
            k_cache,
            v_cache,
            nodes,
            counts,
            prefix_len,
            n_q,
            state,
            peaks,
            totals,
            *q.stride()[:3],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            (size**-0.5 if scale is None else scale) * LOG2_E,
            kv_heads,
            rows,
            columns,
            shared,
            GROUPS=groups,
            PARTS=parts,
            HEAD=size,
            BLOCK_D=block_d,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.slots,
            SPAN=SPAN,
            STAGES=tiles.stages,
            UPCAST=upcast,
            PRECISION="ieee",
            num_warps=tiles.warps,
        )
    _add_up[(triton.cdiv(rows, MERGED_ROWS), kv_heads * batch)](
        state,
        peaks,
        totals,
        counts,
        prefix_len,
        n_q,
        out,
        *out.stride()[:3],
        kv_heads,
        rows,
        GROUPS=groups,
        HEAD=size,
        BLOCK_D=block_d,
        BLOCK_M=MERGED_ROWS,
        SPAN=SPAN,
        num_warps=4,
    )
    return out

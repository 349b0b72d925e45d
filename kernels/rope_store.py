"""Rotary positions and the cache in one launch: queries and keys are rotated, keys and values stored in their slots.

One program per row and head. Texts may have caches of their own, which a table finds. The rotation is that of
Llama: channel c pairs with channel c + D / 2. It is computed in float32 and rounded once, or step by step as torch's
operations round it. Queries and keys may pass an RMS norm over their channels before, that of transformers' modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specengine_kernels.tree_attention import check_table
from torch import Tensor

# ---- meaning


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cosines: Tensor,
    sines: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot: Tensor,
    live: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    stepwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rope_store` in plain torch; returns the rotated queries and both caches; float64 stays float64."""
    kind = torch.promote_types(query.dtype, torch.float32)
    step = query.dtype if stepwise else kind  # that of the numbers between two operations
    cos, sin = (table[positions].to(step)[:, None] for table in (cosines, sines))

    def rotated(states: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            wide = states.to(kind)
            states = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(
                states.dtype
            )
        first, second = states.to(step).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(
            states.dtype
        )

    count, start = int(live), int(slot)
    caches = []
    for cache, rows in ((k_cache, rotated(key, k_norm)), (v_cache, value)):
        after = cache.clone()
        after[:, start : start + count] = rows[:count].transpose(0, 1)
        caches.append(after)
    return rotated(query, q_norm), caches[0], caches[1]


# ---- kernel


@triton.jit
def _turned(
    first,
    second,
    cos,
    sin,
    norm,
    eps,
    channel,
    some,
    kind: tl.constexpr,
    NORM: tl.constexpr,
    STEPWISE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Both halves of a head, normed and rotated, float32."""
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        low = tl.load(norm + channel, mask=some, other=0.0).to(tl.float32)
        high = tl.load(norm + HALF + channel, mask=some, other=0.0).to(tl.float32)
        first = ((first * scale).to(kind).to(tl.float32) * low).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * high).to(kind).to(tl.float32)
    near, across = first * cos, second * sin
    far, back = second * cos, first * sin
    if STEPWISE:
        near, across = near.to(kind).to(tl.float32), across.to(kind).to(tl.float32)
        far, back = far.to(kind).to(tl.float32), back.to(kind).to(tl.float32)
    return near - across, far + back


@triton.jit(
    do_not_specialize=["heads", "kv_heads", "rows"],
    do_not_specialize_on_alignment=["positions", "slot", "live", "table"],
)
def _rope_store(
    query,
    key,
    value,
    positions,
    cosines,
    sines,
    k_cache,
    v_cache,
    slot,
    live,
    table,
    q_norm,
    k_norm,
    eps,
    out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    k_cache_head,
    k_cache_slot,
    v_cache_head,
    v_cache_slot,
    out_row,
    out_head,
    heads,
    kv_heads,
    rows,
    NORM: tl.constexpr,
    STEPWISE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    some = channel < HALF
    at = tl.load(positions + row)
    cos = tl.load(cosines + at * HALF + channel, mask=some, other=0.0)
    sin = tl.load(sines + at * HALF + channel, mask=some, other=0.0)
    text, entry = row // rows, row % rows
    place = tl.load(slot + text) + entry
    stored = some & (entry < tl.load(live + text))
    if table is not None:
        k_cache_head = tl.load(table + 2 * text + 1)
        v_cache_head = k_cache_head
        k_cache += tl.load(table + 2 * text)
        v_cache = k_cache + kv_heads * k_cache_head
    if head < heads:
        source = query + row * q_row + head * q_head + channel
        first = tl.load(source, mask=some, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=some, other=0.0).to(tl.float32)
        kind = out.dtype.element_ty
        first, second = _turned(
            first, second, cos, sin, q_norm, eps, channel, some, kind, NORM, STEPWISE, HALF
        )
        into = out + row * out_row + head * out_head + channel
        tl.store(into, first.to(kind), mask=some)
        tl.store(into + HALF, second.to(kind), mask=some)
    elif head < heads + kv_heads:
        kv_head = head - heads
        source = key + row * k_row + kv_head * k_head + channel
        first = tl.load(source, mask=stored, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=stored, other=0.0).to(tl.float32)
        kind = k_cache.dtype.element_ty
        first, second = _turned(
            first, second, cos, sin, k_norm, eps, channel, some, kind, NORM, STEPWISE, HALF
        )
        into = k_cache + kv_head.to(tl.int64) * k_cache_head + place * k_cache_slot + channel
        tl.store(into, first.to(kind), mask=stored)
        tl.store(into + HALF, second.to(kind), mask=stored)
    else:
        kv_head = head - heads - kv_heads
        source = value + row * v_row + kv_head * v_head + channel
        into = v_cache + kv_head.to(tl.int64) * v_cache_head + place * v_cache_slot + channel
        tl.store(into, tl.load(source, mask=stored), mask=stored)
        tl.store(into + HALF, tl.load(source + HALF, mask=stored), mask=stored)


# ---- launcher


def rope_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cosines: Tensor,
    sines: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot: Tensor,
    live: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    stepwise: bool = False,
    table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions; keys and values of row i go to slot `slot` + i.

    query: [n, Hq, D]; key, value: [n, Hkv, D]; k_cache, v_cache: [Hkv, S, D], one dtype, D even and contiguous, other
    strides free. positions: int64 [n]; cosines, sines: float32 [P, D / 2], contiguous, row p for position p.
    slot: int64 [1]; live: int32 [1]: rows from it on are rotated, and not stored. Positions below P and slots below S
    are the caller's promise. q_norm, k_norm: [D] of the same dtype, weights of RMS norms, both or neither; stepwise:
    round products to the dtype before they are added. table: int64 [texts, 2] as of `tree_attention`: of each text
    n / texts rows are stored in a cache of its own, by its number in slot and live, [texts]. Returns the rotated
    queries, `out` where that is given. Capturable.
    """
    n, heads, size = query.shape
    kv_heads = key.shape[1]
    kinds = {tensor.dtype for tensor in (query, key, value, k_cache, v_cache)}
    if (
        size % 2
        or key.shape != value.shape
        or key.shape[0] != n
        or key.shape[2] != size
        or len(kinds) > 1
    ):
        raise ValueError(
            f"query [n, Hq, D], key, value [n, Hkv, D] of one dtype, D even, got {list(query.shape)}, {kinds}"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[0] != kv_heads or k_cache.shape[2] != size:
        raise ValueError(
            f"k_cache, v_cache: [{kv_heads}, S, {size}] are needed, got {list(k_cache.shape)}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value, k_cache, v_cache)):
        raise ValueError(
            "query, key, value, k_cache, v_cache: the last dimension must be contiguous"
        )
    if cosines.shape != sines.shape or cosines.shape[1] != size // 2 or not cosines.is_contiguous():
        raise ValueError(
            f"cosines, sines: contiguous [positions, {size // 2}] are needed, got {list(cosines.shape)}"
        )
    if (
        cosines.dtype is not torch.float32
        or sines.dtype is not torch.float32
        or not sines.is_contiguous()
    ):
        raise ValueError("cosines, sines: contiguous float32 is needed")
    if positions.dtype is not torch.int64 or positions.shape != (n,):
        raise ValueError(
            f"positions: int64 [{n}] is needed, got {positions.dtype} {list(positions.shape)}"
        )
    for weight in (q_norm, k_norm):
        if (weight is None) is not (q_norm is None) or (
            weight is not None
            and (
                weight.shape != (size,) or weight.stride(0) != 1 or weight.dtype is not query.dtype
            )
        ):
            raise ValueError(f"q_norm, k_norm: both or neither, contiguous {query.dtype} [{size}]")
    if slot.dtype is not torch.int64 or live.dtype is not torch.int32:
        raise ValueError(
            f"slot, live: int64 [1] and int32 [1] are needed, got {slot.dtype}, {live.dtype}"
        )
    texts = len(slot)
    if n % texts or len(live) != texts:
        raise ValueError(
            f"slot, live: one number for each text is needed, got {texts} for {n} rows"
        )
    if table is not None:
        check_table(table, texts, k_cache)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    _rope_store[(n, heads + 2 * kv_heads)](
        query,
        key,
        value,
        positions,
        cosines,
        sines,
        k_cache,
        v_cache,
        slot,
        live,
        table,
        q_norm,
        k_norm,
        eps,
        out,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        *out.stride()[:2],
        heads,
        kv_heads,
        n // texts,
        NORM=q_norm is not None,
        STEPWISE=stepwise,
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2),
        num_warps=1,
        enable_fp_fusion=not stepwise,  # a fused product is not rounded
    )
    return out

"""Rotary positions and the cache in one launch: queries and keys are rotated, keys and values stored in their slots.

One program per row and head. The rotation is that of Llama: channel c pairs with channel c + D / 2. It is computed in
float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rope_store` in plain torch; returns the rotated queries and both caches; float64 stays float64."""
    kind = torch.promote_types(query.dtype, torch.float32)
    cos, sin = (table[positions].to(kind)[:, None] for table in (cosines, sines))

    def rotated(states: Tensor) -> Tensor:
        first, second = states.to(kind).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(states.dtype)

    count, start = int(live), int(slot)
    caches = []
    for cache, rows in ((k_cache, rotated(key)), (v_cache, value)):
        after = cache.clone()
        after[:, start : start + count] = rows[:count].transpose(0, 1)
        caches.append(after)
    return rotated(query), caches[0], caches[1]


# ---- kernel


@triton.jit(do_not_specialize=["heads", "kv_heads"], do_not_specialize_on_alignment=["positions", "slot", "live"])
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
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    some = channel < HALF
    at = tl.load(positions + row)
    cos = tl.load(cosines + at * HALF + channel, mask=some, other=0.0)
    sin = tl.load(sines + at * HALF + channel, mask=some, other=0.0)
    place = tl.load(slot) + row
    stored = some & (row < tl.load(live))
    if head < heads:
        source = query + row * q_row + head * q_head + channel
        first = tl.load(source, mask=some, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=some, other=0.0).to(tl.float32)
        into = out + row * out_row + head * out_head + channel
        tl.store(into, (first * cos - second * sin).to(out.dtype.element_ty), mask=some)
        tl.store(into + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=some)
    elif head < heads + kv_heads:
        kv_head = head - heads
        source = key + row * k_row + kv_head * k_head + channel
        first = tl.load(source, mask=stored, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=stored, other=0.0).to(tl.float32)
        into = k_cache + kv_head.to(tl.int64) * k_cache_head + place * k_cache_slot + channel
        tl.store(into, (first * cos - second * sin).to(k_cache.dtype.element_ty), mask=stored)
        tl.store(into + HALF, (second * cos + first * sin).to(k_cache.dtype.element_ty), mask=stored)
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions; keys and values of row i go to slot `slot` + i.

    query: [n, Hq, D]; key, value: [n, Hkv, D]; k_cache, v_cache: [Hkv, S, D], one dtype, D even and contiguous, other
    strides free. positions: int64 [n]; cosines, sines: float32 [P, D / 2], contiguous, row p for position p.
    slot: int64 [1]; live: int32 [1]: rows from it on are rotated, and not stored. Positions below P and slots below S
    are the caller's promise. Returns the rotated queries, `out` where that is given. Capturable.
    """
    n, heads, size = query.shape
    kv_heads = key.shape[1]
    kinds = {tensor.dtype for tensor in (query, key, value, k_cache, v_cache)}
    if size % 2 or key.shape != value.shape or key.shape[0] != n or key.shape[2] != size or len(kinds) > 1:
        raise ValueError(
            f"query [n, Hq, D], key, value [n, Hkv, D] of one dtype, D even, got {list(query.shape)}, {kinds}"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[0] != kv_heads or k_cache.shape[2] != size:
        raise ValueError(f"k_cache, v_cache: [{kv_heads}, S, {size}] are needed, got {list(k_cache.shape)}")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value, k_cache, v_cache)):
        raise ValueError("query, key, value, k_cache, v_cache: the last dimension must be contiguous")
    if cosines.shape != sines.shape or cosines.shape[1] != size // 2 or not cosines.is_contiguous():
        raise ValueError(f"cosines, sines: contiguous [positions, {size // 2}] are needed, got {list(cosines.shape)}")
    if cosines.dtype is not torch.float32 or sines.dtype is not torch.float32 or not sines.is_contiguous():
        raise ValueError("cosines, sines: contiguous float32 is needed")
    if positions.dtype is not torch.int64 or positions.shape != (n,):
        raise ValueError(f"positions: int64 [{n}] is needed, got {positions.dtype} {list(positions.shape)}")
    if slot.dtype is not torch.int64 or live.dtype is not torch.int32:
        raise ValueError(f"slot, live: int64 [1] and int32 [1] are needed, got {slot.dtype}, {live.dtype}")
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
        out,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        *out.stride()[:2],
        heads,
        kv_heads,
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2),
        num_warps=1,
    )
    return out

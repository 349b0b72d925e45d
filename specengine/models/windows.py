"""Layers that see the last tokens alone, sliding windows: masked by position, as nodes stand in other slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specengine import ops
from specengine.models.kv_cache import KVCache, Rows
from specengine.ops import WORD_BITS


def note_places(cache: KVCache, rows: Rows) -> None:
    """Tell the rows the position of each slot, which the cache notes for scratch that later rows see."""
    slots = torch.arange(cache.capacity, dtype=torch.int64, device=cache.slab.device)
    if cache.places is None or len(cache.places) != len(slots):
        cache.places = slots.clone()
    places = cache.places.index_copy_(0, rows.slot + slots[: len(rows)], rows.positions)
    rows.places = torch.where(slots < rows.prefix, slots, places)


def dense(rows: Rows, window: int) -> Tensor:
    """Return the slots that each row sees, bool [n, end]."""
    assert rows.places is not None
    mask = rows.mask()
    near = rows.places[: rows.end] > rows.positions[:, None] - window
    return near if mask is None else mask & near


def near_prompt(rows: int, before: int, window: int, device: torch.device) -> Tensor:
    """Return what consecutive tokens see of all slots, bool [rows, before + rows]."""
    mask = torch.ones(rows, before + rows, dtype=torch.bool, device=device)
    return mask.tril_(before).triu_(before - window + 1)


def attend_near(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
    """Attend as `attention.attend`, each row to slots of the last `window` positions. Shapes as there."""
    groups = query.shape[0] // keys.shape[0]
    if not ops.is_free(rows.live):
        mask = _on_device(rows, keys.shape[1], window)
        unwritten = torch.arange(keys.shape[1], device=keys.device, dtype=torch.int64) >= rows.slot + rows.live
        keys, values = (  # zeros where fresh memory may hold NaN, which a mask does not keep out of a sum
            cache.masked_fill(unwritten[:, None], 0).repeat_interleave(groups, 0) for cache in (keys, values)
        )
        return scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=scale)[0]
    if window not in rows.near:
        first = min(max(0, int(rows.positions.min()) - window + 1), int(rows.prefix))
        alone = len(rows) == 1 and rows.end == int(rows.prefix) + 1
        packed = None if alone else ops.pack_mask(dense(rows, window)[:, first:], groups, query.dtype)
        rows.near[window] = first, packed
    first, packed = rows.near[window]
    return ops.tree_attention(query, keys[:, first : rows.end], values[:, first : rows.end], packed, scale)


def _on_device(rows: Rows, slots: int, window: int) -> Tensor:
    """Return the mask as `dense`, bool [n, slots], of static shape and without a host read; padding sees itself."""
    assert rows.places is not None
    place = torch.arange(slots, dtype=torch.int64, device=rows.tokens.device)
    node = place - rows.prefix
    bits = rows.words[:, (node // WORD_BITS).clamp(0, rows.words.shape[1] - 1)] >> (node % WORD_BITS)
    named = (bits & 1).bool() & (node < rows.seen) & (node < WORD_BITS * rows.words.shape[1])
    near = rows.places[:slots] > rows.positions[:, None] - window
    own = place == (rows.slot + place[: len(rows)])[:, None]
    return (((node < 0) | named) & near) | own

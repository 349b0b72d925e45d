"""Ops over a key-value cache: attention, and what is written and moved there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specengine.errors import InputError
from specengine.ops._registry import attached, op
from specengine.ops.numbers import WORD_BITS, are_counts, describe, insist

WRONG_PATH = "path: ascending node ids from 0 within the slots of the slab are needed"
CHUNK = 64  # positions that are summed together


class Paths(NamedTuple):
    """Of each row the nodes that it sees, in the order of their positions: nodes int32 [n, most], of which the first
    `counts`, int32 [n], count."""

    nodes: Tensor
    counts: Tensor


@op
def compact_kv(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    """Move slot prefix + path[j] to slot prefix + j of every layer and head, in place, for the first `count` of path.

    slab: [layers, 2, KV heads, capacity, head size]; path: int64 [n], those that count ascending from 0; count, prefix:
    int32 [1]. prefix + n slots must exist; InputError where they don't (on a CUDA device: an asynchronous assertion).
    """
    if slab.dim() != 5 or path.dtype is not torch.int64 or path.dim() != 1 or not are_counts(count, prefix):
        given = describe(slab, path, count, prefix)
        raise InputError(f"slab, path, count, prefix: a cache, int64 [n], int32 [1] x 2 are needed, got {given}")
    if run := attached("compact_kv", slab):
        run(slab, path, count, prefix)
        return
    if not path.shape[0]:
        return
    place = torch.arange(path.shape[0], device=slab.device, dtype=torch.int64)
    there = place < count
    rises = (path[1:] > path[:-1]) | ~there[1:]
    inside = (prefix >= 0) & (prefix + path.masked_fill(~there, 0).amax() < slab.shape[3])
    insist(((path[:1] == 0) | (count < 1)).all() & rises.all() & inside.all(), WRONG_PATH)
    slots = prefix.long() + place
    moved = slab.index_select(3, torch.where(there, prefix.long() + path, slots))
    slab.index_copy_(3, slots, moved)


@op
def pack_mask(mask: Tensor, groups: int, dtype: torch.dtype, prefix: int = 0) -> Any:
    """A visibility mask as `tree_attention` takes it at the least cost there: make it once per forward.

    mask: bool [n, L], True where row sees slot; groups: query heads per key-value head; dtype: that of the queries;
    prefix: how many slots at the start every row sees, as far as is known without looking.
    """
    if mask.dtype is not torch.bool or mask.dim() != 2 or not 0 <= prefix <= mask.shape[1]:
        raise InputError(f"mask: bool [n, L] with L of {prefix} or more is needed, got {describe(mask)}")
    if run := attached("pack_mask", mask):
        return run(mask, groups, dtype, prefix)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf).repeat(groups, 1)


@op
def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """Attention of n tree rows over L slots; query head h reads key-value head h // G, with G = Hq / Hkv.

    query: [Hq, n, D]; key, value: [Hkv, L, D], one floating dtype, any strides. mask: what `pack_mask` gives, or
    bool [n, L], or that repeated for the heads of a group, [G * n, L]; None where every row sees every slot.
    Returns [Hq, n, D]; a row that sees nothing gives 0.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0]:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {describe(query, key, value)}")
    if isinstance(mask, Tensor):
        groups = heads // key.shape[0]
        if mask.shape[0] == rows and groups > 1:
            mask = mask.repeat(groups, 1)
        if mask.shape[0] != groups * rows or mask.shape[1] != key.shape[1]:
            raise InputError(f"mask: [{rows} or {groups * rows}, {key.shape[1]}] is needed, got {describe(mask)}")
    if run := attached("tree_attention", query):
        return run(query, key, value, mask, scale)
    # The query heads of a group become rows of one head, so keys and values are read once and never repeated.
    heads, rows, size = query.shape
    packed = query.reshape(1, key.shape[0], -1, size)
    one_row = packed.shape[2] == 1 and packed.dtype is torch.bfloat16
    if packed.device.type == "cpu" and (one_row or packed.dtype is torch.float16):
        # Here torch's CPU kernel takes 2 to 4 times as long as float32 with the conversions, and is less exact.
        packed, key, value = packed.float(), key.float(), value.float()
    if mask is not None and mask.dtype not in (torch.bool, packed.dtype):
        mask = mask.to(packed.dtype)
    out = scaled_dot_product_attention(packed, key[None], value[None], mask, scale=scale)
    return out.to(query.dtype).view(heads, rows, size)


@op
def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: Tensor,
    prefix: Tensor,
    live: Tensor,
    seen: Tensor,
    scale: float,
) -> Tensor:
    """As `tree_attention` with static shapes: over a whole cache, of which each row sees the first `prefix` slots and,
    of the `seen` slots behind them, those that its words name.

    query: [Hq, n, D]; key, value: [Hkv, capacity, D], one floating dtype. words: int64 [n, w], bit j % 64 of word
    j // 64 names slot prefix + j. prefix, live, seen: int32 [1] on the device; rows from `live` on are padding and
    give 0. What stands in the other slots, NaN too, changes nothing. No host read, so it can be captured.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0] or not query.dtype is key.dtype is value.dtype:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {describe(query, key, value)}")
    if words.dtype is not torch.int64 or words.dim() != 2 or words.shape[0] != rows:
        raise InputError(f"words: int64 [{rows}, words] is needed, got {describe(words)}")
    if any(number.dtype is not torch.int32 or number.shape != (1,) for number in (prefix, live, seen)):
        raise InputError(f"prefix, live, seen: int32 [1] each is needed, got {describe(prefix, live, seen)}")
    if run := attached("cached_attention", query):
        return run(query, key, value, words, prefix, live, seen, scale)
    groups, rows = query.shape[0] // key.shape[0], query.shape[1]
    # which node's slot it is, negative in the prefix
    node = torch.arange(key.shape[1], device=key.device, dtype=torch.int64) - prefix
    inside = node < seen
    bits = words[:, (node // WORD_BITS).clamp(0, words.shape[1] - 1)] >> (node % WORD_BITS)
    named = (bits & 1).bool() & (node < WORD_BITS * words.shape[1])
    padding = torch.arange(rows, device=key.device, dtype=torch.int64) >= live
    mask = torch.zeros(rows, key.shape[1], dtype=query.dtype, device=key.device)
    mask = mask.masked_fill_(~((node < 0) | named) | ~inside | padding[:, None], -math.inf).repeat(groups, 1)
    key, value = (cache.masked_fill(~inside[:, None], 0.0) for cache in (key, value))  # there may be NaN
    return tree_attention(query, key, value, mask, scale).masked_fill(padding[:, None], 0.0)


@op
def rope_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    slab: Tensor,
    slot: Tensor,
    live: Tensor,
) -> Tensor:
    """The queries rotated by their positions; keys, rotated as well, and values go into the slots from `slot` on.

    query: [Hq, n, D]; key, value: [Hkv, n, D]; slab: [2, Hkv, capacity, D], of keys and of values, one floating dtype.
    positions: int64 [n]; tables: cosines and sines, float32 [positions, D / 2]; slot: int64 [1]; live: int32 [1]; all
    on the device. Rows from `live` on are padding, and what is stored of them, if anything, stands behind the others.
    Llama's rotation, channel c with channel c + D / 2, in float32. No host read, so it can be captured.
    """
    heads, rows, size = query.shape
    if size % 2 or key.shape != value.shape or key.shape[1:] != (rows, size) or heads % key.shape[0]:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, n, D] are needed, got {describe(query, key, value)}")
    if slab.dim() != 4 or slab.shape[:2] != (2, key.shape[0]) or slab.shape[3] != size or slab.dtype is not key.dtype:
        raise InputError(f"slab: [2, {key.shape[0]}, capacity, {size}] is needed, got {describe(slab)}")
    if any(table.dtype is not torch.float32 or table.shape[1:] != (size // 2,) for table in tables):
        raise InputError(f"tables: float32 [positions, {size // 2}] x 2 are needed, got {describe(*tables)}")
    if positions.dtype is not torch.int64 or slot.dtype is not torch.int64 or live.dtype is not torch.int32:
        raise InputError(
            f"positions, slot, live: int64 [n], int64 [1], int32 [1], got {describe(positions, slot, live)}"
        )
    if run := attached("rope_store", query):
        return run(query, key, value, positions, tables, slab, slot, live)
    cosines, sines = (torch.cat([table[positions]] * 2, -1) for table in tables)

    def rotated(states: Tensor) -> Tensor:
        first, second = states.float().chunk(2, -1)
        return (states.float() * cosines + torch.cat([-second, first], -1) * sines).to(states.dtype)

    slots = slot + torch.arange(positions.shape[0], device=slab.device, dtype=torch.int64)
    for cache, stored in ((slab[0], rotated(key)), (slab[1], value)):
        cache.index_copy_(1, slots, stored)
    return rotated(query)


@op
def order_paths(words: Tensor) -> Paths:
    """The nodes that each row's words name, in the order of their bits; made once per forward.

    words: int64 [n, w], bit j % 64 of word j // 64: the row sees node j. Returns nodes int32 [n, 64 * w], ascending,
    and how many count, int32 [n]. No host read, so it can be captured.
    """
    if words.dtype is not torch.int64 or words.dim() != 2:
        raise InputError(f"words: int64 [n, words] is needed, got {describe(words)}")
    if run := attached("order_paths", words):
        return run(words)
    named = (words[:, :, None] >> torch.arange(WORD_BITS, device=words.device, dtype=torch.int64) & 1).flatten(1)
    rows, most = named.shape
    places = torch.where(named.bool(), named.cumsum(1) - 1, most)  # behind the end: not named
    ids = torch.arange(most, dtype=torch.int32, device=words.device).expand(rows, most)
    nodes = torch.zeros(rows, most + 1, dtype=torch.int32, device=words.device).scatter_(1, places, ids)
    return Paths(nodes[:, :most].contiguous(), named.sum(1).int())


@op
def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    """As `cached_attention`, but a row's result depends on nothing except the keys and values that it sees, in their
    order: not on other rows, on slots between those, or on the size of the cache. So a tree node's bits are those of
    plain decoding.

    paths: of the rows, by `order_paths`; prefix, live: int32 [1] on the device. No host read, so it can be captured.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0] or not query.dtype is key.dtype is value.dtype:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {describe(query, key, value)}")
    if any(part.dtype is not torch.int32 or len(part) != rows for part in paths) or paths.nodes.dim() != 2:
        raise InputError(f"paths: int32 [{rows}, most], int32 [{rows}] are needed, got {describe(*paths)}")
    if any(number.dtype is not torch.int32 or number.shape != (1,) for number in (prefix, live)):
        raise InputError(f"prefix, live: int32 [1] each is needed, got {describe(prefix, live)}")
    if run := attached("strict_cached_attention", query):
        return run(query, key, value, paths, prefix, live, scale)
    # By whole chunks of absolute positions, of which the j-th node of a path has prefix + j, so that neither the tree
    # nor the size of the cache changes the order of sums.
    (heads, rows, size), (kv_heads, capacity, _) = query.shape, key.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = (query.to(wide) * scale).view(kv_heads, -1, rows, 1, size)
    ends = torch.where(torch.arange(rows, device=key.device, dtype=torch.int64) < live, prefix + paths.counts, 0)
    peak = torch.full(grouped.shape[:3], -math.inf, dtype=wide, device=key.device)
    total, sums = torch.zeros_like(peak), torch.zeros_like(query, dtype=wide).view(*peak.shape, size)
    for start in range(0, capacity, CHUNK):
        positions = torch.arange(start, start + CHUNK, device=key.device, dtype=torch.int64)
        place = (positions - prefix).clamp(0, paths.nodes.shape[1] - 1).expand(rows, -1)
        slots = torch.where(positions < prefix, positions, prefix + paths.nodes.gather(1, place))
        seen = positions < ends[:, None]
        slots = slots.masked_fill(~seen, 0)
        keys, values = (cache[:, slots].to(wide).masked_fill_(~seen[..., None], 0.0) for cache in (key, value))
        scores = (grouped * keys[:, None]).sum(-1).masked_fill_(~seen, -math.inf)
        higher = torch.maximum(peak, scores.amax(-1))
        shift = higher.masked_fill(higher == -math.inf, 0.0)  # of a row that has seen nothing yet
        weights, fade = (scores - shift[..., None]).exp(), (peak - shift).exp()
        total = total * fade + weights.sum(-1)
        sums = sums * fade[..., None] + (weights[..., None] * values[:, None]).sum(-2)
        peak = higher
    return (sums / total.clamp(min=torch.finfo(wide).tiny)[..., None]).view(heads, rows, size).to(query.dtype)

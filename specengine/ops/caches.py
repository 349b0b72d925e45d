"""Ops over a key-value cache: attention, and what is written and moved there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._backends import describe, implementation
from specengine.reference import Paths


def compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    """Move slot prefix + path[j] to slot prefix + j of every layer and head, in place.

    slab: [layers, 2, KV heads, capacity, head size]; path: ascending, starting with 0, within the capacity.
    """
    if slab.dim() != 5:
        raise InputError(f"slab: [layers, 2, KV heads, capacity, head size] is needed, got {describe(slab)}")
    if not path or path[0] != 0 or any(a >= b for a, b in pairwise(path)):
        raise InputError(f"path: got {path}, ascending node ids from 0 are needed")
    if prefix < 0 or prefix + path[-1] >= slab.shape[3]:
        raise InputError(f"path: {path} after {prefix} slots leaves the {slab.shape[3]} slots of the slab")
    implementation("compact_kv", slab.device.type)(slab, prefix, path)


def pack_mask(mask: Tensor, groups: int, dtype: torch.dtype, prefix: int = 0) -> Any:
    """A visibility mask as `tree_attention` takes it at the least cost there: make it once per forward.

    mask: bool [n, L], True where row sees slot; groups: query heads per key-value head; dtype: that of the queries;
    prefix: how many slots at the start every row sees, as far as is known without looking.
    """
    if mask.dtype is not torch.bool or mask.dim() != 2 or not 0 <= prefix <= mask.shape[1]:
        raise InputError(f"mask: bool [n, L] with L of {prefix} or more is needed, got {describe(mask)}")
    return implementation("pack_mask", mask.device.type)(mask, groups, dtype, prefix)


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
    return implementation("tree_attention", query.device.type)(query, key, value, mask, scale)


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
    run = implementation("cached_attention", query.device.type)
    return run(query, key, value, words, prefix, live, seen, scale)


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
    return implementation("rope_store", query.device.type)(query, key, value, positions, tables, slab, slot, live)


def strict_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As `tree_attention`, but a row's result depends on nothing except the keys and values that it sees, in their
    order: not on other rows, nor on slots that it does not see. So a tree node's bits are those of plain decoding.

    mask: bool [n, L], or None where every row sees every slot.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0] or not query.dtype is key.dtype is value.dtype:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {describe(query, key, value)}")
    if mask is not None and (mask.dtype is not torch.bool or mask.shape != (rows, key.shape[1])):
        raise InputError(f"mask: bool [{rows}, {key.shape[1]}] is needed, got {describe(mask)}")
    return implementation("strict_attention", query.device.type)(query, key, value, mask, scale)


def order_paths(words: Tensor) -> Paths:
    """The nodes that each row's words name, in the order of their bits; made once per forward.

    words: int64 [n, w], bit j % 64 of word j // 64: the row sees node j. Returns nodes int32 [n, 64 * w], ascending,
    and how many count, int32 [n]. No host read, so it can be captured.
    """
    if words.dtype is not torch.int64 or words.dim() != 2:
        raise InputError(f"words: int64 [n, words] is needed, got {describe(words)}")
    return implementation("order_paths", words.device.type)(words)


def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    """As `cached_attention`, with what `strict_attention` promises: sums go over fixed chunks of absolute positions,
    the j-th node of a row's path having position prefix + j, so that the tree around a row changes no bit of it.

    paths: of the rows, by `order_paths`; prefix, live: int32 [1] on the device. No host read, so it can be captured.
    """
    heads, rows, _ = query.shape
    if key.shape != value.shape or heads % key.shape[0] or not query.dtype is key.dtype is value.dtype:
        raise InputError(f"query [Hq, n, D], key, value [Hkv, L, D] are needed, got {describe(query, key, value)}")
    if any(part.dtype is not torch.int32 or len(part) != rows for part in paths) or paths.nodes.dim() != 2:
        raise InputError(f"paths: int32 [{rows}, most], int32 [{rows}] are needed, got {describe(*paths)}")
    if any(number.dtype is not torch.int32 or number.shape != (1,) for number in (prefix, live)):
        raise InputError(f"prefix, live: int32 [1] each is needed, got {describe(prefix, live)}")
    run = implementation("strict_cached_attention", query.device.type)
    return run(query, key, value, paths, prefix, live, scale)

"""Ops over a key-value cache: attention, and the rotated keys and values written there."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specengine.ops._meanings import WORD_BITS, refuse_unless, require
from specengine.ops._registry import kernels, native, op
from specengine.ops.networks import rms_norm
from specengine.ops.tree import sent

CHUNK = 64  # positions that are summed together


class Paths(NamedTuple):
    """The nodes that each row sees, in the order of their positions: nodes int32 [n, most], of which the first
    `counts`, int32 [n], count."""

    nodes: Tensor
    counts: Tensor


class Rotation(NamedTuple):
    """Hold how `rope_store` rotates.

    cosines, sines  float32 [positions, D / 2]
    q_norm, k_norm  weights [D] of RMS norms of each query and key before, of their dtype; both or neither
    eps             what those norms add to the variance
    stepwise        round to the dtype after each operation, as transformers' modules do; else once, at the end
    """

    cosines: Tensor
    sines: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    stepwise: bool = False


class Slabs(NamedTuple):
    """Caches of several texts on one device. Rows over them are as many of each text, those of the first one first.

    each   [2, Hkv, capacity, D], of keys and of values, as part of a dense tensor; capacities differ
    table  int64 [n, 2], of each how many numbers after the longest one it begins, and the numbers of a head
    """

    each: tuple[Tensor, ...]
    table: Tensor

    @classmethod
    def by_layer(cls, caches: Sequence[Tensor], tables: Tensor) -> "list[Slabs]":
        """Return those of each layer of caches, [layers, 2, Hkv, capacity, D]; tables: by `tables_of`."""
        return [cls(*layer) for layer in zip(zip(*caches, strict=True), tables, strict=True)]


def tables_of(caches: Sequence[Tensor]) -> Tensor:
    """Return the tables of `Slabs.by_layer`, int64 [layers, n, 2]; they name addresses, and keep no cache alive."""
    places = [
        [
            [(slab.data_ptr() - longest(slabs).data_ptr()) // slab.element_size(), slab.stride(1)]
            for slab in slabs
        ]
        for slabs in zip(*caches, strict=True)
    ]
    return sent(cast(Any, places), torch.int64, caches[0].device)


def longest(slabs: Sequence[Tensor]) -> Tensor:
    """Return the first of the longest slabs."""
    return max(slabs, key=lambda slab: slab.shape[2])


@op
def pack_mask(
    mask: Tensor, groups: int, dtype: torch.dtype, prefix: int = 0, causal: bool = False
) -> Any:
    """Return a visibility mask in the form that `tree_attention` reads fastest; make it once per forward.

    mask: bool [n, L], True where row sees slot; groups: query heads per key-value head; dtype: that of the queries;
    prefix: slots at the start that every row sees, as far as is known without reading the mask; causal: whether the
    rows stand in the last slots and see none after their own.
    """
    refuse_unless(
        mask.dtype is torch.bool and mask.dim() == 2 and 0 <= prefix <= mask.shape[1],
        "mask",
        f"bool [n, L] with L of {prefix} or more",
        mask,
    )
    if run := kernels.pack_mask[mask.device]:
        return run(mask, groups, dtype, prefix, causal)
    return (
        torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        .masked_fill_(~mask, -math.inf)
        .repeat(groups, 1)
    )


@op
def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """Return attention of n tree rows over L slots; query head h reads key-value head h // G, with G = Hq / Hkv.

    query: [Hq, n, D]; key, value: [Hkv, L, D], one floating dtype, any strides. mask: a result of `pack_mask`, or
    bool [n, L], or that repeated for the heads of a group, [G * n, L]; None where every row sees every slot.
    Returns [Hq, n, D]; a row that sees nothing gives 0.
    """
    heads, rows, size = query.shape
    refuse_unless(
        key.shape == value.shape and heads % key.shape[0] == 0,
        "query, key, value",
        "[Hq, n, D], twice [Hkv, L, D]",
        query,
        key,
        value,
    )
    if isinstance(mask, Tensor):
        groups = heads // key.shape[0]
        if mask.shape[0] == rows and groups > 1:
            mask = mask.repeat(groups, 1)
        refuse_unless(
            mask.shape[:2] == (groups * rows, key.shape[1]),
            "mask",
            f"[{rows} or {groups * rows}, {key.shape[1]}]",
            mask,
        )
    if run := kernels.tree_attention[query.device]:
        return run(query, key, value, mask, scale)
    # The query heads of a group become rows of one head, so keys and values are read once and never repeated.
    packed = query.reshape(1, key.shape[0], -1, size)
    one_row = packed.shape[2] == 1 and packed.dtype is torch.bfloat16
    if packed.device.type == "cpu" and (one_row or packed.dtype is torch.float16):
        # Here torch's CPU kernel takes 2 to 4 times as long as float32 with the conversions, and is less exact.
        packed, key, value = packed.float(), key.float(), value.float()
    if mask is not None and mask.dtype not in (torch.bool, packed.dtype):
        mask = mask.to(packed.dtype)
    out = scaled_dot_product_attention(packed, key[None], value[None], mask, scale=scale)
    return out.to(query.dtype).reshape(heads, rows, size)  # on a GPU a transposed view


def _require_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    refuse_unless(
        key.shape == value.shape
        and query.shape[0] % key.shape[0] == 0
        and query.dtype is key.dtype is value.dtype,
        "query, key, value",
        "[Hq, n, D], twice [Hkv, L, D], of one dtype",
        query,
        key,
        value,
    )


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
    """Return attention with static shapes over a whole cache, as `tree_attention`.

    Each row sees the first `prefix` slots and, of the `seen` slots after them, those that its words name.

    query: [Hq, n, D]; key, value: [Hkv, capacity, D], one floating dtype. words: int64 [n, w], bit j % 64 of word
    j // 64 names slot prefix + j. prefix, live, seen: int32 [1] on the device; rows from `live` on are padding and
    give 0. The contents of other slots, NaN too, change nothing. No host read, so it can be captured.
    """
    _require_heads(query, key, value)
    require(
        f"words: int64 [{query.shape[1]}, words]; prefix: int32 [1]; live: int32 [1]; "
        "seen: int32 [1]",
        words,
        prefix,
        live,
        seen,
    )
    if run := kernels.cached_attention[query.device]:
        return run(query, key, value, words, prefix, live, seen, scale)
    groups, rows = query.shape[0] // key.shape[0], query.shape[1]
    # which node's slot it is, negative in the prefix
    node = torch.arange(key.shape[1], device=key.device, dtype=torch.int64) - prefix
    inside = node < seen
    bits = words[:, (node // WORD_BITS).clamp(0, words.shape[1] - 1)] >> (node % WORD_BITS)
    named = (bits & 1).bool() & (node < WORD_BITS * words.shape[1])
    padding = torch.arange(rows, device=key.device, dtype=torch.int64) >= live
    mask = torch.zeros(rows, key.shape[1], dtype=query.dtype, device=key.device)
    mask = mask.masked_fill_(~((node < 0) | named) | ~inside | padding[:, None], -math.inf).repeat(
        groups, 1
    )
    # there may be NaN
    key, value = (cache.masked_fill(~inside[:, None], 0.0) for cache in (key, value))
    return tree_attention(query, key, value, mask, scale).masked_fill(padding[:, None], 0.0)


@op
def lanes_attention(
    query: Tensor,
    slabs: Slabs,
    words: Tensor,
    prefix: Tensor,
    live: Tensor,
    nodes: Tensor,
    scale: float,
) -> Tensor:
    """Return attention of rows of n texts, as many of each, each over its own cache, as `cached_attention` has it.

    query: [Hq, n * rows, D]; words: int64 [n, rows, w]; prefix, live, nodes: int32 [n], the last the slots after the
    prefix. Returns [Hq, n * rows, D]. No host read, so it can be captured.
    """
    for slab in slabs.each:
        _require_heads(query, slab[0], slab[1])
    texts = len(slabs.each)
    require(
        f"table: int64 [{texts}, 2]; words: int64 [{texts}, {query.shape[1] // texts}, words]; "
        f"prefix: int32 [{texts}]; live: int32 [{texts}]; nodes: int32 [{texts}]",
        slabs.table,
        words,
        prefix,
        live,
        nodes,
    )
    if run := kernels.lanes_attention[query.device]:
        return run(query, slabs, words, prefix, live, nodes, scale)
    counts = (count.split(1) for count in (prefix, live, nodes))
    each = zip(query.chunk(texts, 1), slabs.each, words, *counts, strict=True)
    return torch.cat(
        [
            cached_attention(rows, slab[0], slab[1], bits, first, count, last, scale)
            for rows, slab, bits, first, count, last in each
        ],
        1,
    )


@op
def rope_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | Rotation,
    slab: Tensor | Slabs,
    slot: Tensor,
    live: Tensor,
) -> Tensor:
    """Return the queries rotated by their positions; store rotated keys and values in the slots from `slot` on.

    Of Slabs `slot` and `live` have a number for each text.

    query: [Hq, n, D]; key, value: [Hkv, n, D]; slab: [2, Hkv, capacity, D], of keys and of values, one floating dtype.
    positions: int64 [n]; tables: cosines and sines, float32 [positions, D / 2]; slot: int64 [1]; live: int32 [1]; all
    on the device. Rows from `live` on are padding; if they are stored, they stand after the others.
    Llama's rotation, channel c with channel c + D / 2, in float32 unless a Rotation says more. No host read, so it can
    be captured.
    """
    turn = Rotation(*tables)
    heads, rows, size = query.shape
    fits = size % 2 == 0 and key.shape[1:] == (rows, size) and heads % key.shape[0] == 0
    refuse_unless(
        fits and key.shape == value.shape,
        "query, key, value",
        "[Hq, n, D], twice [Hkv, n, D], D even",
        query,
        key,
        value,
    )
    slabs = slab.each if isinstance(slab, Slabs) else (slab,)
    refuse_unless(
        all(
            (one.shape[:2], *one.shape[3:], one.dtype) == ((2, key.shape[0]), size, key.dtype)
            for one in slabs
        ),
        "slab",
        f"[2, {key.shape[0]}, capacity, {size}], of the dtype of key",
        *slabs,
    )
    refuse_unless(
        all(table.dtype is torch.float32 and table.shape[1:] == (size // 2,) for table in turn[:2]),
        "tables",
        f"twice float32 [positions, {size // 2}]",
        *turn[:2],
    )
    refuse_unless(
        (positions.dtype, slot.dtype, live.dtype) == (torch.int64, torch.int64, torch.int32),
        "positions, slot, live",
        "int64 [n], int64 [1] and int32 [1], of Slabs [texts]",
        positions,
        slot,
        live,
    )
    weights = [weight for weight in (turn.q_norm, turn.k_norm) if weight is not None]
    refuse_unless(
        len(weights) != 1
        and all((w.dtype, w.shape) == (query.dtype, query.shape[2:]) for w in weights),
        "q_norm, k_norm",
        f"both, {query.dtype} [{query.shape[2]}], or neither",
        *weights,
    )
    if run := kernels.rope_store[query.device]:
        return run(query, key, value, positions, turn, slab, slot, live)
    step = query.dtype if turn.stepwise else torch.float32
    cosines, sines = (
        torch.cat([table[positions]] * 2, -1).to(step) for table in (turn.cosines, turn.sines)
    )
    if turn.q_norm is not None and turn.k_norm is not None:
        query, key = rms_norm(query, turn.q_norm, turn.eps), rms_norm(key, turn.k_norm, turn.eps)

    def rotated(states: Tensor) -> Tensor:
        first, second = states.to(step).chunk(2, -1)
        return (states.to(step) * cosines + torch.cat([-second, first], -1) * sines).to(
            states.dtype
        )

    stored = torch.stack((rotated(key), value))
    places = torch.arange(rows // len(slabs), device=slot.device, dtype=torch.int64)
    for one, into, states in zip(
        slabs, slot[:, None] + places, stored.chunk(len(slabs), 2), strict=True
    ):
        one.index_copy_(2, into, states)
    return rotated(query)


@op
def order_paths(words: Tensor) -> Paths:
    """Return the nodes that each row's words name, in the order of their bits; make it once per forward.

    words: int64 [n, w], bit j % 64 of word j // 64: the row sees node j. Returns nodes int32 [n, 64 * w], ascending,
    and how many count, int32 [n]. No host read, so it can be captured.
    """
    require("words: int64 [n, words]", words)
    named = (
        words[:, :, None] >> torch.arange(WORD_BITS, device=words.device, dtype=torch.int64) & 1
    ).flatten(1)
    rows, most = named.shape
    places = torch.where(named.bool(), named.cumsum(1) - 1, most)  # after the end: not named
    nodes = torch.zeros(rows, most + 1, dtype=torch.int32, device=words.device).scatter_(
        1, places, torch.arange(most, dtype=torch.int32, device=words.device).expand(rows, most)
    )
    return Paths(nodes[:, :most].contiguous(), named.sum(1).int())


@op
def strict_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Paths,
    prefix: Tensor,
    live: Tensor,
    scale: float,
) -> Tensor:
    """Attend as `cached_attention` does, but a row's result depends only on the keys and values that it sees, in their
    order: not on other rows, on slots between those, or on the size of the cache. So a tree node's bits are those of
    plain decoding.

    paths: of the rows, by `order_paths`; prefix, live: int32 [1] on the device. No host read, so it can be captured.
    """
    if run := native.strict_cached_attention[query.device]:
        return run(query, key, value, paths, prefix, live, scale)
    _require_heads(query, key, value)
    rows = query.shape[1]
    require(
        f"nodes: int32 [{rows}, most]; counts: int32 [{rows}]; prefix: int32 [1]; live: int32 [1]",
        *paths,
        prefix,
        live,
    )
    if run := kernels.strict_cached_attention[query.device]:
        return run(query, key, value, paths, prefix, live, scale)
    # By whole chunks of absolute positions, of which the j-th node of a path has prefix + j, so that neither the tree
    # nor the size of the cache changes the order of sums.
    (heads, rows, size), (kv_heads, capacity, _) = query.shape, key.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = (query.to(wide) * scale).view(kv_heads, -1, rows, 1, size)
    ends = torch.where(
        torch.arange(rows, device=key.device, dtype=torch.int64) < live, prefix + paths.counts, 0
    )
    peak = torch.full(grouped.shape[:3], -math.inf, dtype=wide, device=key.device)
    total, sums = (
        torch.zeros_like(peak),
        torch.zeros_like(query, dtype=wide).view(*peak.shape, size),
    )
    for start in range(0, capacity, CHUNK):
        positions = torch.arange(start, start + CHUNK, device=key.device, dtype=torch.int64)
        place = (positions - prefix).clamp(0, paths.nodes.shape[1] - 1).expand(rows, -1)
        slots = torch.where(positions < prefix, positions, prefix + paths.nodes.gather(1, place))
        visible = positions < ends[:, None]
        slots = slots.masked_fill(~visible, 0)
        keys, values = (
            cache[:, slots].to(wide).masked_fill_(~visible[..., None], 0.0)
            for cache in (key, value)
        )
        scores = (grouped * keys[:, None]).sum(-1).masked_fill_(~visible, -math.inf)
        higher = torch.maximum(peak, scores.amax(-1))
        shift = higher.masked_fill(higher == -math.inf, 0.0)  # of a row that has seen nothing yet
        weights, fade = (scores - shift[..., None]).exp(), (peak - shift).exp()
        total = total * fade + weights.sum(-1)
        sums = sums * fade[..., None] + (weights[..., None] * values[:, None]).sum(-2)
        peak = higher
    return (
        (sums / total.clamp(min=torch.finfo(wide).tiny)[..., None])
        .view(heads, rows, size)
        .to(query.dtype)
    )

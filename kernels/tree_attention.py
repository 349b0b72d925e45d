"""Tree attention: all query rows see one prefix, and of the nodes drafted after it those that their words name.

The rows of the query heads that share a key-value head are packed into one tile, so each key and value is read once
per tile. Full prefix tiles carry no mask. The prefix is cut into splits that run side by side, and the tree is one of
its own; a second kernel merges them. The grid is fixed by shapes alone, lengths are read on the device: one captured
graph serves every length. A short prefix has fewer splits than the grid has room for: the others have nothing to do,
and are not merged. Caches of several sequences may lie anywhere: a table says where. Nothing is summed atomically, so
equal inputs give equal bits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BITS = 64
# of an H100 or H200; used where there is no device to ask
MULTIPROCESSORS, SHARED_BYTES = 132, 227 * 1024
# the shared memory of a program below this: an A100 has 163 KB, the cards after it 99, AMD's 64
FEWER_BYTES = 200 * 1024
MAX_SPLITS = 64  # of the prefix, and the tree's
MIN_SHARE_TILES = tl.constexpr(2)  # full tiles that one split of the prefix reads at least
MERGED_ROWS = 4  # rows per program of the merging kernel
AT_ONCE = tl.constexpr(16)  # splits that it reads without waiting for one in between
LOG2_E = math.log2(math.e)


# ---- meaning


def reference(*inputs: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `tree_attention` in plain torch and in the dtype of q; returns out [B, Nq, Hq, D] and lse
    [B, Nq, Hq]."""
    q, k_cache, v_cache, words, prefix_len, n_q, n_tree = inputs
    groups, size = q.shape[2] // k_cache.shape[1], q.shape[3]
    slots = torch.arange(k_cache.shape[2], device=q.device, dtype=torch.int64)
    # [B, S]: which node stands in a slot, negative in the prefix
    node = slots - prefix_len[:, None].long()
    word = (node // WORD_BITS).clamp(0, words.shape[2] - 1)
    bits = words.gather(2, word[:, None].expand(-1, q.shape[1], -1)) >> (node % WORD_BITS)[:, None]
    named = (bits & 1 == 1) & (node < WORD_BITS * words.shape[2])[:, None]
    inside = node < n_tree[:, None]
    live = torch.arange(q.shape[1], device=q.device, dtype=torch.int64) < n_q[:, None]
    seen = ((node < 0)[:, None] | named) & inside[:, None] & live[:, :, None]
    written = [cache.where(inside[:, None, :, None], 0).to(q.dtype) for cache in (k_cache, v_cache)]
    keys, values = (cache.repeat_interleave(groups, 1) for cache in written)
    scores = torch.einsum("bnhd,bhsd->bnhs", q, keys) * (size**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, :, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
    return torch.einsum("bnhs,bhsd->bnhd", weights, values), lse


# ---- kernels


@triton.jit
def _absorb(
    query,
    keys,
    values,
    seen,
    peak,
    total,
    sums,
    scale,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take one step of the online softmax in base 2: scores times `scale` are log2 weights."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shift = new_peak
    if MASKED:
        # a row that has seen nothing yet
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision=PRECISION)
    return new_peak, total, sums


@triton.jit
def _tile(
    base, slots, stride, end, dims, MASKED: tl.constexpr, HEAD: tl.constexpr, UPCAST: tl.constexpr
):
    """Load rows `slots` of a cache, [slots, dims]; 0 from `end` on, where NaN may be: 0 * NaN is NaN."""
    at = base + slots[:, None] * stride + dims[None, :]
    if MASKED:
        rows = tl.load(at, mask=(slots < end)[:, None] & (dims < HEAD)[None, :], other=0.0)
    elif dims.shape[0] == HEAD:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(dims < HEAD)[None, :], other=0.0)
    return rows.to(tl.float32) if UPCAST else rows


@triton.jit
def _window(words, first, n_words, live):
    """Return 64 visibility bits per row from node `first` on, which may be negative: bit c is node first + c."""
    index, shift = first >> 6, (first & 63).to(tl.int64)
    low = tl.load(words + index, mask=live & (index >= 0) & (index < n_words), other=0)
    high = tl.load(words + index + 1, mask=live & (index + 1 >= 0) & (index + 1 < n_words), other=0)
    kept = 63 - shift  # in two steps, as a shift by 64 is undefined, and >> copies the sign
    return ((low >> shift) & ((2 << kept) - 1)) | ((high << kept) << 1)


@triton.jit
def _shares(length, tile_slots, splits):
    """Return the full tiles of a prefix, those of each of its splits, and how many of `splits` have any."""
    full = length // tile_slots
    share = tl.maximum(tl.cdiv(full, splits), MIN_SHARE_TILES)
    return full, share, tl.cdiv(full, share)


NUMBERS = ("prefix_len", "n_q", "n_tree")  # one each: where they stand makes no other program


@triton.jit(
    do_not_specialize=["words_batch", "words_node", "kv_heads", "rows", "n_words"],
    do_not_specialize_on_alignment=["words", "table", *NUMBERS],
)
def _attend(
    q,
    k,
    v,
    words,
    prefix_len,
    n_q,
    n_tree,
    table,
    out,
    lse,
    partial,
    partial_lse,
    q_batch,
    q_node,
    q_head,
    k_batch,
    k_head,
    k_slot,
    v_batch,
    v_head,
    v_slot,
    words_batch,
    words_node,
    out_batch,
    out_node,
    out_head,
    scale,
    kv_heads,
    rows,
    n_words,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.static_assert(BLOCK_N <= 64, "a tile's columns must fit into one window of words")
    sequence, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    split, splits = tl.program_id(2), tl.num_programs(2)
    length, live_nodes = (
        tl.load(prefix_len + sequence),
        tl.minimum(tl.load(n_q + sequence), rows // GROUPS),
    )
    end = length + tl.load(n_tree + sequence)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    live = node < live_nodes
    columns, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    sequence = sequence.to(tl.int64)
    if table is not None:
        first, step = tl.load(table + 2 * sequence), tl.load(table + 2 * sequence + 1)
        k += tl.multiple_of(first + kv_head * step, 16)
        v = k + tl.multiple_of(kv_heads * step, 16)
    else:
        k += sequence * k_batch + kv_head.to(tl.int64) * k_head
        v += sequence * v_batch + kv_head.to(tl.int64) * v_head
    words += sequence * words_batch + node * words_node
    query = tl.load(
        q + sequence * q_batch + (node * q_node + head * q_head)[:, None] + dims[None, :],
        mask=live[:, None] & (dims < HEAD)[None, :],
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if tl.program_id(0) * BLOCK_M < live_nodes * GROUPS:
        # Splits are cut by the prefix length alone, so a row's sums are grouped alike in every tree.
        if WHOLE:
            full = length // BLOCK_N
            share = full
        else:
            full, share, _ = _shares(length, BLOCK_N, splits - 1)
        for tile in tl.range(
            split * share, tl.minimum((split + 1) * share, full), num_stages=STAGES
        ):
            slots = tile * BLOCK_N + columns
            keys = _tile(k, slots, k_slot, end, dims, False, HEAD, UPCAST)
            values = _tile(v, slots, v_slot, end, dims, False, HEAD, UPCAST)
            peak, total, sums = _absorb(
                query, keys, values, None, peak, total, sums, scale, False, PRECISION
            )
        if split == splits - 1:  # of which no full tile is left, unless it is the only one
            # what is left of the prefix, and the nodes in the slots behind it
            stop = end
            if CAUSAL:  # nobody sees what comes after the slot of the last row here
                last = tl.minimum(
                    (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUPS + 1, live_nodes
                )
                stop = end - live_nodes + last
            for start in tl.range(full * BLOCK_N, stop, BLOCK_N, num_stages=STAGES):
                slots = start + columns
                window = _window(words, start - length, n_words, live)
                named = ((window[:, None] >> columns[None, :].to(tl.int64)) & 1) != 0
                seen = ((slots < length)[None, :] | named) & (slots < end)[None, :]
                keys = _tile(k, slots, k_slot, end, dims, True, HEAD, UPCAST)
                values = _tile(v, slots, v_slot, end, dims, True, HEAD, UPCAST)
                peak, total, sums = _absorb(
                    query, keys, values, seen, peak, total, sums, scale, True, PRECISION
                )

    sees = live & (total > 0)
    result = tl.where(sees[:, None], sums / tl.where(sees, total, 1.0)[:, None], 0.0)
    log2_total = tl.where(sees, peak + tl.log2(tl.where(sees, total, 1.0)), float("-inf"))
    inside = (row < rows)[:, None] & (dims < HEAD)[None, :]
    if WHOLE:
        at = (
            out
            + sequence * out_batch
            + (node * out_node + head * out_head)[:, None]
            + dims[None, :]
        )
        tl.store(at, result.to(out.dtype.element_ty), mask=inside)
        if lse is not None:
            nodes, heads = rows // GROUPS, kv_heads * GROUPS
            tl.store(
                lse + (sequence * nodes + node) * heads + head,
                log2_total * 0.6931471805599453,
                mask=row < rows,
            )
    else:
        place = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * rows + row
        tl.store(partial_lse + place, log2_total, mask=row < rows)
        tl.store(
            partial + place[:, None] * HEAD + dims[None, :], result, mask=inside & sees[:, None]
        )


@triton.jit(
    do_not_specialize=["kv_heads", "rows", "splits", "tile_slots"],
    do_not_specialize_on_alignment=["partial_lse", "prefix_len"],
)
def _merge(
    partial,
    partial_lse,
    prefix_len,
    out,
    lse,
    out_batch,
    out_node,
    out_head,
    kv_heads,
    rows,
    splits,
    tile_slots,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    last = splits - 1  # the tree's
    _, _, used = _shares(tl.load(prefix_len + tl.program_id(1) // kv_heads), tile_slots, last)
    sequence, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    row, dims, part = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_D),
        tl.arange(0, MAX_SPLITS),
    )
    inside = row < rows
    step = tl.num_programs(1).to(tl.int64) * rows  # from a split to the next
    partial_lse += tl.program_id(1).to(tl.int64) * rows + row
    partial += (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * HEAD + dims[None, :]
    parts = tl.load(
        partial_lse[None, :] + part[:, None] * step,
        mask=((part < used) | (part == last))[:, None] & inside[None, :],
        other=float("-inf"),
    )
    peak = tl.max(parts, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(parts - shift[None, :]), 0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, used + 1, AT_ONCE):
        entry = first + tl.arange(0, AT_ONCE)
        split = tl.where(entry < used, entry, last)
        there = (entry <= used)[:, None] & inside[None, :]
        own = tl.load(partial_lse[None, :] + split[:, None] * step, mask=there, other=float("-inf"))
        weights = tl.exp2(own - shift[None, :])[:, :, None]
        read = tl.load(
            partial[None, :, :] + split[:, None, None] * step * HEAD,
            mask=there[:, :, None] & (dims < HEAD)[None, None, :],
            other=0.0,
        )
        # what no split has written may be anything, NaN too
        sums += tl.sum(tl.where(weights > 0, weights * read, 0.0), 0)
    sees = total > 0
    divisor = tl.where(sees, total, 1.0)
    node, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    at = out + sequence * out_batch + (node * out_node + head * out_head)[:, None] + dims[None, :]
    tl.store(
        at,
        (sums / divisor[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (dims < HEAD)[None, :],
    )
    if lse is not None:
        nodes, heads = rows // GROUPS, kv_heads * GROUPS
        result = tl.where(sees, (shift + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + (sequence * nodes + node) * heads + head, result, mask=inside)


# ---- launcher


class Tiles(NamedTuple):
    """Tile sizes of a program: packed rows x slots, warps, pipeline stages."""

    rows: int
    slots: int
    warps: int
    stages: int


@cache
def shared_bytes(device: torch.device) -> int:
    """Return how much shared memory a program can have on the device."""
    if device.type != "cuda":
        return SHARED_BYTES
    card = torch.cuda.get_device_properties(device)
    return getattr(card, "shared_memory_per_block_optin", 0) or getattr(
        card, "shared_memory_per_block", SHARED_BYTES
    )


def tiles_for(rows: int, head_size: int, dtype: torch.dtype, shared: int = SHARED_BYTES) -> Tiles:
    """Return the shipped tiles for `rows` packed rows (query rows x query heads per key-value head).

    shared: bytes that a program can have. What is chosen where they are few fits into 70,000, and on AMD's into 65,536:
    tests/kernels/cards.json. It also holds fewer registers: cards before the H100 keep both operands in them.
    """
    if (
        dtype is torch.float32
    ):  # multiplied in full precision, without tensor cores: larger tiles spill
        return Tiles(32, 32, 8, 2) if head_size <= 64 else Tiles(16, 16, 8, 2)
    wide, few = head_size > 128, shared < FEWER_BYTES
    if rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 32 if wide else 64, 4, 3)
    if wide:
        return Tiles(64, 16 if few else 32, 8, 3)
    if rows <= 64:
        return Tiles(64, 32, 4, 3) if few else Tiles(64, 64, 4, 2)
    return Tiles(128, 32 if few else 64, 8, 3)


def splits_for(programs: int, slots: int, tile_slots: int, device: torch.device) -> int:
    """Return the number of splits, the tree's included, by which `programs` fill the device.

    slots: the most that the prefix may have. Its length says on the device how many splits have work.
    """
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else MULTIPROCESSORS
    )
    shares = slots // (MIN_SHARE_TILES.value * tile_slots)
    prefix_splits = min(processors // programs, MAX_SPLITS - 1, shares)
    # with the tree's split a round of the merge is full, and no round merges that one alone
    prefix_splits -= prefix_splits % AT_ONCE.value == 0
    return prefix_splits + 1 if prefix_splits > 1 else 1


def workspace_for(q: Tensor, splits: int) -> Tensor:
    """Allocate scratch for `tree_attention`, float32, uninitialised; all layers can share it."""
    return torch.empty(
        splits * q.numel() // q.shape[-1] * (q.shape[-1] + 1), dtype=torch.float32, device=q.device
    )


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    words: Tensor,
    prefix_len: Tensor,
    n_q: Tensor,
    n_tree: Tensor,
    *,
    table: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    tiles: Tiles | None = None,
    splits: int | None = None,
    causal: bool = False,
    upcast: bool = False,
) -> Tensor:
    """Attend from Nq rows over the first `prefix_len` slots and the nodes after them that each row's words mark.

    q: [B, Nq, Hq, D], already rotated; k_cache, v_cache: [B, Hkv, S, D], Hq a multiple of Hkv, the dtype of q; node j
    stands in slot prefix_len + j. words: int64 [B, Nq, ceil(nodes / 64)], bit j % 64 of word j // 64 is set where the
    row sees node j. prefix_len, n_q, n_tree: int32 [B] on the device, prefix_len + n_tree <= S. Last dimensions are
    contiguous, other strides free. table: int64 [B, 2], of each sequence how many numbers after k_cache its own begins,
    and how many each of its heads takes, multiples of 16; its values stand after its keys. k_cache and v_cache are then
    those of the longest cache, expanded to B. scale: positive, 1 / sqrt(D) unless given. causal: the rows are the last
    of the nodes, and none sees one after itself, so that nothing after a tile of rows is read: the bits are the same.
    Returns `out` [B, Nq, Hq, D]; `lse` float32 [B, Nq, Hq], contiguous, gets the natural logs of the softmax sums.
    Rows from n_q on and rows that see nothing give 0 and -inf. Slots from prefix_len + n_tree on are not read.
    Capturable; allocates nothing where `out` and `workspace` (`workspace_for`) are given. `upcast` multiplies in
    float32 whatever the inputs are, for the interpreter, whose bfloat16 arithmetic is wrong.
    """
    batch, nodes, heads, size = q.shape
    kv_heads, groups = k_cache.shape[1], heads // k_cache.shape[1]
    check_caches(q, k_cache, v_cache, (prefix_len, n_q, n_tree), scale)
    if words.dtype is not torch.int64 or words.shape[:2] != (batch, nodes) or words.stride(2) != 1:
        raise ValueError(
            f"words: int64 [{batch}, {nodes}, words] is needed, got {words.dtype} {list(words.shape)}"
        )
    if table is not None:
        check_table(table, batch, k_cache)
    rows = nodes * groups
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tiles = tiles_for(rows, size, q.dtype, shared_bytes(q.device)) if tiles is None else tiles
    row_tiles = triton.cdiv(rows, tiles.rows)
    if splits is None:
        splits = splits_for(row_tiles * kv_heads * batch, k_cache.shape[2], tiles.slots, q.device)
    partial = partial_lse = None
    if splits > 1:
        workspace = workspace_for(q, splits) if workspace is None else workspace
        count = splits * batch * heads * nodes
        partial_lse, partial = workspace[count * size :], workspace
    block_d = max(16, triton.next_power_of_2(size))
    _attend[(row_tiles, kv_heads * batch, splits)](
        q,
        k_cache,
        v_cache,
        words,
        prefix_len,
        n_q,
        n_tree,
        table,
        out,
        lse,
        partial,
        partial_lse,
        *q.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *words.stride()[:2],
        *out.stride()[:3],
        (size**-0.5 if scale is None else scale) * LOG2_E,
        kv_heads,
        rows,
        words.shape[2],
        GROUPS=groups,
        HEAD=size,
        BLOCK_D=block_d,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.slots,
        WHOLE=splits == 1,
        CAUSAL=causal,
        STAGES=tiles.stages,
        UPCAST=upcast,
        PRECISION="ieee",
        num_warps=tiles.warps,
    )
    if splits > 1:
        _merge[(triton.cdiv(rows, MERGED_ROWS), kv_heads * batch)](
            partial,
            partial_lse,
            prefix_len,
            out,
            lse,
            *out.stride()[:3],
            kv_heads,
            rows,
            splits,
            tiles.slots,
            GROUPS=groups,
            HEAD=size,
            BLOCK_D=block_d,
            BLOCK_M=MERGED_ROWS,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
        )
    return out


def check_table(table: Tensor, batch: int, cache: Tensor) -> None:
    """Raise ValueError if this is no table of where caches are, or where these are not dense."""
    dense = cache.stride()[-2:] == (cache.shape[-1], 1)
    if table.dtype is not torch.int64 or table.shape != (batch, 2) or not dense:
        raise ValueError(
            f"table: int64 [{batch}, 2] of dense caches is needed, got {table.dtype} {list(table.shape)}"
        )


def check_caches(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: tuple[Tensor, ...], scale: float | None
) -> None:
    """Raise ValueError if the shapes, dtypes and strides are not those that `tree_attention` takes."""
    batch, _, heads, size = q.shape
    if k_cache.shape != v_cache.shape or k_cache.shape[0] != batch or k_cache.shape[3] != size:
        got = f"{list(k_cache.shape)}, {list(v_cache.shape)}"
        raise ValueError(f"k_cache, v_cache: [{batch}, Hkv, S, {size}] are needed, got {got}")
    if heads % k_cache.shape[1]:
        raise ValueError(
            f"q: {heads} heads are not a multiple of {k_cache.shape[1]} key-value heads"
        )
    if not q.dtype is k_cache.dtype is v_cache.dtype or q.dtype not in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ):
        raise ValueError(
            f"q, k_cache, v_cache: one of float16, bfloat16, float32, got {q.dtype}, {k_cache.dtype}"
        )
    if any(length.dtype is not torch.int32 or length.shape != (batch,) for length in lengths):
        raise ValueError(f"lengths: int32 [{batch}] each are needed")
    if any(tensor.stride(-1) != 1 for tensor in (q, k_cache, v_cache)):
        raise ValueError("q, k_cache, v_cache: the last dimension must be contiguous")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale: got {scale}, a positive number is needed")

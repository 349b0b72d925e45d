"""Frontier: drafted nodes are hung into the tree, and what the next draft pass reads of them is gathered.

`_append` is one program: the new nodes' parents are in the tree already, so all entries are written side by side, each
with its parent's ancestor words and its own bit. `_rows` is one program, too: it turns the nodes to draft from into
rows over the cache. `_gather` copies, for each row of a draft pass, the state that it continues and its token's
embedding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BITS = 64
MAX_APPENDED = 1024
BLOCK_H = 1024  # channels per program of `_gather`
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tree(NamedTuple):
    """A tree on the device: tokens, parents, depths int64 [capacity]; log_probs, path_log_probs float32 [capacity];
    ancestors int64 [capacity, ceil(capacity / 64)]; size int32 [1]. Entries from `size` on are undefined."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    path_log_probs: Tensor
    ancestors: Tensor
    size: Tensor


class Rows(NamedTuple):
    """Rows of a draft pass, as `level_rows` writes them: tokens, positions int64 [n]; words int64 [n, w], which slots
    of the scratch each sees; slot int64 [1], of the first; sources, targets int64 [n], its parent and itself; factors
    float32 [n, 1] or None."""

    tokens: Tensor
    positions: Tensor
    words: Tensor
    slot: Tensor
    sources: Tensor
    targets: Tensor
    factors: Tensor | None


# ---- meaning


def reference(
    tree: Tree, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: int
) -> tuple[Tree, list[int], bool]:
    """Compute `append_nodes` in plain torch; returns the tree, the ids, and whether the nodes were refused."""
    start, capacity = int(tree.size), tree.tokens.shape[0]
    after = Tree(*(tensor.clone() for tensor in tree))
    refused = start + count > capacity
    count = 0 if refused else count
    for entry in range(count):
        node, parent = start + entry, int(parents[entry])
        after.tokens[node], after.parents[node] = tokens[entry], parent
        after.depths[node], after.log_probs[node] = after.depths[parent] + 1, log_probs[entry]
        after.path_log_probs[node] = after.path_log_probs[parent] + log_probs[entry]
        after.ancestors[node] = after.ancestors[parent]
        after.ancestors[node, node // WORD_BITS] |= torch.tensor(
            1, dtype=torch.int64, device="cpu"
        ) << (node % WORD_BITS)
    after.size[0] = start + count
    return after, [*range(start, start + count), *[0] * (tokens.shape[0] - count)], refused


def reference_rows(
    tree: Tree, nodes: list[int], width: int, filled: int, used: int, seen: Tensor
) -> tuple[Rows, Tensor]:
    """Compute `level_rows` for these nodes in plain torch; returns `width` rows, without factors, and `seen` after."""
    after, spare = seen.clone(), seen.shape[0] - 1
    whole = torch.zeros(4, width, dtype=torch.int64, device="cpu")
    words = torch.zeros(width, seen.shape[1], dtype=torch.int64, device="cpu")
    for row, node in enumerate([*nodes, *[0] * (width - len(nodes))]):
        parent, own = max(int(tree.parents[node]), 0), min(used + row, spare - 1)
        words[row] = seen[parent]
        words[row, own // WORD_BITS] |= torch.tensor(1, dtype=torch.int64, device="cpu") << (
            own % WORD_BITS
        )
        target = node if row < len(nodes) else spare
        after[target] = words[row]
        numbers = int(tree.tokens[node]), int(tree.depths[node]) + filled - 1, parent, target
        whole[:, row] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    slot = torch.tensor([filled + used], dtype=torch.int64, device="cpu")
    return Rows(whole[0], whole[1], words, slot, whole[2], whole[3], None), after


# ---- kernels


GIVEN = ("size", "parents", "tokens", "log_probs", "count", "ids", "refused")


@triton.jit(do_not_specialize=["capacity", "n_words", "most"], do_not_specialize_on_alignment=GIVEN)
def _append(
    tree_tokens,
    tree_parents,
    tree_depths,
    tree_log_probs,
    tree_paths,
    ancestors,
    size,
    parents,
    tokens,
    log_probs,
    count,
    ids,
    refused,
    capacity,
    n_words,
    most,
    BLOCK: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    start, found = tl.load(size), tl.minimum(tl.load(count), most)
    full = start + found > capacity
    found = tl.where(full, 0, found)
    entry = tl.arange(0, BLOCK)
    some = entry < found
    parent = tl.load(parents + entry, mask=some, other=0)
    token = tl.load(tokens + entry, mask=some, other=0)
    edge = tl.load(log_probs + entry, mask=some, other=0.0)
    depth = tl.load(tree_depths + parent, mask=some, other=0) + 1
    path = tl.load(tree_paths + parent, mask=some, other=0.0) + edge
    node, word = start + entry, tl.arange(0, BLOCK_A)
    tl.store(tree_tokens + node, token, mask=some)
    tl.store(tree_parents + node, parent, mask=some)
    tl.store(tree_log_probs + node, edge, mask=some)
    inside = some[:, None] & (word < n_words)[None, :]
    words = tl.load(ancestors + parent[:, None] * n_words + word[None, :], mask=inside, other=0)
    tl.debug_barrier()  # a warp that reads the size after another has raised it would number its nodes anew
    tl.store(tree_depths + node, depth, mask=some)
    tl.store(tree_paths + node, path, mask=some)
    own = (
        tl.where((node >> 6)[:, None] == word[None, :], 1, 0).to(tl.int64)
        << (node & 63).to(tl.int64)[:, None]
    )
    tl.store(ancestors + node[:, None] * n_words + word[None, :], words | own, mask=inside)
    tl.store(ids + entry, tl.where(some, node, 0), mask=entry < most)
    tl.store(size, start + found)
    if full:
        tl.store(refused, 1)


@triton.jit(
    do_not_specialize=["width", "n_words", "spare", "n_factors"],
    do_not_specialize_on_alignment=["nodes", "live", "filled", "used", "passes", "slot"],
)
def _rows(
    tree_tokens,
    tree_parents,
    tree_depths,
    nodes,
    live,
    filled,
    used,
    passes,
    seen,
    factors,
    tokens,
    positions,
    words,
    slot,
    sources,
    targets,
    out_factors,
    width,
    n_words,
    spare,
    n_factors,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    count, before, committed = tl.load(live), tl.load(used), tl.load(filled)
    passed = tl.load(passes)
    row, word = tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    inside, some = row < width, row < count
    node = tl.load(nodes + row, mask=inside & some, other=0)  # padding reads of the root
    parent = tl.maximum(tl.load(tree_parents + node, mask=inside, other=0), 0)
    depth = tl.load(tree_depths + node, mask=inside, other=0)
    token = tl.load(tree_tokens + node, mask=inside, other=0)
    into = tl.where(some, node, spare)
    own = tl.minimum(before + row, spare - 1)
    both = inside[:, None] & (word < n_words)[None, :]
    bits = tl.load(seen + parent[:, None] * n_words + word[None, :], mask=both, other=0)
    bits |= (
        tl.where((own >> 6)[:, None] == word[None, :], 1, 0).to(tl.int64)
        << (own & 63).to(tl.int64)[:, None]
    )
    tl.debug_barrier()  # a warp that reads counts after another has raised them would take other slots
    tl.store(seen + into[:, None] * n_words + word[None, :], bits, mask=both)
    tl.store(words + row[:, None] * n_words + word[None, :], bits, mask=both)
    tl.store(tokens + row, token, mask=inside)
    tl.store(positions + row, depth + (committed - 1), mask=inside)
    tl.store(sources + row, parent, mask=inside)
    tl.store(targets + row, into, mask=inside)
    if factors is not None:
        factor = tl.load(factors + tl.minimum(depth, n_factors - 1), mask=inside, other=0.0)
        tl.store(out_factors + row, factor, mask=inside)
    tl.store(slot, (committed + before).to(tl.int64))
    tl.store(used, before + count)
    tl.store(passes, passed + tl.where(count > 0, 1, 0))


@triton.jit(do_not_specialize_on_alignment=["sources", "tokens"])
def _gather(
    states,
    sources,
    embeddings,
    tokens,
    out_states,
    out_embeddings,
    state_stride,
    embedding_stride,
    out_stride,
    channels,
    BLOCK: tl.constexpr,
):
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, token, some = tl.load(sources + row), tl.load(tokens + row), channel < channels
    state = tl.load(states + source * state_stride + channel, mask=some)
    tl.store(out_states + row.to(tl.int64) * out_stride + channel, state, mask=some)
    embedding = tl.load(embeddings + token * embedding_stride + channel, mask=some)
    tl.store(out_embeddings + row.to(tl.int64) * out_stride + channel, embedding, mask=some)


# ---- launchers


def append_nodes(
    tree: Tree,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    count: Tensor,
    ids: Tensor,
    refused: Tensor,
) -> None:
    """Hang the first `count` entries into the tree, and write their nodes into `ids`, 0 behind them.

    parents, of the tree, tokens, ids: int64 [m]; log_probs: float32 [m], of the edges; count, refused: int32 [1]; m up
    to 1024. Where the capacity would be exceeded nothing is appended, ids are 0 and refused becomes 1. Capturable;
    allocates nothing.
    """
    most, (capacity, words) = tokens.shape[0], tree.ancestors.shape
    _check(tree, parents, tokens, log_probs, ids, (count, refused))
    _append[(1,)](
        *tree,
        parents,
        tokens,
        log_probs,
        count,
        ids,
        refused,
        capacity,
        words,
        most,
        BLOCK=triton.next_power_of_2(most),
        BLOCK_A=triton.next_power_of_2(words),
        num_warps=max(
            1, min(8, triton.next_power_of_2(most) * triton.next_power_of_2(words) // 64)
        ),
    )


def level_rows(
    tree: Tree,
    nodes: Tensor,
    live: Tensor,
    filled: Tensor,
    used: Tensor,
    passes: Tensor,
    seen: Tensor,
    factors: Tensor | None,
    *,
    rows: Rows | None = None,
) -> Rows:
    """Return the rows of a pass from some nodes of a tree, none of each other's parents; `rows` where these are given.

    nodes: int64 [n], n up to 1024, dense, of which the first `live` count: padding reads of the root and writes to the
    last row of `seen`. live, filled, used, passes: int32 [1], filled slots of the cache, those of its scratch, which
    grow by `live`, and passes, which grow by 1 where there is a node. seen: int64 [nodes + 1, w], dense, by node which
    slots of the scratch it sees; factors: float32 [depths], the last also for deeper nodes. Capturable.
    """
    width, words = nodes.shape[0], seen.shape[1]
    if not 1 <= width <= MAX_APPENDED or nodes.dtype is not torch.int64 or nodes.stride(0) != 1:
        raise ValueError(f"nodes: dense int64 [n], 1 <= n <= {MAX_APPENDED}, is needed")
    if not seen.is_contiguous() or seen.dtype is not torch.int64:
        raise ValueError("seen: contiguous int64 is needed")
    if any(number.dtype is not torch.int32 for number in (live, filled, used, passes)):
        raise ValueError("live, filled, used, passes: int32 [1] each is needed")
    if rows is None:
        even = (
            width + width % 2
        )  # each list begins at a multiple of 16 bytes: one program for all widths
        lists = torch.empty(4, even, dtype=torch.int64, device=seen.device)[:, :width]
        scales = None if factors is None else factors.new_empty(width, 1)
        tokens, positions, sources, targets = lists.unbind()
        both = seen.new_empty(width, words), seen.new_empty(1)
        rows = Rows(tokens, positions, *both, sources, targets, scales)
    block, block_w = triton.next_power_of_2(width), triton.next_power_of_2(words)
    _rows[(1,)](
        *tree[:3],
        nodes,
        live,
        filled,
        used,
        passes,
        seen,
        factors,
        *rows,
        width,
        words,
        seen.shape[0] - 1,
        0 if factors is None else factors.shape[0],
        BLOCK=block,
        BLOCK_W=block_w,
        num_warps=max(1, min(8, block * block_w // 64)),
    )
    return rows


def gather_rows(
    states: Tensor,
    sources: Tensor,
    embeddings: Tensor,
    tokens: Tensor,
    out_states: Tensor,
    out_embeddings: Tensor,
) -> None:
    """Copy the states at `sources` and the embeddings of `tokens`, bit for bit.

    sources, tokens: int64 [n], dense; states: [rows, H]; embeddings: [vocabulary, H]; both out: [n, H], dense along H
    and of their dtypes. Capturable; allocates nothing.
    """
    width, channels = out_states.shape
    if any(ids.shape != (width,) or ids.dtype is not torch.int64 for ids in (sources, tokens)):
        raise ValueError(
            f"sources, tokens: int64 [{width}] is needed, got {list(sources.shape)}, {list(tokens.shape)}"
        )
    if out_embeddings.shape != out_states.shape:
        raise ValueError(
            f"outputs: [n, H] x 2 are needed, got {list(out_states.shape)}, {list(out_embeddings.shape)}"
        )
    if states.dtype is not out_states.dtype or embeddings.dtype is not out_embeddings.dtype:
        raise ValueError(
            "out_states, out_embeddings: the dtypes of states and embeddings are needed"
        )
    if states.shape[1] != channels or embeddings.shape[1] != channels:
        raise ValueError(f"states, embeddings: [rows, {channels}] is needed")
    if any(
        t.stride(1) != 1 for t in (states, embeddings)
    ) or not out_states.stride() == out_embeddings.stride() == (
        out_states.stride(0),
        1,
    ):
        raise ValueError("states, embeddings, outputs: rows must be dense")
    block = min(BLOCK_H, triton.next_power_of_2(channels))
    _gather[(width, triton.cdiv(channels, block))](
        states.view(_WHOLE[states.element_size()]),  # bits, whatever they mean
        sources,
        embeddings.view(_WHOLE[embeddings.element_size()]),
        tokens,
        out_states.view(_WHOLE[out_states.element_size()]),
        out_embeddings.view(_WHOLE[out_embeddings.element_size()]),
        states.stride(0),
        embeddings.stride(0),
        out_states.stride(0),
        channels,
        BLOCK=block,
        num_warps=4,
    )


def _check(
    tree: Tree,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    counts: tuple[Tensor, ...],
) -> None:
    capacity, words = tree.ancestors.shape
    if words < triton.cdiv(capacity, WORD_BITS) or not tree.ancestors.is_contiguous():
        raise ValueError(
            f"tree.ancestors: [capacity, ceil(capacity / 64)] is needed, got {[capacity, words]}"
        )
    if any(tensor.shape != (capacity,) for tensor in tree[:5]):
        raise ValueError(f"tree: arrays of its capacity, {capacity}, are needed")
    most = tokens.shape[0]
    if not 1 <= most <= MAX_APPENDED or not parents.shape == log_probs.shape == ids.shape == (
        most,
    ):
        raise ValueError(
            f"parents, tokens, log_probs, ids: [m] each, 1 <= m <= {MAX_APPENDED}, got {list(tokens.shape)}"
        )
    if (
        not parents.dtype is tokens.dtype is ids.dtype is torch.int64
        or log_probs.dtype is not torch.float32
    ):
        raise ValueError("parents, tokens, ids: int64, log_probs: float32 are needed")
    if any(number.dtype is not torch.int32 for number in (*counts, tree.size)):
        raise ValueError("count, refused, tree.size: int32 [1] each is needed")

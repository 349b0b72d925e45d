"""TokenTree, the draft tree as flat arrays of fixed capacity; the ops on it; numbers, counts and nodes.

A number is what a rule computes with: Python's where reading it is free, else a tensor of one element on its device.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.errors import InputError, PolicyError
from specengine.ops._meanings import (
    HAS_NAN,
    WORD_BITS,
    doubled,
    order_keys,
    own_bits,
    padded,
    refuse_unless,
    require,
)
from specengine.ops._registry import kernels, native, op

NUMBERS = 7  # of a record, before its lists
FREE = "cpu"  # the kind of device whose numbers are read without waiting for it

Number = int | float | Tensor  # a tensor has one element, on a device
Flag = bool | Tensor  # of one element, bool, on a device
Arrays = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # as TokenTree.arrays
Counters = tuple[Tensor, Tensor, Tensor]  # as TokenTree.counters


# ---- numbers and counts


def is_free(tensor: Tensor) -> bool:
    """Return whether the host can read this tensor without waiting for a device."""
    return tensor.device.type == FREE


def number(tensor: Tensor) -> Number:
    """Return a tensor of one element as a number: on a device a tensor, in float64 as Python's floats are.

    On single elements torch takes ten times as long as Python does.
    """
    if tensor.device.type == FREE:
        return tensor.item()
    return doubled(tensor) if tensor.is_floating_point() else tensor


def held(value: Number, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return a number as a tensor of one element, to be read alone."""
    return value if isinstance(value, Tensor) else _constant(value, dtype)


@lru_cache(maxsize=1024)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device="cpu")


@cache  # for good: captured graphs read them
def _lasting(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host on a device, without waiting for a CUDA device."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned).to(
        device, non_blocking=pinned
    )


def where(flag: Flag, one: Number, other: Number) -> Number:
    """Return `one` where the flag is up, else `other`."""
    if isinstance(flag, Tensor):
        return torch.where(flag, one, other)
    return one if flag else other


def row_of(values: Tensor, index: Tensor) -> Tensor:
    """Return one row, [1, ...]; where reading its index, int64 [1], is free, as a view."""
    at = number(index)
    return (
        values.index_select(0, at.to(values.device))
        if isinstance(at, Tensor)
        else values[at : at + 1]
    )


def at_most(value: Number, limit: float) -> Number:
    """Return the lesser of a number and a limit."""
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)


class Nodes(NamedTuple):
    """Some nodes, or indices of other things. ids: int64 [width]; those from `live`, int32 [1], on are padding: any
    that exist."""

    ids: Tensor
    live: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> "Nodes":
        """Return these nodes, without padding."""
        return cls(ids, torch.full((1,), ids.shape[0], dtype=torch.int32, device=ids.device))

    def alive(self) -> Tensor:
        """Return the ids without padding, int64 [live]. Synchronises with the device if they are on one."""
        live = int(self.live)
        return self.ids if live == self.ids.shape[0] else self.ids[:live]

    def where(self, flag: Flag) -> "Nodes":
        """Return these nodes, or none where the flag is down."""
        known = number(flag) if isinstance(flag, Tensor) else flag
        if isinstance(known, Tensor):
            return Nodes(self.ids, self.live * known)
        return self if known else Nodes(self.ids, _lasting(0, torch.int32, self.live.device))

    def unless(self, flag: Flag) -> "Nodes":
        """Return these nodes, or none where the flag is up."""
        return self.where(~flag if isinstance(flag, Tensor) else not flag)

    def masked(self, values: Tensor, filler: float) -> Tensor:
        """Return the nodes' values, [width], with the filler for padding."""
        live = number(self.live)
        return (
            values
            if not isinstance(live, Tensor) and live >= values.shape[0]
            else values.masked_fill(self.padding(), filler)
        )

    def padding(self) -> Tensor:
        """Return which of the ids are padding, bool [width]."""
        return (
            torch.arange(self.ids.shape[0], device=self.ids.device, dtype=torch.int64) >= self.live
        )


class Walked(NamedTuple):
    """A path down a tree. nodes: int64 [n], padded; live: int32 [1]; bonus: int64 [1]; 0 and -1 where the root has no
    choice."""

    nodes: Tensor
    live: Tensor
    bonus: Tensor


# ---- ops


def insist(holds: Tensor, message: str) -> None:
    """Raise InputError where a bool [] does not hold; on another device than a CPU by an asynchronous assertion."""
    if not is_free(holds):
        torch._assert_async(holds, message)  # the same without making the host wait
    elif not holds:
        raise InputError(message)


@op
def append_nodes(
    tree: Arrays,
    size: Tensor,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    count: Tensor,
    overflow: Tensor,
) -> Tensor:
    """Append the first `count` entries to a tree's arrays, at `size`, which grows; return their ids, int64 [m].

    tree: tokens, parents, depths, edge and path log-probabilities, ancestor words: int64 [capacity] x 3, float32
    [capacity] x 2, int64 [capacity, ceil(capacity / 64)], contiguous; parents, tokens: int64 [m], parents that the tree
    has, or InputError (on a CUDA device: an asynchronous assertion); log_probs: float32 [m]; size, count, overflow:
    int32 [1]. Where the capacity would be exceeded nothing is written and overflow becomes 1. Ids of padding are 0.
    """
    if run := native.append_nodes[size.device]:
        return run(tree, size, parents, tokens, log_probs, count, overflow)
    require(
        "parents: int64 [m]; tokens: int64 [m]; log_probs: float32 [m]; size: int32 [1]; count: int32 [1]; "
        "overflow: int32 [1]",
        parents,
        tokens,
        log_probs,
        size,
        count,
        overflow,
    )
    if run := kernels.append_nodes[size.device]:
        return run(tree, size, parents, tokens, log_probs, count, overflow)
    if not parents.shape[0]:
        return parents
    all_tokens, all_parents, depths, edges, paths, ancestors = tree
    capacity = all_tokens.shape[0]
    start, fits = size.long(), size + count <= capacity
    overflow |= ~fits
    node, appended = (
        torch.arange(capacity, device=size.device, dtype=torch.int64),
        count.long() * fits,
    )
    new = (node >= start) & (node < start + appended)
    entry = (node - start).clamp(0, parents.shape[0] - 1)
    above = parents[entry].clamp(0, capacity - 1)
    insist(
        ((parents[entry] >= 0) & (parents[entry] < start) | ~new).all(),
        "parents: must be among the nodes that are there",
    )
    written = (
        (all_tokens, tokens[entry]),
        (all_parents, above),
        (depths, depths[above] + 1),
        (edges, log_probs[entry]),
        (paths, paths[above] + log_probs[entry]),
        (ancestors, ancestors[above] | own_bits(capacity, size.device)),
    )
    for array, values in written:
        array.copy_(torch.where(new if array.dim() == 1 else new[:, None], values, array))
    place = torch.arange(parents.shape[0], device=size.device, dtype=torch.int64)
    ids = (start + place).masked_fill(place >= appended, 0)
    size.add_(appended)
    return ids


@op
def subtree(
    parents: Tensor, ancestors: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Return parents of the first `live` nodes, renumbered in their order, and their ancestor words.

    parents: int64 [capacity]; ancestors: int64 [capacity, words], of the whole tree; nodes: int64 [m], ascending, with
    the root first and closed under parent, or InputError (on a CUDA device: an asynchronous assertion). Returns int64
    [m], -1 in padding, and int64 [m, ceil(m / 64)], 0 in padding.
    """
    if run := native.subtree[nodes.device]:
        return run(parents, ancestors, nodes, live)
    require(
        "parents: int64 [n]; ancestors: int64 [n, words]; nodes: int64 [m]; live: int32 [1]",
        parents,
        ancestors,
        nodes,
        live,
    )
    rows, capacity, device = nodes.shape[0], parents.shape[0], nodes.device
    place = torch.arange(rows, device=device, dtype=torch.int64)
    there, inside = place < live, nodes.clamp(0, capacity - 1)
    spare = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
    # padding writes to the spare entry, which also stands for the root's parent
    renumbered = spare.index_copy(
        0, inside.masked_fill(~there, capacity), place.masked_fill(~there, -1)
    )
    new_parents = renumbered[parents[inside]].masked_fill(~there, -1)
    rises = (nodes[1:] > nodes[:-1]) & (new_parents[1:] >= 0) | ~there[1:]
    insist(
        (nodes[:1] == 0).all()
        & rises.all()
        & ((inside == nodes) | ~there).all()
        & (live > 0).all(),
        "nodes: must be ascending, start with the root and contain every node's parent",
    )
    bits = (ancestors[inside][:, inside // WORD_BITS] >> (inside % WORD_BITS)) & 1
    bits = bits * (there[:, None] & there)
    words = -(-rows // WORD_BITS)
    padded = pad(bits, (0, words * WORD_BITS - rows)).view(rows, words, WORD_BITS)
    shifts = torch.arange(WORD_BITS, device=device, dtype=torch.int64)
    return new_parents, (padded << shifts).sum(-1)  # distinct bits: the sum is a union


@op
def extract(tree: Arrays, nodes: Tensor, live: Tensor) -> Arrays:
    """Return the arrays of a tree of the first `live` nodes alone, of which `subtree` says more; m of each."""
    if run := native.extract[nodes.device]:
        return run(tree, nodes, live)
    tokens, parents, depths, edges, paths, ancestors = tree
    if run := kernels.extract[nodes.device]:
        require("nodes: int64 [m]; live: int32 [1]", nodes, live)
        return run(tree, nodes, live)
    parents, ancestors = subtree(parents, ancestors, nodes, live)
    tokens, depths, edges, paths = (
        part.index_select(0, nodes) for part in (tokens, depths, edges, paths)
    )
    return tokens, parents, depths, edges, paths, ancestors


@op
def ancestor_words(parents: Tensor) -> Tensor:
    """Return a row of words per node: bit j is set where node j is the node itself or one of its ancestors.

    parents: int64 [n], parents[0] = -1, 0 <= parents[i] < i. Returns int64 [n, ceil(n / 64)], bit j in word j // 64.
    InputError where a parent is not an earlier node (on a CUDA device: an asynchronous assertion).
    """
    if run := native.ancestor_words[parents.device]:
        return run(parents)
    require("parents: int64 [n]", parents)
    # Pointer doubling: after round r a row knows its 2**r nearest ancestors. Row n stands for "above the root".
    n, device = parents.shape[0], parents.device
    nodes = torch.arange(n, device=device, dtype=torch.int64)
    insist(
        (parents < nodes).all() & (parents[1:] >= 0).all() & (parents[:1] == -1).all(),
        "parents: the root's must be -1, every other's an earlier node",
    )
    words = torch.zeros(n + 1, -(-n // WORD_BITS), dtype=torch.int64, device=device)
    words[nodes, nodes // WORD_BITS] = torch.ones_like(nodes) << (nodes % WORD_BITS)
    jump = torch.cat([parents, parents.new_tensor([n])])
    jump[:1] = n
    for _ in range((n - 1).bit_length()):
        words |= words[jump]
        jump = jump[jump]
    return words[:n]


@op
def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    """Return the first `columns` bits of each word row as bool [n, columns].

    ancestors: int64 [n, words], 0 <= columns <= 64 * words; InputError otherwise.
    """
    if run := native.tree_mask[ancestors.device]:
        return run(ancestors, columns)
    require("ancestors: int64 [n, words]", ancestors)
    bits = WORD_BITS * ancestors.shape[1]
    refuse_unless(0 <= columns <= bits, "columns", f"0 to {bits}", columns)
    column = torch.arange(columns, device=ancestors.device, dtype=torch.int64)
    return ((ancestors[:, column // WORD_BITS] >> (column % WORD_BITS)) & 1).bool()


@op
def select_best(scores: Tensor, live: Tensor, most: int, limit: Tensor | None = None) -> Nodes:
    """Select the `most` best of the first `live` scores by (score descending, index ascending), in ascending order.

    scores: float32 [m], in creation order; limit: int32 [1], fewer than `most`. -inf is never selected; indices are
    padded with 0. For path log-probabilities the result is closed under parent, also under ties: a child is never
    better than its parent and comes later. InputError on NaN (on a CUDA device: an asynchronous assertion).
    """
    if run := native.select_best[scores.device]:
        return Nodes(*run(scores, live, most, limit))
    require("scores: float32 [m]; live: int32 [1]; limit: int32 [1]", scores, live, limit)
    refuse_unless(most >= 0, "most", "0 or more", most)
    values = scores.masked_fill(
        torch.arange(scores.shape[0], device=scores.device, dtype=torch.int64) >= live, -math.inf
    )
    insist(~values.isnan().any(), HAS_NAN)
    best = order_keys(values).topk(min(most, scores.shape[0])).indices
    count = (values[best] > -math.inf).sum(0, keepdim=True)
    if limit is not None:
        count = torch.minimum(count, limit.clamp(min=0))
    padding = torch.arange(best.shape[0], device=scores.device, dtype=torch.int64) >= count
    indices = best.masked_fill(padding, scores.shape[0]).sort().values.masked_fill(padding, 0)
    return Nodes(padded(indices, most), count.int())


@op
def append_children(
    tree: Arrays,
    counters: Counters,
    frontier: Nodes,
    tokens: Tensor,
    log_probs: Tensor,
    *,
    chosen: Tensor | None = None,
    most: int | None = None,
    limit: Tensor | None = None,
) -> Nodes:
    """Append children under some nodes as `append_nodes` does, parent by parent; return the new nodes, ids [most].

    tokens: int64 [rows, children], log_probs: float32 alike, a row per frontier node. chosen: bool [rows, children];
    without it all entries are. The first `most` chosen ones are appended, or fewer where `limit`, int32 [1], is less.
    The count is that of these entries, also where they overflow.
    """
    if run := native.append_children[tokens.device]:
        return Nodes(*run(tree, counters, frontier, tokens, log_probs, chosen, most, limit))
    size, _, overflow = counters
    require(
        "frontier: int64 [rows]; tokens: int64 [rows, m]; log_probs: float32 [rows, m]; chosen: bool [rows, m]; "
        "size: int32 [1]; live: int32 [1]; overflow: int32 [1]; limit: int32 [1]",
        frontier.ids,
        tokens,
        log_probs,
        chosen,
        size,
        frontier.live,
        overflow,
        limit,
    )
    children, entries = tokens.shape[1], tokens.numel()
    most = entries if most is None else min(most, entries)
    live, tokens, log_probs = frontier.live * children, tokens.reshape(-1), log_probs.reshape(-1)
    if chosen is None and limit is None and most == entries:
        parents = frontier.ids[:, None].expand(-1, children).reshape(-1)
        return Nodes(append_nodes(tree, size, parents, tokens, log_probs, live, overflow), live)
    flags = torch.zeros_like(log_probs)
    if chosen is not None:
        flags = flags.masked_fill(~chosen.reshape(-1), -math.inf)
    selected = select_best(flags, live, most, limit)
    parents = frontier.ids.index_select(0, selected.ids // children)
    tokens, log_probs = (
        tokens.index_select(0, selected.ids),
        log_probs.index_select(0, selected.ids),
    )
    return Nodes(
        append_nodes(tree, size, parents, tokens, log_probs, selected.live, overflow), selected.live
    )


@op
def walk(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    """Walk from the root down while a child carries the token chosen at its parent; return the path and a bonus token.

    tokens, parents, chosen: int64 [n], of which the first `size`, int32 [1], count; siblings carry distinct tokens. A
    node without a choice (-1) is not entered.
    """
    if run := native.walk[tokens.device]:
        return Walked(*run(tokens, parents, chosen, size))
    require(
        "tokens: int64 [n]; parents: int64 [n]; chosen: int64 [n]; size: int32 [1]",
        tokens,
        parents,
        chosen,
        size,
    )
    if run := kernels.walk[tokens.device]:
        return run(tokens, parents, chosen, size)
    # A node is on the path if it and all above it were chosen: by pointer doubling. Siblings carry distinct tokens,
    # so there is one path, and its nodes ascend.
    n, node = (
        tokens.shape[0],
        torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int64),
    )
    above = parents.clamp(min=0)
    agreed = ((tokens == chosen[above]) | (node == 0)) & (chosen >= 0) & (node < size)
    jump = above
    for _ in range((n - 1).bit_length()):
        agreed, jump = agreed & agreed[jump], jump[jump]
    count = agreed.sum(0, keepdim=True)
    path = node.masked_fill(~agreed, n).sort().values
    last = path[(count - 1).clamp(min=0)].clamp(max=n - 1)
    return Walked(
        path.masked_fill(node >= count, 0), count.int(), chosen[last].masked_fill(count == 0, -1)
    )


@op
def record_walk(
    verified: Arrays,
    walked: Walked,
    nodes: Nodes,
    counts: tuple[Tensor, Tensor, Tensor, Tensor],
    root: Tensor,
    record: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Write what the host reads of a cycle; return the path's nodes in the drafted tree and its tokens, [longest] each.

    verified: arrays of the verified tree, which consists of these nodes of the drafted one; walked: by `walk` over it;
    counts: int32 [1], drafted nodes, passes, tokens committed before, and whether there was an overflow. root: int64
    [n], whose first entry becomes the next root: the bonus token, or 0. record: int64 [NUMBERS + 2 * longest + 5 *
    budget], of the path's length, the counts with that of the nodes, and the bonus token; of the tokens chosen after
    the path's nodes, then the root; of the path; of tokens, parents, depths and log-probabilities of the verified tree,
    by their bits. Lists are padded with 0.
    """
    require(
        "record: int64 [n]; root: int64 [m]; nodes: int64 [rows]; live: int32 [1]",
        record,
        root,
        nodes.ids,
        nodes.live,
    )
    if run := kernels.record_walk[record.device]:
        return run(verified, walked, nodes, counts, root, record, longest)
    budget = (len(record) - NUMBERS - 2 * longest) // 5
    path = padded(walked.nodes, longest)
    tokens, parents, depths, *sums = verified[:5]
    place = torch.arange(longest, device=record.device, dtype=torch.int64)
    following = walked.bonus.clamp(min=0)
    passed = tokens.index_select(0, path)
    chosen = torch.where(place < walked.live - 1, passed.roll(-1), following)
    size, passes, length, overflow = counts
    numbers = torch.cat([walked.live, size, nodes.live, passes, length, overflow]).long()
    bits = (array.view(torch.int32) for array in sums)
    lists = (padded(array, budget) for array in (tokens, parents, depths, *bits))
    record.copy_(torch.cat([numbers, walked.bonus, chosen, path, *lists]))
    root[:1].copy_(following)
    return nodes.ids.index_select(0, path), passed


@op
def compact_kv(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    """Move slot prefix + path[j] to slot prefix + j of every layer and head, in place, for the first `count` of path.

    slab: [layers, 2, KV heads, capacity, head size]; path: int64 [n], those that count ascending from 0; count, prefix:
    int32 [1]. prefix + n slots must exist; InputError where they don't (on a CUDA device: an asynchronous assertion).
    """
    if slab.is_contiguous() and (run := native.compact_kv[slab.device]):
        return run(slab, path, count, prefix)
    require("path: int64 [n]; count: int32 [1]; prefix: int32 [1]", path, count, prefix)
    refuse_unless(slab.dim() == 5, "slab", "[layers, 2, KV heads, capacity, head size]", slab)
    if run := kernels.compact_kv[slab.device]:
        return run(slab, path, count, prefix)
    place = torch.arange(path.shape[0], device=slab.device, dtype=torch.int64)
    there = place < count
    rises = (path[1:] > path[:-1]) | ~there[1:]
    inside = (prefix >= 0) & (prefix + path.masked_fill(~there, 0) < slab.shape[3])
    insist(
        ((path[:1] == 0) | (count < 1)).all() & rises.all() & inside.all(),
        "path: ascending node ids from 0 within the slots of the slab are needed",
    )
    slots = prefix.long() + place
    slab.index_copy_(
        3, slots, slab.index_select(3, torch.where(there, prefix.long() + path, slots))
    )
    return None


class PassRows(NamedTuple):
    """Rows of a draft pass, [n], over a cache.

    tokens, positions  int64 [n]
    words              int64 [n, w]: which slots after the committed ones each row sees
    slot               int64 [1], of the first row
    sources, targets   int64 [n]: rows of a state buffer that states are read from and written to
    one                int64 [1], the only row whose result is wanted, or None for all; `targets` is of it alone then
    factors            float32 [n, 1] of the logits, or None
    """

    tokens: Tensor
    positions: Tensor
    words: Tensor
    slot: Tensor
    sources: Tensor
    targets: Tensor
    one: Tensor | None
    factors: Tensor | None


@op
def root_rows(
    root: Tensor,
    held: Tensor,
    taken: Tensor,
    filled: Tensor,
    causal: Tensor,
    width: int,
    factors: Tensor | None,
) -> PassRows:
    """Return the rows of a first pass: the tokens that wait, with the root in place of the last one.

    root: int64 [m], its first entry; held: int64 [waiting + 1], those that wait from entry 1 on; taken, filled: int32
    [1], how many wait, at most `width`, and committed slots; causal: int64 [waiting, w], words of consecutive tokens;
    factors: float32 [depths], of the first the pass has one.
    """
    if run := native.root_rows[held.device]:
        return PassRows(*run(root, held, taken, filled, causal, width, factors))
    require(
        "root: int64 [m]; held: int64 [h]; taken: int32 [1]; filled: int32 [1]; causal: int64 [n, w]; "
        "factors: float32 [depths]",
        root,
        held,
        taken,
        filled,
        causal,
        factors,
    )
    place = torch.arange(width, device=held.device, dtype=torch.int64)
    last = (taken.long() - 1).clamp(min=0)
    tokens = held[1 : width + 1].scatter(0, last, root[:1])
    first = None if factors is None else factors[:1, None]
    return PassRows(
        tokens,
        filled + place,
        causal[:width],
        filled.long(),
        place,
        torch.zeros_like(last),
        last,
        first,
    )


@op
def level_rows(
    tree: Arrays,
    size: Tensor,
    frontier: Nodes,
    filled: Tensor,
    used: Tensor,
    seen: Tensor,
    factors: Tensor | None,
    passes: Tensor | None = None,
) -> PassRows:
    """Return the rows of a pass from some nodes of a tree, whose slots stand after the `used` ones, which grow.

    filled, used: int32 [1], committed slots and those of this tree; seen: int64 [nodes + 1, ceil(nodes / 64)], by node
    which of the latter it sees, the last row being what padding writes to; factors: float32 [depths], of the nodes of a
    depth, the last one also below; passes: int32 [1], the tree's, to be counted by one more where there is a node. The
    nodes are none of each other's parents.
    """
    if run := native.level_rows[size.device]:
        return PassRows(*run(tree, size, frontier, filled, used, seen, factors))
    require(
        "frontier: int64 [n]; live: int32 [1]; filled: int32 [1]; used: int32 [1]; seen: int64 [nodes, w]; "
        "factors: float32 [depths]",
        *frontier,
        filled,
        used,
        seen,
        factors,
    )
    if passes is not None and (run := kernels.level_rows[size.device]):
        return PassRows(*run(tree, size, frontier, filled, used, seen, factors, passes))
    if passes is not None:
        passes += frontier.live > 0
    spare, place = (
        seen.shape[0] - 1,
        torch.arange(frontier.ids.shape[0], device=size.device, dtype=torch.int64),
    )
    padding = place >= frontier.live  # reads of the root, and writes where nothing is read
    nodes, into = frontier.ids.masked_fill(padding, 0), frontier.ids.masked_fill(padding, spare)
    parents, depths = tree[1].index_select(0, nodes).clamp(min=0), tree[2].index_select(0, nodes)
    own_words = own_bits(spare, size.device).index_select(0, (used + place).clamp(max=spare - 1))
    words = seen.index_select(0, parents) | own_words
    seen.index_copy_(0, into, words)
    slot = (filled + used).long()
    used += frontier.live
    if factors is not None:
        factors = factors.index_select(0, depths.clamp(max=factors.shape[0] - 1))[:, None]
    return PassRows(
        tree[0].index_select(0, nodes),
        depths + (filled - 1),
        words,
        slot,
        parents,
        into,
        None,
        factors,
    )


class Free(NamedTuple):
    """Nodes that cost no draft pass, on the host, the likeliest first; `TokenTree.graft` appends them to their tree.

    parents    of entry i, which becomes node len(tree) + i: a node of the tree or of an earlier entry
    tokens     target ids, distinct among siblings
    log_probs  of the edges, natural log
    marks      FREE, and COPIED and RECYCLED where the node comes from there
    ranks      place among the siblings of this kind, 0 is the likeliest
    """

    parents: list[int]
    tokens: list[int]
    log_probs: list[float]
    marks: list[int]
    ranks: list[int]

    def append(self, parent: int, token: int, log_prob: float, mark: int, rank: int) -> None:
        columns: tuple[list[Any], ...] = self
        for column, value in zip(columns, (parent, token, log_prob, mark, rank), strict=True):
            column.append(value)


Continuations = Callable[["TokenTree", Nodes, int, float], Free | None]  # Drafter.free


class Beside(NamedTuple):
    """Continuations that ops ask for by themselves: copies, and a table of successors or None, see drafters.lookup."""

    copies: Any
    table: Any

    def __call__(self, tree: "TokenTree", nodes: Nodes, most: int, least: float) -> Free | None:
        return self.below(tree.arrays, tree.size, nodes, most, least)

    def below(
        self, tree: Arrays, size: Tensor, nodes: Nodes, most: int, least: float
    ) -> Free | None:
        """Return them as Drafter.free does."""
        arrays = tree[0].cpu(), tree[1].cpu(), tree[4].cpu(), size.cpu()
        parts = self.copies.free(arrays, nodes.ids.cpu(), nodes.live.cpu(), most, least, self.table)
        return None if parts is None else Free(*parts)


def graft(
    tree: Arrays, size: Tensor, parents: list[int], tokens: list[int], log_probs: list[float]
) -> Nodes:
    """Append entries as TokenTree.graft does."""
    first, end, capacity = int(size), int(size) + len(tokens), tree[0].shape[0]
    if end > capacity:
        raise overfull(capacity, first, len(tokens))
    depths, scores = tree[2][:first].tolist(), tree[4][:first].tolist()
    for parent, log_prob in zip(parents, log_probs, strict=True):
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] + log_prob)
    whole = torch.tensor([tokens, parents, depths[first:]], dtype=torch.int64, device="cpu")
    real = torch.tensor([log_probs, scores[first:]], dtype=torch.float32, device="cpu")
    for array, values in zip(tree[:5], (*whole, *real), strict=True):
        array[first:end] = values
    words = ancestor_words(tree[1][:end])
    tree[5][first:end] = 0
    tree[5][first:end, : words.shape[1]] = words[first:]
    size.fill_(end)
    return Nodes.of(torch.arange(first, end, device=size.device, dtype=torch.int64))


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node, 0 of the root; each node comes after its parent."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def path_of(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to this one, both included."""
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    return path[::-1]


class TokenTree:
    """Candidate continuations of the last committed token, which is node 0, the root.

    Nodes are numbered in the order of their creation, so `parents[i] < i`; the capacity is fixed, `size` grows.
    Budgets and sizes count the root. All arrays live on one device; entries after the size are undefined:

    tokens, parents, depths    int64 [capacity]; the root has parent -1 and depth 0
    log_probs                  float32 [capacity]; draft log-probability of the edge to the node, natural log
    path_log_probs             float32 [capacity]; sum of `log_probs` from the root, 0 at the root
    ancestors                  int64 [capacity, ceil(capacity / 64)]; bit j of row i: node j is i or an ancestor of i
    size, passes, overflow     int32 [1]; nodes; draft passes spent; whether nodes were refused, as they had no room
    free                       returns continuations that need no draft pass, see Drafter.free; None without a source
    origin                     source of the draft's own proposals, as About.origin
    arrays, counters           the first six and the last three tensors, as ops take them
    memory                     int64, what all tensors of a tree made on a device are parts of, so that one copy moves
                               it; None for others
    """

    __slots__ = (
        "ancestors",
        "arrays",
        "capacity",
        "counters",
        "depths",
        "device",
        "free",
        "log_probs",
        "memory",
        "origin",
        "overflow",
        "parents",
        "passes",
        "path_log_probs",
        "size",
        "staged",
        "tokens",
    )
    arrays: Arrays
    counters: Counters
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    path_log_probs: Tensor
    ancestors: Tensor
    size: Tensor
    passes: Tensor
    overflow: Tensor
    capacity: int
    device: torch.device
    free: Continuations | None
    memory: Tensor | None
    origin: str
    staged: "TokenTree | None"

    def __init__(self, capacity: int, device: torch.device | str = "cpu", token: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}, at least 1 node (the root) is needed")
        blank = _blank(capacity, torch.device(device))
        if blank.size.device.type == FREE:  # small copies take less time than dividing one
            arrays: Any = tuple(map(Tensor.clone, blank.arrays))
            counters: Any = tuple(map(Tensor.clone, blank.counters))
            _fill(self, arrays, counters)
        else:
            _divide(self, cast(Tensor, blank.memory).clone(), capacity)
        self.tokens[:1].fill_(token)

    @classmethod
    def root(cls, token: int, capacity: int = 1, device: torch.device | str = "cpu") -> "TokenTree":
        """Return a tree of the root alone, with room for `capacity` nodes."""
        return cls(capacity, device, token)

    @classmethod
    def alone(cls, token: int, device: torch.device) -> "TokenTree":
        """Return a tree of the root alone that stays one. All but its token is what other such trees have too."""
        if device.type != FREE:
            return cls(1, device, token)
        blank = _blank(1, device)
        tokens = torch.tensor([token], dtype=torch.int64, device=device)
        return _fill(cls.__new__(cls), (tokens, *blank.arrays[1:]), blank.counters)

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        log_probs: Tensor,
        path_log_probs: Tensor,
        passes: int = 0,
    ) -> "TokenTree":
        """Return a tree of these nodes, which has no room for more; the arrays are as above, and kept."""
        numbers = torch.tensor(
            [[tokens.shape[0]], [passes], [0]], dtype=torch.int32, device=tokens.device
        )
        arrays = tokens, parents, depths, log_probs, path_log_probs, ancestor_words(parents)
        return _fill(cls.__new__(cls), arrays, (numbers[0], numbers[1], numbers[2]))

    @classmethod
    def of_lists(
        cls, tokens: list[int], parents: list[int], device: torch.device | str = "cpu"
    ) -> "TokenTree":
        """Return a tree of these nodes, each below an earlier one, with certain edges; -1 is above the root."""
        ids, above, levels = torch.tensor(
            [tokens, parents, depths_of(parents)], dtype=torch.int64, device=device
        )
        edges = torch.zeros(len(tokens), dtype=torch.float32, device=device)
        return cls.of(ids, above, levels, edges, edges)

    def __len__(self) -> int:
        return int(self.size)

    def drawn(self, text: Callable[[int], str] = str, accepted: Collection[int] = ()) -> str:
        """Return a line per node, below its parent: the token, and the draft's probability of the edge to it.

        text: of a token; accepted: the nodes that are marked
        """
        parents = self.parents.tolist()
        tokens, edges = self.tokens.tolist(), self.log_probs.exp().tolist()
        return "\n".join(
            f"{'  ' * (len(path) - 1)}{text(tokens[path[-1]])} {edges[path[-1]]:.3f}"
            f"{' accepted' * (path[-1] in accepted)}"
            for path in sorted(path_of(parents, node) for node in range(len(self)))
        )

    __str__ = drawn

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    def restart(self) -> None:
        """Remove all nodes but the root, whose token stays."""
        self.size.fill_(1)
        self.passes.zero_()
        self.overflow.zero_()

    def root_alone(self) -> Nodes:
        """Return the root as the only node."""
        device = self.device
        return Nodes(_lasting(0, torch.int64, device), _lasting(1, torch.int32, device))

    def add(
        self, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor | None = None
    ) -> Nodes:
        """Append the first `count` entries, or all, under existing nodes; siblings must carry distinct tokens.

        parents, tokens: int64 [m]; log_probs: float32 [m], of the edges; count: int32 [1]. Returns the new nodes.
        Raises PolicyError when the capacity is exceeded; on a device then nothing is added, and `overflow` says so.
        """
        count = torch.full_like(self.size, parents.shape[0]) if count is None else count
        ids = append_nodes(self.arrays, self.size, parents, tokens, log_probs, count, self.overflow)
        return self.appended(Nodes(ids, count))

    def add_children(
        self,
        frontier: Nodes,
        tokens: Tensor,
        log_probs: Tensor,
        chosen: Tensor | None = None,
        most: int | None = None,
        limit: Tensor | None = None,
    ) -> Nodes:
        """Append children under each frontier node, all or those that are chosen; see ops.append_children.

        Returns the new nodes, in creation order; where the capacity is exceeded as `add`.
        """
        return self.appended(
            append_children(
                self.arrays,
                self.counters,
                frontier,
                tokens,
                log_probs,
                chosen=chosen,
                most=most,
                limit=limit,
            )
        )

    def graft(self, parents: list[int], tokens: list[int], log_probs: list[float]) -> Nodes:
        """Append entries from the host, whose parents may be earlier ones: entry i becomes node len(self) + i.

        Raises PolicyError when the capacity is exceeded. Synchronises with the device if the tree is on one.
        """
        return graft(self.arrays, self.size, parents, tokens, log_probs)

    def appended(self, nodes: Nodes) -> Nodes:
        """Return nodes that an op has appended. Raises PolicyError where they had no room; on a device they count 0."""
        overflow = number(self.overflow)
        if isinstance(overflow, Tensor):
            return Nodes(nodes.ids, nodes.live * (overflow == 0))
        if overflow:
            self.overflow.zero_()
            raise overfull(self.capacity, len(self), int(nodes.live))
        return nodes

    def scores(self, nodes: Nodes) -> Tensor:
        """Return the nodes' path log-probabilities, float32 [width], -inf for padding."""
        return nodes.masked(self.path_log_probs.index_select(0, nodes.ids), -math.inf)

    def best(self, nodes: Nodes, most: int) -> Nodes:
        """Select the `most` nodes of these with the largest path log-probabilities, in the order of `nodes`."""
        selected = select_best(self.path_log_probs.index_select(0, nodes.ids), nodes.live, most)
        return (
            Nodes(nodes.ids.index_select(0, selected.ids), selected.live)
            if nodes.ids.shape[0]
            else selected
        )

    def best_of_all(self, most: int, limit: Tensor | None = None) -> Nodes:
        """Select the nodes of the largest path log-probabilities, ascending; they are closed under parent."""
        return select_best(self.path_log_probs, self.size, most, limit)

    def subtree(self, nodes: Nodes) -> "TokenTree":
        """Return the tree of these nodes alone, renumbered in their order, with room for no more than their padding.

        nodes: ascending, with the root first and closed under parent; raises InputError otherwise.
        """
        return _fill(
            TokenTree.__new__(TokenTree),
            extract(self.arrays, *nodes),
            (nodes.live, self.passes, self.overflow),
        )

    def trimmed(self) -> "TokenTree":
        """Return the same nodes without the room after them, as views. Synchronises with the device if on one."""
        size = len(self)
        if size == self.capacity:
            return self
        tokens, parents, depths, edges, paths, ancestors = self.arrays
        arrays = (
            tokens[:size],
            parents[:size],
            depths[:size],
            edges[:size],
            paths[:size],
            ancestors[:size],
        )
        return _fill(TokenTree.__new__(TokenTree), arrays, self.counters)

    def to(self, device: torch.device | str) -> "TokenTree":
        """Return a copy of the tree on a device. Synchronises once with a device that the tree was made on."""
        if self.memory is not None:
            return _divide(
                TokenTree.__new__(TokenTree), self.memory.to(device, copy=True), self.capacity
            )
        arrays: Any = tuple(part.to(device, copy=True) for part in self.arrays)
        counters: Any = tuple(part.to(device, copy=True) for part in self.counters)
        return _fill(TokenTree.__new__(TokenTree), arrays, counters)

    def copy_(self, tree: "TokenTree") -> None:
        """Become a copy of another tree, which has no more nodes than there is room for.

        From the host to memory of a CUDA device that is one copy, which the host does not wait for: it must have read
        a result of the last one before it comes again.
        """
        if self.memory is not None and not is_free(self.size) and is_free(tree.size):
            pinned = self.memory.device.type == "cuda"
            if self.staged is None:
                memory = torch.zeros(
                    self.memory.shape, dtype=torch.int64, device="cpu", pin_memory=pinned
                )
                self.staged = _divide(TokenTree.__new__(TokenTree), memory, self.capacity)
            self.staged.copy_(tree)
            self.memory.copy_(cast(Tensor, self.staged.memory), non_blocking=pinned)
            return
        size, words = tree.capacity, tree.ancestors.shape[1]
        for array, values in zip(self.arrays[:5], tree.arrays, strict=False):
            array[:size].copy_(values)
        self.ancestors[:size].zero_()
        self.ancestors[:size, :words].copy_(tree.ancestors)
        for counter, value in zip(self.counters, tree.counters, strict=True):
            counter.copy_(value)

    def path_tokens(self, node: int) -> list[int]:
        """Return tokens from the root (excluded) to `node` (included)."""
        tokens = self.tokens.tolist()
        return [tokens[above] for above in path_of(self.parents.tolist(), node)[1:]]


def _fill(tree: TokenTree, arrays: Arrays, counters: Counters) -> TokenTree:
    tree.arrays, tree.counters = arrays, counters
    tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.path_log_probs, tree.ancestors = (
        arrays
    )
    tree.size, tree.passes, tree.overflow = counters
    tree.capacity, tree.device, tree.free = tree.tokens.shape[0], tree.tokens.device, None
    tree.memory = tree.staged = None
    tree.origin = "draft"
    return tree


def _divide(tree: TokenTree, memory: Tensor, capacity: int) -> TokenTree:
    """Make the tree's tensors parts of int64 memory, each aligned to 16 bytes as kernels expect."""
    room, words = -(-capacity // 4) * 4, -(-capacity // WORD_BITS)
    tokens, parents, depths, edges, paths, ancestors, *counters = memory.split(
        [room, room, room, room // 2, room // 2, room * words, 2, 2, 2]
    )
    reals = (part.view(torch.float32)[:capacity] for part in (edges, paths))
    arrays = (
        tokens[:capacity],
        parents[:capacity],
        depths[:capacity],
        *reals,
        ancestors.view(room, words)[:capacity],
    )
    size, passes, overflow = (part.view(torch.int32)[:1] for part in counters)
    _fill(tree, arrays, (size, passes, overflow))
    tree.memory = memory
    return tree


@lru_cache(maxsize=16)
def _blank(capacity: int, device: torch.device) -> TokenTree:
    """Return the tree of the root alone that others of this capacity begin as copies of."""
    room, words = -(-capacity // 4) * 4, -(-capacity // WORD_BITS)
    memory = torch.zeros(room * (4 + words) + 6, dtype=torch.int64, device="cpu")
    tree = _divide(TokenTree.__new__(TokenTree), memory, capacity)
    tree.parents[0], tree.ancestors[0, 0], tree.size[0] = -1, 1, 1
    return _divide(TokenTree.__new__(TokenTree), memory.to(device), capacity)


CAPACITY = "capacity: "  # how the error of a full tree begins, before it is said whose


def overfull(capacity: int, size: int, more: int | None = None) -> PolicyError:
    """Return the error of a policy that grew a tree beyond the capacity that it states."""
    nodes = "more" if more is None else f"{more} more"
    return PolicyError(
        f"{CAPACITY}it states room for {capacity} nodes, the root included; the tree has {size} and cannot take {nodes}"
    )


def is_down(flag: Flag) -> bool:
    """Return whether a flag is known to be down without waiting, as on a CPU; work can then be skipped."""
    return (not isinstance(flag, Tensor) or is_free(flag)) and not flag

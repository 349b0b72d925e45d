"""TokenTree, the draft tree as flat arrays of fixed capacity, and the ops on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.errors import InputError, PolicyError
from specengine.ops._registry import attached, op
from specengine.ops.numbers import (
    HAS_NAN,
    WORD_BITS,
    Arrays,
    Flag,
    Nodes,
    are_counts,
    describe,
    insist,
    is_free,
    number,
    order_keys,
    own_bits,
    padded,
)

WRONG_PARENTS = "parents: the root's must be -1, every other's an earlier node"
NOT_THERE = "parents: must be among the nodes that are there"
WRONG_SUBTREE = "nodes: must be ascending, start with the root and contain every node's parent"


@op
def append_nodes(
    tree: Arrays, size: Tensor, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor, overflow: Tensor
) -> Tensor:
    """Write the first `count` entries into a tree's arrays from entry `size` on, which grows; their ids, int64 [m].

    tree: tokens, parents, depths, edge and path log-probabilities, ancestor words: int64 [capacity] x 3, float32
    [capacity] x 2, int64 [capacity, ceil(capacity / 64)], contiguous; parents, tokens: int64 [m], parents that the tree
    has, or InputError (on a CUDA device: an asynchronous assertion); log_probs: float32 [m]; size, count, overflow:
    int32 [1]. Where the capacity would be exceeded nothing is written and overflow becomes 1. Ids of padding are 0.
    """
    if not parents.shape == tokens.shape == log_probs.shape or parents.dim() != 1:
        raise InputError(f"parents, tokens, log_probs: [m] is needed, got {describe(parents, tokens, log_probs)}")
    if not parents.dtype is tokens.dtype is torch.int64 or log_probs.dtype is not torch.float32:
        given = describe(parents, tokens, log_probs)
        raise InputError(f"parents, tokens, log_probs: int64 [m] x 2, float32 [m] are needed, got {given}")
    if not are_counts(size, count, overflow):
        raise InputError(f"size, count, overflow: int32 [1] is needed, got {describe(size, count, overflow)}")
    if run := attached("append_nodes", size):
        return run(tree, size, parents, tokens, log_probs, count, overflow)
    if not parents.shape[0]:
        return parents
    all_tokens, all_parents, depths, edges, paths, ancestors = tree
    capacity = all_tokens.shape[0]
    start, fits = size.long(), size + count <= capacity
    overflow |= ~fits
    node, found = torch.arange(capacity, device=size.device, dtype=torch.int64), count.long() * fits
    new = (node >= start) & (node < start + found)
    entry = (node - start).clamp(0, parents.shape[0] - 1)
    above = parents[entry].clamp(0, capacity - 1)
    insist(((parents[entry] >= 0) & (parents[entry] < start) | ~new).all(), NOT_THERE)
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
    ids = (start + place).masked_fill(place >= found, 0)
    size.add_(found)
    return ids


@op
def subtree(parents: Tensor, ancestors: Tensor, nodes: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """The parents of the first `live` of some nodes, renumbered in their order, and their ancestor words.

    parents: int64 [capacity]; ancestors: int64 [capacity, words], of the whole tree; nodes: int64 [m], ascending, with
    the root first and closed under parent, or InputError (on a CUDA device: an asynchronous assertion). Returns int64
    [m], -1 in padding, and int64 [m, ceil(m / 64)], 0 in padding.
    """
    whole = parents.dtype is ancestors.dtype is nodes.dtype is torch.int64
    if not whole or not parents.dim() == nodes.dim() == 1 or ancestors.dim() != 2 or not are_counts(live):
        given = describe(parents, ancestors, nodes, live)
        raise InputError(
            f"parents, ancestors, nodes, live: int64 [n], [n, words], [m], int32 [1] are needed, got {given}"
        )
    if run := attached("subtree", nodes):
        return run(parents, ancestors, nodes, live)
    rows, capacity, device = nodes.shape[0], parents.shape[0], nodes.device
    place = torch.arange(rows, device=device, dtype=torch.int64)
    there, inside = place < live, nodes.clamp(0, capacity - 1)
    spare = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
    # padding writes to the spare entry, which also stands for the root's parent
    renumbered = spare.index_copy(0, inside.masked_fill(~there, capacity), place.masked_fill(~there, -1))
    new_parents = renumbered[parents[inside]].masked_fill(~there, -1)
    rises = (nodes[1:] > nodes[:-1]) & (new_parents[1:] >= 0) | ~there[1:]
    insist((nodes[:1] == 0).all() & rises.all() & ((inside == nodes) | ~there).all() & (live > 0).all(), WRONG_SUBTREE)
    bits = (ancestors[inside][:, inside // WORD_BITS] >> (inside % WORD_BITS)) & 1
    bits = bits * (there[:, None] & there)
    words = -(-rows // WORD_BITS)
    padded = pad(bits, (0, words * WORD_BITS - rows)).view(rows, words, WORD_BITS)
    shifts = torch.arange(WORD_BITS, device=device, dtype=torch.int64)
    return new_parents, (padded << shifts).sum(-1)  # distinct bits: the sum is a union


@op
def ancestor_words(parents: Tensor) -> Tensor:
    """For each node one row of words: bit j is set where node j is the node itself or one of its ancestors.

    parents: int64 [n], parents[0] = -1, 0 <= parents[i] < i. Returns int64 [n, ceil(n / 64)], bit j in word j // 64.
    InputError where a parent is not an earlier node (on a CUDA device: an asynchronous assertion).
    """
    if parents.dtype is not torch.int64 or parents.dim() != 1:
        raise InputError(f"parents: int64 [n] is needed, got {describe(parents)}")
    if run := attached("ancestor_words", parents):
        return run(parents)
    # Pointer doubling: after round r a row knows its 2**r nearest ancestors. Row n stands for "above the root".
    n, device = parents.shape[0], parents.device
    nodes = torch.arange(n, device=device, dtype=torch.int64)
    insist((parents < nodes).all() & (parents[1:] >= 0).all() & (parents[:1] == -1).all(), WRONG_PARENTS)
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
    """The first `columns` bits of each word row as bool [n, columns].

    ancestors: int64 [n, words], 0 <= columns <= 64 * words; InputError otherwise.
    """
    if ancestors.dtype is not torch.int64 or ancestors.dim() != 2:
        raise InputError(f"ancestors: int64 [n, words] is needed, got {describe(ancestors)}")
    if not 0 <= columns <= WORD_BITS * ancestors.shape[1]:
        raise InputError(f"columns: got {columns}, accepted 0 to {WORD_BITS * ancestors.shape[1]}")
    if run := attached("tree_mask", ancestors):
        return run(ancestors, columns)
    column = torch.arange(columns, device=ancestors.device, dtype=torch.int64)
    return ((ancestors[:, column // WORD_BITS] >> (column % WORD_BITS)) & 1).bool()


@op
def select_best(scores: Tensor, live: Tensor, most: int, limit: Tensor | None = None) -> Nodes:
    """Indices of the `most` best of the first `live` scores by (score descending, index ascending), in ascending order.

    scores: float32 [m], in creation order; limit: int32 [1], fewer than `most`. -inf is never selected; indices are
    padded with 0. For path log-probabilities the result is closed under parent, also under ties: a child is never
    better than its parent and comes later. InputError on NaN (on a CUDA device: an asynchronous assertion).
    """
    if scores.dtype is not torch.float32 or scores.dim() != 1 or most < 0:
        raise InputError(f"scores, most: float32 [m], 0 or more are needed, got {describe(scores)}, {most}")
    if not are_counts(live) or (limit is not None and not are_counts(limit)):
        given = describe(live) if limit is None else describe(live, limit)
        raise InputError(f"live, limit: int32 [1] is needed, got {given}")
    if run := attached("select_best", scores):
        return run(scores, live, most, limit)
    place = torch.arange(scores.shape[0], device=scores.device, dtype=torch.int64)
    values = scores.masked_fill(place >= live, -math.inf)
    insist(~values.isnan().any(), "scores: " + HAS_NAN)
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
    size: Tensor,
    frontier: Nodes,
    tokens: Tensor,
    log_probs: Tensor,
    overflow: Tensor,
    *,
    chosen: Tensor | None = None,
    most: int | None = None,
    limit: Tensor | None = None,
) -> Nodes:
    """Hang children under some nodes as `append_nodes` does, parent by parent; the new nodes, ids [most].

    tokens: int64 [rows, children], log_probs: float32 alike, a row for each frontier node. Of the entries that are
    `chosen`, bool [rows, children], or of all, it is the first `most` (none: all), or `limit`, int32 [1], if that is
    less. The count is that of the entries found, also where they overflow.
    """
    if tokens.dim() != 2 or tokens.shape != log_probs.shape or frontier.ids.shape != tokens.shape[:1]:
        given = describe(frontier.ids, tokens, log_probs)
        raise InputError(f"frontier, tokens, log_probs: [rows], [rows, children] x 2 are needed, got {given}")
    if not frontier.ids.dtype is tokens.dtype is torch.int64 or log_probs.dtype is not torch.float32:
        given = describe(frontier.ids, tokens, log_probs)
        raise InputError(f"frontier, tokens, log_probs: int64, int64, float32 are needed, got {given}")
    if not are_counts(size, frontier.live, overflow) or (limit is not None and not are_counts(limit)):
        raise InputError(f"size, live, overflow, limit: int32 [1] is needed, got {describe(size, *frontier, overflow)}")
    if chosen is not None and (chosen.dtype is not torch.bool or chosen.shape != tokens.shape):
        raise InputError(f"chosen: bool {list(tokens.shape)} is needed, got {describe(chosen)}")
    children, entries = tokens.shape[1], tokens.numel()
    most = entries if most is None else min(most, entries)
    if run := attached("append_children", size):
        return run(tree, size, frontier, tokens, log_probs, overflow, chosen, most, limit)
    live, tokens, log_probs = frontier.live * children, tokens.reshape(-1), log_probs.reshape(-1)
    if chosen is None and limit is None and most == entries:
        parents = frontier.ids[:, None].expand(-1, children).reshape(-1)
        return Nodes(append_nodes(tree, size, parents, tokens, log_probs, live, overflow), live)
    flags = torch.zeros_like(log_probs)
    if chosen is not None:
        flags = flags.masked_fill(~chosen.reshape(-1), -math.inf)
    found = select_best(flags, live, most, limit)
    parents = frontier.ids.index_select(0, found.ids // children)
    tokens, log_probs = tokens.index_select(0, found.ids), log_probs.index_select(0, found.ids)
    return Nodes(append_nodes(tree, size, parents, tokens, log_probs, found.live, overflow), found.live)


class Free(NamedTuple):
    """Nodes that cost no draft pass, on the host, the likeliest first; `TokenTree.graft` hangs them into their tree.

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


Continuations = Callable[["TokenTree", Nodes, int, float], Free | None]  # Drafter.free


class TokenTree:
    """Candidate continuations of the last committed token, which is node 0, the root.

    Nodes are numbered in the order of their creation, so `parents[i] < i`; the capacity is fixed, `size` grows.
    Budgets and sizes count the root. All arrays live on one device; entries behind the size are undefined:

    tokens, parents, depths    int64 [capacity]; the root has parent -1 and depth 0
    log_probs                  float32 [capacity]; draft log-probability of the edge to the node, natural log
    path_log_probs             float32 [capacity]; sum of `log_probs` from the root, 0 at the root
    ancestors                  int64 [capacity, ceil(capacity / 64)]; bit j of row i: node j is i or an ancestor of i
    size, passes, overflow     int32 [1]; nodes; draft passes spent; whether nodes were refused, as they had no room
    free                       returns continuations that need no draft pass, see Drafter.free; None without a source
    """

    ARRAYS = ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors", "size", "passes", "overflow")
    __slots__ = (*ARRAYS, "free")

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}, at least 1 node (the root) is needed")
        self.tokens, self.parents, self.depths = torch.zeros(3, capacity, dtype=torch.int64, device=device).unbind()
        self.log_probs, self.path_log_probs = torch.zeros(2, capacity, device=device, dtype=torch.float32).unbind()
        self.ancestors = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
        self.parents[:1].fill_(-1)
        self.ancestors[:1, :1].fill_(1)
        self.size, self.passes, self.overflow = torch.zeros(3, 1, dtype=torch.int32, device=device).unbind()
        self.size.fill_(1)
        self.free: Continuations | None = None

    @classmethod
    def root(cls, token: int, capacity: int = 1, device: torch.device | str = "cpu") -> TokenTree:
        """A tree of the root alone, with room for `capacity` nodes."""
        tree = cls(capacity, device)
        tree.tokens[:1].fill_(token)
        return tree

    @classmethod
    def of(
        cls, tokens: Tensor, parents: Tensor, depths: Tensor, log_probs: Tensor, path_log_probs: Tensor, passes: int = 0
    ) -> TokenTree:
        """A tree of these nodes, which has no room for more; the arrays are as above, and kept."""
        tree = cls.__new__(cls)
        tree.tokens, tree.parents, tree.depths = tokens, parents, depths
        tree.log_probs, tree.path_log_probs = log_probs, path_log_probs
        tree.ancestors = ancestor_words(parents)
        numbers = torch.tensor([[tokens.shape[0]], [passes], [0]], dtype=torch.int32, device=tokens.device)
        tree.size, tree.passes, tree.overflow = numbers
        tree.free = None
        return tree

    @property
    def capacity(self) -> int:
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def __len__(self) -> int:
        return int(self.size)

    def restart(self) -> None:
        """Only the root is left, whose token stays."""
        self.size.fill_(1)
        self.passes.zero_()
        self.overflow.zero_()

    def root_alone(self) -> Nodes:
        return Nodes.of(torch.zeros(1, dtype=torch.int64, device=self.device))

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor, count: Tensor | None = None) -> Nodes:
        """Hang the first `count` entries, or all, under existing nodes; siblings must carry distinct tokens.

        parents, tokens: int64 [m]; log_probs: float32 [m], of the edges; count: int32 [1]. Returns the new nodes.
        PolicyError when the capacity is exceeded; on a device then nothing is added, and `overflow` says so.
        """
        if count is None:
            count = torch.full_like(self.size, parents.shape[0])
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
        """Hang children under each frontier node, all or those that are chosen; see ops.append_children.

        Returns the new nodes, in creation order; where the capacity is exceeded as `add`.
        """
        given = self.arrays, self.size, frontier, tokens, log_probs, self.overflow
        return self.appended(append_children(*given, chosen=chosen, most=most, limit=limit))

    def graft(self, parents: list[int], tokens: list[int], log_probs: list[float]) -> Nodes:
        """As `add`, of entries on the host whose parents may be earlier ones: entry i becomes node len(self) + i.

        PolicyError when the capacity is exceeded, also on a device, which this waits for.
        """
        size, end = len(self), len(self) + len(tokens)
        if end > self.capacity:
            raise overfull(self.capacity, size, len(tokens))
        depths, scores = self.depths[:size].tolist(), self.path_log_probs[:size].tolist()
        for parent, log_prob in zip(parents, log_probs, strict=True):
            depths.append(depths[parent] + 1)
            scores.append(scores[parent] + log_prob)
        whole = torch.tensor([tokens, parents, depths[size:]], dtype=torch.int64, device="cpu")
        real = torch.tensor([log_probs, scores[size:]], dtype=torch.float32, device="cpu")
        for array, values in zip(self.arrays[:5], (*whole, *real), strict=True):
            array[size:end] = values
        words = ancestor_words(self.parents[:end])
        self.ancestors[size:end] = 0
        self.ancestors[size:end, : words.shape[1]] = words[size:]
        self.size.fill_(end)
        return Nodes.of(torch.arange(size, end, device=self.device, dtype=torch.int64))

    @property
    def arrays(self) -> Arrays:
        """Return the arrays as ops take them."""
        return self.tokens, self.parents, self.depths, self.log_probs, self.path_log_probs, self.ancestors

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
        """float32 [width]: the nodes' path log-probabilities, -inf for padding."""
        return nodes.masked(self.path_log_probs.index_select(0, nodes.ids), -math.inf)

    def best(self, nodes: Nodes, most: int) -> Nodes:
        """The `most` of these nodes with the largest path log-probabilities, in the order in which they are given."""
        found = select_best(self.path_log_probs.index_select(0, nodes.ids), nodes.live, most)
        return Nodes(nodes.ids.index_select(0, found.ids), found.live) if nodes.ids.shape[0] else found

    def best_of_all(self, most: int, limit: Tensor | None = None) -> Nodes:
        """The nodes of the largest path log-probabilities, ascending: a part that is closed under parent."""
        return select_best(self.path_log_probs, self.size, most, limit)

    def subtree(self, nodes: Nodes) -> TokenTree:
        """The tree of these nodes alone, renumbered in their order, with room for no more than their padding.

        nodes: ascending, with the root first and closed under parent; ValueError otherwise.
        """
        tree = TokenTree.__new__(TokenTree)
        tree.free = None
        tree.parents, tree.ancestors = subtree(self.parents, self.ancestors, *nodes)
        tree.tokens, tree.depths = self.tokens.index_select(0, nodes.ids), self.depths.index_select(0, nodes.ids)
        tree.log_probs = self.log_probs.index_select(0, nodes.ids)
        tree.path_log_probs = self.path_log_probs.index_select(0, nodes.ids)
        tree.size, tree.passes, tree.overflow = nodes.live, self.passes, self.overflow
        return tree

    def trimmed(self) -> TokenTree:
        """The same nodes without the room behind them, as views; waits for a device."""
        size = len(self)
        if size == self.capacity:
            return self
        tree = TokenTree.__new__(TokenTree)
        tree.free = None
        tree.tokens, tree.parents, tree.depths = self.tokens[:size], self.parents[:size], self.depths[:size]
        tree.log_probs, tree.path_log_probs = self.log_probs[:size], self.path_log_probs[:size]
        tree.ancestors = self.ancestors[:size]
        tree.size, tree.passes, tree.overflow = self.size, self.passes, self.overflow
        return tree

    def to(self, device: torch.device | str) -> TokenTree:
        """The same tree, in memory of its own, there."""
        tree = TokenTree.__new__(TokenTree)
        tree.free = None
        for name in TokenTree.ARRAYS:
            setattr(tree, name, getattr(self, name).to(device, copy=True))
        return tree

    def copy_(self, tree: TokenTree) -> None:
        """Become that tree, which has no more nodes than there is room for."""
        size, words = tree.capacity, tree.ancestors.shape[1]
        for name in ("tokens", "parents", "depths", "log_probs", "path_log_probs"):
            getattr(self, name)[:size].copy_(getattr(tree, name))
        self.ancestors[:size].zero_()
        self.ancestors[:size, :words].copy_(tree.ancestors)
        for name in ("size", "passes", "overflow"):
            getattr(self, name).copy_(getattr(tree, name))

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root (excluded) to `node` (included)."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]


CAPACITY = "capacity: "  # how the error of a full tree begins, before it is said whose


def overfull(capacity: int, size: int, more: int | None = None) -> PolicyError:
    """Return the error of a policy that grew a tree beyond the capacity that it states."""
    nodes = "more" if more is None else f"{more} more"
    return PolicyError(
        f"{CAPACITY}it states room for {capacity} nodes, the root included; the tree has {size} and cannot take {nodes}"
    )


def is_down(flag: Flag) -> bool:
    """Whether a flag is known to be down without waiting, as it is on a CPU: then work may be left out."""
    return (not isinstance(flag, Tensor) or is_free(flag)) and not flag

"""Ops of a draft tree: hang nodes, take a part of it, what sees what."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.errors import InputError
from specengine.ops._registry import Flag, are_counts, attached, describe, insist, number, op

WORD_BITS = 64
WRONG_PARENTS = "parents: the root's must be -1, every other's an earlier node"
NOT_THERE = "parents: must be among the nodes that are there"
WRONG_SUBTREE = "nodes: must be ascending, start with the root and contain every node's parent"

Arrays = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Nodes(NamedTuple):
    """Some nodes, or indices of other things. ids: int64 [width]; those from `live`, int32 [1], on are padding: any
    that exist."""

    ids: Tensor
    live: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Nodes:
        """These, without padding."""
        return cls(ids, torch.full((1,), ids.shape[0], dtype=torch.int32, device=ids.device))

    def alive(self) -> Tensor:
        """int64 [live]; waits for a device."""
        live = int(self.live)
        return self.ids if live == self.ids.shape[0] else self.ids[:live]

    def where(self, flag: Flag) -> Nodes:
        """These, or none where the flag is down."""
        if isinstance(flag, Tensor):
            flag = number(flag)
        if isinstance(flag, Tensor):
            return Nodes(self.ids, self.live * flag)
        return self if flag else Nodes(self.ids, torch.zeros_like(self.live))

    def unless(self, flag: Flag) -> Nodes:
        """These, or none where the flag is up."""
        return self.where(~flag if isinstance(flag, Tensor) else not flag)

    def masked(self, values: Tensor, filler: float) -> Tensor:
        """These nodes' values, [width], with the filler for padding."""
        live = number(self.live)
        if not isinstance(live, Tensor) and live >= values.shape[0]:
            return values
        return values.masked_fill(self.padding(), filler)

    def padding(self) -> Tensor:
        """bool [width]"""
        return torch.arange(self.ids.shape[0], device=self.ids.device, dtype=torch.int64) >= self.live


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


@cache  # for good: captured graphs read them
def own_bits(capacity: int, device: torch.device) -> Tensor:
    """Word rows in which node i has bit i alone: int64 [capacity, ceil(capacity / 64)]."""
    node = torch.arange(capacity, device=device, dtype=torch.int64)
    words = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
    words[node, node // WORD_BITS] = torch.ones_like(node) << (node % WORD_BITS)
    return words

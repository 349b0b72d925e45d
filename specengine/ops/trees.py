"""Ops on the arrays of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._backends import describe, implementation
from specengine.reference import WORD_BITS


def ancestor_words(parents: Tensor) -> Tensor:
    """Bit j of row i is set iff node j is node i or an ancestor of it.

    parents: int64 [n], parents[0] = -1, 0 <= parents[i] < i. Returns int64 [n, ceil(n / 64)], bit j in word j // 64.
    InputError where a parent is not an earlier node (on a CUDA device: an asynchronous assertion).
    """
    if parents.dtype is not torch.int64 or parents.dim() != 1:
        raise InputError(f"parents: int64 [n] is needed, got {describe(parents)}")
    return implementation("ancestor_words", parents.device.type)(parents)


def subtree(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The parents of `nodes`, renumbered in their order, and their ancestor words (as `ancestor_words` gives them).

    parents: int64 [n], of the whole tree; nodes: int64 [m], ascending, with the root first and closed under parent.
    Returns int64 [m] and int64 [m, ceil(m / 64)]. InputError otherwise (on a CUDA device: an asynchronous assertion).
    """
    if not parents.dtype is nodes.dtype is torch.int64 or parents.dim() != 1 or nodes.dim() != 1:
        raise InputError(f"parents, nodes: int64 [n], [m] are needed, got {describe(parents, nodes)}")
    return implementation("subtree", parents.device.type)(parents, nodes)


def append_nodes(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    size: int,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    """Write nodes into a tree's arrays from entry `size` on: tokens, parents, depths, edge and path log-probabilities,
    ancestor words.

    tree: int64 [capacity] x 3, float32 [capacity] x 2, int64 [capacity, ceil(capacity / 64)], contiguous; parents,
    tokens: int64 [m], parents below `size`; log_probs: float32 [m]; size + m within the capacity.
    """
    m, capacity = parents.shape[0], tree[0].shape[0]
    if not parents.shape == tokens.shape == log_probs.shape or size + m > capacity:
        given = describe(parents, tokens, log_probs)
        raise InputError(f"parents, tokens, log_probs: [m] with m up to {capacity - size} is needed, got {given}")
    if not parents.dtype is tokens.dtype is torch.int64 or log_probs.dtype is not torch.float32:
        given = describe(parents, tokens, log_probs)
        raise InputError(f"parents, tokens, log_probs: int64 [m] x 2, float32 [m] are needed, got {given}")
    implementation("append_nodes", parents.device.type)(tree, size, parents, tokens, log_probs)


def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    """The first `columns` bits of each word row as bool [n, columns].

    ancestors: int64 [n, words], 0 <= columns <= 64 * words; InputError otherwise.
    """
    if ancestors.dtype is not torch.int64 or ancestors.dim() != 2:
        raise InputError(f"ancestors: int64 [n, words] is needed, got {describe(ancestors)}")
    if not 0 <= columns <= WORD_BITS * ancestors.shape[1]:
        raise InputError(f"columns: got {columns}, accepted 0 to {WORD_BITS * ancestors.shape[1]}")
    return implementation("tree_mask", ancestors.device.type)(ancestors, columns)

"""The ops of csrc/ for CPU tensors: outputs allocated here, addresses handed to the extension specengine._expander.

Importing this raises ImportError where the extension is not built, or was built from other sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specengine import reference
from specengine._expander import BestFirst as _BestFirst
from specengine._expander import ancestor_words as _ancestor_words
from specengine._expander import append_nodes as _append_nodes
from specengine._expander import beam_observation as _beam_observation
from specengine._expander import best_action as _best_action
from specengine._expander import best_candidates as _best_candidates
from specengine._expander import classify_paths as _classify_paths
from specengine._expander import classify_row as _classify_row
from specengine._expander import compact_rows as _compact_rows
from specengine._expander import keyed_gumbel_argmax as _keyed_gumbel_argmax
from specengine._expander import mlp as _mlp
from specengine._expander import select_best as _select_best
from specengine._expander import strict_attention as _strict_attention
from specengine._expander import strict_cached_attention as _strict_cached_attention
from specengine._expander import subtree as _subtree
from specengine._expander import top_children as _top_children
from specengine._expander import top_entropy as _top_entropy
from specengine._expander import tree_mask as _tree_mask
from specengine._expander import walk as _walk
from specengine.errors import InputError
from specengine.reference import HAS_NAN, LOWEST, WORD_BITS, WRONG_PARENTS, WRONG_SUBTREE, Candidates, Paths, Popped


def ancestor_words(parents: Tensor) -> Tensor:
    n, parents = parents.shape[0], parents.contiguous()
    out = torch.empty(n, -(-n // WORD_BITS), dtype=torch.int64)
    if not _ancestor_words(parents.data_ptr(), n, out.data_ptr()):
        raise InputError(WRONG_PARENTS)
    return out


def append_nodes(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    size: int,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    parents, tokens, log_probs = parents.contiguous(), tokens.contiguous(), log_probs.contiguous()
    if not _append_nodes(
        [array.data_ptr() for array in tree],
        tree[-1].shape[1],
        size,
        parents.shape[0],
        parents.data_ptr(),
        tokens.data_ptr(),
        log_probs.data_ptr(),
    ):
        raise InputError(f"parents: {parents.tolist()} are not all among the {size} nodes that are there")


def subtree(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    size, kept, parents, nodes = parents.shape[0], nodes.shape[0], parents.contiguous(), nodes.contiguous()
    new_parents = torch.empty(kept, dtype=torch.int64)
    words = torch.empty(kept, -(-kept // WORD_BITS), dtype=torch.int64)
    if not _subtree(parents.data_ptr(), size, nodes.data_ptr(), kept, new_parents.data_ptr(), words.data_ptr()):
        raise InputError(WRONG_SUBTREE)
    return new_parents, words


def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    (n, words), ancestors = ancestors.shape, ancestors.contiguous()
    out = torch.empty(n, columns, dtype=torch.bool)
    _tree_mask(ancestors.data_ptr(), n, words, columns, out.data_ptr())
    return out


def select_best(log_probs: Tensor, count: int) -> Tensor:
    size, log_probs = log_probs.shape[0], log_probs.contiguous()
    out = torch.empty(min(count, size), dtype=torch.int64)
    kept = _select_best(log_probs.data_ptr(), size, count, out.data_ptr())
    if kept < 0:
        raise InputError("log_probs: " + HAS_NAN)
    return out.resize_(kept)


def top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    logits = _with_dense_rows(logits)
    rows = logits.shape[0]
    log_probs, best = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    _top_children(*_matrix(logits), k, normalized, log_probs.data_ptr(), best.data_ptr())
    return log_probs, best


def best_candidates(
    logits: Tensor, scores: Tensor, count: int, log_gate: float, bound: float, normalized: bool
) -> Candidates:
    logits, scores = _with_dense_rows(logits), scores.contiguous()
    count = min(count, logits.shape[0] * logits.shape[1])
    if not count:
        return Candidates(*_room(0))
    found = _room(count)
    kept = _best_candidates(
        *_matrix(logits), scores.data_ptr(), count, log_gate, bound, normalized, *(out.data_ptr() for out in found)
    )
    if kept < count:
        for out in found:
            out.resize_(kept)
    return Candidates(*found)


def _room(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Twice int64, twice float32."""
    whole = torch.int64
    return torch.empty(count, dtype=whole), torch.empty(count, dtype=whole), torch.empty(count), torch.empty(count)


def top_entropy(logits: Tensor, top: int, normalized: bool) -> Tensor:
    logits = _with_dense_rows(logits)
    out = torch.empty(logits.shape[0])
    _top_entropy(*_matrix(logits), top, normalized, out.data_ptr())
    return out


def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    features, (hidden, inputs) = features.contiguous(), net[0].shape
    out = torch.empty(features.shape[:-1])
    _mlp([part.data_ptr() for part in net], inputs, hidden, features.data_ptr(), out.numel(), out.data_ptr())
    return out


def classify_paths(path_log_probs: Tensor, entropies: Tensor, depth: int, net: Sequence[Tensor]) -> Tensor:
    paths, entropies, (rows, children) = path_log_probs.contiguous(), entropies.contiguous(), path_log_probs.shape
    out, addresses = torch.empty_like(paths), [part.data_ptr() for part in net]
    given = paths.data_ptr(), entropies.data_ptr(), depth, rows, children
    _classify_paths(addresses, net[0].shape[0], *given, out.data_ptr())
    return out


def classify_row(logits: Tensor, top: int, depth: int, net: Sequence[Tensor], normalized: bool) -> float:
    row = _with_dense_rows(logits[None])
    address, bfloat16, _, columns, _ = _matrix(row)
    parts, (hidden, inputs) = [part.data_ptr() for part in net], net[0].shape
    return _classify_row(parts, inputs, hidden, address, bfloat16, columns, top, normalized, depth)


def _with_dense_rows(logits: Tensor) -> Tensor:
    if logits.dtype is torch.float16:
        return logits.float().contiguous()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _matrix(logits: Tensor) -> tuple[int, bool, int, int, int]:
    """Address, whether bfloat16 (else float32), rows, columns, row stride in elements."""
    rows, columns = logits.shape
    return logits.data_ptr(), logits.dtype is torch.bfloat16, rows, columns, logits.stride(0)


class BestFirst:
    """As ops.BestFirst says, over csrc/spec/best_first.hpp."""

    __slots__ = ("_queue",)

    def __init__(self, budget: int, batch: int, max_depth: int, device: torch.device | str) -> None:
        self._queue = _BestFirst(budget, batch, max_depth)

    @property
    def bound(self) -> float:
        return self._queue.bound

    def push(
        self, parents: Tensor, depth_of_parents: Tensor, tokens: Tensor, log_probs: Tensor, scores: Tensor
    ) -> None:
        parents, depth_of_parents, tokens = parents.contiguous(), depth_of_parents.contiguous(), tokens.contiguous()
        log_probs, scores = log_probs.contiguous(), scores.contiguous()
        if not self._queue.push(
            parents.data_ptr(),
            depth_of_parents.data_ptr(),
            tokens.data_ptr(),
            log_probs.data_ptr(),
            scores.data_ptr(),
            scores.shape[0],
        ):
            raise InputError("scores: " + HAS_NAN)

    def pop(self) -> Popped:
        return self._draw(self._queue.pop_count(), True)

    def fill(self) -> Popped:
        return self._draw(self._queue.fill_count(), False)

    def _draw(self, count: int, expands: bool) -> Popped:
        parents, tokens = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        expand, log_probs = torch.empty(count if expands else 0, dtype=torch.int64), torch.empty(count)
        nodes, expanded, mass = self._queue.draw(
            count, expands, parents.data_ptr(), tokens.data_ptr(), log_probs.data_ptr(), expand.data_ptr()
        )
        if nodes < count:
            parents.resize_(nodes)
            tokens.resize_(nodes)
            log_probs.resize_(nodes)
        if expanded < count:
            expand.resize_(expanded)
        return Popped(parents, tokens, log_probs, expand, mass)


def beam_observation(
    scores: Tensor, depths: Tensor, width: int, pad: float, shown: tuple[int, int], room: int,
    facts: tuple[float, float], repeats: int,
) -> Tensor:  # fmt: skip
    scores, depths = scores.contiguous(), depths.contiguous()
    out = torch.empty(room + 2 * repeats)
    window, lowest = [width, *shown, room, repeats], pad if pad < 0 else LOWEST
    given = scores.data_ptr(), depths.data_ptr(), scores.shape[0]
    _beam_observation(window, pad, lowest, *given, *facts, out.data_ptr())
    return out


def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> int:
    sizes = [layers[0].shape[1], *(weight.shape[0] for weight in layers[::2])]
    addresses = [part.data_ptr() for part in layers]
    return _best_action(sizes, addresses, activation == "tanh", observation.contiguous().data_ptr())


def strict_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if query.dtype is torch.float16:
        whole = strict_attention(query.float(), key.float(), value.float(), mask, scale)
        return whole.to(torch.float16)
    mask = None if mask is None else mask.contiguous()
    return _attended(_strict_attention, query, key, value, scale, 0 if mask is None else mask.data_ptr())


def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    if query.dtype is torch.float16:
        whole = strict_cached_attention(query.float(), key.float(), value.float(), paths, prefix, live, scale)
        return whole.to(torch.float16)
    nodes, counts = (part.contiguous() for part in paths)
    numbers = nodes.data_ptr(), counts.data_ptr(), prefix.data_ptr(), live.data_ptr()
    return _attended(_strict_cached_attention, query, key, value, scale, nodes.shape[1], *numbers)


def _attended(run: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, *seen: int) -> Tensor:
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    query = query.contiguous()
    heads, rows, size = query.shape
    sizes = [key.shape[0], heads // key.shape[0], rows, key.shape[1], size]
    strides = [key.stride(0), key.stride(1), value.stride(0), value.stride(1)]
    out = torch.empty_like(query)
    given = query.data_ptr(), key.data_ptr(), value.data_ptr()
    run(query.dtype is torch.bfloat16, sizes + strides, scale, *given, *seen, out.data_ptr())
    return out


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    scores = scores.contiguous()
    return _keyed_gumbel_argmax(scores.data_ptr(), scores.shape[0], seed, position)


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    tokens, parents, chosen = tokens.contiguous(), parents.contiguous(), chosen.contiguous()
    return _walk(tokens.data_ptr(), parents.data_ptr(), chosen.data_ptr(), tokens.shape[0])


def compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    if not slab.is_contiguous():
        return reference.compact_kv(slab, prefix, path)
    layers, two, heads, capacity, size = slab.shape
    row_bytes = size * slab.element_size()
    _compact_rows(slab.data_ptr(), layers * two * heads, capacity * row_bytes, row_bytes, prefix, path)
    return None

"""The ops of kernels/ for CUDA tensors, and for CPU tensors in Triton's interpreter (TRITON_INTERPRET=1).

What a kernel does not take (heads above 256 channels, strided channels, more candidates than it ranks) runs by the
reference. Importing this raises ImportError where Triton is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from specengine_kernels import candidate_selection, entropy, frontier, kv_compaction, verification
from specengine_kernels import rope_store as rope_kernel
from specengine_kernels import strict_attention as strict_kernel
from specengine_kernels import top_children as children_kernel
from specengine_kernels import tree_attention as attention_kernel
from torch import Tensor
from torch.nn.functional import pad

from specengine import reference
from specengine.reference import WORD_BITS, Candidates, Paths

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MOST_CANDIDATES = 4096  # of one selection by the kernels; they rank by counting
MOST_CHILDREN = 256  # of a row, for the same reason
MOST_ROWS = 65535  # of a launch's second dimension
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it at import, too


class Words(NamedTuple):
    """A mask as the kernel reads it. words: int64 [1, n, w], of the slots behind the prefix; lengths: int32 [1] each
    of prefix, rows and slots behind the prefix; mask: bool [n, L], the same for what the kernel does not take."""

    words: Tensor
    lengths: tuple[Tensor, Tensor, Tensor]
    mask: Tensor


def append_nodes(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    size: int,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    m, device = parents.shape[0], parents.device
    if not 0 < m <= frontier.MOST_APPENDED:
        return reference.append_nodes(tree, size, parents, tokens, log_probs) if m else None
    sent = torch.tensor([[size], [m], [0]], dtype=torch.int32, device=device)
    given = parents.contiguous(), tokens.contiguous(), log_probs.contiguous()
    rest = frontier.frontier_for(1, device)  # whom to draft from is the policy's choice here
    return frontier.append_nodes(frontier.Tree(*tree, sent[0]), *given, sent[1], rest, sent[2])


def best_candidates(
    logits: Tensor, scores: Tensor, count: int, log_gate: float, bound: float, normalized: bool
) -> Candidates:
    rows, columns = logits.shape
    most = min(count, rows * columns)
    if not 0 < most <= MOST_CANDIDATES or not candidate_selection.fits(rows, columns):
        return Candidates(*reference.best_candidates(logits, scores, count, log_gate, bound, normalized))
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parents, room = scores.to(logits.device).contiguous(), -(-most // 4) * 4  # so that all parts are aligned
    found = torch.empty(3 * room + 2, dtype=torch.int64, device=logits.device)
    given = {"log_gate": log_gate, "bound": bound, "normalized": normalized}
    candidate_selection.select_candidates(logits, parents, most, **given, out=_selection(found, room, most))
    chosen = _selection(found.to(scores.device), room, most)
    kept = int(chosen.count)  # the one read by the host, together with the rest where that goes there
    return Candidates(chosen.rows[:kept], chosen.tokens[:kept], chosen.log_probs[:kept], chosen.scores[:kept])


def _selection(whole: Tensor, room: int, most: int) -> candidate_selection.Selection:
    """The parts of a selection of up to `most` in one int64 buffer, [3 * room + 2]."""
    rows, tokens, numbers, count, anchor = whole.split([room, room, room, 1, 1])
    log_probs, scores = numbers.view(torch.float32).split(room)
    count, anchor = count.view(torch.int32)[:1], anchor.view(torch.float32)[:1]
    return candidate_selection.Selection(rows[:most], tokens[:most], log_probs[:most], scores[:most], count, anchor)


def top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    if k > MOST_CHILDREN or not 0 < logits.shape[0] <= MOST_ROWS:
        return reference.top_children(logits, k, normalized)
    return children_kernel.top_children(logits if logits.stride(1) == 1 else logits.contiguous(), k, normalized)


def top_entropy(logits: Tensor, top: int, normalized: bool) -> Tensor:
    if not 0 < logits.shape[0] <= MOST_ROWS:
        return reference.top_entropy(logits, top, normalized)
    return entropy.top_entropy(logits if logits.stride(1) == 1 else logits.contiguous(), top, normalized)


def choose_tokens(logits: Tensor, positions: Sequence[int], seed: int | None, temperature: float) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if not len(logits) or seed is None:
        return verification.choose_tokens(logits) if len(logits) else reference.choose_tokens(logits, (), None, 1.0)
    sent = torch.tensor([_signed(seed), *(_signed(position) for position in positions)], device=logits.device)
    heat = torch.tensor([temperature], dtype=torch.float32, device=logits.device)
    return verification.choose_tokens(logits, sent[1:], sent[:1], heat)


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    # +inf counts as 3e38 here, and is not finite for the kernel
    return int(choose_tokens(scores.clamp(max=reference.LARGEST)[None], [position], seed, 1.0))


def _signed(value: int) -> int:
    """The int64 with the bits of a number modulo 2**64."""
    return ((value + 2**63) & reference.MASK64) - 2**63


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    n = tokens.shape[0]
    if n > verification.MOST_NODES:
        return reference.walk(tokens, parents, chosen)
    out = torch.zeros(n + 2, dtype=torch.int64, device=tokens.device)  # path, bonus, count: one read
    size = torch.full((1,), n, dtype=torch.int32, device=tokens.device)
    given = tokens.contiguous(), parents.contiguous(), chosen.contiguous()
    verification.walk(*given, size, out[:n], out[n + 1 :].view(torch.int32)[:1], out[n : n + 1])
    values = out.tolist()
    return values[: values[n + 1]]


def compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    if path[-1] == len(path) - 1:  # all of them stand right
        return None
    if slab.stride(4) != 1:
        return reference.compact_kv(slab, prefix, path)
    sent = torch.tensor([len(path), prefix, *path], dtype=torch.int32, device=slab.device)
    return kv_compaction.compact_kv(slab, sent[2:], sent[:1], sent[1:2])


def pack_mask(mask: Tensor, groups: int, dtype: torch.dtype, prefix: int) -> Words:
    rows, slots = mask.shape
    behind = slots - prefix
    bits = pad(mask[:, prefix:], (0, max(WORD_BITS, -(-behind // WORD_BITS) * WORD_BITS) - behind))
    shifts = torch.arange(WORD_BITS, device=mask.device)
    words = (bits.view(rows, -1, WORD_BITS).long() << shifts).sum(-1)  # bits are distinct, so the sum is their union
    return Words(words[None], _lengths(prefix, rows, behind, mask.device), mask)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Words | Tensor | None, scale: float) -> Tensor:
    known = query.dtype in FLOATS and query.shape[2] <= LARGEST_HEAD and scale > 0
    if isinstance(mask, Tensor) or not known or not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        dense = mask.mask.repeat(query.shape[0] // key.shape[0], 1) if isinstance(mask, Words) else mask
        return reference.tree_attention(query, key, value, dense, scale)
    seen = _all_seen(query.shape[1], key.shape[1], query.device) if mask is None else mask
    rows = query.transpose(0, 1)[None]
    out = attention_kernel.tree_attention(
        rows, key[None], value[None], seen.words, *seen.lengths, scale=scale, upcast=INTERPRETED
    )
    return out[0].transpose(0, 1)


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, words: Tensor, prefix: Tensor, live: Tensor, seen: Tensor, scale: float
) -> Tensor:
    known = query.dtype in FLOATS and query.shape[2] <= LARGEST_HEAD and scale > 0
    if not known or not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        return reference.cached_attention(query, key, value, words, prefix, live, seen, scale)
    rows, numbers = query.transpose(0, 1)[None], (prefix, live, seen)
    out = attention_kernel.tree_attention(
        rows, key[None], value[None], words[None], *numbers, scale=scale, upcast=INTERPRETED
    )
    return out[0].transpose(0, 1)


def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    known = query.dtype in FLOATS and query.shape[2] <= LARGEST_HEAD and scale > 0
    if not known or not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        return reference.strict_cached_attention(query, key, value, paths, prefix, live, scale)
    rows, way = query.transpose(0, 1)[None], (paths.nodes.contiguous()[None], paths.counts[None])
    out = strict_kernel.strict_attention(
        rows, key[None], value[None], *way, prefix, live, scale=scale, upcast=INTERPRETED
    )
    return out[0].transpose(0, 1)


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
    if not query.stride(2) == key.stride(2) == value.stride(2) == slab.stride(3) == 1:
        return reference.rope_store(query, key, value, positions, tables, slab, slot, live)
    rows = (states.transpose(0, 1) for states in (query, key, value))
    return rope_kernel.rope_store(*rows, positions, *tables, slab[0], slab[1], slot, live).transpose(0, 1)


@lru_cache(maxsize=8)  # all layers of a forward ask for the same
def _all_seen(rows: int, slots: int, device: torch.device) -> Words:
    none = torch.zeros(1, rows, 1, dtype=torch.int64, device=device)
    return Words(none, _lengths(slots, rows, 0, device), torch.ones(rows, slots, dtype=torch.bool, device=device))


def _lengths(prefix: int, rows: int, behind: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    sent = torch.tensor([[prefix], [rows], [behind]], dtype=torch.int32, device=device)
    return sent[0], sent[1], sent[2]


def implementations() -> dict[str, Callable[..., Any]]:
    """What `ops` finds here."""
    return {
        "append_nodes": append_nodes,
        "best_candidates": best_candidates,
        "cached_attention": cached_attention,
        "choose_tokens": choose_tokens,
        "keyed_gumbel_argmax": keyed_gumbel_argmax,
        "rope_store": rope_store,
        "strict_cached_attention": strict_cached_attention,
        "top_children": top_children,
        "top_entropy": top_entropy,
        "walk": walk,
        "compact_kv": compact_kv,
        "pack_mask": pack_mask,
        "tree_attention": tree_attention,
    }

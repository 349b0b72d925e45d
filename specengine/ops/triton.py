"""The ops of kernels/ for CUDA tensors, and for CPU tensors in Triton's interpreter (TRITON_INTERPRET=1).

Inputs that a kernel does not take (heads above 256 channels, strided channels, more candidates than it ranks) run by
the reference. Importing this raises ImportError where Triton is missing.
"""

import inspect
import math
import os
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, cast

import torch
from specengine_kernels import (
    candidate_selection,
    coupling,
    entropy,
    frontier,
    kv_compaction,
    packed_linear as linear_kernel,
    recurrence as recurrence_kernel,
    rms_norm as norm_kernel,
    rope_store as rope_kernel,
    silu_mul as silu_kernel,
    strict_attention as strict_kernel,
    top_children as children_kernel,
    tree_attention as attention_kernel,
    verification,
)
from torch import Tensor
from torch.nn.functional import pad

from specengine.ops import _trial, attention, networks, tree
from specengine.ops._meanings import FLOATS, WORD_BITS
from specengine.ops._registry import (
    by_meaning,
    is_tried,
    refuse_in_captures,
    taken_where,
    warn_of_fault,
)
from specengine.ops.attention import Paths, Rotation, Slabs, longest
from specengine.ops.select import Candidates
from specengine.ops.tree import Arrays, Walked

LARGEST_HEAD = 256
MAX_CANDIDATES = 4096  # of one selection by the kernels; they rank by counting
MAX_CHILDREN = 256  # of a row, for the same reason
MAX_ROWS = 65535  # of a launch's second dimension
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it at import, too


class Words(NamedTuple):
    """A mask as the kernel reads it. words: int64 [1, n, w], of the slots after the prefix; lengths: int32 [1] each
    of prefix, rows and slots after the prefix; mask: bool [n, L], the same for inputs that no kernel takes; causal: as
    of `pack_mask`."""

    words: Tensor
    lengths: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None = None
    causal: bool = False


@taken_where(lambda arrays, size, parents, *_: 0 < len(parents) <= frontier.MAX_APPENDED)
def append_nodes(
    arrays: Arrays,
    size: Tensor,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    count: Tensor,
    overflow: Tensor,
) -> Tensor:
    parents = parents.contiguous()
    ids = torch.empty_like(parents)
    frontier.append_nodes(
        frontier.Tree(*arrays, size),
        parents,
        tokens.contiguous(),
        log_probs.contiguous(),
        count,
        ids,
        overflow,
    )
    return ids


@taken_where(
    lambda arrays, size, nodes, filled, used, slots, *_: (
        0 < len(nodes.ids) <= frontier.MAX_APPENDED
        and nodes.ids.stride(0) == 1
        and slots.is_contiguous()
    )
)
def level_rows(
    arrays: Arrays,
    size: Tensor,
    nodes: tree.Nodes,
    filled: Tensor,
    used: Tensor,
    slots: Tensor,
    factors: Tensor | None,
    passes: Tensor,
) -> tree.PassRows:
    tokens, positions, words, slot, sources, targets, scales = frontier.level_rows(
        frontier.Tree(*arrays, size), *nodes, filled, used, passes, slots, factors
    )
    return tree.PassRows(tokens, positions, words, slot, sources, targets, None, scales)


@taken_where(
    lambda logits, scores, live, most, *_: (
        scores.device == logits.device
        and most <= MAX_CANDIDATES
        and len(logits)
        and candidate_selection.fits(*logits.shape)
    )
)
def best_candidates(
    logits: Tensor,
    scores: Tensor,
    live: Tensor,
    most: int,
    limit: Tensor | None,
    log_gate: Tensor | None,
    bound: Tensor | None,
    normalized: bool,
) -> Candidates:
    scores = scores.masked_fill(
        torch.arange(len(scores), device=scores.device, dtype=torch.int64) >= live, -math.inf
    )
    *selected, _ = candidate_selection.select_candidates(
        _dense(logits),
        scores,
        most,
        budget=None if limit is None else limit.clamp(0, most),
        log_gate=-math.inf if log_gate is None else log_gate,
        bound=-math.inf if bound is None else bound,
        normalized=normalized,
    )
    return Candidates(*selected)


def _dense(rows: Tensor) -> Tensor:
    """Return rows whose columns lie side by side, as the kernels read them."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _is_dense(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors)


@taken_where(lambda logits, k, _: k <= MAX_CHILDREN and 0 < len(logits) <= MAX_ROWS)
def top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    return children_kernel.top_children(_dense(logits), k, normalized)


@taken_where(lambda logits, *_: 0 < len(logits) <= MAX_ROWS)
def top_entropy(logits: Tensor, top: int, normalized: bool) -> Tensor:
    return entropy.top_entropy(_dense(logits), top, normalized)


@taken_where(lambda logits, *_: len(logits))
def choose_tokens(
    logits: Tensor, positions: Tensor | None, seed: Tensor | None, temperature: Tensor | None
) -> Tensor:
    return verification.choose_tokens(_dense(logits), positions, seed, temperature)


@taken_where(
    lambda logits, token_ids, *_: len(logits) and (token_ids is None or token_ids.stride(0) == 1)
)
def couple(
    logits: Tensor, token_ids: Tensor | None, positions: Tensor, seed: Tensor, scale: Tensor
) -> Tensor:
    return coupling.couple(_dense(logits), token_ids, positions, seed, scale)


@taken_where(lambda tokens, *_: len(tokens) <= verification.MAX_NODES)
def walk(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    path, count, bonus = (
        torch.zeros_like(tokens),
        torch.empty_like(size),
        torch.empty_like(tokens[:1]),
    )
    verification.walk(
        tokens.contiguous(), parents.contiguous(), chosen.contiguous(), size, path, count, bonus
    )
    return Walked(path, count, bonus)


@taken_where(
    lambda verified, walked, nodes, counts, root, record, longest: (
        max(len(nodes.ids), longest, len(record) // 5) <= verification.MAX_NODES
        and nodes.ids.stride(0) == 1
    )
)
def record_walk(
    verified: Arrays,
    walked: Walked,
    nodes: tree.Nodes,
    counts: tuple[Tensor, Tensor, Tensor, Tensor],
    root: Tensor,
    record: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    rows = verification.Verified(*verified[:5], nodes.ids)
    numbers = counts[0], nodes.live, counts[1], counts[2], counts[3]
    return verification.record_walk(rows, walked, numbers, record, root[:1], longest)


@taken_where(lambda slab, *_: slab.stride(4) == 1)
def compact_kv(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    kv_compaction.compact_kv(slab, path, count, prefix)


def pack_mask(
    mask: Tensor, groups: int, dtype: torch.dtype, prefix: int, causal: bool = False
) -> Words:
    rows, slots = mask.shape
    behind = slots - prefix
    bits = pad(mask[:, prefix:], (0, max(WORD_BITS, -(-behind // WORD_BITS) * WORD_BITS) - behind))
    # bits are distinct, so the sum is their union
    words = (
        bits.view(rows, -1, WORD_BITS).long()
        << torch.arange(WORD_BITS, device=mask.device, dtype=torch.int64)
    ).sum(-1)
    return Words(words[None], _counts(mask.device, prefix, rows, behind), mask, causal)


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Words | Tensor | None, scale: float
) -> Tensor:
    if isinstance(mask, Tensor) or not _takes("cached_attention", query, key, value, scale):
        dense = mask
        if isinstance(mask, Words):
            dense = cast(Tensor, mask.mask).repeat(query.shape[0] // key.shape[0], 1)
        return by_meaning(attention.tree_attention, query, key, value, dense, scale)
    visible = _all_seen(query.shape[1], key.shape[1], query.device) if mask is None else mask
    return _attended(query, key, value, visible, scale)


@taken_where(
    lambda query, key, value, words, prefix, live, seen, scale: _takes(
        "cached_attention", query, key, value, scale
    )
)
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
    return _attended(query, key, value, Words(words[None], (prefix, live, seen)), scale)


def _attended(query: Tensor, key: Tensor, value: Tensor, visible: Words, scale: float) -> Tensor:
    return attention_kernel.tree_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        visible.words,
        *visible.lengths,
        scale=scale,
        causal=visible.causal,
        upcast=INTERPRETED,
    )[0].transpose(0, 1)


@taken_where(
    lambda query, slabs, words, prefix, live, nodes, scale: _takes(
        "cached_attention", query, longest(slabs.each)[0], longest(slabs.each)[1], scale
    )
)
def lanes_attention(
    query: Tensor,
    slabs: Slabs,
    words: Tensor,
    prefix: Tensor,
    live: Tensor,
    nodes: Tensor,
    scale: float,
) -> Tensor:
    texts = len(slabs.each)
    keys, values = (cache[None].expand(texts, -1, -1, -1) for cache in longest(slabs.each))
    return (
        attention_kernel.tree_attention(
            query.transpose(0, 1).unflatten(0, (texts, -1)),
            keys,
            values,
            words,
            prefix,
            live,
            nodes,
            table=slabs.table,
            scale=scale,
            upcast=INTERPRETED,
        )
        .flatten(0, 1)
        .transpose(0, 1)
    )


@taken_where(
    lambda query, key, value, paths, prefix, live, scale: _takes(
        "strict_cached_attention", query, key, value, scale
    )
)
def strict_cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Paths,
    prefix: Tensor,
    live: Tensor,
    scale: float,
) -> Tensor:
    return strict_kernel.strict_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        paths.nodes.contiguous()[None],
        paths.counts[None],
        prefix,
        live,
        scale=scale,
        upcast=INTERPRETED,
    )[0].transpose(0, 1)


def _takes(name: str, query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Return True for heads that the kernel of this op serves on this card."""
    if not (
        query.dtype in FLOATS
        and query.shape[2] <= LARGEST_HEAD
        and scale > 0
        and query.stride(2) == key.stride(2) == value.stride(2) == 1
    ):
        return False
    heads = _trial.Heads(query.shape[2], query.shape[0] // key.shape[0], query.dtype)
    return not is_tried(query.device) or _serves(name, heads, query.device)


@cache
def _serves(name: str, heads: _trial.Heads, device: torch.device) -> bool:
    """Try such heads with all tiles when they are first met, which is while their model is loaded; warn of a fault.

    The trial of the op itself knows no model: another head size is another program, and may not fit into the card.
    """
    refuse_in_captures(name, "triton")
    run = {name: inspect.unwrap(globals()[name])}  # which asks for no trial
    inputs = _trial.OF_HEADS[name](heads, device)
    if torch.cuda.is_initialized():
        _trial.side_by_side([((name,), run, arguments) for arguments in inputs], device)
    if fault := _trial.differs((name,), run, device, inputs):
        warn_of_fault(f"{name} of {heads} on {device}", f"triton is wrong there: {fault}")
    return not fault


def rope_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    turn: Rotation,
    slab: Tensor | Slabs,
    slot: Tensor,
    live: Tensor,
) -> Tensor:
    weights = [weight for weight in (turn.q_norm, turn.k_norm) if weight is not None]
    cache = longest(slab.each) if isinstance(slab, Slabs) else slab
    dense = query.stride(2) == key.stride(2) == value.stride(2) == cache.stride(3) == 1
    if not dense or any(weight.stride(0) != 1 for weight in weights):
        return by_meaning(
            attention.rope_store, query, key, value, positions, turn, slab, slot, live
        )
    rows = (states.transpose(0, 1) for states in (query, key, value))
    cosines, sines, *norms, eps, stepwise = turn
    return rope_kernel.rope_store(
        *rows,
        positions,
        cosines,
        sines,
        cache[0],
        cache[1],
        slot,
        live,
        *norms,
        eps,
        stepwise=stepwise,
        table=slab.table if isinstance(slab, Slabs) else None,
    ).transpose(0, 1)


@taken_where(
    lambda states, residual, weight, eps: (
        len(states) > 0
        and states.shape[1] <= norm_kernel.LARGEST_ROW
        and _is_dense(states, residual, weight)
    )
)
def add_rms_norm(
    states: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return norm_kernel.add_rms_norm(states, residual, weight, eps)


@taken_where(lambda states, *_: len(states) and _is_dense(states))
def packed_linear(states: Tensor, weight: networks.QuantizedWeight, bias: Tensor | None) -> Tensor:
    return linear_kernel.packed_linear(
        states, linear_kernel.Weight(*weight), bias, upcast=INTERPRETED
    )


@taken_where(lambda gate, up: len(gate) and _is_dense(gate, up))
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return silu_kernel.silu_mul(gate, up)


@taken_where(
    lambda states, sources, table, tokens, weights, eps: (
        len(sources) > 0
        and states.shape[1] == table.shape[1] <= norm_kernel.LARGEST_ROW
        and _is_dense(states, sources, table, tokens, *weights)
    )
)
def gather_norms(
    states: Tensor,
    sources: Tensor,
    table: Tensor,
    tokens: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    return norm_kernel.gather_norms(states, sources, table, tokens, weights, eps)


@taken_where(
    lambda states, sources, table, tokens: (
        len(sources) > 0
        and states.shape[1] == table.shape[1]
        and _is_dense(states, sources, table, tokens)
    )
)
def gather_rows(
    states: Tensor, sources: Tensor, table: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    shape = len(sources), states.shape[1]
    of_states, of_table = states.new_empty(shape), table.new_empty(shape)
    frontier.gather_rows(states, sources, table, tokens, of_states, of_table)
    return of_states, of_table


def tree_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, activate: bool
) -> Tensor:
    return recurrence_kernel.tree_convolution(_dense(inputs), weight, bias, sources, silu=activate)


@taken_where(
    lambda heads, scalars, state, *_: (
        state.shape[1] <= LARGEST_HEAD and len(heads[0]) * state.numel() < 2**31
    )
)
def tree_recurrence(
    heads: tuple[Tensor, Tensor, Tensor],
    scalars: tuple[Tensor, Tensor],
    state: Tensor,
    lineage: networks.Lineage,
    steps: networks.Steps,
    delta: bool,
) -> Tensor:
    tree = None
    if lineage.parents is not None and lineage.branches is not None:
        scratch = state.new_empty(len(heads[0]), *state.shape)
        tree = lineage.parents, lineage.branches, scratch, *steps
    contiguous = [tensor.contiguous() for tensor in (*heads, *scalars)]
    return recurrence_kernel.tree_recurrence(*contiguous, state, tree, delta=delta)


@taken_where(lambda states, *_: states.shape[2] <= LARGEST_HEAD)
def advance_states(states: Tensor, steps: networks.Steps, path: Tensor, count: Tensor) -> None:
    recurrence_kernel.advance_states(states, *steps, path, count)


@lru_cache(maxsize=8)  # all layers of a forward ask for the same
def _all_seen(rows: int, slots: int, device: torch.device) -> Words:
    return Words(
        torch.zeros(1, rows, 1, dtype=torch.int64, device=device),
        _counts(device, slots, rows, 0),
        torch.ones(rows, slots, dtype=torch.bool, device=device),
    )


def _counts(device: torch.device, *counts: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(counts, dtype=torch.int32, device=device).split(1)


def implementations() -> dict[str, Callable[..., Any]]:
    """Return the functions above, each named as its op."""
    return {
        name: _on_its_device(value)
        for name, value in globals().items()
        if inspect.isfunction(value)
        and value.__module__ == __name__
        and name[0] != "_"
        and name != "implementations"
    }


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run on the device of the tensors; Triton by itself takes the current device."""

    @wraps(function)
    def run(*given: Any) -> Any:
        first = given[0][0] if isinstance(given[0], tuple) else given[0]
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return function(*given)
        with torch.cuda.device(first.device):
            return function(*given)

    return run

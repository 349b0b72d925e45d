"""The ops of ops/resident.py by the kernels of kernels/, where they take them.

Importing this raises ImportError where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from specengine_kernels import best_first, candidate_selection, frontier, kv_compaction, verification
from torch import Tensor

from specengine import reference_resident as reference
from specengine.reference_resident import Drawn, Found, Frontier, Queues, Selection, Walked

MOST_CANDIDATES = 4096  # of one selection by the kernels; they rank by counting


def select_candidates(logits: Tensor, scores: Tensor, most: int, limit: Tensor, log_gate: Tensor) -> Selection:
    if most > MOST_CANDIDATES or logits.stride(1) != 1 or not candidate_selection.fits(*logits.shape):
        return reference.select_candidates(logits, scores, most, limit, log_gate)
    given = {"budget": limit.clamp(0, most), "log_gate": log_gate}
    return Selection(*candidate_selection.select_candidates(logits, scores.contiguous(), most, **given)[:5])


def step_queues(
    queues: Queues,
    found: Selection,
    frontier: Frontier,
    ids: Tensor | None,
    level: Tensor,
    batch: int,
    max_depth: int,
    threshold: float,
) -> Drawn:
    if queues.scores.shape[0] > best_first.MOST_BUDGET:
        return reference.step_queues(queues, found, frontier, ids, level, batch, max_depth, threshold)
    given = best_first.Queues(*queues), best_first.Candidates(*found), frontier.nodes, frontier.depths, frontier.live
    options = {"batch": batch, "max_depth": max_depth, "threshold": threshold, "target_ids": ids}
    return _drawn(best_first.step_queues(*given, level, **options))


def fill_queues(queues: Queues) -> Drawn:
    if queues.scores.shape[0] > best_first.MOST_BUDGET:
        return reference.fill_queues(queues)
    return _drawn(best_first.fill_queues(best_first.Queues(*queues)))


def _drawn(given: best_first.Drawn) -> Drawn:
    return Drawn(given.parents, given.tokens, given.log_probs, given.count, Found(given.expand, given.expanded))


def hang_nodes(
    tree: tuple[Tensor, ...],
    size: Tensor,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    count: Tensor,
    expand: Found,
) -> Frontier:
    if parents.shape[0] > frontier.MOST_APPENDED:
        return reference.hang_nodes(tree, size, parents, tokens, log_probs, count, expand)
    drafted = frontier.frontier_for(expand.indices.shape[0], size.device)
    refused = torch.zeros_like(size)
    given = parents.contiguous(), tokens.contiguous(), log_probs.contiguous(), count
    wanted = {"expand": expand.indices, "expanded": torch.minimum(expand.live, count)}
    frontier.append_nodes(frontier.Tree(*tree, size), *given, drafted, refused, **wanted)
    return Frontier(*drafted)


def choose_rows(logits: Tensor, positions: Tensor, seed: Tensor | None, temperature: Tensor) -> Tensor:
    if logits.stride(1) != 1:
        return reference.choose_rows(logits, positions, seed, temperature)
    if seed is None:
        return verification.choose_tokens(logits)
    return verification.choose_tokens(logits, positions, seed, temperature)


def walk_down(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    if tokens.shape[0] > verification.MOST_NODES:
        return reference.walk_down(tokens, parents, chosen, size)
    path, count, bonus = torch.zeros_like(tokens), torch.empty_like(size), torch.empty_like(tokens[:1])
    given = tokens.contiguous(), parents.contiguous(), chosen.contiguous()
    verification.walk(*given, size, path, count, bonus)
    return Walked(path, count, bonus)


def move_rows(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    if slab.stride(4) != 1:
        return reference.move_rows(slab, path, count, prefix)
    return kv_compaction.compact_kv(slab, path, count, prefix)


def gather_rows(states: Tensor, sources: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    dense = states.stride(1) == table.stride(1) == sources.stride(0) == tokens.stride(0) == 1
    if not dense or states.shape[1] != table.shape[1] or not len(sources):
        return reference.gather_rows(states, sources, table, tokens)
    shape = len(sources), states.shape[1]
    out = states.new_empty(shape), table.new_empty(shape)
    frontier.gather_rows(states, sources, table, tokens, *out)
    return out


def implementations() -> dict[str, Callable[..., Any]]:
    """What `ops` finds here."""
    return {
        "select_candidates": select_candidates,
        "step_queues": step_queues,
        "fill_queues": fill_queues,
        "gather_rows": gather_rows,
        "hang_nodes": hang_nodes,
        "choose_rows": choose_rows,
        "walk_down": walk_down,
        "move_rows": move_rows,
    }

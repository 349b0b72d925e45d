"""Ops of a cycle that stays on the device: fixed shapes, counts in device memory, nothing that the host reads.

All can be captured in a graph. What stands behind a count is padding; sizes and counts are int32 [1] on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._backends import FLOATS, describe, implementation
from specengine.reference_resident import Drawn, Found, Frontier, Queues, Selection, Walked


def select_nodes(scores: Tensor, size: Tensor, most: int, limit: Tensor | None = None) -> Found:
    """As `select_best` of the first `size` scores: ascending indices of the best `most`, or of the best `limit` (int32
    [1]) where that is less; -inf is never selected.

    scores: float32 [m] without NaN; the indices are padded with 0.
    """
    numbers = (size,) if limit is None else (size, limit)
    if scores.dtype is not torch.float32 or scores.dim() != 1 or not _are_numbers(*numbers) or most < 1:
        raise InputError(f"scores, size, limit: float32 [m], int32 [1] are needed, got {describe(scores, *numbers)}")
    return implementation("select_nodes", scores.device.type)(scores, size, most, limit)


def select_candidates(logits: Tensor, scores: Tensor, most: int, limit: Tensor, log_gate: Tensor) -> Selection:
    """As `best_candidates`, of up to `limit` (at most `most`) continuations, with a gate that the device knows.

    logits: float32, bfloat16 or float16 [rows, V]; scores: float32 [rows], -inf for padding; limit: int32 [1], nothing
    passes where it is 0 or less; log_gate: float32 [1], -inf for none.
    """
    if logits.dtype not in FLOATS or logits.dim() != 2 or scores.shape != logits.shape[:1] or most < 1:
        raise InputError(f"logits, scores: floating [rows, V], [rows] are needed, got {describe(logits, scores)}")
    if not _are_numbers(limit) or not log_gate.dtype is scores.dtype is torch.float32 or log_gate.shape != (1,):
        raise InputError(f"limit, log_gate: int32 [1], float32 [1] are needed, got {describe(limit, log_gate)}")
    return implementation("select_candidates", logits.device.type)(logits, scores, most, limit, log_gate)


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
    """As `BestFirst.push` of what was found under the frontier, then as `BestFirst.pop`; changes `queues`.

    At `level`, int32 [1], 1 the queues begin anew. Where the frontier is empty nothing changes and nothing is drawn;
    where the mass is below `threshold` nothing is to be drafted from. found: scores descend and are not NaN; ids:
    int64 [draft vocabulary], the tokens of its columns, or None where they are the columns.
    """
    budget, count = queues.scores.shape[0], found.scores.shape
    if any(part.shape != count for part in found[:4]) or found.scores.dtype is not torch.float32 or len(count) != 1:
        raise InputError(f"found: int64 [m] x 2, float32 [m] x 2 are needed, got {describe(*found[:4])}")
    if any(part.shape != (budget,) for part in queues) or not _are_numbers(found.live, frontier.live, level):
        given = describe(*queues, found.live, frontier.live, level)
        raise InputError(f"queues, live, level: [budget] x 6, int32 [1] x 3 are needed, got {given}")
    if batch < 1 or max_depth < 1:
        raise InputError(f"batch, max_depth: 1 or more are needed, got {batch}, {max_depth}")
    run = implementation("step_queues", level.device.type)
    return run(queues, found, frontier, ids, level, batch, max_depth, threshold)


def fill_queues(queues: Queues) -> Drawn:
    """As `BestFirst.fill`, for the last time."""
    return implementation("fill_queues", queues.scores.device.type)(queues)


def hang_nodes(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    size: Tensor,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    count: Tensor,
    expand: Found,
) -> Frontier:
    """As `append_nodes`, of the first `count` entries, at `size`, which grows; and those of them to draft from.

    tree: as in `append_nodes`; parents, tokens: int64 [m]; log_probs: float32 [m]; expand: indices into the entries.
    Where the capacity would be exceeded nothing is appended and the frontier is empty.
    """
    if not parents.shape == tokens.shape == log_probs.shape or parents.dim() != 1 or not _are_numbers(size, count):
        given = describe(parents, tokens, log_probs, size, count)
        raise InputError(f"parents, tokens, log_probs, size, count: [m] x 3, int32 [1] x 2 are needed, got {given}")
    run = implementation("hang_nodes", size.device.type)
    return run(tree, size, parents, tokens, log_probs, count, expand)


def gather_rows(states: Tensor, sources: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows of a draft pass read: the states at `sources`, the embeddings of `tokens`.

    states: [rows, H]; table: [vocabulary, E]; sources, tokens: int64 [n]. Returns [n, H] and [n, E].
    """
    if not sources.dtype is tokens.dtype is torch.int64 or sources.shape != tokens.shape or sources.dim() != 1:
        raise InputError(f"sources, tokens: int64 [n] x 2 are needed, got {describe(sources, tokens)}")
    return implementation("gather_rows", states.device.type)(states, sources, table, tokens)


def take_subtree(parents: Tensor, ancestors: Tensor, nodes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """As `subtree`, of the first `count` of `nodes`: parents, -1 in padding, and ancestor words, 0 in padding.

    parents: int64 [capacity]; ancestors: int64 [capacity, words]; nodes: int64 [m], closed under parent (unchecked).
    """
    if not parents.dtype is ancestors.dtype is nodes.dtype is torch.int64 or not _are_numbers(count):
        raise InputError(
            f"parents, ancestors, nodes: int64 is needed, got {describe(parents, ancestors, nodes, count)}"
        )
    return implementation("take_subtree", nodes.device.type)(parents, ancestors, nodes, count)


def choose_rows(logits: Tensor, positions: Tensor, seed: Tensor | None, temperature: Tensor) -> Tensor:
    """As `choose_tokens`, with what it draws by on the device.

    logits: floating [n, V]; positions: int64 [n]; seed: int64 [1], 64 bits, or None for the argmax; temperature:
    float32 [1].
    """
    if logits.dtype not in FLOATS or logits.dim() != 2 or positions.shape != logits.shape[:1]:
        raise InputError(f"logits, positions: floating [n, V], int64 [n] are needed, got {describe(logits, positions)}")
    if temperature.dtype is not torch.float32 or (seed is not None and seed.dtype is not torch.int64):
        raise InputError(f"seed, temperature: int64 [1], float32 [1] are needed, got {describe(temperature)}")
    return implementation("choose_rows", logits.device.type)(logits, positions, seed, temperature)


def walk_down(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    """As `walk`, of the first `size` nodes, with the bonus token; a node without a choice (-1) is not entered.

    tokens, parents, chosen: int64 [n]; siblings carry distinct tokens.
    """
    if not tokens.shape == parents.shape == chosen.shape or tokens.dim() != 1 or not _are_numbers(size):
        given = describe(tokens, parents, chosen, size)
        raise InputError(f"tokens, parents, chosen, size: int64 [n] x 3, int32 [1] are needed, got {given}")
    return implementation("walk_down", tokens.device.type)(tokens, parents, chosen, size)


def move_rows(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    """As `compact_kv`, of the first `count` entries of `path`, int64 [n]; `n` slots behind the prefix must exist."""
    if slab.dim() != 5 or path.dtype is not torch.int64 or path.dim() != 1 or not _are_numbers(count, prefix):
        given = describe(slab, path, count, prefix)
        raise InputError(f"slab, path, count, prefix: a cache, int64 [n], int32 [1] x 2 are needed, got {given}")
    implementation("move_rows", slab.device.type)(slab, path, count, prefix)


def _are_numbers(*tensors: Tensor) -> bool:
    return all(tensor.dtype is torch.int32 and tensor.shape == (1,) for tensor in tensors)

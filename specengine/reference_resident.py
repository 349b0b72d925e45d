"""What the ops of ops/resident.py mean, in plain torch: static shapes, counts in device memory, no read by the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specengine import reference
from specengine.reference import WORD_BITS, own_bits


class Found(NamedTuple):
    """Indices, padded: int64 [most]; how many: int32 [1]."""

    indices: Tensor
    live: Tensor


class Selection(NamedTuple):
    """As Candidates, padded. rows, columns: int64 [most]; log_probs, scores: float32 [most]; live: int32 [1]."""

    rows: Tensor
    columns: Tensor
    log_probs: Tensor
    scores: Tensor
    live: Tensor


class Frontier(NamedTuple):
    """Nodes to draft from, padded with the root. nodes, depths: int64 [width]; scores: float32 [width], of the paths,
    -inf for padding; live: int32 [1]."""

    nodes: Tensor
    depths: Tensor
    scores: Tensor
    live: Tensor


class Walked(NamedTuple):
    """A path down a tree. nodes: int64 [n], padded; live: int32 [1]; bonus: int64 [1]; 0 and -1 where the root has no
    choice."""

    nodes: Tensor
    live: Tensor
    bonus: Tensor


class Queues(NamedTuple):
    """The queues of ops.BestFirst, best first, behind their ends -inf. accepted, scores, log_probs: float32 [budget],
    of G and of Q; parents, depths, tokens: int64 [budget]."""

    accepted: Tensor
    scores: Tensor
    log_probs: Tensor
    parents: Tensor
    depths: Tensor
    tokens: Tensor

    @classmethod
    def start(cls, budget: int, device: torch.device | str) -> Queues:
        """With the root in G."""
        accepted, scores, log_probs = torch.full((3, budget), -math.inf, device=device)
        accepted[:1].zero_()
        parents, depths, tokens = torch.zeros(3, budget, dtype=torch.int64, device=device)
        return cls(accepted, scores, log_probs, parents, depths, tokens)


class Drawn(NamedTuple):
    """What comes out of the queues, best first. parents, tokens: int64 [budget]; log_probs: float32 [budget]; live:
    int32 [1]; expand: those of them to draft from."""

    parents: Tensor
    tokens: Tensor
    log_probs: Tensor
    live: Tensor
    expand: Found


def select_nodes(scores: Tensor, size: Tensor, most: int, limit: Tensor | None) -> Found:
    live = torch.arange(scores.shape[0], device=scores.device) < size
    values = scores.masked_fill(~live, -math.inf)
    best = reference.order_keys(values).topk(min(most, scores.shape[0])).indices
    count = (values[best] > -math.inf).sum(0, keepdim=True)
    if limit is not None:
        count = torch.minimum(count, limit.clamp(min=0))
    padding = torch.arange(best.shape[0], device=scores.device) >= count
    indices = best.masked_fill(padding, scores.shape[0]).sort().values.masked_fill(padding, 0)
    return Found(_padded(indices, most), count.int())


def select_candidates(logits: Tensor, scores: Tensor, most: int, limit: Tensor, log_gate: Tensor) -> Selection:
    log_probs, best = reference.top_children(logits, min(most, logits.shape[1]), False)
    paths = reference.defined(scores)[:, None] + log_probs
    found = paths.reshape(-1)
    passes = (found > -math.inf) & (found >= found.max() + log_gate)
    order = reference.order_keys(found.masked_fill(~passes, -math.inf)).topk(min(most, found.shape[0])).indices
    count = torch.minimum(passes.sum(0, keepdim=True), limit).clamp(min=0, max=most).int()
    chosen = order // best.shape[1], best.reshape(-1)[order], log_probs.reshape(-1)[order], found[order]
    rows, columns, edges, sums = (_padded(part, most) for part in chosen)
    return Selection(rows, columns, edges, sums, count)


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
    going, begins = frontier.live > 0, level == 1
    fresh = Queues.start(queues.scores.shape[0], level.device)
    known = (torch.where(begins, new, old) for new, old in zip(fresh, queues, strict=True))
    after, drawn = _pop(_push(Queues(*known), found, frontier, ids), batch, max_depth, threshold, going)
    for into, values in zip(queues, after, strict=True):
        into.copy_(torch.where(going, values, into))
    return drawn


def fill_queues(queues: Queues) -> Drawn:
    place = torch.arange(queues.scores.shape[0], device=queues.scores.device)
    room = len(place) - (queues.accepted > -math.inf).sum(0, keepdim=True)
    nodes = ((queues.scores > -math.inf) & (place < room)).sum(0, keepdim=True).int()
    nothing = Found(place[:1], torch.zeros_like(nodes))
    return Drawn(queues.parents, queues.tokens, queues.log_probs, nodes, nothing)


def _push(queues: Queues, found: Selection, frontier: Frontier, ids: Tensor | None) -> Queues:
    padding = torch.arange(found.scores.shape[0], device=found.scores.device) >= found.live
    parents, depths = (part.index_select(0, found.rows) for part in (frontier.nodes, frontier.depths))
    tokens = found.columns if ids is None else ids.index_select(0, found.columns)
    given = (found.scores.masked_fill(padding, -math.inf), found.log_probs, parents, depths + 1, tokens)
    # of equal scores those that were there rank first
    best = reference.order_keys(torch.cat([queues.scores, given[0]])).topk(queues.scores.shape[0]).indices
    return Queues(queues.accepted, *(torch.cat(pair)[best] for pair in zip(queues[1:], given, strict=True)))


def _pop(queues: Queues, batch: int, max_depth: int, threshold: float, going: Tensor) -> tuple[Queues, Drawn]:
    budget, place = queues.scores.shape[0], torch.arange(queues.scores.shape[0], device=going.device)
    there = queues.scores > -math.inf
    inner = there & (queues.depths < max_depth)
    taken = there & (inner.cumsum(0) - inner.long() < batch) & going
    after, nodes = _accept(queues, taken)
    worst = after.accepted[-1:]  # -inf where G is not full
    drafted = (place < nodes) & (queues.scores > worst) & inner
    mass = (queues.scores.double().exp() * drafted).sum(0, keepdim=True)
    drafted &= mass >= threshold
    count = drafted.sum(0, keepdim=True).int()
    expand = place.masked_fill(~drafted, budget).sort().values.masked_fill(place >= count, 0)[:batch]
    return after, Drawn(queues.parents, queues.tokens, queues.log_probs, nodes.int(), Found(expand, count))


def _accept(queues: Queues, taken: Tensor) -> tuple[Queues, Tensor]:
    """The first entries of Q, those that are `taken`, into G; and how many of them G keeps, int64 [1]."""
    budget, place = queues.scores.shape[0], torch.arange(taken.shape[0], device=taken.device)
    ranked = torch.cat([queues.accepted, queues.scores.masked_fill(~taken, -math.inf)])
    best = reference.order_keys(ranked).topk(budget).indices
    kept = ((best >= budget) & (ranked[best] > -math.inf)).sum(0, keepdim=True)
    count = taken.sum(0, keepdim=True)
    source = (place + count).clamp(max=budget - 1)
    scores, log_probs, *rest = (values[source] for values in queues[1:])
    scores = scores.masked_fill(place + count >= budget, -math.inf)
    return Queues(ranked[best], scores, log_probs, *rest), kept


def hang_nodes(
    tree: tuple[Tensor, ...],
    size: Tensor,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    count: Tensor,
    expand: Found,
) -> Frontier:
    all_tokens, all_parents, depths, edges, paths, ancestors = tree
    capacity = all_tokens.shape[0]
    start, found = size.long(), count.long() * (size + count <= capacity)
    node = torch.arange(capacity, device=size.device)
    new = (node >= start) & (node < start + found)
    entry = (node - start).clamp(0, parents.shape[0] - 1)
    above = parents[entry].clamp(0, capacity - 1)
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
    width = expand.indices.shape[0]
    chosen = (expand.live.long() * (found > 0)).clamp(max=width)
    padding = torch.arange(width, device=size.device) >= chosen
    nodes = (start + expand.indices).masked_fill(padding, 0)
    size.add_(found)
    scores = paths[nodes].masked_fill(padding, -math.inf)
    return Frontier(nodes, depths[nodes].masked_fill(padding, 0), scores, chosen.int())


def take_subtree(parents: Tensor, ancestors: Tensor, nodes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    rows, device = nodes.shape[0], nodes.device
    place = torch.arange(rows, device=device)
    live = place < count
    spare = torch.full((parents.shape[0] + 1,), -1, dtype=torch.int64, device=device)
    # padding writes to the spare entry, which also stands for the root's parent
    renumbered = spare.index_copy(0, nodes.masked_fill(~live, parents.shape[0]), place.masked_fill(~live, -1))
    new_parents = renumbered[parents[nodes]].masked_fill(~live, -1)
    bits = (ancestors[nodes][:, nodes // WORD_BITS] >> (nodes % WORD_BITS)) & 1
    bits = bits * (live[:, None] & live)
    words = -(-rows // WORD_BITS)
    padded = torch.nn.functional.pad(bits, (0, words * WORD_BITS - rows)).view(rows, words, WORD_BITS)
    return new_parents, (padded << torch.arange(WORD_BITS, device=device)).sum(-1)  # distinct bits: the sum is a union


def choose_rows(logits: Tensor, positions: Tensor, seed: Tensor | None, temperature: Tensor) -> Tensor:
    if seed is None:
        return reference.choose_tokens(logits, (), None, 1.0)
    finite = torch.isfinite(logits)
    scores = reference.defined(logits.masked_fill(~finite, -math.inf).float() / temperature).double()
    best = (scores - torch.log(-torch.log(_uniform(seed, positions, logits.shape[1])))).argmax(1)
    return best.masked_fill(~finite.any(1), -1)


def _uniform(seed: Tensor, positions: Tensor, columns: int) -> Tensor:
    """reference.philox_uniform for many positions, all on the device: float64 [n, columns]."""
    low, position = 0xFFFFFFFF, positions[:, None]
    index = torch.arange(-(-columns // 4), device=positions.device)
    counter = (index, position & low, (position >> 32) & low, torch.zeros_like(position))
    words = reference.philox4x32(counter, (seed & low, (seed >> 32) & low))
    x = torch.stack(torch.broadcast_tensors(*words), -1).reshape(positions.shape[0], -1)[:, :columns]
    return (x.double() + 0.5) / 2.0**32


def walk_down(tokens: Tensor, parents: Tensor, chosen: Tensor, size: Tensor) -> Walked:
    # A node is on the path if it and all above it were chosen: by pointer doubling. Siblings carry distinct tokens,
    # so there is one path, and its nodes ascend.
    n, node = tokens.shape[0], torch.arange(tokens.shape[0], device=tokens.device)
    above = parents.clamp(min=0)
    agreed = ((tokens == chosen[above]) | (node == 0)) & (chosen >= 0) & (node < size)
    jump = above
    for _ in range((n - 1).bit_length()):
        agreed, jump = agreed & agreed[jump], jump[jump]
    count = agreed.sum(0, keepdim=True)
    path = node.masked_fill(~agreed, n).sort().values
    last = path[(count - 1).clamp(min=0)].clamp(max=n - 1)
    bonus = chosen[last].masked_fill(count == 0, -1)
    return Walked(path.masked_fill(node >= count, 0), count.int(), bonus)


def move_rows(slab: Tensor, path: Tensor, count: Tensor, prefix: Tensor) -> None:
    place = torch.arange(path.shape[0], device=slab.device)
    slots = prefix.long() + place
    moved = slab.index_select(3, torch.where(place < count, prefix.long() + path, slots))
    slab.index_copy_(3, slots, moved)


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - values.shape[0]))


def gather_rows(states: Tensor, sources: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return states.index_select(0, sources), table.index_select(0, tokens)

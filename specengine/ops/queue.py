"""The op of a best-first search: a bounded queue of scored nodes over one tree. Source: SALF Alg. 2."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specengine.ops._meanings import HAS_NAN, doubled, order_keys, refuse_unless, require
from specengine.ops._registry import kernels, native, op
from specengine.ops.select import Candidates
from specengine.ops.tree import Nodes, insist


class Queues(NamedTuple):
    """The queue Q of scored, not yet drawn nodes and the scores of the accepted set G, each the best `budget` of all.

    Ranked by (path log-probability descending, order of creation ascending), after their ends -inf. accepted, of G,
    scores, of Q: float32 [budget], paths; log_probs: float32 [budget], edges; parents, depths, tokens: int64 [budget];
    bound: float32 [1]: no candidate at or below it can come to anything, -inf while there is room.
    """

    accepted: Tensor
    scores: Tensor
    log_probs: Tensor
    parents: Tensor
    depths: Tensor
    tokens: Tensor
    bound: Tensor

    @classmethod
    def start(cls, budget: int, device: torch.device | str) -> Self:
        """Return queues that hold the root, in G."""
        accepted, scores, log_probs = torch.full(
            (3, budget), -math.inf, device=device, dtype=torch.float32
        )
        accepted[:1].zero_()
        parents, depths, tokens = torch.zeros(3, budget, dtype=torch.int64, device=device)
        return cls(accepted, scores, log_probs, parents, depths, tokens, _bound(accepted, scores))


class Search(NamedTuple):
    """batch: nodes drafted from at once; max_depth: of a node drafted; threshold: the least mass of a batch that is
    worth a pass; fill: whether the tree is filled up from the queue when the search stops."""

    batch: int
    max_depth: int
    threshold: float
    fill: bool


class Drawn(NamedTuple):
    """Nodes drawn from the queues, best first. parents, tokens: int64 [budget]; log_probs: float32 [budget], of the
    edge; live: int32 [1]; expand: those of them to draft from, indices."""

    parents: Tensor
    tokens: Tensor
    log_probs: Tensor
    live: Tensor
    expand: Nodes


@op
def step_queues(
    queues: Queues,
    found: Candidates,
    frontier: Nodes,
    depths: Tensor,
    token_ids: Tensor | None,
    passes: Tensor,
    search: Search,
) -> Drawn:
    """Push candidates under the frontier into Q, and draw a batch from it; changes `queues`.

    The best `batch` of Q above the greatest depth move into G, and all that rank before the last of them; those that G
    keeps become nodes. Drafted from are those of them above the worst of a full G and above the greatest depth, if the
    sum of their path probabilities is `threshold` or more. Where none is, the search is over, and with `fill` the best
    of Q become nodes while G has room.

    found: best first; -inf is passed over; rows: places in the frontier; token_ids: int64 [draft vocabulary], the
    tokens of its columns, or None where they are the columns; depths: int64, of the tree's nodes; passes: int32 [1]; at
    1 the queues begin anew. Where the frontier is empty nothing changes and nothing is drawn. InputError on NaN scores
    (on a CUDA device an asynchronous assertion, or by the kernel they are passed over as -inf is).
    """
    if run := native.step_queues[passes.device]:
        parents, tokens, log_probs, drawn_live, expand = run(
            queues, found, frontier, depths, token_ids, passes, search
        )
        return Drawn(parents, tokens, log_probs, drawn_live, Nodes(*expand))
    require(
        "rows: int64 [m]; columns: int64 [m]; log_probs: float32 [m]; scores: float32 [m]; live: int32 [1]; "
        "frontier: int64 [width]; live: int32 [1]; depths: int64 [n]; token_ids: int64 [V]; passes: int32 [1]; "
        "accepted: float32 [b]; scores: float32 [b]; log_probs: float32 [b]; parents: int64 [b]; "
        "depths: int64 [b]; tokens: int64 [b]; bound: float32 [1]",
        *found,
        *frontier,
        depths,
        token_ids,
        passes,
        *queues,
    )
    refuse_unless(search.batch >= 1, "batch", "1 or more", search.batch)
    refuse_unless(search.max_depth >= 1, "max_depth", "1 or more", search.max_depth)
    if run := kernels.step_queues[passes.device]:
        return run(queues, found, frontier, depths, token_ids, passes, search)
    going, begins = frontier.live > 0, passes == 1
    fresh = Queues.start(queues.scores.shape[0], passes.device)
    queues_before = Queues(
        *(torch.where(begins, new, old) for new, old in zip(fresh, queues, strict=True))
    )
    after, drawn = _draw(
        _push(queues_before, found, frontier.ids, depths, token_ids), search, going
    )
    for into, values in zip(queues, after, strict=True):
        into.copy_(torch.where(going, values, into))
    return drawn


def _push(
    queues: Queues, candidates: Candidates, nodes: Tensor, depths: Tensor, token_ids: Tensor | None
) -> Queues:
    scores = candidates.scores.masked_fill(
        Nodes(candidates.rows, candidates.live).padding(), -math.inf
    )
    insist(~scores.isnan().any(), HAS_NAN)
    parents = nodes.index_select(0, candidates.rows)
    tokens = (
        candidates.columns if token_ids is None else token_ids.index_select(0, candidates.columns)
    )
    pushed = scores, candidates.log_probs, parents, depths.index_select(0, parents) + 1, tokens
    # of equal scores those that were there rank first
    best = order_keys(torch.cat([queues.scores, scores])).topk(queues.scores.shape[0]).indices
    scores, log_probs, parents, depths, tokens = (
        torch.cat(pair)[best] for pair in zip(queues[1:6], pushed, strict=True)
    )
    return Queues(queues.accepted, scores, log_probs, parents, depths, tokens, queues.bound)


def _draw(queues: Queues, search: Search, going: Tensor) -> tuple[Queues, Drawn]:
    budget, place = (
        queues.scores.shape[0],
        torch.arange(queues.scores.shape[0], device=going.device, dtype=torch.int64),
    )
    there = queues.scores > -math.inf
    inner = there & (queues.depths < search.max_depth)
    taken = there & (inner.cumsum(0) - inner.long() < search.batch) & going
    count = taken.sum(0, keepdim=True)
    # the `taken` first entries of Q move to G, which keeps `nodes` of them
    ranked = torch.cat([queues.accepted, queues.scores.masked_fill(~taken, -math.inf)])
    best = order_keys(ranked).topk(budget).indices
    nodes = ((best >= budget) & (ranked[best] > -math.inf)).sum(0, keepdim=True)
    later = (place + count).clamp(max=budget - 1)
    scores, log_probs, *rest = (values[later] for values in queues[1:6])
    scores = scores.masked_fill(place + count >= budget, -math.inf)
    after = Queues(
        ranked[best], scores, log_probs, rest[0], rest[1], rest[2], _bound(ranked[best], scores)
    )
    # -inf where G is not full
    drafted = (place < nodes) & (queues.scores > after.accepted[-1:]) & inner
    drafted &= (doubled(queues.scores).exp() * drafted).sum(0, keepdim=True) >= search.threshold
    expanded = drafted.sum(0, keepdim=True).int()
    expand = (
        place.masked_fill(~drafted, budget)
        .sort()
        .values.masked_fill(place >= expanded, 0)[: search.batch]
    )
    room = budget - (after.accepted > -math.inf).sum(0, keepdim=True)
    waiting = (after.scores > -math.inf).sum(0, keepdim=True)
    filled = torch.minimum(room, waiting) * (going & (expanded == 0) & search.fill)
    # those drawn stood first in Q, those filled up after all that were taken
    source = torch.where(place < nodes, place, place - nodes + count).clamp(max=budget - 1)
    parents, tokens, log_probs = (
        part[source] for part in (queues.parents, queues.tokens, queues.log_probs)
    )
    return after, Drawn(parents, tokens, log_probs, (nodes + filled).int(), Nodes(expand, expanded))


def _bound(accepted: Tensor, scores: Tensor) -> Tensor:
    """Return the budget-th best of both together, float32 [1]; -inf while they hold fewer."""
    return torch.cat([accepted, scores]).topk(accepted.shape[0]).values[-1:]

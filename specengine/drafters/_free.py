"""Continuations without a draft pass, best first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from specengine.drafters import Free
from specengine.drafters._suffixes import Context


class Proposal(NamedTuple):
    """A continuation of a context, with its mark."""

    log_prob: float
    token: int
    mark: int


class Leaf(NamedTuple):
    """A node that continuations hang under: its path log-probability, and the tokens that it has children of."""

    node: int
    context: Context
    score: float
    taken: Collection[int] = ()


def best_first(
    leaves: Iterable[Leaf], first: int, most: int, least: float, propose: Callable[[Context], list[Proposal]]
) -> Free | None:
    """The `most` likeliest continuations below the leaves whose path log-probability is `least` or more.

    first: the id of the first of them; propose: the continuations of a context, the likeliest first. Of paths that are
    equally likely those of an earlier parent come first.
    """
    free, opened = Free([], [], [], [], []), list[tuple[Leaf, list[Proposal]]]()
    waiting: list[tuple[float, int, int]] = []  # the best sibling left of each parent: cost, place in `opened`, rank

    def open_below(leaf: Leaf) -> None:
        proposals = propose(leaf.context)
        if leaf.taken:
            proposals = [proposal for proposal in proposals if proposal.token not in leaf.taken]
        if proposals and (score := leaf.score + proposals[0].log_prob) >= least:
            heapq.heappush(waiting, (-score, len(opened), 0))
            opened.append((leaf, proposals))

    for leaf in leaves:
        open_below(leaf)
    while waiting and len(free.tokens) < most:
        cost, place, rank = heapq.heappop(waiting)
        parent, proposals = opened[place]
        log_prob, token, mark = proposals[rank]
        free.parents.append(parent.node)
        free.tokens.append(token)
        free.log_probs.append(log_prob)
        free.marks.append(mark)
        free.ranks.append(rank)
        rank += 1
        if rank < len(proposals) and (score := parent.score + proposals[rank].log_prob) >= least:
            heapq.heappush(waiting, (-score, place, rank))
        open_below(Leaf(first + len(free.tokens) - 1, (token, parent.context), -cost))
    return free if free.tokens else None

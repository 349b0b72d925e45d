"""Continuations without a draft pass, best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from sys import float_info

from specengine.drafters import Free
from specengine.drafters._suffixes import Context

# Plain tuples, as this runs on the host in every cycle.
Proposal = tuple[float, int, int]  # probability, token and mark
Leaf = tuple[int, Context, float, Collection[int]]  # node, its context, path log-probability, tokens of its children
Propose = Callable[[Context, float], list[Proposal]]


def best_first(leaves: list[Leaf], first: int, most: int, least: float, propose: Propose) -> Free | None:
    """The `most` likeliest continuations below the leaves whose path log-probability is `least` or more.

    first: the id of the first of them; propose: the continuations of a context that have this probability or more, the
    likeliest first. Of paths that are equally likely those of an earlier parent come first.
    """
    free, parents = Free([], [], [], [], []), list(leaves)
    # Cost (the path log-probability, negated), place of the parent, and rank, of each parent's best continuation left;
    # rank -1 of a parent whose continuations nobody has asked for yet: asking takes the time, and many are not needed.
    waiting = [(-leaf[2], place, -1) for place, leaf in enumerate(parents) if leaf[2] >= least]
    proposals: dict[int, list[Proposal]] = {}
    heapify(waiting)
    while waiting and len(free.tokens) < most:
        cost, place, rank = heappop(waiting)
        node, context, score, taken = parents[place]
        if rank < 0:
            found = propose(context, math.exp(least - score) or float_info.min)
            proposals[place] = found = [p for p in found if p[1] not in taken] if taken else found
        else:
            found = proposals[place]
            _, token, mark = found[rank]
            free.parents.append(node)
            free.tokens.append(token)
            free.log_probs.append(-cost - score)
            free.marks.append(mark)
            free.ranks.append(rank)
            heappush(waiting, (cost, len(parents), -1))
            parents.append((first + len(free.tokens) - 1, (token, context), -cost, ()))
        if rank + 1 < len(found):
            heappush(waiting, (-score - math.log(found[rank + 1][0]), place, rank + 1))
    return free if free.tokens else None

"""Ops of a search that weighs what nodes are worth against what they cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._registry import are_counts, attached, describe, op
from specengine.ops.select import padded
from specengine.ops.tree import Nodes

ODDS = 7.0  # the greatest log-odds that a table of chances tells apart, and the smallest, negative


class Prices(NamedTuple):
    """What a cycle costs, in expected tokens: float32 [nodes + 1], of verifying so many nodes, and [width + 1], of a
    draft pass from so many; widths: int64 [w], of passes that are thought of, ascending, the last one `width`."""

    verify: Tensor
    draft: Tensor
    widths: Tensor


@op
def chances(log_probs: Tensor, cells: Tensor, table: Tensor) -> Tensor:
    """Log-chances of acceptance by a table that was counted: float32 like `log_probs`.

    log_probs: float32 [n], stated by the draft; cells: int64 [n], rows of the table; table: float32 [cells, knots], the
    chance at log-odds from -ODDS to ODDS in equal steps, linear between. -inf, what was not proposed, stays.
    """
    if log_probs.dtype is not torch.float32 or cells.dtype is not torch.int64 or log_probs.shape != cells.shape:
        raise InputError(f"log_probs, cells: float32 [n], int64 [n] are needed, got {describe(log_probs, cells)}")
    if table.dtype is not torch.float32 or table.dim() != 2 or table.shape[1] < 2 or log_probs.dim() != 1:
        raise InputError(f"log_probs, table: float32 [n], [cells, knots] are needed, got {describe(log_probs, table)}")
    if run := attached("chances", log_probs):
        return run(log_probs, cells, table)
    knots = table.shape[1]
    at = knot_of(log_probs, knots)
    low = at.long().clamp(max=knots - 2)
    part = at - low
    rows = table.reshape(-1).index_select(0, cells * knots + low), table.reshape(-1)[cells * knots + low + 1]
    found = torch.lerp(rows[0], rows[1], part).log()
    return torch.where(log_probs > -math.inf, found, log_probs)


def knot_of(log_probs: Tensor, knots: int) -> Tensor:
    """Where on the knots of a table a probability stands: float32, 0 to knots - 1."""
    odds = log_probs - torch.log1p(-log_probs.exp())  # +inf of a certain one
    return (odds.clamp(-ODDS, ODDS) + ODDS) * ((knots - 1) / (2 * ODDS))


@op
def next_pass(
    paths: Tensor,
    depths: Tensor,
    waiting: Tensor,
    size: Tensor,
    profile: Tensor,
    prices: Prices,
    rounds: int,
) -> Nodes:
    """The nodes whose draft pass promises the most, none where no pass promises more than it costs: ids [width].

    paths: float32 [m], log-chances of the first `size` nodes, the root's is 0; depths: int64 [m]; waiting: bool [m],
    not yet drafted from; profile: float32 [levels, places], the chances of the children of a node at depth level
    (deeper ones as the last), best first.
    A tree is worth the best, over n, of the summed chances of its n likeliest nodes less the price of verifying them.
    For each of prices.widths, `rounds` passes from that many of the likeliest waiting nodes (ties: the first) are played
    through, with children as the profile has them; a width is worth its tree's best after any of these passes, less
    their prices. Of the widths within WORTH of the best the narrowest is taken, and its first pass returned.
    """
    require_search(paths, depths, waiting, size, profile, prices)
    if rounds < 1:
        raise InputError(f"rounds: got {rounds}, at least 1 is needed")
    if run := attached("next_pass", paths):
        return run(paths, depths, waiting, size, profile, prices, rounds)
    levels, most, widths = profile.shape[0], prices.draft.shape[0] - 1, prices.widths[:, None]
    place = torch.arange(paths.shape[0], device=paths.device)
    known = torch.where(place < size, paths.double().exp(), 0.0)
    played = _Played(
        known.expand(len(widths), -1),
        depths.clamp(0, levels - 1).expand(len(widths), -1),
        (waiting & (place < size)).expand(len(widths), -1),
        torch.zeros_like(widths, dtype=torch.float64),
    )
    ends, first = [], None
    for _ in range(rounds):
        order = _order(torch.where(played.waiting, played.chances, -1.0))[:, :most]
        drawn = played.waiting.gather(1, order) & (torch.arange(order.shape[1], device=paths.device) < widths)
        first = (order, drawn) if first is None else first
        played = played.after(order, drawn, profile.double(), prices.draft.double())
        ends.append(_value(played.chances, prices.verify) - played.spent[:, 0])
    best = torch.stack(ends).max(0).values
    taken = (best >= best.max() - WORTH).int().argmax(0, keepdim=True)
    pays = best.max() > _value(known[None], prices.verify) + WORTH
    order, drawn = (part.index_select(0, taken)[0] for part in first)
    found = drawn & pays
    ids, live = torch.where(found, order, paths.shape[0]).sort().values, found.sum(0, keepdim=True).int()
    ids = padded(ids, most)
    return Nodes(ids.masked_fill(torch.arange(most, device=ids.device) >= live, 0), live)


WORTH = 1e-9  # tokens: by so little rounding can make equal values differ


class _Played(NamedTuple):
    """What a few passes may have made of a tree, by their width: float64, int64, bool [widths, nodes]; the price of the
    passes, float64 [widths, 1]."""

    chances: Tensor
    depths: Tensor
    waiting: Tensor
    spent: Tensor

    def after(self, order: Tensor, drawn: Tensor, profile: Tensor, draft: Tensor) -> _Played:
        """One pass more, from the nodes `order`, [widths, nodes drafted from], as far as they are `drawn`."""
        widths, places = len(order), profile.shape[1]
        depths = self.depths.gather(1, order)
        scale = self.chances.gather(1, order) * drawn
        children = (scale[..., None] * profile[depths]).reshape(widths, -1)
        below = (depths + 1).clamp(max=len(profile) - 1)[..., None].expand(-1, -1, places).reshape(widths, -1)
        left = self.waiting & ~torch.zeros_like(self.waiting).scatter(1, order, drawn)
        return _Played(
            torch.cat([self.chances, children], 1),
            torch.cat([self.depths, below], 1),
            torch.cat([left, children > 0], 1),
            self.spent + draft[drawn.sum(1, keepdim=True)],
        )


def _value(found: Tensor, verify: Tensor) -> Tensor:
    """What trees are worth, float64 [trees]; found: float64 [trees, nodes], chances."""
    most = min(found.shape[1], verify.shape[0] - 1)
    best = found.topk(most).values
    worth = best.cumsum(1) - verify[1 : most + 1]
    return worth.masked_fill(best <= 0, -math.inf).max(1).values


def _order(values: Tensor) -> Tensor:
    """Indices of each row by value, descending, the first of equals first."""
    return values.sort(dim=1, descending=True, stable=True).indices


def require_search(
    paths: Tensor, depths: Tensor, waiting: Tensor, size: Tensor, profile: Tensor, prices: Prices
) -> None:
    kinds = paths.dtype, depths.dtype, waiting.dtype
    if kinds != (torch.float32, torch.int64, torch.bool) or not paths.shape == depths.shape == waiting.shape:
        given = describe(paths, depths, waiting)
        raise InputError(f"paths, depths, waiting: float32, int64, bool [m] are needed, got {given}")
    if not are_counts(size) or paths.dim() != 1 or not len(paths):
        raise InputError(f"paths, size: float32 [m], int32 [1] are needed, got {describe(paths, size)}")
    tables = profile, prices.verify, prices.draft
    if any(table.dtype is not torch.float32 or not table.numel() for table in tables) or profile.dim() != 2:
        raise InputError(f"profile, prices: float32 [levels, places], [n], [n] are needed, got {describe(*tables)}")
    if (
        min(len(prices.verify), len(prices.draft)) < 2
        or prices.widths.dtype is not torch.int64
        or not len(prices.widths)
    ):
        raise InputError(f"prices: of 1 node at least, and int64 widths, are needed, got {describe(*prices)}")

"""Ops of a search that weighs the worth of nodes against their costs."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.ops._meanings import doubled, padded, precision, refuse_unless, require
from specengine.ops._registry import kernels, native, op
from specengine.ops.select import Drafted, top_children
from specengine.ops.tree import (
    Arrays,
    Beside,
    Counters,
    Free,
    Nodes,
    append_nodes,
    depths_of,
    graft,
    is_free,
    select_best,
)


class Prices(NamedTuple):
    """Costs of a cycle in expected tokens: float32 [nodes + 1], of verifying that many nodes, and [width + 1], of a
    draft pass from that many; widths: int64 [w], of the passes that are compared, ascending, the last one `width`."""

    verify: Tensor
    draft: Tensor
    widths: Tensor


class Counts(NamedTuple):
    """Counts of the outcomes of drafted tokens.

    A token's cell is given by its group (a kind of generation), its source, depth and rank; within a cell its stated
    log-odds fall between two knots, which share the outcome by distance. A chance is hits over tries.

    hits, tries, table      float32 [groups * SOURCES * DEPTHS * RANKS, KNOTS]; the table is their ratio
    gains, passes, profile  float32 [LEVELS, PLACES], [LEVELS], [LEVELS, PLACES]: summed chances of the children by
                            place, of that many nodes drafted from of each level, their ratio. Level 0 is the root, then
                            nodes by the chance of their own edge, as the children of sure nodes are sure
    group                   int64 [1], the present one
    """

    hits: Tensor
    tries: Tensor
    table: Tensor
    gains: Tensor
    passes: Tensor
    profile: Tensor
    group: Tensor


class Notes(NamedTuple):
    """Notes of a search on each node of a tree of capacity c, [c + 1]: padding writes to the last entry.

    stated: float32, the draft's log-probability of the edge; cells: int64; places: int64, among the siblings; waiting:
    bool, not drafted from yet; drafted: bool, it was.
    """

    stated: Tensor
    cells: Tensor
    places: Tensor
    waiting: Tensor
    drafted: Tensor


class Throughput(NamedTuple):
    """Seconds and tokens of cycles, and the prices that follow from them.

    verify, draft  float32 [nodes + 1], [width + 1]: seconds of verifying that many nodes, of a pass from that many
    prices         the same in expected tokens, at the rate of `recent`
    recent         float32 [2]: tokens committed, and the seconds that they took, newer cycles weighing more
    drafting       float32 [1], seconds of the present tree's passes; verified: int32 [1], its verified nodes
    overhead       float32 [1], seconds of a cycle outside verification and passes
    experts        float32 [2 + RELATIONS]: seconds of reading a row's experts, what share of all experts these are, and
                   by a node's relation how much of them is new, over the share that no node before it has read.
                   `verify` has those of nodes of the least relation. [0] of a target without experts
    """

    verify: Tensor
    draft: Tensor
    prices: Prices
    recent: Tensor
    drafting: Tensor
    verified: Tensor
    overhead: Tensor
    experts: Tensor


class SearchState(NamedTuple):
    """What a search reads and writes on a device."""

    counts: Counts
    notes: Notes
    throughput: Throughput


SOURCES, DEPTHS, RANKS, KNOTS = 8, 4, 5, 15  # of Step.marks; 1 to 3 and deeper; of places; of odds
PLACES = 10  # children of a node that are looked at: of ranks 0, 1, 2, 3, 3, then 4
RELATIONS = 6  # of nodes at depth 1, 2 and deeper: the first of its siblings, then a later one
LEVELS = 8  # of a profile: of the root, then of chances in equal parts
ODDS = 7.0  # the greatest log-odds that a table of chances tells apart, and the smallest, negative
MIN_CHANCE, MAX_CHANCE = 1e-4, 0.999  # chances
# tries that a knot remembers, nodes drafted from that a level of a profile does
WINDOW, PASSES = 150.0, 60.0


@op
def chances(stated: Tensor, cells: Tensor, table: Tensor) -> Tensor:
    """Return log-chances of acceptance by a table that was counted: float32 like `stated`.

    stated: float32 [n], the draft's log-probabilities; cells: int64 [n], rows of the table; table: float32 [cells,
    knots], the chance at log-odds from -ODDS to ODDS in equal steps, linear between. -inf, not proposed, stays.
    """
    if run := native.chances[stated.device]:
        return run(stated, cells, table)
    require(
        "stated: float32 [n]; cells: int64 [n]; table: float32 [cells, knots]", stated, cells, table
    )
    refuse_unless(table.shape[1] >= 2, "table", "2 knots or more", table)
    knots, flat = table.shape[1], table.reshape(-1)
    at = knot_of(stated, knots)
    low = at.long().clamp(max=knots - 2)
    at_low, at_high = (flat.index_select(0, cells * knots + low + more) for more in (0, 1))
    return torch.where(stated > -math.inf, torch.lerp(at_low, at_high, at - low).log(), stated)


def knot_of(log_probs: Tensor, knots: int) -> Tensor:
    """Return the place of a probability on the knots of a table: float32, 0 to knots - 1."""
    odds = log_probs - (-log_probs.expm1()).clamp(min=0.0).log()  # +inf of a certain one
    return (odds.clamp(-ODDS, ODDS) + ODDS) * ((knots - 1) / (2 * ODDS))


def cells_of(group: Tensor, sources: Tensor | None, depths: Tensor, places: Tensor) -> Tensor:
    """Return the cells of nodes, int64, by group, source (None: 0), depth and place, which broadcast."""
    deep = (depths - 1).clamp(0, DEPTHS - 1)
    rank = (places - (places > 3).long()).clamp(max=RANKS - 1)
    source = group * SOURCES if sources is None else group * SOURCES + sources.long()
    return (source * DEPTHS + deep) * RANKS + rank


def relation_of(depth: int, later: bool) -> int:
    """Return the relation of a node below the root to those before it. later: whether a sibling is among them."""
    return 2 * min(max(depth, 1), RELATIONS // 2) - 2 + later


def level_of(chances: Tensor, levels: int) -> Tensor:
    """Return the levels, int64, of nodes in a profile of that many, by the chances of their edges, 0 to 1."""
    return (
        (chances * (levels - 1)).long().clamp(max=levels - 2) + 1
        if levels > 1
        else chances.long() * 0
    )


class Limits(NamedTuple):
    """least: log-chance of a path, of likelier ones nodes are made; budget: new nodes per level; rounds: draft passes
    thought ahead; max_passes: draft passes per tree."""

    least: float
    budget: int
    rounds: int
    max_passes: int


@op
def grow_likely(
    tree: Arrays,
    counters: Counters,
    frontier: Nodes,
    drafted: Drafted,
    state: SearchState,
    limits: Limits,
) -> Nodes:
    """Append the likeliest children of the frontier, and return the nodes to draft from next, as `next_pass`.

    tree, counters: of a TokenTree. Children are the PLACES best columns of each row, by `top_children`; of those whose
    path has a log-chance of limits.least or more the limits.budget likeliest are appended, with log-chances for edges.
    The frontier is noted as drafted, new nodes as waiting; throughput.drafting gains the seconds of the pass. There is
    no further pass after limits.max_passes, by counters[1]. Without room nothing is appended, and the overflow,
    counters[2], is 1. On a device a frontier of several nodes that is as wide as the widest pass takes the returned
    ones in.
    """
    if run := native.grow_likely[frontier.ids.device]:
        return Nodes(*run(tree, counters, frontier, drafted, state, limits))
    size, passes, _ = counters
    _require_state(tree, state)
    require(
        "frontier: int64 [rows]; live: int32 [1]; logits: floating [rows, V]; token_ids: int64 [V]; "
        "marks: uint8 [rows, V]; size: int32 [1]; passes: int32 [1]; overflow: int32 [1]",
        *frontier,
        drafted.logits,
        drafted.token_ids,
        drafted.marks,
        *counters,
    )
    drafted = drafted.mixed(tree, frontier)
    if run := kernels.grow_likely[frontier.ids.device]:
        return run(tree, counters, frontier, drafted, state, limits)
    throughput = state.throughput
    throughput.drafting.add_(throughput.draft.index_select(0, frontier.live))
    stated, columns = top_children(drafted.logits, PLACES, drafted.normalized)
    sources = None if drafted.marks is None else drafted.marks.gather(1, columns)
    tokens = columns if drafted.token_ids is None else drafted.token_ids[columns]
    _append_likely(tree, counters, frontier, (tokens, stated, sources), state, limits)
    selected = _next_of(tree, size, state, limits.rounds)
    selected = Nodes(selected.ids, selected.live * (passes < limits.max_passes))
    if is_free(size) or not 1 < len(frontier.ids) == len(selected.ids):
        return selected
    for into, values in zip(frontier, selected, strict=True):
        into.copy_(values)
    return frontier


def _next_of(tree: Arrays, size: Tensor, state: SearchState, rounds: int) -> Nodes:
    waiting = state.notes.waiting[: tree[0].shape[0]]  # without the spare entry
    profile, prices = state.counts.profile, state.throughput.prices
    return next_pass(tree[4], tree[3], waiting, size, profile, prices, rounds)


def _append_likely(
    tree: Arrays,
    counters: Counters,
    frontier: Nodes,
    children: tuple[Tensor, Tensor, Tensor | None],
    state: SearchState,
    limits: Limits,
) -> None:
    """children: tokens, stated log-probabilities and marks, [rows, places], best first."""
    (size, _, overflow), (tokens, stated, sources) = counters, children
    counts, notes = state.counts, state.notes
    rows, places = tokens.shape
    drafted = _spared(frontier, notes)
    notes.waiting.index_fill_(0, drafted, False)
    notes.drafted.index_fill_(0, drafted, True)
    place = torch.arange(places, device=size.device, dtype=torch.int64).expand(rows, -1).reshape(-1)
    under = frontier.ids.masked_fill(frontier.padding(), 0)
    depths = (tree[2].index_select(0, under) + 1)[:, None].expand(-1, places).reshape(-1)
    cells = cells_of(counts.group, None if sources is None else sources.reshape(-1), depths, place)
    flat = stated.masked_fill(frontier.padding()[:, None], -math.inf).reshape(-1)
    edges = chances(flat, cells, counts.table)
    paths = tree[4].index_select(0, under)[:, None].expand(-1, places).reshape(-1) + edges
    paths = torch.where(paths >= limits.least, paths, -math.inf)
    selected = select_best(paths, frontier.live * places, limits.budget)
    parents = under.index_select(0, selected.ids // places)
    drawn, carried = (
        values.index_select(0, selected.ids) for values in (tokens.reshape(-1), edges)
    )
    ids = append_nodes(tree, size, parents, drawn, carried, selected.live, overflow)
    at = _spared(Nodes(ids, selected.live * (overflow == 0)), notes)
    for noted, values in ((notes.stated, flat), (notes.cells, cells), (notes.places, place)):
        noted.index_copy_(0, at, values.index_select(0, selected.ids))
    notes.waiting.index_fill_(0, at, True)


def _require_state(tree: Arrays, state: SearchState) -> None:
    """Raise InputError where tables are not those of the cells, levels and places above, or too small for the tree."""
    counts, notes, throughput = state.counts, state.notes, state.throughput
    table, profile = f"float32 [cells, {KNOTS}]", f"float32 [{LEVELS}, {PLACES}]"
    require(
        f"hits: {table}; tries: {table}; table: {table}; gains: {profile}; passes: float32 [{LEVELS}]; "
        f"profile: {profile}; group: int64 [1]; stated: float32 [n]; cells: int64 [n]; places: int64 [n]; "
        "waiting: bool [n]; drafted: bool [n]; draft: float32 [width]; drafting: float32 [1]; "
        "experts: float32 [numbers]",
        *counts,
        *notes,
        throughput.draft,
        throughput.drafting,
        throughput.experts,
    )
    refuse_unless(
        len(notes.stated) > len(tree[0]), "stated", f"{len(tree[0]) + 1} or more", notes.stated
    )
    refuse_unless(
        len(throughput.experts) in (0, 2 + RELATIONS),
        "experts",
        f"{2 + RELATIONS} numbers or none",
        throughput.experts,
    )


def _spared(nodes: Nodes, notes: Notes) -> Tensor:
    """Return the nodes' ids, with the spare entry for padding."""
    return nodes.ids.masked_fill(nodes.padding(), notes.stated.shape[0] - 1)


@op
def bind_search(state: SearchState) -> SearchState:
    """Return the state, of which the ops of a search are then asked; a backend may check and look it up once, here.

    Its tensors are shared, so that what is written into them holds, and may not be resized.
    """
    return run(state) if (run := native.bind_search[state.throughput.recent.device]) else state


@op
def count_outcomes(
    tree: Arrays,
    size: Tensor,
    path: Nodes,
    chosen: Tensor,
    state: SearchState,
) -> None:
    """Take the outcome of a tree into counts and throughput: the target, at the nodes of `path`, chose these tokens.

    path: the root first; chosen: int64, its token after each of them. Of a node on the path every child was tried,
    and the one that carries the chosen token was a hit; knots forget beyond WINDOW tries. The chances of the children
    of all nodes drafted from go into the profile. The path's nodes are committed tokens, as in `update_throughput`.
    """
    if run := native.count_outcomes[size.device]:
        return run(tree, size, path, chosen, state)
    require(
        "path: int64 [width]; chosen: int64 [width]; size: int32 [1]; live: int32 [1]",
        path.ids,
        chosen,
        size,
        path.live,
    )
    _require_state(tree, state)
    if run := kernels.count_outcomes[size.device]:
        return run(tree, size, path, chosen, state)
    _count(tree, size, path, chosen, state.counts, state.notes)
    update_throughput(state.throughput, path.live)
    return None


def _count(
    tree: Arrays, size: Tensor, path: Nodes, chosen: Tensor, counts: Counts, notes: Notes
) -> None:
    (tokens, parents, _, edges, _, _), nodes = tree, tree[0].shape[0]
    place = torch.arange(nodes, device=size.device, dtype=torch.int64)
    there = (place > 0) & (place < size)
    above = parents.masked_fill(~there, 0)
    chosen_tokens = torch.full((nodes + 1,), -1, dtype=torch.int64, device=size.device)
    chosen_tokens = chosen_tokens.index_copy(
        0, path.ids.masked_fill(path.padding(), nodes), chosen
    )[:nodes].index_select(0, above)
    tried = there & (chosen_tokens >= 0)
    at = knot_of(notes.stated[:nodes].masked_fill(~tried, -1.0), KNOTS)
    low = at.long().clamp(max=KNOTS - 2)
    cells = notes.cells[:nodes].masked_fill(~tried, 0)
    knots = torch.cat([low, low + 1]) + (cells * KNOTS).repeat(2)
    weights = torch.cat([1 - (at - low), at - low]) * tried.repeat(2)
    counts.tries.view(-1).index_add_(0, knots, weights)
    counts.hits.view(-1).index_add_(0, knots, weights * (chosen_tokens == tokens).repeat(2))
    decay = (WINDOW / counts.tries).clamp(max=1.0)
    counts.tries.mul_(decay)
    counts.hits.mul_(decay)
    torch.div(counts.hits, counts.tries, out=counts.table).clamp_(MIN_CHANCE, MAX_CHANCE)
    drafted = notes.drafted[:nodes] & (there | (place == 0))
    shown = there & drafted.index_select(0, above)
    levels = level_of(edges.exp().masked_fill(~there, 0.0), LEVELS)
    levels = levels.masked_fill(~drafted, 0).index_fill(0, levels.new_zeros(1), 0)
    rows = levels.index_select(0, above) * PLACES + notes.places[:nodes].masked_fill(~shown, 0)
    counts.gains.view(-1).index_add_(0, rows, torch.where(shown, edges.exp(), 0.0))
    counts.passes.index_add_(0, levels, drafted.float())
    decay = (PASSES / counts.passes).clamp(max=1.0)
    counts.passes.mul_(decay)
    counts.gains.mul_(decay[:, None])
    torch.div(counts.gains, counts.passes[:, None], out=counts.profile)


@op
def update_throughput(throughput: Throughput, committed: Tensor) -> None:
    """Enter a cycle that committed that many tokens, int32 [1], into the throughput, and price seconds anew.

    A second costs what it would bring elsewhere: the tokens of recent cycles by their seconds, at least what decoding
    one token after the other brings. Without a cycle to enter, `committed` is 0: seconds are priced alone.
    """
    if run := native.update_throughput[throughput.recent.device]:
        return run(throughput, committed)
    require("committed: int32 [1]; verified: int32 [1]", committed, throughput.verified)
    took = (
        throughput.verify.index_select(0, throughput.verified)
        + throughput.drafting
        + throughput.overhead
    )
    entry = torch.cat([committed.float(), took])
    throughput.recent.copy_(
        torch.where(committed > 0, throughput.recent * MEMORY + entry, throughput.recent)
    )
    rate = torch.maximum(throughput.recent[:1] / throughput.recent[1:], 1 / throughput.verify[1:2])
    torch.mul(throughput.verify, rate, out=throughput.prices.verify)
    torch.mul(throughput.draft, rate, out=throughput.prices.draft)
    return None


@op
def select_worth(paths: Tensor, size: Tensor, price: Tensor, most: int) -> Nodes:
    """Select the n likeliest of the first `size` nodes, for the n whose summed chances exceed their price the most.

    paths: float32 [m], log-chances; price: float32 [nodes + 1], of n nodes, in the same unit; `most` bounds n, as the
    price's length does. The fewest of equals; at least the first. Ids are ascending, [most]. Ties as in `select_best`.
    """
    if run := native.select_worth[paths.device]:
        return Nodes(*run(paths, size, price, most))
    require("paths: float32 [m]; size: int32 [1]; price: float32 [n]", paths, size, price)
    refuse_unless(
        most >= 1 and len(price) >= 2, "most, price", "1 or more, 2 entries or more", most, price
    )
    there = torch.arange(paths.shape[0], device=paths.device, dtype=torch.int64) < size
    considered = min(most, len(price) - 1, len(paths))
    best = doubled(torch.where(there, paths, -math.inf).topk(considered).values)
    worth = best.exp().cumsum(0) - price[1 : considered + 1]
    worth = worth.masked_fill(best == -math.inf, -math.inf)
    count = (worth >= worth.max() - WORTH).int().argmax(0, keepdim=True).int() + 1
    return select_best(paths, size, most, count)


@op
def next_pass(
    paths: Tensor,
    edges: Tensor,
    waiting: Tensor,
    size: Tensor,
    profile: Tensor,
    prices: Prices,
    rounds: int,
) -> Nodes:
    """Select the nodes whose draft pass promises the most, none where no pass promises more than it costs: ids [width].

    paths, edges: float32 [m], log-chances of the first `size` nodes' paths and edges, the root's are 0; waiting: bool
    [m], not yet drafted from; profile: float32 [levels, places], the chances of children, best first, as in Counts.
    A tree is worth the best, over n, of the summed chances of its n likeliest nodes less the price of verifying them.
    For each of prices.widths, `rounds` passes from that many of the likeliest waiting nodes (ties: the first) are
    played through, with children as the profile has them; a width is worth its tree's best after any of these passes,
    less their prices. Of the widths within WORTH of the best the narrowest is taken, and its first pass returned.
    """
    if run := native.next_pass[paths.device]:
        return Nodes(*run(paths, edges, waiting, size, profile, prices, rounds))
    require(
        "paths: float32 [m]; edges: float32 [m]; waiting: bool [m]; size: int32 [1]; "
        "profile: float32 [levels, places]; verify: float32 [n]; draft: float32 [width]; "
        "widths: int64 [w]",
        paths,
        edges,
        waiting,
        size,
        profile,
        *prices,
    )
    least = min(len(paths), profile.numel(), len(prices.widths), rounds)
    refuse_unless(
        least >= 1 and min(len(prices.verify), len(prices.draft)) >= 2,
        "paths, profile, prices, rounds",
        "1 node, place, width and round or more, and prices from 0 nodes to 1 or more",
        paths,
        profile,
        *prices,
        rounds,
    )
    most, widths = prices.draft.shape[0] - 1, prices.widths[:, None]
    place = torch.arange(paths.shape[0], device=paths.device, dtype=torch.int64)
    chances_known = torch.where(place < size, doubled(paths).exp(), 0.0)
    played = _Played(
        chances_known.expand(len(widths), -1),
        torch.where(
            place > 0, level_of(edges.masked_fill(place >= size, 0.0).exp(), len(profile)), 0
        ).expand(len(widths), -1),
        (waiting & (place < size)).expand(len(widths), -1),
        torch.zeros_like(widths, dtype=precision(paths.device)),
    )
    ends, drawings = [], []
    for _ in range(rounds):
        chances = torch.where(played.waiting, played.chances, -1.0)
        # the first of equals first
        order = chances.sort(dim=1, descending=True, stable=True).indices[:, :most]
        place = torch.arange(order.shape[1], device=paths.device, dtype=torch.int64)
        drawn = played.waiting.gather(1, order) & (place < widths)
        drawings.append((order, drawn))
        played = played.after(order, drawn, doubled(profile), doubled(prices.draft))
        ends.append(_value(played.chances, prices.verify) - played.spent[:, 0])
    best = torch.stack(ends).max(0).values
    taken = (best >= best.max() - WORTH).int().argmax(0, keepdim=True)
    pays = best.max() > _value(chances_known[None], prices.verify) + WORTH
    order, drawn = (part.index_select(0, taken)[0] for part in drawings[0])
    selected = drawn & pays
    ids, live = (
        torch.where(selected, order, paths.shape[0]).sort().values,
        selected.sum(0, keepdim=True).int(),
    )
    ids = padded(ids, most)
    return Nodes(
        ids.masked_fill(torch.arange(most, device=ids.device, dtype=torch.int64) >= live, 0), live
    )


# of continuations that need no draft pass
FreeSource = Beside | Callable[[Nodes, int, float], Free | None]
Source = FreeSource | None


@op
def start_search(
    tree: Arrays,
    size: Tensor,
    state: SearchState,
    rounds: int,
    free: Source,
    asked: tuple[int, float],
    skipped: Tensor,
    patience: int,
) -> Tensor:
    """Note the root as waiting and nothing as drafted or spent; return whether it is drafted from, int32 [1], 0 or 1.

    It is where its pass pays, or after `patience` cycles without one, of which skipped, int32 [1], is the count. It
    pays where `next_pass` finds one, unless free continuations of the root leave so little to the draft that no pass
    pays. asked: how many of these, and their least log-probability. A pass may bring its usual share of the chance that
    none of them is right. With a source of these it reads the tree on the host.
    """
    if run := native.start_search[size.device]:
        return run(tree, size, state, rounds, free, asked, skipped, patience)
    _require_state(tree, state)
    require("skipped: int32 [1]", skipped)
    if free is None and (run := kernels.start_search[size.device]):
        return run(tree, size, state, rounds, free, asked, skipped, patience)
    for part in (state.throughput.drafting, state.notes.drafted, state.notes.waiting):
        part.zero_()
    state.notes.waiting[:1].fill_(True)
    pays = (_next_of(tree, size, state, rounds).live > 0).int()
    if free is not None and pays:
        root = Nodes.of(torch.zeros(1, dtype=torch.int64, device=size.device))
        free_nodes = _free_below(free, tree, size, root, *asked)
        if free_nodes is not None and _is_covered(free_nodes, tree, size, state):
            pays.zero_()
    pays |= skipped >= patience
    skipped += 1
    skipped *= 1 - pays
    return pays


def _free_below(
    free: FreeSource, tree: Arrays, size: Tensor, nodes: Nodes, most: int, least: float
) -> Free | None:
    if isinstance(free, Beside):
        return free.below(tree, size, nodes, most, least)
    return free(nodes, most, least)


def _is_covered(free: Free, tree: Arrays, size: Tensor, state: SearchState) -> bool:
    counts = state.counts
    edges = chances(*_read(free, tree, size, counts), counts.table).exp().tolist()
    paths, missed, depths = [1.0], [1.0], [0]  # of the root, and the free nodes below it
    for parent, edge in zip(free.parents, edges, strict=True):
        missed[parent] -= paths[parent] * edge
        paths.append(paths[parent] * edge)
        missed.append(paths[-1])
        depths.append(depths[parent] + 1)
    share, price = float(counts.profile[0].sum()), float(state.throughput.prices.draft[1])
    gains = (
        share * sum(chance for chance, depth in zip(missed, depths, strict=True) if depth == level)
        - price
        for level in range(max(depths) + 1)
    )
    return not any(gain > 0 for gain in accumulate(gains))


def _read(free: Free, tree: Arrays, size: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
    """Return stated log-probabilities and cells of free nodes."""
    first, device = int(size), size.device
    depths = depths_of([*tree[1][:first].tolist(), *free.parents])[first:]
    marks, below, ranks = torch.tensor(
        (free.marks, depths, free.ranks), dtype=torch.int64, device=device
    )
    cells = cells_of(counts.group, marks, below, ranks.clamp(max=PLACES - 1))
    return torch.tensor(free.log_probs, device=device, dtype=torch.float32), cells


@op
def keep_likely(
    tree: Arrays,
    size: Tensor,
    state: SearchState,
    free: Source,
    asked: tuple[int, int, float],
    most: int,
) -> Nodes:
    """Append free continuations of the likeliest waiting nodes, and select what to verify as `select_worth`.

    asked: of how many waiting nodes, how many continuations, and their least log-probability. Their edges are
    log-chances, and notes has them; throughput.verified is the number of selected nodes. With a source of these it
    reads the tree on the host.

    Where throughput.experts has entries, a node's price also depends on how it is related to those before it. Then
    nodes are taken one after the other, below taken ones, each the one that is worth the most beyond its own experts
    (ties: the first), and as many of these are selected as are worth the most.
    """
    if run := native.keep_likely[size.device]:
        return Nodes(*run(tree, size, state, free, asked, most))
    _require_state(tree, state)
    counts, notes, throughput = state.counts, state.notes, state.throughput
    related = throughput.experts.numel() > 0
    if free is None and not related and (run := kernels.keep_likely[size.device]):
        return run(tree, size, state, free, asked, most)
    if free is not None:
        leaves, more, least = asked
        waiting = notes.waiting[: int(size)].nonzero()[:, 0]
        if len(waiting) > leaves:
            best = select_best(tree[4].index_select(0, waiting), Nodes.of(waiting).live, leaves)
            waiting = waiting.index_select(0, best.ids[: int(best.live)])
        free_nodes = _free_below(
            free, tree, size, Nodes.of(waiting), min(more, tree[0].shape[0] - int(size)), least
        )
        if free_nodes is not None:
            stated, cells = _read(free_nodes, tree, size, counts)
            edges = chances(stated, cells, counts.table).tolist()
            new = graft(tree, size, free_nodes.parents, free_nodes.tokens, edges).ids
            notes.stated[new], notes.cells[new] = stated, cells
    selected = (
        _select_related(tree, int(size), throughput, most)
        if related
        else select_worth(tree[4], size, throughput.prices.verify, most)
    )
    throughput.verified.copy_(selected.live)
    return selected


def _select_related(tree: Arrays, size: int, throughput: Throughput, most: int) -> Nodes:
    _, parents, depths, _, paths, _ = (array[:size].tolist() for array in tree)
    price = throughput.prices.verify.tolist()
    seconds, share, *ratios = throughput.experts.tolist()
    seconds *= price[1] / throughput.verify[1].item()
    chances, later = [math.exp(path) for path in paths], [False] * size
    taken, waiting = [0], [node for node in range(1, size) if parents[node] == 0]
    total, worth, read, least = chances[0], [chances[0] - price[1]], share, share
    while waiting and len(taken) < min(most, len(price) - 1):
        new = [min(1.0, ratio * (1.0 - read)) for ratio in ratios]
        usual = min(1.0, min(ratios) * (1.0 - least))

        def relation(node: int) -> int:
            return relation_of(depths[node], later[parents[node]])

        values = {node: chances[node] - seconds * (new[relation(node)] - usual) for node in waiting}
        best = min(waiting, key=lambda node: (-values[node], node))
        total += values[best]
        read += share * new[relation(best)]
        least += share * usual
        later[parents[best]] = True
        taken.append(best)
        waiting = [node for node in waiting if node != best]
        waiting += [node for node in range(best + 1, size) if parents[node] == best]
        worth.append(total - price[len(taken)])
    count = 1 + next(n for n, value in enumerate(worth) if value >= max(worth) - WORTH)
    ids = torch.tensor(sorted(taken[:count]), device=tree[0].device, dtype=torch.int64)
    return Nodes(padded(ids, most), torch.full((1,), count, device=ids.device, dtype=torch.int32))


MEMORY = 0.97  # of recent tokens and seconds, per cycle
WORTH = 1e-9  # tokens: by so little rounding can make equal values differ


class _Played(NamedTuple):
    """A tree after a few imagined passes, by their width: float64, int64, bool [widths, nodes]; the price of the
    passes, float64 [widths, 1]."""

    chances: Tensor
    levels: Tensor
    waiting: Tensor
    spent: Tensor

    def after(self, order: Tensor, drawn: Tensor, profile: Tensor, draft: Tensor) -> "_Played":
        """Return the tree after one more pass, from the nodes of `order`, [widths, most], that are `drawn`."""
        widths = len(order)
        edges = profile[self.levels.gather(1, order)]
        scale = self.chances.gather(1, order) * drawn
        children = (scale[..., None] * edges).reshape(widths, -1)
        below = level_of(edges, len(profile)).reshape(widths, -1)
        remaining = self.waiting & ~torch.zeros_like(self.waiting).scatter(1, order, drawn)
        return _Played(
            torch.cat([self.chances, children], 1),
            torch.cat([self.levels, below], 1),
            torch.cat([remaining, children > 0], 1),
            self.spent + draft[drawn.sum(1, keepdim=True)],
        )


def _value(chances: Tensor, verify: Tensor) -> Tensor:
    """Return the worth of trees, float64 [trees]; chances: float64 [trees, nodes]."""
    most = min(chances.shape[1], verify.shape[0] - 1)
    best = chances.topk(most).values
    worth = best.cumsum(1) - verify[1 : most + 1]
    return worth.masked_fill(best <= 0, -math.inf).max(1).values

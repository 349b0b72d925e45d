"""Random inputs of each op with padding, and what runs it on a device against its meaning; any backend must pass.

What may not be read is NaN or huge; what stands behind a count in a result must be an index all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specengine import ops
from specengine.drafters import lookup
from specengine.ops import worth
from specengine.ops.tree import Free
from tests import toy
from tests.ops.inputs import HUGE, NAN, count, poisoned

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Draw:
    """Random numbers of one case; `between` includes both ends."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.random))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.between(0, len(choices) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def whole(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self.random)

    def scores(self, size: int) -> Tensor:
        """float32 with ties and -inf."""
        scores = torch.randint(-4, 1, (size,), generator=self.random).float()
        return scores.masked_fill(torch.rand(size, generator=self.random) < 0.2, -math.inf)

    def limit(self, most: int) -> Tensor | None:
        return self.one_of([None, count(self.between(-2, most + 2)), count(2**31 - 1)])

    def strided(self, values: Tensor) -> Tensor:
        """The same, at times not dense in its last dimension."""
        return torch.stack([values, values], -1)[..., 0] if self.between(0, 3) == 0 else values


def select_best(draw: Draw) -> tuple:
    live, most = draw.between(0, 40), draw.between(0, 12)
    scores = poisoned(draw.scores(live), draw.between(0, 30))
    return (draw.strided(scores), count(live), most, draw.limit(most)), {}


def best_candidates(draw: Draw) -> tuple:
    rows, padding, columns, most = (
        draw.between(1, 5),
        draw.between(0, 3),
        draw.between(1, 150),
        draw.between(1, 30),
    )
    logits = (draw.normal(rows, columns) * 3).to(draw.one_of(FLOATS))
    normalized = draw.between(0, 1) == 1
    if normalized:  # sums are exact, so that the order of ties can be asked for
        logits = logits.round()
    options = {
        "limit": draw.limit(most),
        "log_gate": draw.one_of([None, torch.tensor([-math.inf]), torch.tensor([math.log(0.1)])]),
        "bound": draw.one_of([None, torch.tensor([-math.inf]), torch.tensor([-3.5])]),
        "normalized": normalized,
    }
    scores = poisoned(draw.scores(rows), padding)
    return (draw.strided(poisoned(logits, padding)), scores, count(rows), most), options


def tree_of(draw: Draw, size: int, capacity: int) -> tuple:
    """A tree's arrays, poisoned behind its nodes."""
    grown = toy.random_tree(draw.between(0, 10**6), size, 1000)
    parts = grown.tokens, grown.parents, grown.depths, grown.log_probs, grown.path_log_probs
    words = torch.zeros(size, -(-capacity // 64), dtype=torch.int64)
    words[:, : grown.ancestors.shape[1]] = grown.ancestors
    return *(poisoned(part, capacity - size) for part in parts), poisoned(words, capacity - size)


def append_nodes(draw: Draw) -> tuple:
    size, found, padding = draw.between(1, 70), draw.between(0, 16), draw.between(0, 4)
    tree = tree_of(draw, size, 80)
    given = (
        draw.whole(size, found),
        draw.whole(1000, found),
        -torch.rand(found, generator=draw.random),
    )
    return (
        tree,
        count(size),
        *(poisoned(part, padding) for part in given),
        count(found),
        count(0),
    ), {}


def append_children(draw: Draw) -> tuple:
    size, rows, padding, children = (
        draw.between(1, 70),
        draw.between(0, 5),
        draw.between(0, 3),
        draw.between(1, 5),
    )
    tree, width = tree_of(draw, size, 80), (rows + padding) * children
    edges = -torch.rand(rows, children, generator=draw.random)
    given = (poisoned(part, padding) for part in (draw.whole(1000, rows, children), edges))
    chosen = torch.rand(rows + padding, children, generator=draw.random) < 0.6
    most = draw.between(0, width + 2)
    options = {
        "chosen": draw.one_of([None, chosen]),
        "most": draw.one_of([None, most]),
        "limit": draw.limit(most),
    }
    frontier = ops.Nodes(draw.whole(size, rows + padding), count(rows))
    return (tree, (count(size), count(1), count(0)), frontier, *given), options


def subtree(draw: Draw) -> tuple:
    size, most = draw.between(1, 90), draw.between(1, 70)
    *_, paths, words = tree = tree_of(draw, size, 130)
    with ops.meaning():
        nodes = ops.select_best(paths, count(size), most)
    return (tree[1], words, *nodes), {}


def extract(draw: Draw) -> tuple:
    size, most = draw.between(1, 90), draw.between(1, 70)
    tree = tree_of(draw, size, 130)
    with ops.meaning():
        nodes = ops.select_best(tree[4], count(size), most)
    nodes = nodes.ids[: int(nodes.live)], nodes.live  # padding has other values in a tree
    return (tree, *nodes), {}


def root_rows(draw: Draw) -> tuple:
    waiting, width = draw.between(1, 5), draw.between(1, 70)
    held = draw.whole(1000, width + draw.between(1, 4))
    causal = draw.whole(10**6, len(held) - 1, 2)
    factors = draw.one_of([None, draw.normal(draw.between(1, 4))])
    taken = count(draw.between(0, min(waiting, width)))
    return (
        draw.whole(1000, 3),
        held,
        taken,
        count(draw.between(0, 99)),
        causal,
        width,
        factors,
    ), {}


def level_rows(draw: Draw) -> tuple:
    size, spare, padding = draw.between(1, 70), draw.between(70, 80), draw.between(0, 3)
    tree, rows = tree_of(draw, size, 80), draw.between(0, 5)
    frontier = torch.randperm(size, generator=draw.random)[:rows]
    nodes = ops.Nodes(torch.cat([frontier, draw.whole(size, padding)]), count(len(frontier)))
    seen = draw.whole(10**6, spare + 1, 2)
    seen[spare] = 0
    factors = draw.one_of([None, draw.normal(draw.between(1, 4))])
    return (
        tree,
        count(size),
        nodes,
        count(draw.between(0, 99)),
        count(draw.between(0, 90)),
        seen,
        factors,
    ), {}


def step_queues(draw: Draw) -> tuple:
    """In the middle of a search, at its beginning, or where it is over."""
    budget, search = (
        draw.between(1, 70),
        ops.Search(draw.between(1, 8), draw.between(1, 4), 0.0, False),
    )
    queues, passes, depths = ops.Queues.start(budget, "cpu"), draw.between(1, 4), draw.whole(4, 30)
    for step in range(1, passes + 1):
        rows, found, padding = draw.between(1, 5), draw.between(0, 60), draw.between(0, 3)
        scores = draw.scores(found).sort(descending=True).values
        parts = (
            draw.whole(rows, found),
            draw.whole(40, found),
            -torch.rand(found, generator=draw.random),
            scores,
        )
        padded = [torch.cat([part, part.new_zeros(padding)]) for part in parts[:2]]
        candidates = ops.Candidates(
            *padded, *(poisoned(part, padding) for part in parts[2:]), count(found)
        )
        frontier = ops.Nodes(draw.whole(30, rows), count(rows))
        ids = draw.one_of([None, draw.whole(10**6, 40)])
        if step < passes:
            with ops.meaning():
                ops.step_queues(queues, candidates, frontier, depths, ids, count(step), search)
    if passes == 1:
        for part in queues:  # what an earlier search may have left
            part.fill_(NAN if part.is_floating_point() else 7)
    search = search._replace(threshold=draw.one_of([0.0, 0.3, 9.0]), fill=draw.between(0, 1) == 1)
    live = frontier.live if passes == 1 or draw.between(0, 4) else count(0)
    return (
        queues,
        candidates,
        frontier._replace(live=live),
        depths,
        ids,
        count(passes),
        search,
    ), {}


def beam_observation(draw: Draw) -> tuple:
    width, expansions, depths = draw.between(1, 5), draw.between(0, 3), [0]
    for depth in range(1, expansions + 2):
        depths += [depth] * draw.between(0, width if depth == 1 else width**2)
    padding, pad = draw.between(0, 5), draw.one_of([-20.0, -2.0, 0.0])
    window = ops.Window(
        width, draw.between(0, 1) == 1, draw.between(0, 70), pad, draw.between(0, 3), (1000.0, 10.0)
    )
    scores = poisoned(draw.scores(len(depths)), padding)
    given = scores, poisoned(torch.tensor(depths), padding), count(len(depths)), count(expansions)
    return (*given, torch.tensor([draw.between(1, 10**6)]), window), {}


def network(draw: Draw, inputs: int) -> tuple[Tensor, ...]:
    """Weights fall with the width of a layer, as trained ones do: sums stay small enough for the limit of `same`."""
    hidden = draw.between(1, 50)
    first, last = draw.normal(hidden, inputs) / inputs**0.5, draw.normal(1, hidden) / hidden**0.5
    return first, draw.normal(hidden), last, draw.normal(1)


def classify_paths(draw: Draw) -> tuple:
    rows, children = draw.between(1, 9), draw.between(1, 11)
    paths, entropies = draw.normal(rows, children) - 3, torch.rand(rows, generator=draw.random) * 4
    return (
        draw.strided(paths),
        draw.strided(entropies),
        count(draw.between(0, 9)),
        network(draw, 3),
    ), {}


def classify_row(draw: Draw) -> tuple:
    logits = (draw.normal(1, draw.between(1, 400)) * 4).to(draw.one_of(FLOATS))
    given = draw.strided(logits), draw.between(1, 120), count(draw.between(0, 9)), network(draw, 12)
    return given, {"normalized": draw.between(0, 1) == 1}


def best_action(draw: Draw) -> tuple:
    inputs, hidden, outputs = draw.between(1, 40), draw.between(1, 40), draw.between(1, 12)
    layers = (
        draw.normal(hidden, inputs),
        draw.normal(hidden),
        draw.normal(outputs, hidden),
        draw.normal(outputs),
    )
    return (draw.strided(draw.normal(inputs)), layers, draw.one_of(["relu", "tanh"])), {}


def chances(draw: Draw) -> tuple:
    size, cells, knots = draw.between(0, 20), draw.between(1, 6), draw.between(2, 15)
    log_probs = -draw.normal(size).exp() * draw.one_of([0.01, 1.0, 10.0])
    log_probs = log_probs.masked_fill(draw.normal(size) > 1, -math.inf).masked_fill(
        draw.normal(size) > 1, 0.0
    )
    table = torch.rand(cells, knots, generator=draw.random) * 0.9 + 0.05
    return (draw.strided(log_probs), draw.whole(cells, size), table), {}


def search_of(draw: Draw, tree: tuple, size: int) -> tuple:
    """Counts that were counted, and notes of a tree's nodes, poisoned behind them."""
    capacity, cells = tree[0].shape[0], 2 * worth.SOURCES * worth.DEPTHS * worth.RANKS
    tries = (
        torch.rand(cells, worth.KNOTS, generator=draw.random)
        * draw.one_of([5.0, worth.WINDOW - 0.5])
        + 0.5
    )
    hits = tries * torch.rand(tries.shape, generator=draw.random)
    passes = torch.rand(worth.LEVELS, generator=draw.random) * (worth.PASSES - 0.5) + 0.5
    gains = passes[:, None] * torch.rand(worth.LEVELS, worth.PLACES, generator=draw.random)
    table, profile = (
        (hits / tries).clamp(worth.MIN_CHANCE, worth.MAX_CHANCE),
        gains / passes[:, None],
    )
    counts = ops.Counts(hits, tries, table, gains, passes, profile, draw.whole(2, 1))
    stated = -draw.normal(size).exp()
    waiting = torch.rand(size, generator=draw.random) < 0.5
    noted = stated, draw.whole(cells, size), draw.whole(worth.PLACES, size), waiting, ~waiting
    room = capacity + 1 - size
    padding = [torch.zeros(room, dtype=torch.bool)] * 2
    flags = (torch.cat([part, rest]) for part, rest in zip(noted[3:], padding, strict=True))
    return counts, ops.Notes(*(poisoned(part, room) for part in noted[:3]), *flags)


def throughput_of(draw: Draw, nodes: int, width: int) -> ops.Throughput:
    verify, draft, earned, spent = (
        torch.rand(n, generator=draw.random) + 0.1 for n in (nodes + 1, width + 1, 2, 1)
    )
    widths = torch.tensor(sorted({*(draw.between(1, width) for _ in range(3)), width}))
    scale = draw.one_of([0.0, 0.02, 0.2])
    prices = ops.Prices(verify * scale, draft * scale, widths)
    beside, related = torch.rand(1, generator=draw.random), draw.normal(2 + worth.RELATIONS).abs()
    experts = draw.one_of([torch.zeros(0), related / 2, related.round(decimals=1) / 4])
    return ops.Throughput(
        verify, draft, prices, 9 * earned, spent, count(draw.between(0, nodes)), beside, experts
    )


def state_of(
    draw: Draw, tree: tuple, size: int, narrowest: int = 1, widest: int = 6
) -> ops.SearchState:
    counts, notes = search_of(draw, tree, size)
    throughput = throughput_of(draw, draw.between(1, 20), draw.between(narrowest, widest))
    return ops.SearchState(counts, notes, throughput)


def copies_of(draw: Draw, tree: tuple, size: int, ids: Tensor | None) -> Any:
    """Copies, which know a text of the tree's tokens; those of the extension, if it runs the ops here."""
    copies = lookup.backend().Copies([0.5, 0.7, 0.9], 8.0, 0.98, 8)
    text = [int(tree[0][draw.between(0, size - 1)]) for _ in range(60)]
    copies.begin(text[:40], text[40:] if draw.between(0, 1) else [])
    copies.columns(ids)
    return copies


def grow_likely(draw: Draw) -> tuple:
    size, rows, padding = draw.between(1, 40), draw.between(1, 5), draw.between(0, 3)
    tree, columns = tree_of(draw, size, draw.one_of([80, size + 3])), draw.between(1, 300)
    frontier = torch.randperm(size, generator=draw.random)[:rows]
    rows = len(frontier)
    logits = (draw.normal(rows, columns) * 3).round(decimals=1)
    normalized = draw.between(0, 1) == 1
    if normalized:  # log-probabilities, some not proposed
        logits = -logits.exp().masked_fill(draw.normal(rows, columns) > 1, math.inf)
    ids = draw.one_of([None, torch.randperm(2 * columns, generator=draw.random)[:columns]])
    marks = draw.one_of([None, draw.whole(worth.SOURCES, rows + padding, columns).to(torch.uint8)])
    logits = draw.strided(poisoned(logits.to(draw.one_of(FLOATS)), padding))
    copies = (
        None
        if logits.dtype is torch.float16
        else draw.one_of([None, copies_of(draw, tree, size, ids)])
    )
    drafted = ops.Drafted(logits, ids, normalized, marks, copies)
    nodes = ops.Nodes(torch.cat([frontier, draw.whole(size, padding)]), count(rows))
    limits = ops.Limits(draw.one_of([-1e9, -6.0, -2.0]), draw.between(1, 40), draw.between(1, 3), 4)
    counters = count(size), count(draw.between(1, 5)), count(0)
    state = state_of(draw, tree, size, 8, 9)
    return (tree, counters, nodes, drafted, state, limits), {}


def source_of(draw: Draw, size: int) -> Callable[..., Free | None] | None:
    """None, or what proposes nodes below the first one that it is asked for in a tree of this size."""
    kinds = [(draw.between(1, 7), draw.between(0, 12)) for _ in range(draw.between(0, 6))]

    def below(nodes: ops.Nodes, most: int, least: float) -> Free | None:
        taken = kinds[: max(most, 0)] if len(nodes[0]) else []
        parents = (
            [int(nodes[0][0]), int(nodes[0][0]), size, size + 2, size, size + 4] if taken else []
        )
        edges = [least * number / 6 for number in range(len(taken))]
        tokens = list(range(2000, 2000 + len(taken)))
        marks, ranks = [mark for mark, _ in taken], [rank for _, rank in taken]
        return Free(parents[: len(taken)], tokens, edges, marks, ranks) if taken else None

    return draw.one_of([None, below, below])


def start_search(draw: Draw) -> tuple:
    tree = tree_of(draw, 1, draw.one_of([40, 80]))
    state = state_of(draw, tree, 1)
    return (
        tree,
        count(1),
        state,
        draw.between(1, 3),
        source_of(draw, 1),
        (draw.between(1, 6), -draw.between(1, 3)),
        count(draw.between(0, 5)),
        draw.between(1, 6),
    ), {}


def keep_likely(draw: Draw) -> tuple:
    size = draw.between(1, 40)
    tree = tree_of(draw, size, draw.one_of([80, size + 3]))
    state = state_of(draw, tree, size)
    asked = draw.between(1, 9), draw.between(1, 6), -draw.between(1, 3)
    return (tree, count(size), state, source_of(draw, size), asked, draw.between(1, 30)), {}


def count_outcomes(draw: Draw) -> tuple:
    size, padding = draw.between(1, 70), draw.between(0, 4)
    tree = tree_of(draw, size, 80)
    path, chosen = [0], []
    while True:
        below = [node for node in range(1, size) if int(tree[1][node]) == path[-1]]
        if not below or draw.between(0, 3) == 0:
            chosen.append(draw.between(0, 999))
            break
        path.append(draw.one_of(below))
        chosen.append(int(tree[0][path[-1]]))
    nodes = ops.Nodes(torch.tensor(path + [0] * padding), count(len(path)))
    state = state_of(draw, tree, size)
    return (tree, count(size), nodes, poisoned(torch.tensor(chosen), padding), state), {}


def update_throughput(draw: Draw) -> tuple:
    throughput = throughput_of(draw, draw.between(1, 20), draw.between(1, 6))
    return (throughput, count(draw.one_of([0, draw.between(1, 9)]))), {}


def select_worth(draw: Draw) -> tuple:
    live, most = draw.between(1, 40), draw.between(1, 12)
    scores = -draw.scores(live).abs() if draw.between(0, 1) else -draw.normal(live).abs()
    price = draw.one_of([0.0, 0.05, 0.5]) * torch.rand(draw.between(2, 20), generator=draw.random)
    return (draw.strided(poisoned(scores, draw.between(0, 30))), count(live), price, most), {}


def next_pass(draw: Draw) -> tuple:
    size, padding = draw.between(1, 30), draw.between(0, 9)
    tree = toy.random_tree(draw.between(0, 10**6), size, 60)
    waiting = torch.rand(size, generator=draw.random) < 0.5
    rounded = draw.between(0, 1)  # then chances tie
    paths = tree.path_log_probs.round() if rounded else tree.path_log_probs
    paths = paths.masked_fill(draw.normal(size) > 1.5, -math.inf)
    profile = (
        torch.rand(draw.between(1, 3), draw.between(1, 4), generator=draw.random)
        .sort(1, descending=True)
        .values
    )
    width, nodes = draw.between(1, 6), draw.between(1, 20)
    prices = [
        draw.one_of([0.0, 0.02, 0.2]) * torch.rand(n + 1, generator=draw.random)
        for n in (nodes, width)
    ]
    widths = torch.tensor(sorted({*(draw.between(1, width) for _ in range(3)), width}))
    given = (poisoned(part, padding) for part in (paths, tree.log_probs))
    waiting = torch.cat([waiting, torch.ones(padding, dtype=torch.bool)])
    return (
        *given,
        waiting,
        count(size),
        profile,
        ops.Prices(*prices, widths),
        draw.between(1, 3),
    ), {}


def choose_tokens(draw: Draw) -> tuple:
    rows, kind = draw.between(2, 5), draw.one_of(FLOATS)
    logits = (draw.normal(rows, draw.between(3, 70)) * 3).round(decimals=1).to(kind)
    logits[0] = NAN
    logits[-1, -1] = math.inf
    seed = draw.one_of([None, draw.whole(2**62, 1), -draw.whole(2**62, 1)])
    return (
        logits,
        torch.arange(rows) * 2**20 + draw.between(0, 2**40),
        seed,
        torch.tensor([0.7]),
    ), {}


def truncate(draw: Draw) -> tuple:
    """Chances are far from where a row ends: eighths, whose sums no share falls on."""
    rows, columns, kind = draw.between(1, 5), draw.between(1, 300), draw.one_of(FLOATS)
    logits = (draw.normal(rows, columns) * 3).round().to(kind)  # with ties
    logits[0, draw.between(0, columns - 1)] = draw.one_of([-math.inf, NAN, math.inf])
    numbers = draw.one_of([0.0, 0.05, 0.5]), draw.one_of([0.0, 0.13, 0.83, 1.0])
    min_p, top_p = (torch.tensor([number]) for number in numbers)
    top_k = torch.tensor([draw.one_of([1, draw.between(1, 300), 2**62])])
    return (
        draw.strided(logits),
        torch.tensor([draw.one_of([0.7, 1.0])]),
        ops.Truncation(top_k, top_p, min_p),
    ), {}


def couple(draw: Draw) -> tuple:
    rows, columns, kind = draw.between(1, 5), draw.between(3, 700), draw.one_of(FLOATS)
    logits = (draw.normal(rows, columns) * 3).to(kind)
    logits[0, draw.between(0, columns - 1)] = draw.one_of([-math.inf, NAN, math.inf])
    ids = draw.one_of([None, torch.randperm(3 * columns, generator=draw.random)[:columns]])
    positions = 2**33 + draw.whole(3, rows)
    seed = draw.one_of([1, -1]) * draw.whole(2**62, 1)
    return (
        draw.strided(logits),
        ids,
        positions,
        seed,
        torch.tensor([draw.one_of([0.0, 0.7, 3.0])]),
    ), {}


def walk(draw: Draw) -> tuple:
    size, padding = draw.between(1, 70), draw.between(0, 5)
    tree, chosen = toy.random_tree(draw.between(0, 10**6), size, 60), draw.whole(3, size)
    for node in range(1, size):
        if draw.between(0, 2):
            chosen[tree.parents[node]] = tree.tokens[node]
    if draw.between(0, 2) == 0:
        chosen[draw.between(0, size - 1)] = -1
    parents = torch.cat([tree.parents, tree.parents.new_full((padding,), -1)])
    return (poisoned(tree.tokens, padding), parents, poisoned(chosen, padding), count(size)), {}


def compact_kv(draw: Draw) -> tuple:
    """What stands behind the path is scratch, so there is no padding here."""
    prefix, places = draw.between(0, 9), draw.between(0, 8)
    path = torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.randperm(8, generator=draw.random) + 1]
    )[:places]
    slab = draw.normal(2, 2, 3, prefix + 12, 8)
    return (slab, path.sort().values, count(places), count(prefix)), {}


def gather_rows(draw: Draw) -> tuple:
    rows, channels = draw.between(1, 9), draw.between(16, 20)
    states, table = (draw.normal(n, channels).to(draw.one_of(FLOATS)) for n in (7, 11))
    return (states, draw.whole(7, rows), table, draw.whole(11, rows)), {}


CASES: dict[str, Callable[[Draw], tuple]] = {
    case.__name__: case
    for case in (
        append_children,
        append_nodes,
        extract,
        root_rows,
        level_rows,
        start_search,
        keep_likely,
        beam_observation,
        best_action,
        best_candidates,
        chances,
        choose_tokens,
        truncate,
        couple,
        classify_paths,
        classify_row,
        gather_rows,
        compact_kv,
        count_outcomes,
        update_throughput,
        grow_likely,
        next_pass,
        select_best,
        select_worth,
        step_queues,
        subtree,
        walk,
    )
}


def check(op: str, seed: int, device: str = "cpu") -> None:
    """The op on the device gives what it means on the CPU, and leaves what it changes in the same state."""
    given, options = CASES[op](Draw(seed))
    theirs = tree_map_only(Tensor, lambda part: part.to(device, copy=True), (given, options))
    means = ops.by_meaning(lambda: getattr(ops, op)(*given, **options))
    found = getattr(ops, op)(*theirs[0], **theirs[1])
    same(found, means)
    same(theirs, (given, options))


def same(found: Any, means: Any) -> None:
    """Numbers up to rounding, all else exactly; of what is padded only what counts."""
    if isinstance(means, ops.Nodes | ops.Candidates | ops.Walked | ops.Drawn):
        live = int(means.live)
        assert int(found.live) == live
        for name in means._fields:
            ours, theirs = getattr(found, name), getattr(means, name)
            if name in ("live", "bonus", "expand"):
                same(ours, theirs)
                continue
            assert ours.shape == theirs.shape
            same(ours[:live], theirs[:live])
            if theirs.dtype is torch.int64:
                assert bool(((ours[live:] >= 0) & (ours[live:] < HUGE)).all()), (
                    "padding is an index all the same"
                )
    elif isinstance(means, ops.Queues):
        waiting = int((means.scores > -math.inf).sum())
        for name in means._fields:
            size = None if name in ("accepted", "scores", "bound") else waiting
            same(getattr(found, name)[:size], getattr(means, name)[:size])
    elif isinstance(means, ops.Notes):
        for ours, theirs in zip(
            found, means, strict=True
        ):  # the last entry is what padding writes to
            same(ours[:-1], theirs[:-1])
    elif isinstance(means, Tensor):
        assert found.dtype is means.dtype
        torch.testing.assert_close(found.cpu(), means, rtol=1e-5, atol=1e-5, equal_nan=True)
    elif isinstance(means, tuple | list):
        for ours, theirs in zip(found, means, strict=True):
            same(ours, theirs)
    elif isinstance(means, dict):
        same(list(found.values()), list(means.values()))
    else:
        assert found == means

"""Cases of the ops with counts on the device, each against its twin with counts on the host; any backend must pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from specengine.device_tree import DeviceTree
from torch import Tensor

from specengine import ops, reference
from tests import toy


def number(value: int, device: str) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def scores_of(seed: int, count: int, device: str) -> Tensor:
    """float32 [count] with ties and -inf."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 1, (count,), generator=random).float()
    return scores.masked_fill(torch.rand(count, generator=random) < 0.2, -math.inf).to(device)


def check_select_nodes(seed: int, size: int, capacity: int, most: int, device: str) -> None:
    scores = scores_of(seed, capacity, device)
    scores[size:] = math.nan  # not looked at
    found = ops.select_nodes(scores, number(size, device), most)
    expected = ops.select_best(scores[:size], most)
    live = int(found.live)
    assert found.indices.shape == (most,)
    assert found.indices[:live].tolist() == expected.tolist()
    assert not found.indices[live:].any()


def check_select_candidates(
    seed: int, rows: int, padding: int, columns: int, most: int, limit: int, device: str
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows + padding, columns, generator=random).to(device) * 3
    logits[rows:] = math.nan
    scores = torch.cat([scores_of(seed, rows, device), torch.full((padding,), -math.inf, device=device)])
    for gate in (-math.inf, math.log(0.1)):
        found = ops.select_candidates(logits, scores, most, number(limit, device), torch.tensor([gate], device=device))
        wanted = reference.best_candidates(
            logits[:rows], scores[:rows], min(max(limit, 0), most), gate, -math.inf, False
        )
        live = int(found.live)
        assert [part[:live].tolist() for part in found[:2]] == [part.tolist() for part in wanted[:2]]
        for ours, theirs in zip(found[2:4], wanted[2:], strict=True):
            torch.testing.assert_close(ours[:live], theirs, rtol=1e-5, atol=1e-5)
        for indices, bound in ((found.rows, len(logits)), (found.columns, columns)):
            assert indices.shape == (most,)
            assert bool(((indices >= 0) & (indices < bound)).all()), "padding is an index all the same"


def check_hang_nodes(seed: int, size: int, count: int, padding: int, width: int, capacity: int, device: str) -> None:
    grown = toy.random_tree(seed, size + count, 1000)
    tree, entries = DeviceTree(capacity, device), count + padding
    before = (grown.tokens, grown.parents, grown.depths, grown.log_probs, grown.path_log_probs)
    arrays = (tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.path_log_probs)
    for ours, theirs in zip(arrays, before, strict=True):
        ours[:size] = theirs[:size].to(device)
    words = ops.ancestor_words(grown.parents[:size])
    tree.ancestors[:size, : words.shape[1]] = words.to(device)
    len(tree).fill_(size)
    random = torch.Generator().manual_seed(seed)
    parents = torch.randint(0, size, (entries,), generator=random).to(device)
    tokens, edges = torch.arange(entries, device=device) + 5, -torch.rand(entries, generator=random).to(device)
    parents[count:] = 0
    chosen = torch.randperm(max(count, 1), generator=random)[: min(width, count)].sort().values
    expand = torch.zeros(width, dtype=torch.int64)
    expand[: len(chosen)] = chosen
    found = tree.add(
        parents, tokens, edges, number(count, device), ops.Found(expand.to(device), number(len(chosen), device))
    )
    if size + count > capacity:
        assert len(tree) == size
        assert int(found.live) == 0
        return
    assert len(tree) == size + count
    assert tree.tokens[size : size + count].tolist() == tokens[:count].tolist()
    assert tree.parents[size : size + count].tolist() == parents[:count].tolist()
    known = tree.parents[: size + count]
    wanted = ops.ancestor_words(known.cpu())
    assert tree.ancestors[: size + count, : wanted.shape[1]].tolist() == wanted.tolist()
    assert tree.depths[size : size + count].tolist() == (tree.depths[parents[:count]] + 1).tolist()
    sums = tree.path_log_probs[parents[:count]] + edges[:count]
    torch.testing.assert_close(tree.path_log_probs[size : size + count], sums, rtol=0, atol=0)
    live = int(found.live)
    assert found.nodes.tolist() == [size + int(entry) for entry in chosen] + [0] * (width - live)
    assert found.depths[:live].tolist() == tree.depths[found.nodes[:live]].tolist()
    assert found.scores[:live].tolist() == tree.path_log_probs[found.nodes[:live]].tolist()
    assert found.scores[live:].tolist() == [-math.inf] * (width - live)


def check_queues(seed: int, budget: int, batch: int, max_depth: int, rows: int, device: str) -> None:
    """A whole search beside BestFirst: the same nodes drawn, in order, the same to draft from, and the same filled."""
    random = torch.Generator().manual_seed(seed)

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=random)

    queues = ops.Queues.start(budget, device)
    for array in queues:  # what an earlier search may have left
        array.fill_(-0.5 if array.is_floating_point() else 7)
    theirs = ops.best_first(budget, batch, max_depth)
    ids = torch.randperm(9, generator=random) if seed % 2 else None
    for level in range(1, 5):
        count = int(whole(7 + seed % 60, 1))
        nodes, depths, places, columns = whole(9, rows), whole(3, rows), whole(rows, count), whole(9, count)
        scores = scores_of(int(places.sum()) + seed, count, "cpu").sort(descending=True).values
        edges = torch.rand(count, generator=random)
        tokens = columns if ids is None else ids[columns]
        theirs.push(nodes[places], depths[places], tokens, edges, scores)
        wanted = theirs.pop()
        poison = torch.full((3,), math.nan)
        padded = [torch.cat([part, torch.zeros(3, dtype=torch.int64)]) for part in (places, columns)]
        padded += [torch.cat([part, poison]) for part in (edges, scores)]
        found = ops.Selection(*(part.to(device) for part in padded), number(count, device))
        on_device = nodes.to(device), depths.to(device), torch.zeros(rows, device=device)
        given = None if ids is None else ids.to(device), number(level, device), batch, max_depth
        before = [part.tolist() for part in queues]
        nothing = ops.step_queues(queues, found, ops.Frontier(*on_device, number(0, device)), *given, 0.0)
        assert int(nothing.live) == int(nothing.expand.live) == 0
        assert [part.tolist() for part in queues] == before
        # the mass reaches the one threshold and not the other
        stops = bool(whole(2, 1))
        threshold = wanted.mass * (1 + 1e-9) + 1e-12 if stops else wanted.mass * (1 - 1e-9)
        drawn = ops.step_queues(queues, found, ops.Frontier(*on_device, number(1, device)), *given, threshold)
        check_drawn(drawn, wanted._replace(expand=wanted.expand[:0]) if stops else wanted)
        assert drawn.expand.indices.shape == (min(batch, budget),)
    check_drawn(ops.fill_queues(queues), theirs.fill())


def check_drawn(drawn: ops.Drawn, wanted: ops.Popped) -> None:
    live, expanded = int(drawn.live), int(drawn.expand.live)
    ours = drawn.parents[:live], drawn.tokens[:live], drawn.log_probs[:live]
    assert [part.tolist() for part in ours] == [part.tolist() for part in wanted[:3]]
    assert drawn.expand.indices[:expanded].tolist() == wanted.expand.tolist()
    assert not drawn.expand.indices[expanded:].any()


def check_take_subtree(seed: int, size: int, most: int, capacity: int, device: str) -> None:
    grown = toy.random_tree(seed, size, 1000)
    nodes = ops.select_best(grown.path_log_probs, most)
    parents, words = ops.subtree(grown.parents, nodes)
    all_parents = torch.full((capacity,), 0)
    all_parents[:size] = grown.parents
    ancestors = torch.full((capacity, -(-capacity // 64)), -1)
    known = ops.ancestor_words(grown.parents)
    ancestors[:size], ancestors[:size, : known.shape[1]] = 0, known
    padded = torch.zeros(most, dtype=torch.int64)
    padded[: len(nodes)] = nodes
    given = all_parents.to(device), ancestors.to(device), padded.to(device)
    found = ops.take_subtree(*given, number(len(nodes), device))
    assert found[0].tolist() == parents.tolist() + [-1] * (most - len(nodes))
    assert found[1][: len(nodes), : words.shape[1]].tolist() == words.tolist()
    assert not found[1][len(nodes) :].any()


def check_choose_rows(seed: int, rows: int, columns: int, kind: torch.dtype, device: str) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, columns, generator=random) * 3).round(decimals=1).to(kind).to(device)
    logits[0] = math.nan
    logits[-1, -1] = math.inf
    positions = torch.arange(rows, device=device) * 2**20 + seed
    heat = torch.tensor([0.7], device=device)
    for key in (None, seed, 2**64 - 1 - seed):
        signed = None if key is None else torch.tensor([(key + 2**63) % 2**64 - 2**63], device=device)
        found = ops.choose_rows(logits, positions, signed, heat)
        # the divisor as float32 has it, as it is on the device
        wanted = reference.choose_tokens(logits.cpu(), positions.tolist(), key, float(heat))
        assert found.tolist() == wanted.tolist()


def check_walk_down(seed: int, size: int, padding: int, device: str) -> None:
    tree = toy.random_tree(seed, size, 3)
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, 3, (size,), generator=random)
    if seed % 3 == 0:
        chosen[int(torch.randint(0, size, (1,), generator=random))] = -1
    tokens, parents, choices = (
        torch.cat([part, torch.full((padding,), value)]).to(device)
        for part, value in ((tree.tokens, 1), (tree.parents, 0), (chosen, 1))
    )
    found = ops.walk_down(tokens, parents, choices, number(size, device))
    path, bonus = _walk(tree.tokens.tolist(), tree.parents.tolist(), chosen.tolist())
    live = int(found.live)
    assert (found.nodes[:live].tolist(), int(found.bonus)) == (path, bonus)
    assert bool(((found.nodes >= 0) & (found.nodes < size + padding)).all())


def _walk(tokens: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], int]:
    if chosen[0] < 0:
        return [], -1
    path = [0]
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]] and chosen[node] >= 0:
            path.append(node)
    return path, chosen[path[-1]]


def check_move_rows(seed: int, prefix: int, taken: int, places: int, device: str) -> None:
    random = torch.Generator().manual_seed(seed)
    slab = torch.randn(2, 2, 3, prefix + places + 2, 8, generator=random).to(device)
    path = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(places - 1, generator=random) + 1])[:taken]
    path = path.sort().values
    expected = slab.clone()
    if taken:
        ops.compact_kv(expected, prefix, path.tolist())
    padded = torch.zeros(places, dtype=torch.int64)
    padded[:taken] = path
    ops.move_rows(slab, padded.to(device), number(taken, device), number(prefix, device))
    # behind the path anything may stand, as it is scratch
    torch.testing.assert_close(slab[:, :, :, : prefix + taken], expected[:, :, :, : prefix + taken], rtol=0, atol=0)
    torch.testing.assert_close(slab[:, :, :, prefix + places :], expected[:, :, :, prefix + places :], rtol=0, atol=0)


def check_gather_rows(seed: int, count: int, channels: int, own: int, dtype: torch.dtype, device: str) -> None:
    """own: channels of the embeddings."""
    random = torch.Generator().manual_seed(seed)
    states, table = (torch.randn(n, c, generator=random).to(device, dtype) for n, c in ((7, channels), (11, own)))
    sources, tokens = (torch.randint(n, (count,), generator=random).to(device) for n in (7, 11))
    found = ops.gather_rows(states, sources, table, tokens)
    assert torch.equal(found[0], torch.stack([states[i] for i in sources.tolist()]))
    assert torch.equal(found[1], torch.stack([table[i] for i in tokens.tolist()]))


CHECKS: dict[str, Callable[[int, str], None]] = {
    "select_nodes": lambda seed, device: check_select_nodes(seed, seed % 40, 40, 1 + seed % 9, device),
    "select_candidates": lambda seed, device: check_select_candidates(
        seed, 1 + seed % 5, seed % 4, 1 + seed * 7 % 150, 1 + seed % 30, seed % 34 - 2, device
    ),
    "hang_nodes": lambda seed, device: check_hang_nodes(
        seed, 1 + seed % 70, seed % 17, seed % 5 + 1, 1 + seed % 8, 80, device
    ),
    "step_queues": lambda seed, device: check_queues(
        seed, 1 + seed % 9 * (1 + seed % 8), 1 + seed % 4, 1 + seed % 3, 1 + seed % 5, device
    ),
    "gather_rows": lambda seed, device: check_gather_rows(
        seed, 1 + seed % 9, 16 + seed % 5, 16 + seed % 5 + seed % 2, (torch.float32, torch.bfloat16)[seed % 2], device
    ),
    "take_subtree": lambda seed, device: check_take_subtree(seed, 1 + seed % 90, 1 + seed % 70, 130, device),
    "choose_rows": lambda seed, device: check_choose_rows(
        seed, 2 + seed % 4, 3 + seed % 70, (torch.float32, torch.bfloat16)[seed % 2], device
    ),
    "walk_down": lambda seed, device: check_walk_down(seed, 1 + seed % 70, seed % 5, device),
    "move_rows": lambda seed, device: check_move_rows(seed, seed % 9, seed % 7, 7 + seed % 3, device),
}

"""What each op of `ops` means, in plain torch on any device; the compiled backends are tested against this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from specengine.errors import InputError

WORD_BITS = 64
LARGEST = 3e38  # what +inf counts as: finite in float32, so that differences of scores stay defined
MASK64 = (1 << 64) - 1

WRONG_PARENTS = "parents: the root's must be -1, every other's an earlier node"
WRONG_SUBTREE = "nodes: must be ascending, start with the root and contain every node's parent"
HAS_NAN = "contains NaN"


class Paths(NamedTuple):
    """Of each row the nodes that it sees, in the order of their positions: nodes int32 [n, most], of which the first
    `counts`, int32 [n], count."""

    nodes: Tensor
    counts: Tensor


class Candidates(NamedTuple):
    """Scored continuations of a layer. rows, columns: int64 [m]; log_probs: float32 [m], of the edge; scores: float32
    [m], of the path."""

    rows: Tensor
    columns: Tensor
    log_probs: Tensor
    scores: Tensor


class Popped(NamedTuple):
    """Queue entries that become tree nodes, best first. parents, tokens: int64 [m]; log_probs: float32 [m], of the
    edge; expand: int64 [k], ascending indices into them of the nodes to draft from; mass: the sum of those nodes'
    path probabilities (S of SALF Alg. 2)."""

    parents: Tensor
    tokens: Tensor
    log_probs: Tensor
    expand: Tensor
    mass: float


def ancestor_words(parents: Tensor) -> Tensor:
    # Pointer doubling: after round r a row knows its 2**r nearest ancestors. Row n stands for "above the root".
    n, device = parents.shape[0], parents.device
    nodes = torch.arange(n, device=device)
    _require((parents < nodes).all() & (parents[1:] >= 0).all() & (parents[:1] == -1).all(), WRONG_PARENTS)
    words = torch.zeros(n + 1, -(-n // WORD_BITS), dtype=torch.int64, device=device)
    words[nodes, nodes // WORD_BITS] = torch.ones_like(nodes) << (nodes % WORD_BITS)
    jump = torch.cat([parents, parents.new_tensor([n])])
    jump[:1] = n
    for _ in range((n - 1).bit_length()):
        words |= words[jump]
        jump = jump[jump]
    return words[:n]


def subtree(parents: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    size, kept = parents.shape[0], nodes.shape[0]
    inside = nodes.clamp(0, max(size - 1, 0))  # what is outside is refused below, and must not be read before
    renumbered = torch.full((size + 1,), -1, dtype=torch.int64, device=parents.device)
    renumbered[inside] = torch.arange(kept, device=parents.device)
    new_parents = renumbered[parents[inside]]  # the root's parent -1 reads the spare last entry, which stays -1
    rooted = (nodes[:1] == 0).sum() == 1
    _require(
        rooted & (new_parents[1:] >= 0).all() & (nodes[1:] > nodes[:-1]).all() & (inside == nodes).all(), WRONG_SUBTREE
    )
    return new_parents, ancestor_words(new_parents)


def append_nodes(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    size: int,
    parents: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    all_tokens, all_parents, depths, edges, paths, ancestors = tree
    stop = size + parents.shape[0]
    all_tokens[size:stop] = tokens
    all_parents[size:stop] = parents
    depths[size:stop] = depths[parents] + 1
    edges[size:stop] = log_probs
    paths[size:stop] = paths[parents] + log_probs
    ancestors[size:stop] = ancestors[parents] | own_bits(ancestors.shape[0], ancestors.device)[size:stop]


@lru_cache(maxsize=16)
def own_bits(capacity: int, device: torch.device) -> Tensor:
    """Word rows in which node i has bit i alone: int64 [capacity, ceil(capacity / 64)]."""
    node = torch.arange(capacity, device=device)
    words = torch.zeros(capacity, -(-capacity // WORD_BITS), dtype=torch.int64, device=device)
    words[node, node // WORD_BITS] = torch.ones_like(node) << (node % WORD_BITS)
    return words


def tree_mask(ancestors: Tensor, columns: int) -> Tensor:
    column = torch.arange(columns, device=ancestors.device)
    return ((ancestors[:, column // WORD_BITS] >> (column % WORD_BITS)) & 1).bool()


def select_best(log_probs: Tensor, count: int) -> Tensor:
    _require(~log_probs.isnan().any(), "log_probs: " + HAS_NAN)
    best = order_keys(log_probs).topk(min(count, log_probs.shape[0])).indices.sort().values
    return best[log_probs[best] > -math.inf]


def top_children(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    values = defined(logits.float())
    columns = order_keys(values).topk(k).indices
    best = values.gather(1, columns)
    if normalized:
        return best, columns
    peak = best[:, :1].clamp(min=torch.finfo(torch.float32).min)  # finite also in rows of -inf alone
    return (best - peak) - (values - peak).exp().sum(1, keepdim=True).log().clamp(min=0.0), columns


def best_candidates(
    logits: Tensor, scores: Tensor, count: int, log_gate: float, bound: float, normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns, home = logits.shape[1], scores.device
    log_probs, best = top_children(logits, min(max(count, 1), columns), normalized)
    scores = scores.to(logits.device)
    paths = defined(scores)[:, None] + log_probs
    passes = (paths > bound) & (paths > -math.inf)
    if log_gate > -math.inf and paths.numel():
        passes &= paths >= paths.max() + log_gate
    row, place = passes.nonzero(as_tuple=True)
    found = paths[row, place]
    order = order_keys(found).argsort(descending=True)[:count]
    row, place = row[order], place[order]
    chosen = row, best[row, place], log_probs[row, place], found[order]
    return Candidates(*(tensor.to(home) for tensor in chosen))


def top_entropy(logits: Tensor, top: int, normalized: bool) -> Tensor:
    log_probs, _ = top_children(logits, top, normalized)
    log_probs = log_probs.double()
    return -torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0).sum(1).float()


def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    # by their weights, as calling a module takes longer than the products
    hidden = linear(features, net[0], net[1]).relu()
    return linear(hidden, net[2], net[3])[..., 0].sigmoid()


LOWEST = -1e4  # finite, so that an impossible candidate does not silence a network


def lay_out(scores: Tensor, depths: Tensor, width: int, places: int, pad: float) -> Tensor:
    """float32 [places]: path log-probabilities, in the order of creation, each level of a beam from its own place on.

    scores: float32 [m]; depths: int64 [m], ascending from 1. A level holds parents by children, row-major, and has room
    for width (the first) or width**2 of them; where there are fewer, they stand together at its beginning. Vacant
    places hold the pad; scores below a negative pad, or LOWEST, count as that.
    """
    scores = scores.clamp(min=pad if pad < 0 else LOWEST)
    laid = torch.full((places,), pad, device=scores.device)
    first = torch.searchsorted(depths, depths)
    start = (depths > 1) * width + (depths - 2).clamp(min=0) * width**2
    laid[start + torch.arange(len(depths), device=depths.device) - first] = scores
    return laid


def beam_observation(
    scores: Tensor, depths: Tensor, width: int, pad: float, shown: tuple[int, int], room: int,
    facts: tuple[float, float], repeats: int,
) -> Tensor:  # fmt: skip
    laid = lay_out(scores[1:], depths[1:], width, shown[1], pad)[shown[0] :]
    vacant = laid.new_full((room - len(laid),), pad)
    return torch.cat([laid, vacant, *(laid.new_full((repeats,), fact) for fact in facts)])


def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> int:
    values = observation
    for place in range(0, len(layers), 2):  # without modules, whose calls take longer than these products
        if place:
            values = values.tanh() if activation == "tanh" else values.relu()
        values = linear(values, layers[place], layers[place + 1])
    return int(values.argmax())


def classify_paths(path_log_probs: Tensor, entropies: Tensor, depth: int, net: Sequence[Tensor]) -> Tensor:
    probs = path_log_probs.exp()
    return mlp(torch.stack((probs, entropies[:, None].expand_as(probs), torch.full_like(probs, depth)), -1), net)


def classify_row(logits: Tensor, top: int, depth: int, net: Sequence[Tensor], normalized: bool) -> float:
    count = net[0].shape[1] - 2
    probs = top_children(logits[None], min(count, logits.shape[0]), normalized)[0][0].exp()
    missing = probs.new_zeros(count - probs.shape[0])
    last = top_entropy(logits[None], min(top, logits.shape[0]), normalized), probs.new_full((1,), depth)
    return float(mlp(torch.cat([probs, missing, *last]), net))


class BestFirst:
    """As ops.BestFirst says, in Python lists; best first."""

    def __init__(self, budget: int, batch: int, max_depth: int, device: torch.device | str) -> None:
        self._budget, self._batch, self._max_depth, self._device = budget, batch, max_depth, device
        self._accepted: list[tuple[float, int]] = [(-0.0, 0)]  # negated score, creation order
        self._queue: list[tuple[float, int, int, int, int, float]] = []  # and parent, depth, token, edge
        self._created = 0

    @property
    def bound(self) -> float:
        known = sorted([entry[0] for entry in (*self._accepted, *self._queue)])
        return -known[self._budget - 1] if len(known) >= self._budget else -math.inf

    def push(
        self, parents: Tensor, depth_of_parents: Tensor, tokens: Tensor, log_probs: Tensor, scores: Tensor
    ) -> None:
        if bool(scores.isnan().any()):
            raise InputError("scores: " + HAS_NAN)
        rows = zip(*(values.tolist() for values in (scores, parents, depth_of_parents, tokens, log_probs)), strict=True)
        for score, parent, depth, token, edge in rows:
            if score > -math.inf:
                self._created += 1
                self._queue.append((-score, self._created, parent, depth + 1, token, edge))
        self._queue = sorted(self._queue)[: self._budget]

    def pop(self) -> Popped:
        inner = [place for place, entry in enumerate(self._queue) if entry[3] < self._max_depth]
        count = inner[self._batch - 1] + 1 if len(inner) >= self._batch else len(self._queue)
        taken, self._queue = self._queue[:count], self._queue[count:]
        self._accepted = sorted([*self._accepted, *(entry[:2] for entry in taken)])[: self._budget]
        within = set(self._accepted)
        worst = self._accepted[-1][0] if len(self._accepted) == self._budget else math.inf
        nodes = [entry for entry in taken if entry[:2] in within]
        expand = [i for i, entry in enumerate(nodes) if entry[0] < worst and entry[3] < self._max_depth]
        return self._popped(nodes, expand)

    def fill(self) -> Popped:
        room = self._budget - len(self._accepted)
        taken, self._queue = self._queue[:room], self._queue[room:]
        self._accepted = sorted([*self._accepted, *(entry[:2] for entry in taken)])
        return self._popped(taken, [])

    def _popped(self, nodes: list[tuple[float, int, int, int, int, float]], expand: list[int]) -> Popped:
        return Popped(
            torch.tensor([entry[2] for entry in nodes], dtype=torch.int64, device=self._device),
            torch.tensor([entry[4] for entry in nodes], dtype=torch.int64, device=self._device),
            torch.tensor([entry[5] for entry in nodes], dtype=torch.float32, device=self._device),
            torch.tensor(expand, dtype=torch.int64, device=self._device),
            math.fsum(math.exp(-nodes[i][0]) for i in expand),
        )


def keyed_gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    values = defined(scores).double()
    if not bool((values > -math.inf).any()):
        return -1
    noise = -torch.log(-torch.log(philox_uniform(seed, position, scores.shape[0]).to(scores.device)))
    return int((values + noise).argmax())


def choose_tokens(logits: Tensor, positions: Sequence[int], seed: int | None, temperature: float) -> Tensor:
    scores = logits.masked_fill(~torch.isfinite(logits), -math.inf)
    if seed is None:
        best, ids = scores.max(dim=-1)
        return torch.where(best > -math.inf, ids, -1)
    scores = scores.float() / temperature
    rows = zip(scores, positions, strict=True)
    chosen = [keyed_gumbel_argmax(row, seed & MASK64, position & MASK64) for row, position in rows]
    return torch.tensor(chosen, device=logits.device)


def walk(tokens: Tensor, parents: Tensor, chosen: Tensor) -> list[int]:
    # One pass is enough, as children come after their parents.
    choice = chosen.tolist()
    path, wanted, last = [0], choice[0], 0
    for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
        if parent == last and token == wanted:
            path.append(node)
            last, wanted = node, choice[node]
    return path


def compact_kv(slab: Tensor, prefix: int, path: Sequence[int]) -> None:
    first = next((j for j, slot in enumerate(path) if slot != j), len(path))
    if first < len(path):
        moved = torch.tensor(path[first:], device=slab.device) + prefix
        slab[:, :, :, prefix + first : prefix + len(path)] = slab.index_select(3, moved)


def strict_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    # Row by row over what it sees alone: every call has the shape that it has when the row is decoded by itself.
    heads, rows, size = query.shape
    out = torch.zeros_like(query)
    for row in range(rows):
        seen = slice(None) if mask is None else mask[row]
        keys, values = key[:, seen].float(), value[:, seen].float()
        if keys.shape[1]:
            grouped = query[:, row].float().view(key.shape[0], -1, size) * scale
            weights = (grouped[:, :, None] * keys[:, None]).sum(-1).softmax(-1)
            out[:, row] = (weights[..., None] * values[:, None]).sum(2).view(heads, size).to(query.dtype)
    return out


def order_paths(words: Tensor) -> Paths:
    named = (words[:, :, None] >> torch.arange(WORD_BITS, device=words.device) & 1).flatten(1)
    rows, most = named.shape
    places = torch.where(named.bool(), named.cumsum(1) - 1, most)  # behind the end: not named
    ids = torch.arange(most, dtype=torch.int32, device=words.device).expand(rows, most)
    nodes = torch.zeros(rows, most + 1, dtype=torch.int32, device=words.device).scatter_(1, places, ids)
    return Paths(nodes[:, :most].contiguous(), named.sum(1).int())


CHUNK = 64  # positions that are summed together


def strict_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, prefix: Tensor, live: Tensor, scale: float
) -> Tensor:
    # By chunks of absolute positions, so that neither the tree nor the size of the cache changes the order of sums.
    (heads, rows, size), (kv_heads, capacity, _) = query.shape, key.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = (query.to(wide) * scale).view(kv_heads, -1, rows, 1, size)
    ends = torch.where(torch.arange(rows, device=key.device) < live, prefix + paths.counts, 0)
    peak = torch.full(grouped.shape[:3], -math.inf, dtype=wide, device=key.device)
    total, sums = torch.zeros_like(peak), torch.zeros_like(query, dtype=wide).view(*peak.shape, size)
    for start in range(0, capacity, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, capacity), device=key.device)
        place = (positions - prefix).clamp(0, paths.nodes.shape[1] - 1).expand(rows, -1)
        slots = torch.where(positions < prefix, positions, prefix + paths.nodes.gather(1, place))
        seen = positions < ends[:, None]
        slots = slots.masked_fill(~seen, 0)
        keys, values = (cache[:, slots].to(wide).masked_fill_(~seen[..., None], 0.0) for cache in (key, value))
        scores = (grouped * keys[:, None]).sum(-1).masked_fill_(~seen, -math.inf)
        higher = torch.maximum(peak, scores.amax(-1))
        shift = higher.masked_fill(higher == -math.inf, 0.0)  # of a row that has seen nothing yet
        weights, fade = (scores - shift[..., None]).exp(), (peak - shift).exp()
        total = total * fade + weights.sum(-1)
        sums = sums * fade[..., None] + (weights[..., None] * values[:, None]).sum(-2)
        peak = higher
    return (sums / total.clamp(min=torch.finfo(wide).tiny)[..., None]).view(heads, rows, size).to(query.dtype)


def pack_mask(mask: Tensor, groups: int, dtype: torch.dtype, prefix: int) -> Tensor:
    """[groups * n, L]: 0 where seen, -inf where not."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf).repeat(groups, 1)


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, words: Tensor, prefix: Tensor, live: Tensor, seen: Tensor, scale: float
) -> Tensor:
    groups, rows = query.shape[0] // key.shape[0], query.shape[1]
    node = torch.arange(key.shape[1], device=key.device) - prefix  # which node's slot it is, negative in the prefix
    inside = node < seen
    bits = words[:, (node // WORD_BITS).clamp(0, words.shape[1] - 1)] >> (node % WORD_BITS)
    named = (bits & 1).bool() & (node < WORD_BITS * words.shape[1])
    padding = torch.arange(rows, device=key.device) >= live
    mask = torch.zeros(rows, key.shape[1], dtype=query.dtype, device=key.device)
    mask = mask.masked_fill_(~((node < 0) | named) | ~inside | padding[:, None], -math.inf).repeat(groups, 1)
    key, value = (cache.masked_fill(~inside[:, None], 0.0) for cache in (key, value))  # there may be NaN
    return tree_attention(query, key, value, mask, scale).masked_fill(padding[:, None], 0.0)


def rope_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    slab: Tensor,
    slot: Tensor,
    live: Tensor,
) -> Tensor:
    cosines, sines = (torch.cat([table[positions]] * 2, -1) for table in tables)

    def rotated(states: Tensor) -> Tensor:
        first, second = states.float().chunk(2, -1)
        return (states.float() * cosines + torch.cat([-second, first], -1) * sines).to(states.dtype)

    slots = slot + torch.arange(positions.shape[0], device=slab.device)
    for cache, rows in ((slab[0], rotated(key)), (slab[1], value)):
        cache.index_copy_(1, slots, rows)
    return rotated(query)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    # The query heads of a group become rows of one head, so keys and values are read once and never repeated.
    heads, rows, size = query.shape
    packed = query.reshape(1, key.shape[0], -1, size)
    one_row = packed.shape[2] == 1 and packed.dtype is torch.bfloat16
    if packed.device.type == "cpu" and (one_row or packed.dtype is torch.float16):
        # Here torch's CPU kernel takes 2 to 4 times as long as float32 with the conversions, and is less exact.
        packed, key, value = packed.float(), key.float(), value.float()
    if mask is not None and mask.dtype not in (torch.bool, packed.dtype):
        mask = mask.to(packed.dtype)
    out = scaled_dot_product_attention(packed, key[None], value[None], mask, scale=scale)
    return out.to(query.dtype).view(heads, rows, size)


def defined(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf).clamp(max=LARGEST)


def order_keys(values: Tensor) -> Tensor:
    """int64 keys of the order (value descending, index along the last axis ascending): larger is better, none equal.

    values: float32 without NaN. topk itself leaves open which of two equal values it takes.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, its equal
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | (
        0xFFFFFFFF - torch.arange(values.shape[-1], device=values.device)
    )


def _require(holds: Tensor, message: str) -> None:
    if holds.device.type == "cpu":
        if not holds:
            raise InputError(message)
    else:
        torch._assert_async(holds, message)  # the same without making the host wait


def philox_uniform(seed: int, position: int, n: int) -> Tensor:
    """The uniforms behind `keyed_gumbel_argmax`: float64 [n], on the CPU, in the open interval (0, 1)."""
    index = torch.arange(-(-n // 4))
    position &= MASK64
    counter = (index, index.new_tensor(position & 0xFFFFFFFF), index.new_tensor(position >> 32), index.new_tensor(0))
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))), 1)
    return (words.reshape(-1)[:n].double() + 0.5) / 2.0**32


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Any, Any]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four counter words (int64 tensors of values below 2**32); four tensors of the same kind.

    key: two words below 2**32, numbers or tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * factor, both below 2**32; in halves, as the product exceeds a signed 64-bit word."""
    upper = a * (factor >> 16)
    lower = a * (factor & 0xFFFF)
    total = (upper >> 16) + (((upper & 0xFFFF) << 16) + lower >> 32)
    return total, ((upper << 16) + lower) & 0xFFFFFFFF

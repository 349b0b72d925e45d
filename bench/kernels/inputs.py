"""Random inputs for a case: a tree over a cache, logits as a draft head gives them, a slab of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cases import Attention, Choice, Compaction, Rule, Search, Selection


class Tree(NamedTuple):
    """q [1, N, Hq, D], k and v [1, Hkv, L + N, D], words [1, N, N / 64], the dense mask bool [N, L + N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    words: Tensor
    lengths: tuple[Tensor, Tensor, Tensor]
    mask: Tensor


def random_tree(nodes: int) -> Tensor:
    """Return which nodes (ancestors and itself) each node sees, bool [N, N]."""
    generator = torch.Generator().manual_seed(nodes)
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(0, node, (), generator=generator))]
    return seen


def pack(seen: Tensor) -> Tensor:
    """Pack bool [N, M] into int64 words."""
    padded = F.pad(seen, (0, -seen.shape[1] % 64)).view(seen.shape[0], -1, 64).long()
    return (padded << torch.arange(64)).sum(-1)


def tree_inputs(case: Attention, device: torch.device) -> Tree:
    slots = case.prefix + case.nodes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    seen = random_tree(case.nodes)
    mask = torch.cat([torch.ones(case.nodes, case.prefix, dtype=torch.bool), seen], 1)
    prefix, nodes = (
        torch.tensor([value], dtype=torch.int32, device=device)
        for value in (case.prefix, case.nodes)
    )
    q = normal(1, case.nodes, case.heads, case.size)
    k, v = (normal(1, case.kv_heads, slots, case.size) for _ in range(2))
    return Tree(q, k, v, pack(seen)[None].to(device), (prefix, nodes, nodes), mask.to(device))


class Layer(NamedTuple):
    logits: Tensor
    parents: Tensor


def layer_inputs(case: Selection, device: torch.device) -> Layer:
    # a peaked distribution under a random order of tokens, as a draft head gives
    ranks = torch.rand(case.rows, case.columns, device=device).argsort(1).argsort(1)
    logits = (
        -1.35 * (ranks + 1.0).log() + 0.1 * torch.randn(case.rows, case.columns, device=device)
    ).bfloat16()
    return Layer(logits, -torch.rand(case.rows, device=device) * 4)


class Slab(NamedTuple):
    slab: Tensor
    path: Tensor
    kept: Tensor
    prefix: Tensor


def slab_inputs(case: Compaction, device: torch.device) -> Slab:
    slab = torch.randn(
        case.layers,
        2,
        case.kv_heads,
        case.prefix + 64,
        case.size,
        device=device,
        dtype=torch.bfloat16,
    )
    spread = torch.linspace(0, 63, case.kept).round().int()
    kept, prefix = (
        torch.tensor([value], dtype=torch.int32, device=device)
        for value in (case.kept, case.prefix)
    )
    return Slab(slab, spread.to(device), kept, prefix)


class Rows(NamedTuple):
    """logits [N, V]; positions, tokens and parents int64 [N]; seed int64 [1]; drawn int64 [N], to write into."""

    logits: Tensor
    positions: Tensor
    tokens: Tensor
    parents: Tensor
    seed: Tensor
    drawn: Tensor


def row_inputs(case: Choice, device: torch.device) -> Rows:
    logits = layer_inputs(Selection(case.nodes, case.columns), device).logits
    nodes = torch.arange(case.nodes, device=device)
    seed, drawn = torch.tensor([7], device=device), torch.zeros_like(nodes)
    return Rows(
        logits,
        nodes // 8 + 1000,
        nodes,
        (nodes - 1).div(2, rounding_mode="floor").clamp(min=-1),
        seed,
        drawn,
    )


class Layers(NamedTuple):
    """A frontier, int64 [batch] x 2 and int32 [1], the tokens of the draft's columns, and two layers of candidates,
    best first: rows, columns int64 [m], log-probabilities, scores float32 [m], count int32 [1]; levels: int32 [2]."""

    nodes: Tensor
    depths: Tensor
    live: Tensor
    ids: Tensor
    first: tuple[Tensor, ...]
    second: tuple[Tensor, ...]
    levels: Tensor


def search_inputs(case: Search, device: torch.device) -> Layers:
    def layer() -> tuple[Tensor, ...]:
        rows, columns = (
            torch.randint(most, (case.budget - 1,), device=device) for most in (case.batch, 32000)
        )
        scores = (-6.0 * torch.rand(case.budget - 1, device=device)).sort(descending=True).values
        return rows, columns, scores / 2, scores, torch.full_like(live, case.budget - 1)

    nodes, levels = (
        torch.arange(case.batch, device=device),
        torch.tensor([1, 2], dtype=torch.int32, device=device),
    )
    live, ids = torch.full_like(levels[:1], case.batch), torch.randperm(32000, device=device)
    return Layers(nodes, nodes // 4, live, ids, layer(), layer(), levels)


class Level(NamedTuple):
    """Logits [rows, V]; tokens, parents int64 and edges float32 [nodes - 1], of a tree without its root; nodes: int64
    [rows], those that are drafted from."""

    logits: Tensor
    tokens: Tensor
    parents: Tensor
    edges: Tensor
    nodes: Tensor


def level_inputs(case: Rule, device: torch.device) -> Level:
    logits = layer_inputs(Selection(case.rows, case.columns), device).logits
    tokens = torch.arange(1, case.nodes, device=device)
    edges = -0.1 - torch.rand(case.nodes - 1, device=device)
    nodes = torch.arange(case.nodes - case.rows, case.nodes, device=device)
    return Level(logits, tokens, (tokens - 1) // 2, edges, nodes)


INPUTS: dict[str, Callable[..., Any]] = {
    "attention": tree_inputs,
    "selection": layer_inputs,
    "compaction": slab_inputs,
    "choice": row_inputs,
    "search": search_inputs,
    "rule": level_inputs,
}

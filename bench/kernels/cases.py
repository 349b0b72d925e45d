"""Shapes of work for each kernel, and the least that each must move and compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

LOG_MU = math.log(0.03)  # TALON's gate


@dataclass(frozen=True)
class Attention:
    """`nodes` rows over `prefix` slots and themselves, as a random tree."""

    nodes: int
    prefix: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128


@dataclass(frozen=True)
class Selection:
    """The best `most` of `rows` rows of bfloat16 logits, behind TALON's gate or without one."""

    rows: int
    columns: int
    most: int = 60
    gated: bool = False


@dataclass(frozen=True)
class Compaction:
    """`kept` nodes of a cache of 64 behind `prefix` slots."""

    layers: int
    kept: int
    kv_heads: int = 8
    size: int = 128
    prefix: int = 1024


@dataclass(frozen=True)
class Choice:
    """The target's token after each of `nodes` nodes, from bfloat16 logits; greedy, or drawn with keyed noise."""

    nodes: int
    columns: int
    sampled: bool = False


@dataclass(frozen=True)
class Search:
    """A step of a best-first search: `budget` - 1 candidates go into the queues, a batch comes out."""

    budget: int
    batch: int


@dataclass(frozen=True)
class Rule:
    """A level of `auto`: the likeliest children of `rows` nodes, by bfloat16 logits, join a tree of `nodes` nodes."""

    rows: int
    columns: int
    nodes: int = 33


Case = Attention | Selection | Compaction | Choice | Search | Rule
NODES, PREFIXES = (1, 16, 32, 64, 128, 256), (512, 2048, 4096, 16384, 32768)
CASES: list[Case] = [
    *(Attention(nodes, prefix) for nodes, prefix in product(NODES, PREFIXES)),
    *(Attention(nodes, prefix, 9, 3, 64) for nodes, prefix in product((16, 64), (512, 4096))),  # SmolLM2-135M
    *(Selection(rows, columns, gated=gated)
      for rows, columns, gated in product((1, 10, 64), (32000, 49152, 128256, 151936), (False, True))),
    Selection(64, 128256, most=256),
    *(Compaction(layers, kept) for layers, kept in product((1, 32), (2, 8, 50))),
    *(Choice(nodes, columns, sampled)
      for nodes, columns, sampled in product((1, 16, 64), (49152, 128256), (False, True))),
    *(Search(budget, batch) for budget, batch in ((12, 4), (60, 10), (256, 32))),
    *(Rule(rows, columns) for rows, columns in product((1, 7), (32000, 128256))),
]  # fmt: skip
QUICK: list[Case] = [
    Attention(64, 4096),
    Attention(16, 4096),
    Selection(10, 128256, gated=True),
    Compaction(32, 8),
    Choice(64, 128256),
    Search(60, 10),
    Rule(7, 32000),
]


def kind_of(case: Case) -> str:
    return type(case).__name__.lower()


class Floor(NamedTuple):
    """The least that any way must move and compute."""

    bytes: int
    operations: int


def floor_of(case: Case) -> Floor:
    if isinstance(case, Attention):
        slots = case.prefix + case.nodes
        cache, rows = 2 * slots * case.kv_heads * case.size, 2 * case.nodes * case.heads * case.size
        return Floor(2 * (cache + rows), 2 * rows * slots)
    if isinstance(case, Selection):
        return Floor(case.rows * case.columns * 2, 0)
    if isinstance(case, Choice):
        return Floor(case.nodes * case.columns * 2, 0)
    if isinstance(case, Rule):
        return Floor(case.rows * case.columns * 2, 0)
    if isinstance(case, Search):
        # read and written: of G a score, of Q two numbers and three of 64 bits
        entry = 3 * 4 + 3 * 8
        return Floor(2 * case.budget * entry + (case.budget - 1) * (2 * 4 + 2 * 8), 0)
    return Floor(2 * 2 * case.layers * case.kv_heads * (case.kept - 1) * case.size * 2, 0)

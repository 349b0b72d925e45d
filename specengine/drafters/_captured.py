"""Drafts whose passes are captured in CUDA graphs, over trees that stand on the host: a module of drafts, none itself.

The padded frontier: a pass of n nodes runs as one of `bucket(n)` rows, of which only the n are looked at. Policies see
what they see without padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import ops
from specengine.causal_lm import attend_padded
from specengine.drafters import Step
from specengine.drafters.eagle import Eagle, embed
from specengine.drafters.small_model import SmallModel
from specengine.errors import InputError
from specengine.graphs import Graphs, RowBuffer, SlotWords, bucket, buckets, causal_words, room, words_for
from specengine.models.eagle_head import RotatingAttend, Rotation
from specengine.tree import TokenTree

MOST_ROWS = 64  # of one pass; more nodes are run in pieces, as none sees another of its own pass

HOST = torch.device("cpu")


class _Passes:
    """The padded passes of one draft: buffers by size, and whom each node sees in the scratch."""

    def __init__(self, device: torch.device) -> None:
        self.graphs = Graphs(device)
        self.slots = SlotWords()
        self._buffers: dict[tuple[int, int], RowBuffer] = {}

    def rows(self, count: int, nodes: int) -> RowBuffer:
        """The buffer for `count` rows of a tree of up to `nodes` nodes."""
        key = bucket(count), words_for(nodes)
        if key not in self._buffers:
            self._buffers[key] = RowBuffer(*key, self.graphs.device)
        return self._buffers[key]


def in_pieces(nodes: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `run` gives of all nodes, at most MOST_ROWS of them at a time."""
    if len(nodes) <= MOST_ROWS:
        return run(nodes)
    pieces = [[found.clone() for found in run(piece)] for piece in nodes.split(MOST_ROWS)]  # the next overwrites them
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


class CapturedEagle(Eagle):
    """As Eagle. States stand in one buffer: by node, then a spare row for padding, then features of pending tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._passes = _Passes(self.target.device)
        self._nodes = 0  # that the state buffer has room for
        self._tables = self.head.rope.tables(0, self.target.device)
        self.resident_ids = self._target_ids
        self._target_ids = None if self._target_ids is None else self._target_ids.to(HOST)

    @property
    def graphs(self) -> Graphs:
        return self._passes.graphs

    def reserve(self, tokens: int, nodes: int) -> None:
        self.cache.reserve(room(tokens + nodes + MOST_ROWS))
        if len(self._tables[0]) < self.cache.capacity:  # a position is never beyond its slot
            self._tables = self.head.rope.tables(self.cache.capacity, self.target.device)
        if nodes > self._nodes:
            self._nodes = nodes
            self._states = self._states.new_zeros(nodes + 1 + MOST_ROWS, self._states.shape[1])

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        super().begin(prompt, features)
        self.graphs.require_same(self.head, self.target.model)

    @torch.inference_mode()
    def step(self, tree: TokenTree, nodes: Tensor) -> Step:
        if tree.passes:
            began = time.perf_counter()
            logits, states = in_pieces(nodes, lambda piece: self._nodes_at_once(tree, piece))
            self._seconds += time.perf_counter() - began
        else:
            self.reserve(self.cache.length + len(self._pending), tree.capacity)
            self._passes.slots.start(tree.capacity, root_slots=0)
            if not 1 <= len(self._pending) <= MOST_ROWS:
                step = super().step(tree, nodes)  # a prompt, or nothing yet
                return Step(step.logits, step.token_ids, step.normalized, step.hidden, HOST)
            began = time.perf_counter()
            logits, states = self._root(tree)
            self._seconds += time.perf_counter() - began
        return Step(logits, self._target_ids, hidden=states, results=HOST)

    @torch.inference_mode()
    def warm_up(self, tokens: int, nodes: int) -> None:
        """Capture the passes over trees of up to `nodes` nodes behind up to `tokens` tokens."""
        self.reserve(tokens, nodes)
        self.graphs.require_same(self.head, self.target.model)
        for size in buckets(MOST_ROWS):
            rows, spare = self._passes.rows(size, self._nodes), self._nodes
            rows.fill([], torch.zeros(0), torch.zeros(0, 1), slot=self.cache.length, prefix=0, seen=0, spare=spare)
            self._forward(rows)

    def _root(self, tree: TokenTree) -> tuple[Tensor, Tensor]:
        pending, self._pending = self._pending, self._pending[:0]
        count, length, spare = len(pending), self.cache.length, self._nodes
        self._states[spare + 1 : spare + 1 + count] = pending
        rows = self._passes.rows(count, self._nodes)
        targets = torch.full((count,), spare)
        targets[-1] = 0
        rows.fill(
            [*self._tokens[length + 1 :], int(tree.tokens[0])],
            torch.arange(length, length + count),
            causal_words(count),
            slot=length,
            prefix=length,
            seen=count,
            sources=torch.arange(spare + 1, spare + 1 + count),
            targets=targets,
            spare=spare,
        )
        self.cache.length += count
        logits, states = self._forward(rows)
        return logits[count - 1 : count], states[count - 1 : count]

    def _nodes_at_once(self, tree: TokenTree, nodes: Tensor) -> tuple[Tensor, Tensor]:
        length, slots, parents = self.cache.length, self._passes.slots, tree.parents[nodes]
        slot, count = length + slots.used, len(nodes)
        words = slots.add(parents, nodes)
        rows = self._passes.rows(count, self._nodes)
        rows.fill(
            tree.tokens[nodes],
            tree.depths[nodes] + (length - 1),
            words,
            slot=slot,
            prefix=length,
            seen=slots.used,
            sources=parents,
            targets=nodes,
            spare=self._nodes,
        )
        logits, states = self._forward(rows)
        return logits[:count], states[:count]

    def _forward(self, rows: RowBuffer) -> tuple[Tensor, Tensor]:
        reads = *rows.tensors, self.cache.slab, self._states, *self._tables
        return self.graphs.run(f"draft pass of {rows.rows} rows", reads, lambda: self._pass(rows))

    def _pass(self, rows: RowBuffer) -> tuple[Tensor, Tensor]:
        attend = _PaddedAttention(self.cache.slab[0], rows, self._tables)
        hidden = self._states.index_select(0, rows.sources)
        embeddings = embed(self.head, self.target.model, rows.tokens)
        states = self._runs(hidden[None], embeddings[None], rows.positions[None], attend)[0]
        self._states.index_copy_(0, rows.targets, states)
        logits = self._runs.logits(states)
        return self.target.head(states.to(self.target.model.dtype)) if logits is None else logits, states

    # ---- for resident cycles (resident.py)

    ahead = 0  # of a sequence of n tokens and a root, n + ahead are in the cache once the root has been drafted from

    @property
    def drafted(self) -> int:
        """How many committed tokens the draft has run, each with the one behind it."""
        return self.cache.length

    @property
    def spare(self) -> int:
        """The row of the state buffer that padding reads and writes; behind it stand states of accepted tokens."""
        return self._nodes

    @property
    def resident_reads(self) -> tuple[Tensor, ...]:
        return self.cache.slab, self._states, *self._tables

    @property
    def resident_weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.head,)

    def resident_pass(self, rows: RowBuffer, tokens: Tensor, positions: Tensor, words: Tensor, **where: Any) -> Tensor:
        """Logits of rows that stand on the device, given as RowBuffer.write takes them."""
        rows.write(tokens, positions, words, spare=self.spare, **where)
        return self._pass(rows)[0]

    def resident_states(self, nodes: Tensor) -> Tensor:
        """The hidden states, [n, hidden size], of nodes that passes were run from; the root's is that of row 0."""
        return self._states.index_select(0, nodes)

    def resident_accept(self, features: Tensor | None, path: Tensor) -> None:
        """Take the features of accepted nodes, [nodes, features * hidden size]; path: int64 [n], padded."""
        if features is None:
            raise InputError("features: an EAGLE draft needs a target that gives its hidden states")
        fused = self._runs.fuse(features.index_select(0, path).to(self.head.dtype))
        self._states[self.spare + 1 : self.spare + 1 + len(path)].copy_(fused)

    def resident_start(self, root: int) -> list[int]:
        """Put what has not been drafted from where accepted nodes stand; its tokens, the root last."""
        pending, self._pending = self._pending, self._pending[:0]
        self._states[self.spare + 1 : self.spare + 1 + len(pending)] = pending
        return [*self._tokens[self.cache.length + 1 :], root]

    def resident_end(self, tokens: list[int], drafted: int) -> None:
        """These tokens are committed; the draft has run the first `drafted` of them, each with the one behind it."""
        self.cache.length = min(drafted, len(tokens))
        self._tokens, self._pending = tokens[: self.cache.length], self._pending[:0]


class CapturedSmallModel(SmallModel):
    """As SmallModel; prompts are run eagerly."""

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None, *, pack: bool | None = None) -> None:
        super().__init__(model, vocab_size, pack=pack)
        self.lm.require_capture()
        self._passes = _Passes(self.lm.device)
        self._nodes = 1  # of the largest tree expected

    @property
    def graphs(self) -> Graphs:
        return self._passes.graphs

    def reserve(self, tokens: int, nodes: int) -> None:
        self._nodes = max(self._nodes, nodes)
        self.cache.reserve(room(tokens + self._nodes + MOST_ROWS))

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        super().begin(prompt, features)
        self.graphs.require_same(self.lm.model)

    def step(self, tree: TokenTree, nodes: Tensor) -> Step:
        if tree.passes:
            self._slots = torch.cat([self._slots, nodes])
            (logits,) = in_pieces(nodes, lambda piece: (self._nodes_at_once(tree, piece),))
        else:
            logits = self._root(tree)
        return Step(logits[:, : self.vocab_size], results=HOST)

    @torch.inference_mode()
    def warm_up(self, tokens: int, nodes: int) -> None:
        """Capture the passes over trees of up to `nodes` nodes behind up to `tokens` tokens."""
        self.reserve(tokens, nodes)
        self.graphs.require_same(self.lm.model)
        for size in buckets(MOST_ROWS):
            rows = self._passes.rows(size, self._nodes)
            rows.fill([], torch.zeros(0), torch.zeros(0, 1), slot=self.cache.length, prefix=0, seen=0)
            self._forward(rows)

    def _root(self, tree: TokenTree) -> Tensor:
        pending, length = self._tokens[self.cache.length :], self.cache.length
        count = len(pending) + 1
        self.reserve(length + count, tree.capacity)
        self._passes.slots.start(tree.capacity, root_slots=1)
        if count > MOST_ROWS:
            return self._step_root(tree)
        self._tree, self._slots = tree, torch.zeros(1, dtype=torch.int64)
        rows = self._passes.rows(count, self._nodes)
        positions = torch.arange(length, length + count)
        tokens = self._known([*pending, int(tree.tokens[0])])
        rows.fill(tokens, positions, causal_words(count), slot=length, prefix=length, seen=count)
        self.cache.length += count - 1  # the root is not committed yet: its slot is the first of the scratch
        return self._forward(rows)[count - 1 : count]

    def _nodes_at_once(self, tree: TokenTree, nodes: Tensor) -> Tensor:
        length, slots = self.cache.length, self._passes.slots
        slot, words = length + slots.used, slots.add(tree.parents[nodes], nodes)
        rows = self._passes.rows(len(nodes), self._nodes)
        positions = tree.depths[nodes] + length
        rows.fill(tree.tokens[nodes], positions, words, slot=slot, prefix=length, seen=slots.used)
        return self._forward(rows)[: len(nodes)]

    @torch.inference_mode()
    def _forward(self, rows: RowBuffer) -> Tensor:
        reads, began = (*rows.tensors, self.cache.slab), time.perf_counter()
        name = f"draft pass of {rows.rows} rows"
        logits, _ = self.graphs.run(name, reads, lambda: self.lm.forward_padded(rows, self.cache))
        self.lm.seconds += time.perf_counter() - began
        return logits

    # ---- for resident cycles (resident.py)

    ahead, spare, resident_ids = 1, 0, None

    @property
    def drafted(self) -> int:
        """How many committed tokens the draft has run, and the one behind them."""
        return self.cache.length - self.ahead

    @property
    def resident_reads(self) -> tuple[Tensor, ...]:
        return (self.cache.slab,)

    @property
    def resident_weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.lm.model,)

    def resident_pass(self, rows: RowBuffer, tokens: Tensor, positions: Tensor, words: Tensor, **where: Any) -> Tensor:
        """Logits of rows that stand on the device, given as RowBuffer.write takes them."""
        rows.write(tokens.clamp(max=self.lm.vocab_size - 1), positions, words, **where)
        return self.lm.forward_padded(rows, self.cache)[0][:, : self.vocab_size]

    def resident_accept(self, features: Tensor | None, path: Tensor) -> None:
        """Nothing is kept of a tree: accepted tokens are run again with the next root, which costs rows alone."""

    def resident_start(self, root: int) -> list[int]:
        """The tokens that the cache lacks, the root last."""
        return [*self._tokens[self.cache.length :], root]

    def resident_end(self, tokens: list[int], drafted: int) -> None:
        """These tokens are committed; the draft has run the first `drafted` of them, and the one behind them."""
        self.cache.length = min(drafted + self.ahead, len(tokens))
        self._tokens = tokens


class _PaddedAttention(RotatingAttend):
    """Attention of padded rows at positions, and with slots for keys and values, that the device knows."""

    def __init__(self, slab: Tensor, rows: RowBuffer, tables: Rotation) -> None:
        self.slab, self.rows, self.tables = slab, rows, tables

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = self.rows
        at = rows.positions, self.tables, self.slab, rows.slots, rows.live
        rotated = ops.rope_store(query[0], key[0], value[0], *at)
        return attend_padded(rotated, self.slab[0], self.slab[1], rows)[None]

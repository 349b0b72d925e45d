"""EAGLE heads whose passes are captured in CUDA graphs, over trees on the host or the device: no draft by itself."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from specengine import ops
from specengine.cuda_graphs import Graphs, RowBuffer, buckets, causal_words, room
from specengine.drafters import Step
from specengine.drafters._head_draft import HeadDraft
from specengine.drafters._passes import HOST, MOST_ROWS, Passes, in_pieces
from specengine.errors import InputError
from specengine.modeling.attention import attend_padded
from specengine.modeling.eagle_head import RotatingAttend, Rotation, embedding_table
from specengine.tree import TokenTree


class CapturedEagle(HeadDraft):
    """As HeadDraft. States stand in one buffer: by node, a spare row for padding, features of pending tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._passes = Passes(self.target.device)
        self._nodes = 0  # that the state buffer has room for
        self._tables = self.head.rope.tables(0, self.target.device)
        self._captured_ids = self._target_ids
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
        if int(tree.passes):
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
        table = embedding_table(self.head, self.target.model)
        hidden, embeddings = ops.gather_rows(self._states, rows.sources, table, rows.tokens)
        states = self._runs(hidden[None], embeddings.to(self.head.dtype)[None], rows.positions[None], attend)[0]
        self._states.index_copy_(0, rows.targets, states)
        logits = self._runs.logits(states)
        return self.target.head(states.to(self.target.model.dtype)) if logits is None else logits, states

    # ---- for cycles on the device, see CapturedDraft

    @property
    def drafted(self) -> int:
        """How many committed tokens the draft has run, each with the one behind it."""
        return self.cache.length

    @property
    def captured_ids(self) -> Tensor | None:
        return self._captured_ids

    @property
    def spare(self) -> int:
        """The row of the state buffer that padding reads and writes; behind it stand states of accepted tokens."""
        return self._nodes

    @property
    def captured_reads(self) -> tuple[Tensor, ...]:
        return self.cache.slab, self._states, *self._tables

    @property
    def captured_weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.head,)

    def captured_pass(self, rows: RowBuffer, tokens: Tensor, positions: Tensor, words: Tensor, **where: Any) -> Tensor:
        """Logits of rows that stand on the device, given as RowBuffer.write takes them."""
        rows.write(tokens, positions, words, spare=self.spare, **where)
        return self._pass(rows)[0]

    def captured_states(self, nodes: Tensor) -> Tensor:
        """The hidden states, [n, hidden size], of nodes that passes were run from; the root's is that of row 0."""
        return self._states.index_select(0, nodes)

    def captured_accept(self, features: Tensor | None, path: Tensor) -> None:
        """Take the features of accepted nodes, [nodes, features * hidden size]; path: int64 [n], padded."""
        if features is None:
            raise InputError("features: an EAGLE draft needs a target that gives its hidden states")
        fused = self._runs.fuse(features.index_select(0, path).to(self.head.dtype))
        self._states[self.spare + 1 : self.spare + 1 + len(path)].copy_(fused)

    def captured_start(self, root: int) -> list[int]:
        """Put what has not been drafted from where accepted nodes stand; its tokens, the root last."""
        pending, self._pending = self._pending, self._pending[:0]
        self._states[self.spare + 1 : self.spare + 1 + len(pending)] = pending
        return [*self._tokens[self.cache.length + 1 :], root]

    def captured_end(self, tokens: list[int], drafted: int) -> None:
        """These tokens are committed; the draft has run the first `drafted` of them, each with the one behind it."""
        self.cache.length = min(drafted, len(tokens))
        self._tokens, self._pending = tokens[: self.cache.length], self._pending[:0]


class _PaddedAttention(RotatingAttend):
    """Attention of padded rows at positions, and with slots for keys and values, that the device knows."""

    def __init__(self, slab: Tensor, rows: RowBuffer, tables: Rotation) -> None:
        self.slab, self.rows, self.tables = slab, rows, tables

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = self.rows
        at = rows.positions, self.tables, self.slab, rows.slots, rows.live
        rotated = ops.rope_store(query[0], key[0], value[0], *at)
        return attend_padded(rotated, self.slab[0], self.slab[1], rows)[None]

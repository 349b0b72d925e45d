"""Smaller models whose passes are captured in CUDA graphs, over trees on the host or the device: no draft by itself."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.cuda_graphs import Graphs, RowBuffer, buckets, causal_words, room
from specengine.drafters import Step
from specengine.drafters._model_draft import ModelDraft
from specengine.drafters._passes import HOST, MOST_ROWS, Passes, in_pieces
from specengine.modeling.causal_lm import CausalLM
from specengine.tree import TokenTree


class CapturedSmallModel(ModelDraft):
    """As ModelDraft; prompts are run eagerly."""

    lm: CausalLM  # passes are captured of its modules

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None, *, pack: bool | None = None) -> None:
        super().__init__(model, vocab_size, pack=pack)
        self.lm.require_capture()
        self._passes = Passes(self.lm.device)
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
        if int(tree.passes):
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

    # ---- for cycles on the device, see CapturedDraft

    ahead = 1

    @property
    def drafted(self) -> int:
        """How many committed tokens the draft has run, and the one behind them."""
        return self.cache.length - self.ahead

    @property
    def captured_reads(self) -> tuple[Tensor, ...]:
        return (self.cache.slab,)

    @property
    def captured_weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.lm.model,)

    def captured_pass(self, rows: RowBuffer, tokens: Tensor, positions: Tensor, words: Tensor, **where: Any) -> Tensor:
        """Logits of rows that stand on the device, given as RowBuffer.write takes them."""
        rows.write(tokens.clamp(max=self.lm.vocab_size - 1), positions, words, **where)
        return self.lm.forward_padded(rows, self.cache)[0][:, : self.vocab_size]

    def captured_accept(self, features: Tensor | None, path: Tensor) -> None:
        """Nothing is kept of a tree: accepted tokens are run again with the next root, which costs rows alone."""

    def captured_start(self, root: int) -> list[int]:
        """The tokens that the cache lacks, the root last."""
        return [*self._tokens[self.cache.length :], root]

    def captured_end(self, tokens: list[int], drafted: int) -> None:
        """These tokens are committed; the draft has run the first `drafted` of them, and the one behind them."""
        self.cache.length = min(drafted + self.ahead, len(tokens))
        self._tokens = tokens

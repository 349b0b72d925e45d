"""An EAGLE head over a cache in torch: all variants, all devices."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from specengine import ops
from specengine.models import huggingface
from specengine.models.attention import Prompt, attend
from specengine.models.eagle import EagleHead, RotatingAttend, causal, embed_for
from specengine.models.huggingface import CausalLM
from specengine.models.kv_cache import KVCache, Rows
from specengine.models.native import NativeLM
from specengine.models.twins import Packed, worth_packing
from specengine.models.windows import note_places


class TorchHead:
    """`head` as a function of rows; its keys and values stand in `cache`, [1 layer]."""

    def __init__(self, head: EagleHead, target: CausalLM | NativeLM, pack: bool | None = None) -> None:
        self.config, self.module, self._target = head.config, head, target
        self.dtype, device = head.dtype, target.device
        self.cache = KVCache(1, self.config.num_kv_heads, self.config.head_dim, 1, dtype=self.dtype, device=device)
        self.target_ids: Tensor | None = head.target_ids()
        self._packed: Packed | None = Packed(head) if (worth_packing(head) if pack is None else pack) else None
        self._runs: Any = head
        self._tables = head.rope.tables(0, device)
        self._window = self.config.sliding_window or None

    @property
    def weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.module,)

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self._tables

    def __copy__(self) -> TorchHead:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.cache = self.cache.empty()
        return made

    def refresh(self) -> None:
        """Take in weights that were changed since the last call, and a cache that has grown."""
        if self._packed is not None:
            self._runs = self._packed.model()
        if len(self._tables[0]) < self.cache.capacity:  # a position is never beyond its slot
            self._tables = self.module.rope.tables(self.cache.capacity, self.cache.slab.device)

    def extend(self, features: Tensor, tokens: list[int]) -> None:
        """Run consecutive rows behind the cache's, and commit them; features: the target's, [rows, features]."""
        hidden = self._runs.fuse(features.to(self.dtype))
        for first in range(0, len(tokens), huggingface.PREFILL_ROWS):
            ids = tokens[first : first + huggingface.PREFILL_ROWS]
            piece = torch.tensor(ids, device=hidden.device, dtype=torch.int64)
            rows, length = len(piece), self.cache.length
            self.cache.reserve(length + rows)
            positions = torch.arange(length, length + rows, device=hidden.device, dtype=torch.int64)
            embeddings = embed_for(self.module, self._target, piece)
            inputs = hidden[first : first + rows], embeddings, positions
            self._runs(*(tensor[None] for tensor in inputs), _PromptAttention(self.cache, length, self._window))
            self.cache.length = length + rows

    def forward(
        self, states: Tensor, sources: Tensor, rows: Rows, one: Tensor | None, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits and recurrent states of rows, or of the row `one` alone.

        The inputs of the rows are at `sources` in `states`, or there in the target's features, which are fused then.
        """
        if len(self._tables[0]) < self.cache.capacity and ops.is_free(rows.slot):
            self.refresh()
        if features is not None:
            states = self._runs.fuse(features.to(self.dtype))
        hidden, embeddings = self._inputs(states, sources, rows)
        inputs = hidden, embeddings.to(self.dtype), rows.positions
        if self._window is not None:
            note_places(self.cache, rows)
        attention = _RowAttention(self.cache, rows, self._tables, self._window)
        recurrent = self._runs(*(tensor[None] for tensor in inputs), attention)[0]
        recurrent = recurrent if one is None else recurrent.index_select(0, one)
        logits = self._runs.logits(recurrent)
        return self._target.head(self._runs.readout(recurrent)) if logits is None else logits, recurrent

    def _inputs(self, states: Tensor, sources: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        head = self.module
        if isinstance(self._target, NativeLM) and not head.config.own_embeddings:
            return states.index_select(0, sources), self._target.embed(rows.tokens)
        own = head.config.own_embeddings
        table = head.embed_tokens.weight if own else cast(CausalLM, self._target).table
        return ops.gather_rows(states, sources, table, rows.tokens)


class _PromptAttention:
    """Attention of consecutive rows behind `before` others, whose keys and values go to the cache."""

    def __init__(self, cache: KVCache, before: int, window: int | None) -> None:
        self.slab, self.before, self.window = cache.slab[0], before, window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = key.shape[2]
        keys, values = self.slab[:, :, : self.before + rows]
        keys[:, self.before :], values[:, self.before :] = key[0], value[0]
        if not self.before and (self.window is None or self.window >= rows):
            return causal(query, key, value)
        mask = Prompt(self.before).packed_mask(rows, query.shape[1] // key.shape[1], query, self.window)
        return ops.tree_attention(query[0], keys, values, mask, query.shape[-1] ** -0.5)[None]


class _RowAttention(RotatingAttend):
    """Attention of rows, which rotates them and puts their keys and values where they belong."""

    def __init__(self, cache: KVCache, rows: Rows, tables: tuple[Tensor, Tensor], window: int | None) -> None:
        self.slab, self.rows, self.tables, self.window = cache.slab[0], rows, tables, window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = self.rows
        at = rows.positions, self.tables, self.slab, rows.slot, rows.live
        rotated = ops.rope_store(query[0], key[0], value[0], *at)
        return attend(rotated, self.slab[0], self.slab[1], rows, window=self.window)[None]

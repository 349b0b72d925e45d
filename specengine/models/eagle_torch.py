"""An EAGLE head over a cache in torch: all variants, all devices."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from specengine import ops
from specengine.models.attention import Prompt, attend, note_places
from specengine.models.eagle import DraftHead, EagleHead, RotatingAttend, causal, embed_for
from specengine.models.huggingface import CausalLM
from specengine.models.kv_cache import CacheLayout, KVCache, LanguageModel, Rows
from specengine.models.native import NativeLM
from specengine.models.twins import Packed, worth_packing


class TorchHead(DraftHead):
    """Run an EAGLE head's module on any device."""

    def __init__(self, head: EagleHead, target: LanguageModel, pack: bool | None = None) -> None:
        self.config, self.module, self._target = head.config, head, target
        self.dtype, device = head.dtype, target.device
        slab = 1, self.config.num_kv_heads, self.config.head_dim
        self.cache = KVCache(CacheLayout((slab,), self.dtype, device), 1)
        self.target_ids, self.weights = head.target_ids(), (head,)
        self._packed: Packed | None = (
            Packed(head) if (worth_packing(head) if pack is None else pack) else None
        )
        self._runs: Any = head
        self.reads: tuple[Tensor, Tensor] = head.rope.tables(0, device)
        self._window = self.config.sliding_window or None

    def refresh(self) -> None:
        if self._packed is not None:
            self._runs = self._packed.model()
        if len(self.reads[0]) < self.cache.capacity:  # a position is never beyond its slot
            self.reads = self.module.rope.tables(self.cache.capacity, self.cache.slab.device)

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        hidden = self._runs.fuse(features.to(self.dtype))
        embeddings = embed_for(self.module, self._target, tokens)
        attention = _PromptAttention(self.cache, self.cache.length, self._window)
        self._runs(hidden[None], embeddings[None], positions[None], attention)

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if len(self.reads[0]) < self.cache.capacity and ops.is_free(rows.slot):
            self.refresh()
        if features is not None:
            states = self._runs.fuse(features.to(self.dtype))
        hidden, embeddings = self._inputs(states, sources, rows)
        inputs = hidden, embeddings.to(self.dtype), rows.positions
        if self._window is not None:
            note_places(self.cache, rows)
        attention = _RowAttention(self.cache, rows, self.reads, self._window)
        recurrent = self._runs(*(tensor[None] for tensor in inputs), attention)[0]
        recurrent = recurrent if one is None else recurrent.index_select(0, one)
        logits = self._runs.logits(recurrent)
        return self._target.head(
            self._runs.readout(recurrent)
        ) if logits is None else logits, recurrent

    def _inputs(self, states: Tensor, sources: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        own = self.config.own_embeddings
        if isinstance(self._target, NativeLM) and not own:
            return states.index_select(0, sources), self._target.embed(rows.tokens)
        table = self.module.embed_tokens.weight if own else cast(CausalLM, self._target).table
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
        mask = Prompt(self.before).packed_mask(
            rows, query.shape[1] // key.shape[1], query, self.window
        )
        return ops.tree_attention(query[0], keys, values, mask, query.shape[-1] ** -0.5)[None]


class _RowAttention(RotatingAttend):
    """Attention of rows, which rotates them and puts their keys and values where they belong."""

    def __init__(
        self, cache: KVCache, rows: Rows, tables: tuple[Tensor, Tensor], window: int | None
    ) -> None:
        self.slab, self.rows, self.tables, self.window = cache.slab[0], rows, tables, window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = self.rows
        rotated = ops.rope_store(
            query[0], key[0], value[0], rows.positions, self.tables, self.slab, rows.slot, rows.live
        )
        return attend(rotated, self.slab[0], self.slab[1], rows, window=self.window)[None]

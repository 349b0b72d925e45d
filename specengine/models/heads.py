"""DraftHead, what drafts from a target's hidden states over a cache of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from specengine.models.eagle import EagleConfig
from specengine.models.huggingface import PREFILL_ROWS
from specengine.models.kv_cache import KVCache, Rows


class DraftHead(ABC):
    """Run a head's rows; row i pairs the target's state at position i with token i + 1.

    config      its sizes
    cache       keys and values of its layer, of committed rows and of a tree's
    dtype       of its recurrent states
    target_ids  the target's token of each column of its logits, int64 [draft vocabulary]; None where they are the same
    weights     modules whose weights it reads; reads: further tensors, which CUDA graphs read where they are
    """

    config: EagleConfig
    cache: KVCache
    dtype: torch.dtype
    target_ids: Tensor | None = None
    weights: tuple[nn.Module, ...] = ()
    reads: tuple[Tensor, ...] = ()

    def __copy__(self) -> Self:
        """Return a head over an empty cache, with the same weights."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.cache = self.cache.empty()
        return twin

    def refresh(self) -> None:  # noqa: B027 (nothing to do where the head owns its weights)
        """Take in weights that were changed since the last call, and a cache that has grown."""

    def extend(self, features: Tensor, tokens: list[int]) -> None:
        """Run consecutive rows after the cache's, and commit them; features: the target's, [rows, features]."""
        device = self.cache.slab.device
        for first in range(0, len(tokens), PREFILL_ROWS):
            ids = torch.tensor(tokens[first : first + PREFILL_ROWS], device=device, dtype=torch.int64)
            end = self.cache.length + len(ids)
            self.cache.reserve(end)
            positions = torch.arange(end - len(ids), end, device=device, dtype=torch.int64)
            self._prefill(features[first : first + len(ids)], ids, positions)
            self.cache.length = end

    @abstractmethod
    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """Run rows of a prompt, whose slots are free in the cache and whose positions are those of the slots."""

    @abstractmethod
    def forward(
        self, states: Tensor, sources: Tensor, rows: Rows, one: Tensor | None, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits and recurrent states of rows, or of the row `one` alone.

        The inputs of the rows are at `sources` in `states`, or there in the target's features, which are fused then.
        """


def reader_of_states(size: int, vocabulary: int) -> EagleConfig:
    """Return the sizes of a head that reads the state after the target's final norm, and writes one as large."""
    return EagleConfig(
        version=1,
        hidden_size=size,
        intermediate_size=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        target_hidden_size=size,
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary,
    )

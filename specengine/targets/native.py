"""A model of the Llama family on the C++ forward for CPUs; every token has the bits of plain decoding in any tree."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.modeling import threads
from specengine.modeling.native import NativeLM
from specengine.modeling.rows import Rows
from specengine.ops.tree import TokenTree
from specengine.records import Successors
from specengine.targets import Chosen, Target, in_own_dtype


class NativeTarget(Target):
    """`lm` with its own KV cache. Logits and features are float32, the cache is in the model's dtype."""

    device = torch.device("cpu")

    def __init__(self, lm: NativeLM) -> None:
        self.lm = lm
        self.cache = lm.new_cache(1)
        self.tokens: list[int] = []
        self._version = self.lm.version
        self.max_context, self.vocab_size = lm.max_context, lm.vocab_size
        self._features: tuple[int, ...] = ()

    @property
    def model(self) -> PreTrainedModel:
        """The same model as transformers runs it, read when it is first asked for."""
        return self.lm.model

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.lm.source.name

    @property
    def backend(self) -> str:  # type: ignore[override]
        return f"native ({self.lm.instruction_set}, {self.lm.weight_bytes / 1e6:.0f} MB of weights as {self.lm.stored})"

    @property
    def generation_config(self) -> Any:
        return self.lm.source.generation_config

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.lm.dtype

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    def running(self) -> AbstractContextManager[None]:
        return in_own_dtype(threads.alone(), "cpu")

    def reserve(self, tokens: int, scratch: int) -> None:
        self.cache.reserve(tokens + scratch)

    def want_features(self, ids: tuple[int, ...]) -> None:
        self.lm.prepare_features(ids)
        self._features = ids

    def cached(self, tokens: list[int]) -> int:
        """Takes in a model that was changed, of which nothing is cached then."""
        self.lm.refresh()
        if self.lm.version != self._version:
            self.reset()
            self._version = self.lm.version
        return super().cached(tokens)

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        kept = self.cached(tokens) if keep is None else keep
        self.cache.crop(kept)
        self.tokens = tokens[:kept]
        _, features = self.lm.extend(self.cache, tokens[kept:], self._features, logits="none")
        self.tokens = list(tokens)
        return features

    def rate(self, tokens: list[int]) -> Tensor:
        if not self.tokens:
            self.cached([])
        logits, _ = self.lm.extend(self.cache, tokens, logits="all")
        self.tokens = [*self.tokens, *tokens]
        return cast(Tensor, logits)

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        return self.lm.forward(self._rows(tree), self.cache, self._features)

    def choose(self, tree: TokenTree) -> Chosen:
        rows = self._rows(tree)
        best = Successors.room(int(rows.live), max(1, self.successors))
        _, features = self.lm.forward(rows, self.cache, self._features, best=best)
        return Chosen(best.tokens[:, 0].tolist(), features, best if self.successors else None)

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        self.cache.commit(path)
        self.tokens.extend(tree.tokens[path].tolist())

    def reset(self) -> None:
        self.cache.crop(0)
        self.tokens = []

    def _rows(self, tree: TokenTree) -> Rows:
        self.cache.reserve(self.cache.length + len(tree))
        return Rows.of(tree, self.cache.filled)

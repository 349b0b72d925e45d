"""Any Hugging Face causal LM as the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import ops
from specengine.causal_lm import CausalLM, Visibility
from specengine.targets import Target
from specengine.tree import TokenTree


class HuggingFaceTarget(Target):
    """`model` (an AutoModelForCausalLM) with its own KV cache; the model itself stays usable as before."""

    def __init__(self, model: PreTrainedModel, *, pack: bool | None = None) -> None:
        self.lm = CausalLM(model, pack=pack)
        self.cache = self.lm.new_cache(1)
        self.tokens: list[int] = []
        self._features: tuple[int, ...] = ()
        self.max_context = self.lm.max_context
        self.vocab_size = self.lm.vocab_size

    @property
    def model(self) -> PreTrainedModel:
        return self.lm.model

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.lm.device

    @property
    def generation_config(self) -> Any:
        return self.lm.model.generation_config

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    def reserve(self, tokens: int, scratch: int) -> None:
        self.cache.reserve(tokens + scratch)

    def want_features(self, ids: tuple[int, ...]) -> None:
        if ids and ids != self._features:
            self.lm.prepare_features(ids)
        self._features = ids

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.lm.refresh()
        kept = self.cached(tokens) if keep is None else keep
        self.cache.crop(kept)
        self.tokens = tokens[:kept]
        _, features = self.lm.extend(self.cache, tokens[kept:], self._features)
        self.tokens = list(tokens)
        return features

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        length = self.cache.length
        self.cache.reserve(length + tree.size)
        visibility = Visibility()
        if tree.size > 1:
            mask = torch.ones(tree.size, length + tree.size, dtype=torch.bool, device=self.device)
            mask[:, length:] = ops.tree_mask(tree.ancestors, tree.size)
            visibility = Visibility(mask)
        return self.lm.forward(
            tree.tokens, tree.depths + length, self.cache, length, visibility, features=self._features
        )

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        tokens = tree.tokens[path].tolist()
        self.cache.compact(path)
        self.tokens.extend(tokens)

    def reset(self) -> None:
        self.cache.crop(0)
        self.tokens = []

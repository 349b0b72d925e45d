"""Targets: one file = one way of running the model whose output must not change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from specengine.tree import TokenTree


class Target(ABC):
    """The model whose tokens are committed. It owns its KV cache; `tokens` are those the cache holds.

    `features` in the results are the hidden states that trained drafts read, None where no draft asks for them.
    """

    tokens: list[int]
    max_context: int
    vocab_size: int
    model_seconds: float  # spent in model forwards, ever
    device: torch.device
    generation_config: Any = None  # the model's own defaults

    @abstractmethod
    def reserve(self, tokens: int, scratch: int) -> None:
        """Make room for `tokens` committed tokens and trees of up to `scratch` nodes."""

    def cached(self, tokens: list[int]) -> int:
        """How many of `tokens` the cache holds already."""
        return common_prefix(self.tokens, tokens)

    @abstractmethod
    def prefill(self, tokens: list[int]) -> Any:
        """Make the cache hold `tokens`, reusing what it holds of them; returns their features.

        No logits: the engine leaves out the prompt's last token, which becomes the root of the first tree.
        """

    @abstractmethod
    def verify(self, tree: TokenTree) -> tuple[Tensor, Any]:
        """Logits of every node given its own path, [nodes, vocabulary]."""

    @abstractmethod
    def commit(self, tree: TokenTree, path: list[int]) -> None:
        """Keep these nodes' keys and values, forget the rest."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length

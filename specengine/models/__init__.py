"""Models: what runs a language model over tree rows, and `Target`, the model whose output must not change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.errors import UnsupportedModelError
from specengine.models.kv_cache import KVCache
from specengine.ops.select import LARGEST, top_children
from specengine.ops.tree import TokenTree


class Chosen(NamedTuple):
    """The result of verifying a tree greedily. tokens: the choice after every node, -1 where no logit is finite."""

    tokens: list[int]
    features: Tensor | None
    successors: Successors | None


class Target(ABC):
    """The model whose tokens are committed. It owns its KV cache; `tokens` are those the cache holds.

    `features` in the results are the hidden states that a trained draft reads, float [rows, features * hidden size];
    None where none are wanted.
    """

    tokens: list[int]
    max_context: int
    vocab_size: int
    model_seconds: float  # spent in model forwards, ever
    device: torch.device
    dtype: torch.dtype  # of the weights, or what they stand for
    name: str = ""  # of the model
    backend: str = ""  # what runs it, and why, for people
    captured: bool = False  # whether its cycles run as graphs, as captured.py does it
    generation_config: Any = None  # the model's own defaults
    successors: int = 0  # how many of a node's likeliest next tokens are wanted

    @property
    def notes(self) -> list[str]:
        """Return notes for the user on how the target runs here; they appear in the statistics."""
        return []

    def running(self) -> AbstractContextManager[None]:
        """Return the context manager that cycles run in."""
        return nullcontext()

    @abstractmethod
    def reserve(self, tokens: int, scratch: int) -> None:
        """Make room for `tokens` committed tokens and trees of up to `scratch` nodes."""

    def cached(self, tokens: list[int]) -> int:
        """Return how many of `tokens` the cache holds already."""
        return common_prefix(self.tokens, tokens)

    def want_features(self, ids: tuple[int, ...]) -> None:
        """Give these hidden states from now on, numbered as in transformers' `hidden_states`; () is none."""
        if ids:
            raise UnsupportedModelError(f"{type(self).__name__}: gives no hidden states, and this draft reads them")

    def want_successors(self, count: int) -> None:
        """Give so many of the likeliest next tokens of every verified node from now on, fewer of a small vocabulary."""
        self.successors = min(count, self.vocab_size)

    @abstractmethod
    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        """Run a prompt into the cache; return the features of the tokens that were run.

        The first `keep` tokens, which the cache must hold, are not run again; by default none that it holds are.
        There are no logits: the engine leaves out the prompt's last token, which becomes the root of the first tree.
        """

    def rate(self, tokens: list[int]) -> Tensor:
        """Run `tokens` after those in the cache and keep them; return the logits after each, [tokens, vocabulary].

        Call it in pieces for a long text. Raises UnsupportedModelError if the target cannot do it.
        """
        raise UnsupportedModelError(f"{type(self).__name__}: gives no logits of a prompt")

    @abstractmethod
    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        """Return the logits of every node given its own path, [nodes, vocabulary], and the nodes' features."""

    def choose(self, tree: TokenTree) -> Chosen | None:
        """Verify greedily, without logits; return None if that is no cheaper than `verify`."""
        return None

    @abstractmethod
    def commit(self, tree: TokenTree, path: list[int]) -> None:
        """Keep the keys and values of the accepted path; drop those of the other nodes."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""


class CachedTarget(Target):
    """A target over a language model `lm` with the KV cache of one sequence.

    `lm` runs tree rows (`forward`) and prompts (`extend`), and tells by `version` whether its weights were changed.
    """

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self.cache: KVCache = lm.new_cache(1)
        self.tokens = []
        self.max_context, self.vocab_size = lm.max_context, lm.vocab_size
        self._version = lm.version
        self._features: tuple[int, ...] = ()

    @property
    def model(self) -> PreTrainedModel:
        """The model as transformers runs it. A native one is read when it is first asked for."""
        return self.lm.model

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.lm.dtype

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    def reserve(self, tokens: int, scratch: int) -> None:
        self.cache.reserve(tokens + scratch)

    def want_features(self, ids: tuple[int, ...]) -> None:
        if ids and ids != self._features:
            self.lm.prepare_features(ids)
        self._features = ids

    def cached(self, tokens: list[int]) -> int:
        """Refresh a model that was changed, and drop its cache, before the cache is looked at."""
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
        return logits

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        self.cache.commit(path)
        self.tokens.extend(tree.tokens[path].tolist())

    def reset(self) -> None:
        self.cache.crop(0)
        self.tokens = []


def in_own_dtype(running: AbstractContextManager[None], device: str) -> AbstractContextManager[None]:
    """Return `running`, around which autocast is switched off on this kind of device where a caller has switched it on.

    An answer is that of the model's own dtype, whatever it is asked in.
    """
    return _without_autocast(running, device) if torch.is_autocast_enabled(device) else running


@contextmanager
def _without_autocast(running: AbstractContextManager[None], device: str) -> Iterator[None]:
    with torch.autocast(device, enabled=False), running:
        yield


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the length of the longest common prefix."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


class Successors(NamedTuple):
    """The target's likeliest next tokens after some nodes, best first, the lower token first of equals.

    tokens: int64 [nodes, count]; logits: float32 alike, before any processor. Where no logit is finite: -1 and -inf.
    """

    tokens: Tensor
    logits: Tensor

    @classmethod
    def room(cls, nodes: int, count: int) -> Successors:
        """On the host, to be filled."""
        return cls(
            torch.empty(nodes, count, dtype=torch.int64, device="cpu"),
            torch.empty(nodes, count, dtype=torch.float32, device="cpu"),
        )

    @classmethod
    def of(cls, logits: Tensor, count: int) -> Successors:
        """Of logits [nodes, vocabulary], on their device; +inf takes the place of an entry."""
        values, tokens = top_children(logits, count, normalized=True)
        missing = (values == -math.inf) | (values >= LARGEST)
        return cls(tokens.masked_fill(missing, -1), values.masked_fill(missing, -math.inf))

"""Any Hugging Face causal LM as the target."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import ops
from specengine.errors import UnsupportedModelError
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.kv_cache import KVCache
from specengine.modeling.rows import Rows
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.targets import Target, in_own_dtype


class HuggingFaceTarget(Target):
    """`model` (an AutoModelForCausalLM) with its own KV cache; the model itself stays usable as before.

    strict    a node's logits have the bits that plain decoding of its path gives, in half precision too
    captured  its cycles run as graphs; without a CUDA device the same functions run uncaptured
    UnsupportedModelError where this model on this device cannot keep what is asked for.
    """

    makes: type[CausalLM] = CausalLM

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool | None = None,
        strict: bool = False,
        captured: bool = False,
        compile_blocks: bool = False,
        reason: str = "",
    ) -> None:
        """reason: why it is not the native forward, or not graphs, that run this model, for people."""
        self.reason, self.captured = reason, captured
        self.lm = self.makes(model, pack=pack, compile_blocks=compile_blocks)
        if captured:
            self.lm.require_capture()
        self.strict_rows = strict_rows(self.lm, padded=captured) if strict else 0  # of each forward
        self.cache = self.lm.new_cache(1)
        self.tokens: list[int] = []
        self._version = self.lm.version
        self._features: tuple[int, ...] = ()
        self.max_context = self.lm.max_context
        self.vocab_size = self.lm.vocab_size

    @property
    def notes(self) -> list[str]:
        uncaptured = self.captured and self.device.type != "cuda"
        return ["graphs: without a CUDA device the padded forwards run uncaptured"] if uncaptured else []

    @property
    def model(self) -> PreTrainedModel:
        return self.lm.model

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.lm.device

    @property
    def backend(self) -> str:  # type: ignore[override]
        return "huggingface" + (f" ({self.reason})" if self.reason else "")

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.lm.dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.lm.model.config._name_or_path

    @property
    def generation_config(self) -> Any:
        return self.lm.model.generation_config

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    def running(self) -> AbstractContextManager[None]:
        running = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        return in_own_dtype(running, self.device.type)

    def reserve(self, tokens: int, scratch: int) -> None:
        self.cache.reserve(tokens + scratch)

    def want_features(self, ids: tuple[int, ...]) -> None:
        if ids and ids != self._features:
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
        _, features = self.lm.extend(self.cache, tokens[kept:], self._features)
        self.tokens = list(tokens)
        return features

    def rate(self, tokens: list[int]) -> Tensor:
        if not self.tokens:
            self.cached([])
        logits, _ = self.lm.extend(self.cache, tokens, logits="all")
        self.tokens = [*self.tokens, *tokens]
        return cast(Tensor, logits)

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        if ops.is_free(tree.size):
            tree = tree.trimmed()
        if ops.is_free(self.cache.filled):
            self.cache.reserve(self.cache.length + tree.capacity + self.strict_rows)
        rows = Rows.of(tree, self.cache.filled)
        if not self.strict_rows:
            return self.lm.forward(rows, self.cache, self._features)
        firsts, most = range(0, len(rows), self.strict_rows), self.strict_rows
        pieces = [rows.strict_piece(first, most, padded=self.captured) for first in firsts]
        found = [self.lm.forward(piece, self.cache, self._features) for piece in pieces]
        logits, features = zip(*found, strict=True)
        return torch.cat(logits)[: len(rows)], torch.cat(features)[: len(rows)] if self._features else None

    def keep(self, path: Nodes) -> None:
        """As `commit`, of nodes of the tree verified last; who calls it says in the end what `tokens` are."""
        self.cache.keep(path)

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        self.cache.commit(path)
        self.tokens.extend(tree.tokens[path].tolist())

    def reset(self) -> None:
        self.cache.crop(0)
        self.tokens = []


STRICT_ROWS = (32, 16, 8, 4, 2)
PADDED_ROWS = 64  # of every strict forward under graphs: products of one shape give a row the same bits
TRIED = 16  # tokens


@torch.inference_mode()
def strict_rows(lm: CausalLM, *, padded: bool) -> int:
    """The most rows that a forward of `lm` can hold without changing the bits of any of them.

    padded: every forward has PADDED_ROWS rows, plain decoding's too.
    Tried on a few tokens, alone and among others. UnsupportedModelError where the bits change.
    """
    if lm.attention != "tree":
        raise UnsupportedModelError(
            "strict: this model's attention runs with a dense mask, whose sums follow the cache"
        )
    cache = lm.new_cache(64 + PADDED_ROWS)
    lm.extend(cache, [token % lm.vocab_size for token in (1, 2, 3, 5, 7)])
    tokens = torch.arange(11, 11 + TRIED, dtype=torch.int64, device="cpu") * 13 % lm.vocab_size
    alone = torch.cat([_siblings(lm, cache, token[None], padded) for token in tokens])
    for most in (PADDED_ROWS,) if padded else STRICT_ROWS:
        sizes = [size for size in (2, 3, 5, 8, 12, 16, 24, 31, 32, PADDED_ROWS) if size <= most]
        if all(_same_bits(lm, cache, tokens, alone, size, padded) for size in sizes):
            return most
    if padded:
        raise UnsupportedModelError(
            f"strict: on this {lm.device.type} a row of a {lm.dtype} matrix product changes with its place among "
            f"{PADDED_ROWS} rows, so no tree can have the bits of plain decoding"
        )
    raise UnsupportedModelError(
        f"strict: on this {lm.device.type} the matrix products of {lm.dtype} change with the number of rows, so "
        "no tree can have the bits of plain decoding; bfloat16 on a CPU with AMX keeps them, and with graphs=True all "
        "forwards have one number of rows"
    )


def _same_bits(lm: CausalLM, cache: KVCache, tokens: Tensor, alone: Tensor, size: int, padded: bool) -> bool:
    # others, and elsewhere, for each size
    places = (torch.arange(size, dtype=torch.int64, device="cpu") * 5 + size) % TRIED
    return torch.equal(_siblings(lm, cache, tokens[places], padded), alone[places.to(alone.device)])


def _siblings(lm: CausalLM, cache: KVCache, tokens: Tensor, padded: bool) -> Tensor:
    """Logits of `tokens`, each of them the next one behind what `cache` holds."""
    count, filled = len(tokens), cache.filled
    own = ops.own_bits(count, filled.device)
    positions, live = torch.full_like(tokens, cache.length), torch.full_like(filled, count)
    rows = Rows(tokens.to(filled.device), positions.to(filled.device), own, filled.long(), filled, live)
    piece = rows.strict_piece(0, PADDED_ROWS if padded else count, padded=padded)
    return lm.forward(piece, cache)[0][:count]

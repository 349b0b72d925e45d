"""Any Hugging Face causal LM as the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import ops
from specengine.errors import UnsupportedModelError
from specengine.modeling.attention import Visibility
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.kv_cache import KVCache
from specengine.targets import Target
from specengine.tree import TokenTree


class HuggingFaceTarget(Target):
    """`model` (an AutoModelForCausalLM) with its own KV cache; the model itself stays usable as before.

    strict: a node's logits have the bits that plain decoding of its path gives, in half precision too.
    UnsupportedModelError where this model on this device cannot keep that.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool | None = None,
        strict: bool = False,
        compile_blocks: bool = False,
        reason: str = "",
    ) -> None:
        """reason: why it is not the native forward that runs this model, for people."""
        self.reason = reason
        self.lm = CausalLM(model, pack=pack, compile_blocks=compile_blocks)
        self._strict_rows = strict_rows(self.lm) if strict else 0  # that one forward may hold
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
        tree = tree.trimmed()
        length = self.cache.length
        self.cache.reserve(length + len(tree))
        mask = None
        if len(tree) > 1:
            mask = torch.ones(len(tree), length + len(tree), dtype=torch.bool, device=self.device)
            mask[:, length:] = ops.tree_mask(tree.ancestors, len(tree))
        if self._strict_rows:
            return self._verify_strictly(tree, mask)
        return self.lm.forward(
            tree.tokens,
            tree.depths + length,
            self.cache,
            length,
            Visibility(mask, prefix=length),
            features=self._features,
        )

    def _verify_strictly(self, tree: TokenTree, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        length, found = self.cache.length, []
        for first in range(0, len(tree), self._strict_rows):
            rows = slice(first, min(first + self._strict_rows, len(tree)))
            seen = None if mask is None else mask[rows, : length + rows.stop]
            visibility = Visibility(seen, strict=True)
            positions = tree.depths[rows] + length
            found.append(
                self.lm.forward(
                    tree.tokens[rows], positions, self.cache, length + first, visibility, features=self._features
                )
            )
        logits, features = zip(*found, strict=True)
        return torch.cat(logits), None if features[0] is None else torch.cat(features)

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        tokens = tree.tokens[path].tolist()
        self.cache.compact(path)
        self.tokens.extend(tokens)

    def reset(self) -> None:
        self.cache.crop(0)
        self.tokens = []


STRICT_ROWS = (32, 16, 8, 4, 2)
TRIED = 16  # tokens


@torch.inference_mode()
def strict_rows(lm: CausalLM) -> int:
    """The most rows that a forward of `lm` can hold without changing the bits of any of them.

    Tried on a few tokens, alone and among others. UnsupportedModelError where two rows are too many already.
    """
    if lm.attention != "tree":
        raise UnsupportedModelError(
            "strict: this model's attention runs with a dense mask, whose sums follow the cache"
        )
    cache = lm.new_cache(1)
    lm.extend(cache, [token % lm.vocab_size for token in (1, 2, 3, 5, 7)])
    tokens = torch.arange(11, 11 + TRIED) * 13 % lm.vocab_size
    alone = torch.cat([_siblings(lm, cache, token[None]) for token in tokens])
    for most in STRICT_ROWS:
        sizes = [size for size in (2, 3, 5, 8, 12, 16, 24, 31, 32) if size <= most]
        if all(_same_bits(lm, cache, tokens, alone, size) for size in sizes):
            return most
    raise UnsupportedModelError(
        f"strict: on this {lm.device.type} the matrix products of {lm.model.dtype} change with the number of rows, so "
        "no tree can have the bits of plain decoding; bfloat16 on a CPU with AMX keeps them, and with graphs=True all "
        "forwards have one number of rows"
    )


def _same_bits(lm: CausalLM, cache: KVCache, tokens: Tensor, alone: Tensor, size: int) -> bool:
    places = (torch.arange(size) + size) % TRIED  # others for each size
    return torch.equal(_siblings(lm, cache, tokens[places]), alone[places.to(alone.device)])


def _siblings(lm: CausalLM, cache: KVCache, tokens: Tensor) -> Tensor:
    """Logits of `tokens`, each of them the next one behind what `cache` holds."""
    rows, length = len(tokens), cache.length
    cache.reserve(length + rows)
    mask = torch.cat([torch.ones(rows, length, dtype=torch.bool), torch.eye(rows, dtype=torch.bool)], 1).to(lm.device)
    positions = torch.full((rows,), length, device=lm.device)
    return lm.forward(tokens.to(lm.device), positions, cache, length, Visibility(mask, strict=True))[0]

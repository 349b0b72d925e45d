"""LongRoPE: models whose frequencies are others once a text passes their original context (Phi-3.5, Phi-4-mini).

transformers then turns all positions by the long frequencies: a text up to the original context keeps the short ones,
and the step that passes it runs everything again.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.ops.tree import TokenTree

LONG_ROPE = "longrope"


def switches(config: Any) -> bool:
    """Return whether a text can pass the original context of a LongRoPE model, as transformers has those of Phi.

    Other classes of transformers leave the cached keys as they were; those end with the original context here.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    first, context = (
        rope.get("original_max_position_embeddings"),
        getattr(config, "max_position_embeddings", None),
    )
    supported = (
        hasattr(config, "original_max_position_embeddings") and rope.get("rope_type") == LONG_ROPE
    )
    return supported and first is not None and context is not None and int(first) < int(context)


class LongRopeLM(CausalLM):
    """A LongRoPE model whose frequencies are chosen by `use`, not by the positions of a forward."""

    def __init__(
        self, model: PreTrainedModel, *, pack: bool | None = None, merge: bool = False
    ) -> None:
        super().__init__(model, pack=pack, merge=merge)
        self.original = self.max_context
        self.max_context = int(self.config.max_position_embeddings)

    def _own_twin(self) -> PreTrainedModel:
        twin = super()._own_twin()
        self._rotaries: list[tuple[Tensor, Tensor, Tensor]] = []
        for module in twin.modules():
            if vars(module).get("rope_type") == LONG_ROPE:
                config: Any = module.config
                first = config.rope_parameters["original_max_position_embeddings"]
                short = module.original_inv_freq.clone()
                far, _ = ROPE_INIT_FUNCTIONS[LONG_ROPE](config, short.device, seq_len=first + 1)
                module._buffers["inv_freq"] = used = short.clone()
                # the twin's alone: its forward leaves the buffer as it is
                module.__dict__["rope_type"] = "default"
                self._rotaries.append((used, short, far.to(short.dtype)))
        return twin

    def use(self, *, long: bool) -> None:
        """Choose the frequencies of the forwards to come."""
        for used, short, far in self._rotaries:
            used.copy_(far if long else short)


class LongRopeTarget(HuggingFaceTarget):
    """A LongRoPE model as the target: nodes beyond the original context are not entered from before it."""

    makes = LongRopeLM
    lm: LongRopeLM
    _long = False  # the frequencies of the keys in the cache

    def cached(self, tokens: list[int]) -> int:
        return super().cached(tokens) if self._long == self._passes(len(tokens)) else 0

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        reused = self.cached(tokens) if keep is None else keep
        self._choose(long=self._passes(len(tokens)))
        return super().prefill(tokens, reused)

    def rate(self, tokens: list[int]) -> Tensor:
        if not self.tokens:
            self._choose(long=False)
        room = self.lm.original - len(self.tokens)
        if self._long or room >= len(tokens):
            return super().rate(tokens)
        first = [super().rate(tokens[:room])] if room > 0 else []
        self._run_again()
        return torch.cat([*first, super().rate(tokens[max(0, room) :])])

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        if self._passes(len(self.tokens)) and not self._long:
            self._run_again()
        logits, features = super().verify(tree)
        if not self._long:
            beyond = tree.trimmed().depths + len(self.tokens) >= self.lm.original
            logits = logits.masked_fill(beyond.to(logits.device)[:, None], math.nan)
        return logits, features

    def _passes(self, length: int) -> bool:
        """Return whether the token at position `length` is beyond the original context."""
        return length >= self.lm.original

    def _choose(self, *, long: bool) -> None:
        self._long = long
        self.lm.use(long=long)

    def _run_again(self) -> None:
        self._choose(long=True)
        self.cache.crop(0)
        self.lm.extend(self.cache, self.tokens, logits="none")

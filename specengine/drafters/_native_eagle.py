"""An EAGLE-3 head on the C++ forward of csrc/cpu."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from specengine.drafters import Step
from specengine.drafters._head_draft import HeadDraft
from specengine.errors import UnsupportedModelError
from specengine.modeling import threads
from specengine.modeling.attention import Visibility
from specengine.modeling.eagle_head import EagleConfig, rope_frequencies
from specengine.modeling.native import NativeLM, add_weight, as_words, extension
from specengine.modeling.sources import Weight
from specengine.tree import TokenTree


class NativeEagle(HeadDraft):
    """As HeadDraft, for a NativeLM as the target; states and logits are float32, the cache is in the target's dtype.

    UnsupportedModelError for heads that csrc/cpu does not run: EAGLE-1, embeddings of their own, norms before the
    fusion, biases of the fusion, other activations than silu.
    """

    def __init__(self, config: EagleConfig, state: Mapping[str, Tensor], target: NativeLM, *, name: str = "") -> None:
        refuse(config)
        self._begin_with(config, target, name, torch.float32)
        self.cache = type(self.cache)(1, config.num_kv_heads, config.head_dim, 1, dtype=target.dtype)
        self._config = config
        self._packed = None
        part = state.get("d2t")
        self._target_ids = None if part is None else part + torch.arange(config.draft_vocab_size)
        self._weights = extension().Weights(threads.count())
        for key, tensor in state.items():
            if key != "d2t":
                add_weight(self._weights, Weight.of(key, tensor.to(target.dtype)))
        frequencies, scale = rope_frequencies(config)
        sizes = [config.hidden_size, config.draft_vocab_size, config.num_heads, config.num_kv_heads, config.head_dim]
        flags = [config.norm_before_residual, config.norm_logits, config.norm_recurrent]
        self._head = extension().Eagle(
            target.instruction_set, sizes, flags, config.rms_norm_eps, self._weights, frequencies.tolist(), scale
        )
        self._found = torch.empty(0)  # logits of the last pass

    @torch.inference_mode()
    def step(self, tree: TokenTree, nodes: Tensor) -> Step:
        began = time.perf_counter()
        states = self._step_root(tree) if int(tree.passes) == 0 else self._step_nodes(tree, nodes)
        self._seconds += time.perf_counter() - began
        if states is None:
            return Step(torch.full((1, 1), float("-inf")), normalized=True)
        return Step(self._found, self._target_ids, hidden=states)

    def _run(self, hidden: Tensor, tokens: Tensor, positions: Tensor, start: int, visibility: Visibility) -> Tensor:
        rows, causal = hidden.shape[0], visibility.in_order or visibility.mask is None
        hidden, positions = hidden.contiguous(), positions.contiguous()
        embeddings, states = self.target.embed(tokens), torch.empty(rows, self._config.hidden_size)
        # a prompt's pieces need no logits but the last row's, tree nodes all
        self._found = torch.empty(1 if causal else rows, self._config.draft_vocab_size)
        prefix, words = start, None
        if not causal:
            assert visibility.mask is not None
            prefix = visibility.prefix
            words = as_words(visibility.mask[:, prefix:])
        seen = (0, 0) if words is None else (words.data_ptr(), words.shape[1])
        self._head.forward(
            [positions.data_ptr(), rows, prefix, start, *seen],
            hidden.data_ptr(),
            embeddings.data_ptr(),
            self.cache.slab.data_ptr(),
            self.cache.capacity,
            self.cache.slab.dtype is torch.bfloat16,
            states.data_ptr(),
            self._found.data_ptr(),
            rows - self._found.shape[0],
            threads.count(),
        )
        return states

    def _fuse(self, features: Tensor) -> Tensor:
        features = features.float().contiguous()
        fused = torch.empty(features.shape[0], self._config.hidden_size)
        if len(fused):
            self._head.fuse(features.data_ptr(), len(features), fused.data_ptr(), threads.count())
        return fused


def refuse(config: EagleConfig) -> None:
    """Raise UnsupportedModelError where csrc/cpu does not run such a head."""
    reasons = {
        f"EAGLE-{config.version}": config.version != 3,
        "embeddings of its own": config.own_embeddings,
        f"fusion norm {config.fusion_norm}": config.fusion_norm != "none",
        "a bias in the fusion": config.fc_bias,
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        "other sizes of target and draft": config.target_hidden_size != config.hidden_size,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"native: an EAGLE head with {reason}")

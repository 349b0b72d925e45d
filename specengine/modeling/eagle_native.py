"""An EAGLE-3 head on the C++ forward of csrc/cpu."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specengine.errors import UnsupportedModelError
from specengine.modeling import threads
from specengine.modeling.eagle_head import EagleConfig, rope_frequencies
from specengine.modeling.extension import extension
from specengine.modeling.kv_cache import KVCache
from specengine.modeling.native import PREFILL_ROWS, NativeLM, add_weight
from specengine.modeling.rows import Rows
from specengine.modeling.sources import Weight


class NativeHead:
    """As TorchHead, for a NativeLM as the target; states and logits are float32, the cache is in the target's dtype.

    Beside a bfloat16 target its matrices are kept as int8 with a scale per output: a pass waits for its weights, and no
    answer hangs on how they are rounded.

    UnsupportedModelError for heads that csrc/cpu does not run: EAGLE-1, embeddings of their own, no vocabulary
    head, norms before the fusion, biases of the fusion, other activations than silu.
    """

    dtype = torch.float32
    weights: tuple[torch.nn.Module, ...] = ()
    reads: tuple[Tensor, ...] = ()

    def __init__(self, config: EagleConfig, state: Mapping[str, Tensor], target: NativeLM) -> None:
        refuse(config)
        self.config, self._target = config, target
        self.cache = KVCache(1, config.num_kv_heads, config.head_dim, 1, dtype=target.dtype)
        part = state.get("d2t")
        columns = torch.arange(config.draft_vocab_size, dtype=torch.int64, device="cpu")
        self.target_ids = None if part is None else part + columns
        self._weights = extension().Weights(threads.count())
        quantize = "int8" if target.dtype is torch.bfloat16 else None
        weights = [Weight.of(key, tensor.to(target.dtype)) for key, tensor in state.items() if key != "d2t"]
        kinds = {add_weight(self._weights, weight, quantize) for weight in weights}
        self.stored = ", ".join(sorted(kinds - {""}))  # what the matrices are kept as
        frequencies, scale = rope_frequencies(config)
        sizes = [config.hidden_size, config.draft_vocab_size, config.num_heads, config.num_kv_heads, config.head_dim]
        flags = [config.norm_before_residual, config.norm_logits, config.norm_recurrent]
        self._head = extension().Eagle(
            target.instruction_set, sizes, flags, config.rms_norm_eps, self._weights, frequencies.tolist(), scale
        )

    def refresh(self) -> None:
        """Its weights are its own."""

    def fuse(self, features: Tensor) -> Tensor:
        features = features.float().contiguous()
        fused = torch.empty(features.shape[0], self.config.hidden_size, dtype=torch.float32, device="cpu")
        if len(fused):
            self._head.fuse(features, fused, threads.count())
        return fused

    def extend(self, hidden: Tensor, tokens: list[int]) -> None:
        """Run consecutive rows behind the cache's, and commit them; hidden: [rows, hidden size]."""
        for first in range(0, len(tokens), PREFILL_ROWS):
            piece = torch.tensor(tokens[first : first + PREFILL_ROWS], dtype=torch.int64, device="cpu")
            length = self.cache.length
            self.cache.reserve(length + len(piece))
            positions = torch.arange(length, length + len(piece), dtype=torch.int64, device="cpu")
            self._call(hidden[first : first + len(piece)], piece, positions, (length, length, None), 0)
            self.cache.length = length + len(piece)

    def forward(self, states: Tensor, sources: Tensor, rows: Rows, one: Tensor | None) -> tuple[Tensor, Tensor]:
        """As TorchHead.forward; the row `one` can be the last one alone."""
        seen = int(rows.prefix), int(rows.slot), rows.words.contiguous()
        wanted = len(rows) if one is None else 1
        found, logits = self._call(states.index_select(0, sources), rows.tokens, rows.positions, seen, wanted)
        return logits, found[-wanted:]

    def _call(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, seen: tuple[int, int, Tensor | None], wanted: int
    ) -> tuple[Tensor, Tensor]:
        """States of all rows, logits of the last `wanted`; seen: prefix, first slot, words."""
        rows, (prefix, slot, words) = len(tokens), seen
        hidden, positions, embeddings = hidden.contiguous(), positions.contiguous(), self._target.embed(tokens)
        states = torch.empty(rows, self.config.hidden_size, dtype=torch.float32, device="cpu")
        logits = torch.empty(wanted, self.config.draft_vocab_size, dtype=torch.float32, device="cpu")
        self._head.forward(
            positions,
            prefix,
            slot,
            words,
            hidden,
            embeddings,
            self.cache.slab,
            states,
            logits if wanted else None,
            threads.count(),
        )
        return states, logits


def refuse(config: EagleConfig) -> None:
    """Raise UnsupportedModelError where csrc/cpu does not run such a head."""
    reasons = {
        f"EAGLE-{config.version}": config.version != 3,
        "embeddings of its own": config.own_embeddings,
        "the target's vocabulary head": not config.own_head,
        f"fusion norm {config.fusion_norm}": config.fusion_norm != "none",
        "a bias in the fusion": config.fc_bias,
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        "other sizes of target and draft": config.target_hidden_size != config.hidden_size,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"native: an EAGLE head with {reason}")

"""DFlash: a draft of several layers that predicts a block of positions in one pass, over keys of the target's states.

Source: DFlash (arXiv 2602.06036) and its repository; whether windows are causal by default, vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from specengine import ops
from specengine.models.eagle import Attend, DecoderLayer, EagleConfig, EagleHead, TorchHead
from specengine.models.kv_cache import Rows


@dataclass(frozen=True)
class DflashConfig(EagleConfig):
    """Sizes and variants of a DFlash head.

    block_size     positions of a pass: the token committed last, and those that are predicted
    mask_token_id  token of the target's embeddings that stands for a position to predict
    windows        positions that a row sees, including itself, by layer; 0: all
    causal         whether a row of the block sees none after it, by layer
    """

    num_layers: int = 1  # type: ignore[misc]
    block_size: int = 16
    mask_token_id: int = 0
    windows: tuple[int, ...] = (0,)
    causal: tuple[bool, ...] = (False,)

    kind = "DFlash"

    @property
    def depths(self) -> int:  # type: ignore[override]
        return self.block_size - 1

    def network(self) -> DflashNet:
        return DflashNet(self)


class DflashNet(EagleHead):
    """The network. Its logits are the target's head's of the states; tensors may carry any leading dimensions."""

    config: DflashConfig

    def __init__(self, config: DflashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(DecoderLayer(config, size) for _ in range(config.num_layers))
        for layer in self.layers:
            layer.input_layernorm = nn.RMSNorm(size, eps=eps)

    def fuse(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.hidden_norm(self.fc(features)))

    def forward(  # type: ignore[override]
        self, embeddings: Tensor, positions: Tensor, attends: Iterable[Attend]
    ) -> Tensor:
        """Return states of a block, [..., rows, hidden size], of its embeddings; attends: by layer."""
        states, rotation = embeddings, self.rope(positions, embeddings.dtype)
        for layer, attend in zip(cast(Any, self.layers), attends, strict=True):
            states = layer(layer.input_layernorm(states), states, rotation, attend)
        return cast(Tensor, self.norm(states))


class DflashHead(TorchHead):
    """Run a DFlash head; its cache holds keys and values of committed tokens, from the target's states of these."""

    config: DflashConfig

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        fused = self._runs.fuse(features.to(self.dtype))
        rotation = self._runs.rope(positions, fused.dtype)
        for slab, layer in zip(self.cache.slab, self._runs.layers, strict=True):
            both = torch.stack(layer.self_attn.keys_and_values(fused, rotation))
            slab[:, :, positions] = both.to(slab.dtype)

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits of all positions of the block but the first, and the state of the first of these.

        rows: committed tokens to be kept, with the root in place of the last; features: theirs.
        """
        count, size = int(rows.live), self.config.block_size
        first = int(rows.slot) + count
        self.cache.reserve(first + size)
        self._prefill(cast(Tensor, features)[:count], rows.tokens, rows.positions[:count])
        block = rows.tokens.new_full((size,), self.config.mask_token_id)
        block[:1] = rows.tokens.index_select(0, cast(Tensor, one))
        out = self._run_block(self._target.embed(block), first)[1:]
        return self._target.head(out), out[:1]

    def _run_block(self, embeddings: Tensor, first: int) -> Tensor:
        """Return the states of a block, [rows, hidden size]; first: its first slot, and position."""
        end, device = first + len(embeddings), embeddings.device
        positions = torch.arange(first, end, device=device, dtype=torch.int64)
        attends = [partial(self._attend, layer, first) for layer in range(self.config.num_layers)]
        return cast(Tensor, self._runs(embeddings.to(self.dtype), positions, attends))

    def _attend(self, layer: int, first: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from a block whose first position is `first`, over the context and itself; as of Attend."""
        window, causal = self.config.windows[layer], self.config.causal[layer]
        end = first + key.shape[-2]
        keys, values = self.cache.slab[layer, :, :, :end]
        keys[:, first:], values[:, first:] = key, value
        slots = torch.arange(end, device=key.device, dtype=torch.int64)
        rows = slots[first:, None]
        mask = (slots > rows - (window or end)) & (slots <= (rows if causal else end))
        return ops.tree_attention(
            query, keys, values, mask if window or causal else None, query.shape[-1] ** -0.5
        )

"""DFlash: a draft of several layers that predicts a block of positions in one pass, over keys of the target's states.

Sources: DFlash (arXiv 2602.06036) and its repository; whether windows are causal by default, vLLM and SGLang. DSpark:
DeepSeek's paper (arXiv 2607.05147) and DeepSpec. DFlash2: SpecForge, SGLang and vLLM (#52816).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from specengine import ops
from specengine.models.eagle import (
    Attend,
    DecoderLayer,
    EagleConfig,
    EagleHead,
    Rotation,
    TorchHead,
)
from specengine.models.kv_cache import Rows


@dataclass(frozen=True)
class DflashConfig(EagleConfig):
    """Sizes and variants of a DFlash, DSpark or DFlash2 head.

    block_size     rows of a pass: the token committed last, and masks
    mask_token_id  token of the target's embeddings that stands for a position to predict
    windows        positions that a row sees, including itself, by layer; 0: all
    causal         whether a row of the block sees none after it, by layer
    anchored       each row predicts the token after its position, the first one too; else each mask that of its own
    rank           channels by which a token corrects the logits of the position after it; 0: positions are independent
    gated          the correction also depends on the state of its position (DSpark)
    candidates     tokens that a position proposes, the best before the correction (DFlash2); 0: all
    taps           rows that the convolutions of a layer read (DFlash2); 0: none
    group_size     channels that share what a row adds to a convolution's kernel
    """

    num_layers: int = 1  # type: ignore[misc]
    block_size: int = 16
    mask_token_id: int = 0
    windows: tuple[int, ...] = (0,)
    causal: tuple[bool, ...] = (False,)
    anchored: bool = False
    rank: int = 0
    gated: bool = False
    candidates: int = 0
    taps: int = 0
    group_size: int = 1

    @property
    def kind(self) -> str:
        return "DFlash2" if self.taps else "DSpark" if self.rank else "DFlash"

    @property
    def depths(self) -> int:  # type: ignore[override]
        return self.block_size - (not self.anchored)

    def network(self) -> DflashNet:
        return DflashNet(self)


class MarkovHead(nn.Module):
    """Correct the logits of positions by the tokens before them: W2 W1[token], in DSpark's paper of first order."""

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.markov_w1 = nn.Embedding(config.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.draft_vocab_size, bias=False)
        if config.gated:
            self.gate_proj = nn.Linear(config.hidden_size + config.rank, config.rank)

    def forward(self, tokens: Tensor, states: Tensor, columns: Tensor | None) -> Tensor:
        """Return what to add to logits, [rows, columns].

        tokens: int64 [rows], before the positions; states: [rows, hidden size], of the positions; columns: int64, of
        the draft's vocabulary, or None for all of them.
        """
        latent = self.markov_w1(tokens)
        if self.gated:
            latent = latent * self.gate_proj(torch.cat([states, latent], -1)).sigmoid()
        weight = self.markov_w2.weight
        return linear(latent, weight if columns is None else weight[columns])


class CandidateSelector(nn.Module):
    """Correct the logits of candidates by the tokens before them, as DFlash2 does: (A[token] * H state) . B[column]."""

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)
        table = self.hidden_projection.weight.new_empty(2, config.vocab_size, config.rank)
        self.predecessor_codebook, self.successor_codebook = map(nn.Parameter, table)

    def forward(self, tokens: Tensor, states: Tensor, columns: Tensor) -> Tensor:
        """Return the same as a MarkovHead, of these columns alone, int64 [columns]."""
        latent = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        return cast(Tensor, latent @ self.successor_codebook[columns].T)


class BlockConvolution(nn.Module):
    """Convolve the rows of a block before and after a part of its layer, each row with a kernel of its own.

    Channel c of row i becomes the sum over taps t of (base[t, c] + d[i, t, group of c]) x[i - t, c], without rows
    before the block. d of both sides is read from the rows before the first one.
    """

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.group_size = config.group_size
        self.kernel_projection = nn.Linear(
            config.hidden_size,
            2 * config.taps * (config.hidden_size // config.group_size),
            bias=False,
        )
        self.base_kernel = nn.Parameter(
            self.kernel_projection.weight.new_empty(2, config.taps, config.hidden_size)
        )

    def forward(self, rows: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """Return rows, [..., rows, hidden size], of `inner` between both convolutions."""
        added = self.kernel_projection(rows).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        kernels = self.base_kernel + added.repeat_interleave(self.group_size, -1)
        before, after = kernels.unbind(-3)
        return _convolved(inner(_convolved(rows, before)), after)


def _convolved(rows: Tensor, kernels: Tensor) -> Tensor:
    """Return convolved rows, [..., rows, hidden size]; kernels: [..., rows, taps, hidden size]."""
    shifted = [
        pad(rows, (0, 0, tap, 0))[..., : rows.shape[-2], :] for tap in range(kernels.shape[-2])
    ]
    return (kernels * torch.stack(shifted, -2)).sum(-2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer whose attention and MLP stand between convolutions."""

    def __init__(self, config: DflashConfig, width: int) -> None:
        super().__init__(config, width)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(
        self, inputs: Tensor, residual: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor:
        attention = partial(self.self_attn, rotation=rotation, attend=attend)
        out = residual + self.attention_conv(inputs, attention)
        return cast(Tensor, out + self.mlp_conv(self.post_attention_layernorm(out), self.mlp))


class DflashNet(EagleHead):
    """The network; tensors may carry any leading dimensions."""

    config: DflashConfig

    def __init__(self, config: DflashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        layer_class = ConvolvedLayer if config.taps else DecoderLayer
        self.layers = nn.ModuleList(layer_class(config, size) for _ in range(config.num_layers))
        for layer in self.layers:
            layer.input_layernorm = nn.RMSNorm(size, eps=eps)
        if config.candidates:
            self.candidate_selector = CandidateSelector(config)
        elif config.rank:
            self.markov_head = MarkovHead(config)
        self._add_vocabulary()

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
            slab[:, :, positions] = torch.stack(layer.self_attn.keys_and_values(fused, rotation))

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and states of all positions that the block predicts.

        rows: committed tokens to be kept, with the root in place of the last; features: theirs.
        """
        count, size = int(rows.live), self.config.block_size
        first = int(rows.slot) + count
        self.cache.reserve(first + size)
        self._prefill(cast(Tensor, features)[:count], rows.tokens, rows.positions[:count])
        block = pad(
            rows.tokens.index_select(0, cast(Tensor, one)),
            (0, size - 1),
            value=self.config.mask_token_id,
        )
        out = self._run_block(self._target.embed(block), first)[size - self.config.depths :]
        return self._logits(out), out

    def corrections(self, tokens: Tensor, states: Tensor, columns: Tensor | None) -> Tensor:
        """Return what to add to logits, [rows, columns], as of MarkovHead and CandidateSelector."""
        name = "candidate_selector" if self.config.candidates else "markov_head"
        return cast(Tensor, getattr(self.module, name)(tokens, states, columns))

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

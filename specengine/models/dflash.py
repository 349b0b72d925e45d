"""DFlash: a draft of several layers that predicts a block of positions in one pass, over keys of the target's states.

Sources: DFlash (arXiv 2602.06036) and its repository; whether windows are causal by default, vLLM and SGLang. DSpark,
also with layers of Gemma 4: DeepSeek's paper (arXiv 2607.05147) and DeepSpec. DFlash2: SpecForge, SGLang and vLLM
(#52816). Domino: its paper (arXiv 2605.29707) and SpecForge.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from specengine import ops
from specengine.models.eagle import (
    Attend,
    DecoderLayer,
    EagleConfig,
    EagleHead,
    HeadAttention,
    Rotation,
    TorchHead,
    rotate,
)
from specengine.models.kv_cache import Rows


@dataclass(frozen=True)
class DflashConfig(EagleConfig):
    """Sizes and variants of a DFlash, DSpark, DFlash2 or Domino head.

    block_size     rows of a pass: the token committed last, and masks
    mask_token_id  token of the target's embeddings that stands for a position to predict
    windows        positions that a row sees, including itself, by layer; 0: all
    causal         whether a row of the block sees none after it, by layer
    anchored       each row predicts the token after its position, the first one too; else each mask that of its own
    rank           channels by which a token corrects the logits of the position after it; 0: positions are independent
    gated          the correction also depends on the state of its position (DSpark)
    recurrent      the correction depends on all tokens of the block before its position (DSpark)
    gru_size       channels of the recurrent state that makes it do so (Domino); 0: none
    uncorrected    positions, the first ones, that are not corrected (Domino)
    candidates     tokens that a position proposes, the best before the correction (DFlash2); 0: all
    taps           rows that the convolutions of a layer read (DFlash2); 0: none
    group_size     channels that share what a row adds to a convolution's kernel
    gemma4         layers are those of Gemma 4, and embeddings are scaled as there
    shared_values  of such layers: values are made by the projection of keys
    """

    num_layers: int = 1  # type: ignore[misc]
    block_size: int = 16
    mask_token_id: int = 0
    windows: tuple[int, ...] = (0,)
    causal: tuple[bool, ...] = (False,)
    anchored: bool = False
    rank: int = 0
    gated: bool = False
    recurrent: bool = False
    gru_size: int = 0
    uncorrected: int = 0
    candidates: int = 0
    taps: int = 0
    group_size: int = 1
    gemma4: bool = False
    shared_values: bool = False

    @property
    def kind(self) -> str:
        kinds = {"DFlash2": self.taps, "Domino": self.gru_size, "DSpark": self.rank}
        return next((kind for kind, size in kinds.items() if size), "DFlash")

    @property
    def depths(self) -> int:  # type: ignore[override]
        return self.block_size - (not self.anchored)

    def network(self) -> "DflashNet":
        return DflashNet(self)


class MarkovHead(nn.Module):
    """Correct the logits of positions by the tokens before them: W2 W1[token], in DSpark's paper of first order.

    The recurrent variant reads W1 of all tokens before, through a state with a gate.
    """

    successors = "markov_w2.weight"  # [draft vocabulary, rank], by which corrections are the products of `latents`

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.gated, self.recurrent = config.gated, config.recurrent
        self.markov_w1 = nn.Embedding(config.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.draft_vocab_size, bias=False)
        if config.gated:
            self.gate_proj = nn.Linear(config.hidden_size + config.rank, config.rank)
        if config.recurrent:
            self.joint_proj = nn.Linear(config.hidden_size + 2 * config.rank, 3 * config.rank)

    def latents(self, tokens: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of corrections, [rows, rank], and the recurrent state after the tokens.

        tokens: int64 [rows], before the positions; states: [rows, hidden size], of the positions; memory: [rows,
        memory size], the recurrent state before the tokens.
        """
        latent = self.markov_w1(tokens)
        if self.recurrent:
            gate, candidate, out = self.joint_proj(torch.cat([memory, latent, states], -1)).chunk(
                3, -1
            )
            return out.tanh(), torch.lerp(candidate.tanh(), memory, gate.sigmoid())
        if self.gated:
            latent = latent * self.gate_proj(torch.cat([states, latent], -1)).sigmoid()
        return latent, memory


class DominoHead(nn.Module):
    """Correct the logits of positions by a GRU over the embeddings of the tokens before them, through an MLP."""

    successors = "embed_proj.2.weight"

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.prefix_gru = nn.GRU(size, config.gru_size, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + config.gru_size, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, config.vocab_size, bias=False),
        )

    def latents(self, embeddings: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as a MarkovHead; embeddings: of the tokens, [rows, hidden size]."""
        after = self.prefix_gru(embeddings[:, None], memory[None])[1][0]
        return silu(self.embed_proj[0](torch.cat([states, after], -1))), after


class CandidateSelector(nn.Module):
    """Correct the logits of candidates by the tokens before them, as DFlash2 does: (A[token] * H state) . B[column]."""

    successors = "successor_codebook"

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.predecessor_codebook, self.successor_codebook = map(
            nn.Parameter,
            self.hidden_projection.weight.new_empty(2, config.vocab_size, config.rank),
        )

    def latents(self, tokens: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as a MarkovHead."""
        return self.predecessor_codebook[tokens] * self.hidden_projection(states), memory


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
        before, after = (self.base_kernel + added.repeat_interleave(self.group_size, -1)).unbind(-3)
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
        out = residual + self.attention_conv(
            inputs, partial(self.self_attn, rotation=rotation, attend=attend)
        )
        return cast(Tensor, out + self.mlp_conv(self.post_attention_layernorm(out), self.mlp))


class NormedAttention(HeadAttention):
    """The attention of Gemma 4's layers: values are normed too, and may be made by the projection of keys."""

    def __init__(self, config: DflashConfig, width: int) -> None:
        super().__init__(config, width)
        self.v_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, elementwise_affine=False)
        if config.shared_values:
            self.v_proj = None  # type: ignore[assignment]

    def keys_and_values(self, inputs: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        keys = self._heads(self.k_proj(inputs))
        return rotate(self.k_norm(keys), rotation), self.v_norm(
            keys if self.v_proj is None else self._heads(self.v_proj(inputs))
        )


class Gemma4Layer(DecoderLayer):
    """A decoder layer of Gemma 4: attention and MLP are normed before they are added, and the sum is scaled."""

    def __init__(self, config: DflashConfig, width: int) -> None:
        super().__init__(config, width)
        self.self_attn = NormedAttention(config, width)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.register_buffer("layer_scalar", torch.ones_like(self.self_attn.q_proj.weight[0, :1]))

    def forward(
        self, inputs: Tensor, residual: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor:
        out = residual + self.post_attention_layernorm(self.self_attn(inputs, rotation, attend))
        added = self.mlp(self.pre_feedforward_layernorm(out))
        return cast(Tensor, (out + self.post_feedforward_layernorm(added)) * self.layer_scalar)


class DflashNet(EagleHead):
    """The network; tensors may carry any leading dimensions."""

    config: DflashConfig

    def __init__(self, config: DflashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        layer_class = (
            Gemma4Layer if config.gemma4 else ConvolvedLayer if config.taps else DecoderLayer
        )
        self.layers = nn.ModuleList(layer_class(config, size) for _ in range(config.num_layers))
        for layer in self.layers:
            layer.input_layernorm = nn.RMSNorm(size, eps=eps)
        if config.candidates:
            self.candidate_selector = CandidateSelector(config)
        elif config.gru_size:
            self.logit_head = DominoHead(config)
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

    shares = False
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
        scale = torch.tensor(  # a number of the target's dtype, as Gemma 4's is
            self.hidden_size**0.5 if self.config.gemma4 else 1.0,
            dtype=self._target.dtype,
            device="cpu",
        )
        out = self._run_block(self._target.embed(block) * scale, first)[-self.config.depths :]
        return self._logits(out), out

    def latents(self, tokens: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of corrections and the recurrent state after tokens, as of MarkovHead."""
        read = self._target.embed(tokens).to(self.dtype) if self.config.gru_size else tokens
        return cast(tuple[Tensor, Tensor], self._corrects.latents(read, states, memory))

    def corrections(self, latents: Tensor, columns: Tensor | None) -> Tensor:
        """Return the sums to add to logits, [rows, columns]; columns: int64, of the draft's vocabulary; None: all."""
        weight = self._corrects.get_parameter(self._corrects.successors)
        return linear(latents, weight if columns is None else weight[columns])

    @property
    def _corrects(self) -> Any:
        return next(
            getattr(self.module, name)
            for name in ("logit_head", "candidate_selector", "markov_head")
            if hasattr(self.module, name)
        )

    def _run_block(self, embeddings: Tensor, first: int) -> Tensor:
        """Return the states of a block, [rows, hidden size]; first: its first slot, and position."""
        positions = torch.arange(
            first, first + len(embeddings), device=embeddings.device, dtype=torch.int64
        )
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
            query,
            keys,
            values,
            mask if window or causal else None,
            1.0 if self.config.gemma4 else query.shape[-1] ** -0.5,
        )

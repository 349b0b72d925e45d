"""The networks of EAGLE drafts: one decoder layer that predicts the target's hidden states, and so its tokens.

Serving, training and measuring run these modules, each with its own attention function. Below them, what runs a head
over a cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from specengine import ops
from specengine.errors import require_input
from specengine.models import SharedRows, fused
from specengine.models.attention import JoinedRows, Prompt, attend, note_places, prompt_mask
from specengine.models.configs import rope_of
from specengine.models.huggingface import PREFILL_ROWS
from specengine.models.kv_cache import CacheLayout, KVCache, LanguageModel, Rows
from specengine.models.twins import Packed, is_changed, worth_packing

# query [..., heads, rows, head size], key and value [..., KV heads, rows, head size] of the rows at hand, rotated by
# their positions; returns [..., heads, rows, head size]. Keys and values of earlier rows are the function's own.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cosines and sines, [..., 1, rows, head size]


DEFAULT_THETA = 10000.0
# tokens that a fine-tune or padding adds; beyond, it is another model's vocabulary
MAX_APPENDED = 1024
SUCCESSORS = {  # tables by token with which blocks correct logits
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "logit_head.embed_proj.2.weight",
}


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and variants of an EAGLE draft head.

    version              1 (EAGLE-1 and -2, HASS: one hidden state, the target's own head) or 3 (EAGLE-3)
    target_hidden_size   channels of each hidden state of the target that is read
    vocab_size           of the target; `draft_vocab_size` is that of the draft's own head
    rope                 as transformers' `rope_parameters`: rope_type, rope_theta, what the type needs
    layer_ids            hidden states read by EAGLE-3, numbered as transformers does; None: `default_layer_ids`
    own_embeddings       the head brings token embeddings, else it reads the target's
    own_head             an EAGLE-3 head brings its vocabulary head, else the target's reads its states
    fc_bias              of the fusion layer
    qkv_bias, o_bias     of the attention's projections
    qk_norm              RMSNorm of queries and keys per head, as in Qwen3
    fusion_norm          RMSNorm before EAGLE-3's fusion layer: of each hidden state, or of the whole of them
    norm_before_residual the residual is the normalised input instead of the input itself
    norm_logits          logits are read after the final norm
    norm_recurrent       children read their parent's state after the final norm
    sliding_window       positions that a row of the layer sees, including itself; 0: all
    temperatures         divisors of the logits when the head serves, by depth from the root's children on; the last
                         one also holds below, none changes nothing. They change the probabilities that policies read,
                         not the order of tokens

    The two last differ by producer: `norm_output` of SpecForge is the former, that of speculators the latter.
    Sources: Li et al. 2024 (EAGLE, EAGLE-2), 2025 (EAGLE-3); their code and that of SpecForge and speculators.
    """

    version: Literal[1, 3]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": DEFAULT_THETA}
    )
    max_position_embeddings: int = 2048
    layer_ids: tuple[int, ...] | None = None
    own_embeddings: bool = False
    own_head: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    fusion_norm: Literal["none", "each", "whole"] = "none"
    norm_before_residual: bool = False
    norm_logits: bool = True
    norm_recurrent: bool = False
    sliding_window: int = 0
    temperatures: tuple[float, ...] = ()

    num_layers: ClassVar[int] = 1
    mlp_bias: ClassVar[bool] = False  # as LlamaMLP reads it
    depths: ClassVar[int] = 64  # tokens ahead that it can predict

    @property
    def kind(self) -> str:
        """Return what a head of this config is called."""
        return f"EAGLE-{self.version}"

    def network(self) -> "EagleHead":
        """Return the network with freshly initialised weights."""
        return Eagle1Head(self) if self.version == 1 else Eagle3Head(self)

    @property
    def num_features(self) -> int:
        """Return how many hidden states of the target are read."""
        return len(self.feature_ids(0))

    def feature_ids(self, layers: int) -> tuple[int, ...]:
        """Return the hidden states read of a target of `layers` layers; EAGLE-1 reads the one after the final norm."""
        if self.version == 1:
            return (layers,)
        return default_layer_ids(layers) if self.layer_ids is None else self.layer_ids


def default_layer_ids(layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's low, middle and high hidden state: the inputs of layers 2, L/2 and L - 3 (0-based)."""
    return 2, layers // 2, layers - 3


def head_from(
    config: EagleConfig, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> "EagleHead":
    """Return the network with these weights (see checkpoints.eagle), ready to serve."""
    with torch.device("meta"):
        head = config.network()
    head.load_state_dict(dict(state), assign=True)
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend over a whole sequence: each row sees itself and the rows before it."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def within(window: int) -> Attend:
    """Return `causal` for rows that see the last `window` positions, their own included; 0: all before them."""
    if not window:
        return causal

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = prompt_mask(query.shape[-2], 0, query.device, window)
        return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    return attend


class EagleHead(nn.Module, ABC):
    """A draft head. Row i pairs the target's hidden state at position i with token i + 1 and predicts token i + 2.

    Tensors may carry any leading dimensions. A row's `hidden` is `fuse` of the target's features where they are
    known, and the parent's recurrent state, which `forward` returns, where they are not.
    """

    fc: nn.Linear
    layers: nn.ModuleList
    embed_tokens: nn.Embedding
    d2t: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Return `hidden` from the target's features, [..., rows, features * target hidden size]."""

    @abstractmethod
    def forward(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return the recurrent states of rows, [..., rows, hidden size].

        hidden, embeddings: [..., rows, hidden size], of the row's feature and of its token; positions: int64
        [..., rows], those of the features.
        """

    def rotation(self, positions: Tensor, dtype: torch.dtype, attend: Attend) -> Rotation | None:
        """Return the rotation of queries and keys before `attend`; None where it rotates them itself."""
        return None if isinstance(attend, _RowAttention) else self.rope(positions, dtype)

    def readout(self, recurrent: Tensor) -> Tensor:
        """Return the states that the vocabulary head reads, [..., rows, hidden size]."""
        return recurrent

    def vocabulary_head(self) -> nn.Linear | None:
        """Return the draft's own head, [draft vocabulary, hidden size]; None where the target's takes its place."""
        return getattr(self, "lm_head", None)

    def logits(self, recurrent: Tensor) -> Tensor | None:
        """Return logits [..., rows, draft vocabulary]; None where the target's head reads the `readout`."""
        layer = self.vocabulary_head()
        return None if layer is None else layer(self.readout(recurrent))

    def target_ids(self) -> Tensor | None:
        """Return the target's token of each column, int64 [draft vocabulary]; None where they are the same."""
        if (offsets := getattr(self, "d2t", None)) is None:
            return None
        return offsets + torch.arange(len(offsets), device=offsets.device, dtype=torch.int64)

    def _add_vocabulary(self) -> None:
        """Add the draft's own head and, where that has fewer columns than the target's, their map."""
        config = self.config
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # Offsets, not ids: column d stands for target token d + d2t[d].
        self.register_buffer(
            "d2t",
            torch.zeros_like(self.lm_head.weight[:, 0], dtype=torch.int64)
            if config.draft_vocab_size < config.vocab_size
            else None,
        )


class Eagle1Head(EagleHead):
    """EAGLE-1 and -2, HASS and TALF: predicts the state after the target's final norm; the target's head reads it."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, config.hidden_size)])

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        fused = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return self.layers[0](fused, fused, self.rotation(positions, fused.dtype, attend), attend)


class Eagle3Head(EagleHead):
    """EAGLE-3: fuses several hidden states of the target, and reads logits over a vocabulary of its own."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.num_features * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        if config.fusion_norm == "whole":
            self.input_norm = _norm(width, config)
        elif config.fusion_norm == "each":
            self.fc_norm = nn.ModuleList(
                _norm(config.target_hidden_size, config) for _ in range(config.num_features)
            )
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = _norm(config.hidden_size, config)
        self._add_vocabulary()

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.fusion_norm == "whole":
            features = self.input_norm(features)
        elif self.config.fusion_norm == "each":
            states = features.chunk(self.config.num_features, dim=-1)
            features = torch.cat(
                [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1
            )
        return self.fc(features)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        out = self.layers[0](
            hidden, embeddings, self.rotation(positions, hidden.dtype, attend), attend
        )
        return self.norm(out) if self.config.norm_recurrent else out

    def readout(self, recurrent: Tensor) -> Tensor:
        normed = self.config.norm_recurrent or not self.config.norm_logits
        return recurrent if normed else self.norm(recurrent)


class DecoderLayer(nn.Module):
    """Llama's decoder layer without its input norm."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, width)
        self.post_attention_layernorm = _norm(config.hidden_size, config)
        self.mlp = LlamaMLP(config)

    def forward(
        self, inputs: Tensor, residual: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor:
        """Return states [..., rows, hidden size]; inputs: [..., rows, width]; residual: [..., rows, hidden size]."""
        out = residual + self.self_attn(inputs, rotation, attend)
        return out + self.mlp(self.post_attention_layernorm(out))


class Eagle3Layer(DecoderLayer):
    """Attend over the normalised embedding and hidden state side by side."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = _norm(config.hidden_size, config)
        self.hidden_norm = _norm(config.hidden_size, config)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return super().forward(
            inputs, normed if self.norm_before_residual else hidden, rotation, attend
        )


class HeadAttention(nn.Module):
    """Grouped-query attention with rotary positions; who sees whom is up to `attend`."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        self.q_norm = _norm(config.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = _norm(config.head_dim, config) if config.qk_norm else nn.Identity()

    def forward(self, inputs: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        out = attend(
            rotate(self.q_norm(self._heads(self.q_proj(inputs))), rotation),
            *self.keys_and_values(inputs, rotation),
        )
        return self.o_proj(out.transpose(-3, -2).flatten(-2))

    def keys_and_values(self, inputs: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows, [..., KV heads, rows, head size] each."""
        return rotate(self.k_norm(self._heads(self.k_proj(inputs))), rotation), self._heads(
            self.v_proj(inputs)
        )

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)


class Rope:
    """Rotary positions with the draft's own parameters, never the target's; frequencies stay float32 in any model."""

    def __init__(self, config: EagleConfig) -> None:
        self._config = config
        self._frequencies: Tensor | None = None
        self._scale = 1.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        half = self._angles(positions)
        angles = torch.cat([half, half], dim=-1).unsqueeze(-3)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)

    def tables(self, count: int, device: torch.device) -> Rotation:
        """Return cosines and sines of positions 0 to count, float32 [count, head size / 2] each."""
        angles = self._angles(torch.arange(count, device=device, dtype=torch.int64))
        return angles.cos() * self._scale, angles.sin() * self._scale

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angles, float32 [..., rows, head size / 2]."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            frequencies, self._scale = rope_frequencies(self._config)
            self._frequencies = frequencies.to(positions.device)
        return positions[..., None].float() * self._frequencies


def rope_frequencies(config: EagleConfig) -> tuple[Tensor, float]:
    """Return radians per position, float32 [head size / 2], and the factor on cosines and sines."""
    as_llama = LlamaConfig(
        hidden_size=config.num_heads
        * config.head_dim,  # which transformers wants to agree, and frequencies do not read
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    with torch.device("cpu"):
        return rope_of(as_llama)


def rotate(states: Tensor, rotation: Rotation | None) -> Tensor:
    """Return heads, [..., heads, rows, head size], turned by the positions of their rows; as they are for None."""
    if rotation is None:
        return states
    cosines, sines = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


def _norm(size: int, config: EagleConfig) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=config.rms_norm_eps)


# ---- heads over a cache


@dataclass(eq=False)
class HeadRows(SharedRows):
    """Rows of one text that a head is to run.

    model     a copy of the head, with the text's cache
    rows      what they are and see
    states    [any, hidden], whose rows `sources` are read unless there are `features` of the target, [n, features]
    rated     of how many rows the results are used, the last ones
    one       int64 [1], the row whose results are used where padding may follow it; None: none does
    out       the recurrent states of these rows, once they were run, [rated, hidden]
    logits    theirs, [rated, draft vocabulary]
    """

    drafts = True
    model: Any
    rows: Rows
    states: Tensor
    sources: Tensor
    features: Tensor | None
    rated: int
    one: Tensor | None = None
    out: Tensor = field(init=False)
    logits: Tensor = field(init=False)


class DraftHead(ABC):
    """Run a head's rows; row i pairs the target's state at position i with token i + 1.

    hidden_size   channels of its recurrent states
    feature_ids   hidden states of the target that it reads, numbered as in transformers; feature_size: their channels
    temperatures  as in EagleConfig
    cache         keys and values of its layer, of committed rows and of a tree's
    dtype         of its recurrent states
    target_ids    int64 [draft vocabulary], the target's token of each column of its logits; None: they are the same
    weights       modules whose weights it reads; reads: further tensors, which CUDA graphs read where they are
    multiple      rows by which `extend` pads its rows
    shares        whether its `run_lanes` runs rows of several texts
    """

    cache: KVCache
    dtype: torch.dtype
    target_ids: Tensor | None = None
    weights: tuple[nn.Module, ...] = ()
    reads: tuple[Tensor, ...] = ()
    multiple = 1
    shares = False

    def __init__(
        self,
        hidden_size: int,
        feature_ids: tuple[int, ...],
        feature_size: int,
        temperatures: tuple[float, ...] = (),
    ) -> None:
        self.feature_ids, self.feature_size = feature_ids, feature_size
        self.hidden_size, self.temperatures = hidden_size, temperatures

    def __copy__(self) -> Self:
        """Return a head over an empty cache, with the same weights."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.cache = KVCache(self.cache.layout, 1)
        return twin

    def refresh(self) -> None:  # noqa: B027 (nothing to do where the head owns its weights)
        """Take in weights that were changed since the last call, and a cache that has grown."""

    def extend(self, features: Tensor, tokens: list[int]) -> None:
        """Run consecutive rows after the cache's, and commit them; features: the target's, [rows, features]."""
        device = self.cache.slab.device
        padding = -len(tokens) % self.multiple
        tokens, features = [*tokens, *[0] * padding], pad(features, (0, 0, 0, padding))
        for first in range(0, len(tokens), PREFILL_ROWS):
            ids = torch.tensor(
                tokens[first : first + PREFILL_ROWS], device=device, dtype=torch.int64
            )
            end = self.cache.length + len(ids)
            self.cache.reserve(end)
            positions = torch.arange(end - len(ids), end, device=device, dtype=torch.int64)
            self._prefill(features[first : first + len(ids)], ids, positions)
            self.cache.length = end
        self.cache.length -= padding

    @abstractmethod
    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """Run rows of a prompt, whose slots are free in the cache and whose positions are those of the slots."""

    @abstractmethod
    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and recurrent states of rows, or of the row `one` alone.

        The inputs of the rows are at `sources` in `states`, or there in the target's features, which are fused then.
        """


class EagleRunner(DraftHead):
    """Run an EAGLE head. InputError where it was made for another target."""

    def __init__(self, config: EagleConfig, target: LanguageModel, dtype: torch.dtype) -> None:
        """dtype: of the cache."""
        require_fit(config, target)
        super().__init__(
            config.hidden_size,
            config.feature_ids(target.layers),
            config.num_features * config.target_hidden_size,
            config.temperatures,
        )
        self.config = config
        slab = config.num_layers, config.num_kv_heads, config.head_dim
        self.cache = KVCache(CacheLayout((slab,), dtype, target.device), 1)


class TorchHead(EagleRunner):
    """Run an EAGLE head's module on any device."""

    shares = True

    def __init__(self, head: EagleHead, target: LanguageModel, pack: bool | None = None) -> None:
        super().__init__(head.config, target, head.dtype)
        self.module, self._target, self.dtype = head, target, head.dtype
        self.weights_of: Any = head  # by which rows of several texts are put together
        self.target_ids, self.weights = head.target_ids(), (head,)
        self._packed: Packed | None = Packed(head) if worth_packing(head, pack) else None
        self._runs: Any = head
        self._fused = fused.FusedHead(head) if _fits(head, target.device) else None
        self.reads: tuple[Tensor, Tensor] = head.rope.tables(0, target.device)
        self._window = self.config.sliding_window or None

    def refresh(self) -> None:
        if self._packed is not None:
            self._runs = self._packed.model()
        if len(self.reads[0]) < self.cache.capacity:  # a position is never beyond its slot
            self.reads = self.module.rope.tables(self.cache.capacity, self.cache.slab.device)

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        hidden = self._runs.fuse(features.to(self.dtype))
        embeddings = embed_for(self.module, self._target, tokens)
        attends = partial(self._attend_prompt, self.cache.length)
        self._runs(hidden[None], embeddings[None], positions[None], attends)

    def _attend_prompt(self, before: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from rows that follow `before` others, and store their keys and values; as of Attend."""
        rows = key.shape[2]
        keys, values = self.cache.slab[0, :, :, : before + rows]
        keys[:, before:], values[:, before:] = key[0], value[0]
        whole = not before and (self._window is None or self._window >= rows)
        if whole and query.device.type == "cpu":
            return causal(query, key, value)
        mask = Prompt(before).packed_mask(rows, query.shape[1] // key.shape[1], query, self._window)
        return ops.tree_attention(query[0], keys, values, mask, query.shape[-1] ** -0.5)[None]

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch = HeadRows(
            self, rows, states, sources, features, len(rows) if one is None else 1, one
        )
        self.run_lanes([batch])
        return batch.logits, batch.out

    def run_lanes(self, batch: Sequence[HeadRows], slabs: Sequence[ops.Slabs] = ()) -> None:
        """Run rows of several texts in one forward, each over the cache of its own head.

        slabs: those caches' by layer, where the attention of as many rows of each may be one operation.
        """
        for each in batch:
            head, slot = each.model, each.rows.slot
            if len(head.reads[0]) < head.cache.capacity and ops.is_free(slot):
                head.refresh()
            if self._window is not None:
                note_places(head.cache, each.rows)
        self._fuse(batch)
        table = getattr(self._target, "table", None)  # none of a model whose weights are packed
        if self.config.own_embeddings:
            table = self.module.embed_tokens.weight
        attends = _RowAttention(batch, self._window, slabs)
        if self._fused is not None and table is not None and table.dtype is self.dtype:
            recurrent, read = self._fused.run(batch, table, attends)
        else:
            recurrent, read = self._run_module(batch, table, attends)
        logits, counts = self._logits(read), [each.rated for each in batch]
        for each, out, rated in zip(
            batch, recurrent.split(counts), logits.split(counts), strict=True
        ):
            each.out, each.logits = out, rated

    def _fuse(self, batch: Sequence[HeadRows]) -> None:
        """Take what the target's features give, of all rows that have any, as their states."""
        unread = [each for each in batch if each.features is not None]
        if not unread:
            return
        features = [cast(Tensor, each.features) for each in unread]
        states = self._runs.fuse(fused.joined(features).to(self.dtype))
        for each, rows in zip(unread, states.split([*map(len, features)]), strict=True):
            each.states = rows

    def _run_module(
        self, batch: Sequence[HeadRows], table: Tensor | None, attends: "_RowAttention"
    ) -> tuple[Tensor, Tensor]:
        """Return the recurrent states of the rows that are used, and what the vocabulary head reads of them."""
        inputs = [
            (each.states.index_select(0, each.sources), self._target.embed(each.rows.tokens))
            if table is None
            else ops.gather_rows(each.states, each.sources, table, each.rows.tokens)
            for each in batch
        ]
        hidden, embeddings = map(fused.joined, zip(*inputs, strict=True))
        positions = fused.joined([each.rows.positions for each in batch])
        recurrent = self._runs(
            hidden[None], embeddings.to(self.dtype)[None], positions[None], attends
        )[0]
        (recurrent,) = fused.rated(batch, recurrent)
        return recurrent, self._runs.readout(recurrent)

    def _logits(self, states: Tensor) -> Tensor:
        """Return logits, [rows, draft vocabulary], of states after the final norm."""
        layer = self._runs.vocabulary_head()
        return self._target.head(states) if layer is None else layer(states)


def _fits(head: EagleHead, device: torch.device) -> bool:
    """Return whether rows of this head are run by the ops of fused layers, which a backend has there."""
    return (
        device.type in fused.DEVICES
        and type(head) in (Eagle1Head, Eagle3Head)
        and type(cast(Any, head.layers[0]).mlp.act_fn) in fused.ACTIVATIONS
        and not any(map(is_changed, head.modules()))
        and ops.is_served(fused.OF_HEADS, device)
    )


class _RowAttention:
    """Attention of rows, which rotates them and puts their keys and values where they belong."""

    def __init__(
        self, batch: Sequence[HeadRows], window: int | None, slabs: Sequence[ops.Slabs]
    ) -> None:
        self._batch, self._window, self._slabs = batch, window, slabs
        self._lanes = JoinedRows.of([each.rows for each in batch]) if slabs else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **norms: Any) -> Tensor:
        """Return [1, heads, rows, head size]; norms: of queries and keys, as in ops.Rotation."""
        if self._lanes is not None:
            longest = max(
                (each.model for each in self._batch), key=lambda each: each.cache.capacity
            )
            positions = fused.joined([each.rows.positions for each in self._batch])
            turn, slab = ops.Rotation(*longest.reads, **norms), self._slabs[0]
            places = self._lanes.slot, self._lanes.live
            turned = ops.rope_store(query[0], key[0], value[0], positions, turn, slab, *places)
            return self._lanes.attend(turned, slab, query.shape[-1] ** -0.5)[None]
        counts = [len(each.rows) for each in self._batch]
        rows = (states[0].split(counts, 1) for states in (query, key, value))
        heads = [self._attend(*text, norms=norms) for text in zip(self._batch, *rows, strict=True)]
        return fused.joined(heads, 1)[None]

    def _attend(
        self, text: HeadRows, query: Tensor, key: Tensor, value: Tensor, *, norms: Any
    ) -> Tensor:
        rows, slab = text.rows, text.model.cache.slab[0]
        turn = ops.Rotation(*text.model.reads, **norms)
        rotated = ops.rope_store(
            query, key, value, rows.positions, turn, slab, rows.slot, rows.live
        )
        return attend(rotated, slab[0], slab[1], rows, window=self._window)


def embed_for(head: EagleHead, target: LanguageModel, tokens: Tensor) -> Tensor:
    """Return token embeddings as the head reads them, [..., hidden size], without the target's scale."""
    return (
        embedding(tokens, head.embed_tokens.weight)
        if head.config.own_embeddings
        else target.embed(tokens).to(head.dtype)
    )


def with_appended_tokens(
    config: EagleConfig, state: Mapping[str, Tensor], target: LanguageModel
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return the head for a target whose vocabulary has grown since the head was made; any other head as it is.

    Its tokens keep their ids. It reads the appended ones by the target's embeddings, and drafts them only where the
    target's head reads its states.
    """
    old_size, size, added = config.vocab_size, target.vocab_size, dict(state)
    widened = config.own_embeddings and config.hidden_size != config.target_hidden_size
    if widened or not old_size < size <= old_size + MAX_APPENDED:
        return config, added
    if config.own_embeddings:
        table = added["embed_tokens.weight"]
        rows = target.embed(
            torch.arange(old_size, size, dtype=torch.int64, device=target.device)
        ).to(table)
        added["embed_tokens.weight"] = torch.cat([table, rows])
    for name in SUCCESSORS & added.keys():  # which neither correct nor are corrected
        missing = (size - old_size) * (len(added[name]) == old_size)
        added[name] = pad(added[name], (0, 0, 0, missing))
    if config.version == 1 or not config.own_head:
        return replace(config, vocab_size=size, draft_vocab_size=size), added
    if config.draft_vocab_size == old_size:
        added["d2t"] = torch.zeros(old_size, dtype=torch.int64, device="cpu")
    return replace(config, vocab_size=size), added


def require_fit(config: EagleConfig, target: LanguageModel) -> None:
    """Raise InputError unless the head was made for a target of this shape."""
    require_shape(
        config,
        hidden_size=int(target.config.hidden_size),
        vocab_size=target.vocab_size,
        layers=target.layers,
    )


def require_shape(config: EagleConfig, *, hidden_size: int, vocab_size: int, layers: int) -> None:
    """Raise InputError unless the head was made for a target of these sizes."""
    require_sizes((config.target_hidden_size, hidden_size), (config.vocab_size, vocab_size))
    ids = config.feature_ids(layers)
    # transformers gives the last hidden state after the final norm, and EAGLE-3 reads states before it
    require_input(
        f"draft: it reads hidden states {', '.join(map(str, ids))}; a target of {layers} layers has "
        f"0 to {layers - 1} before its final norm",
        config.version != 3 or all(0 <= i < layers for i in ids),
    )


def require_sizes(hidden_size: tuple[int, int], vocabulary: tuple[int, int]) -> None:
    """Raise InputError unless the sizes that a draft was made for, which come first, are those of the target."""
    for name, (expected, actual) in {"hidden size": hidden_size, "vocabulary": vocabulary}.items():
        require_input(
            f"draft: it was made for a target with {name} {expected}, this one has {actual}; train one for this "
            "target: specengine train draft FOLDER --target MODEL",
            expected == actual,
        )

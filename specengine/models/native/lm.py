"""A causal language model of a known family on the C++ forward of csrc/cpu: one call runs all layers over tree rows.

A row's results depend on the row and on what it sees, not on the rest of its batch: the same bits in every tree and in
plain decoding, in float32, bfloat16, int8 and packed GGUF blocks.
"""

import copy
import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specengine.errors import UnsupportedModelError, require, require_supported
from specengine.models import Chosen, SharedRows, Successors, families
from specengine.models.attention import Prompt
from specengine.models.configs import (
    ACTIVATIONS,
    context_limit,
    family_of,
    kinds_of_layers,
    of_few_layers,
    shape_of,
)
from specengine.models.dflash import DflashConfig, DflashHead
from specengine.models.eagle import EagleConfig, EagleRunner, HeadRows, head_from, rope_frequencies
from specengine.models.extension import (
    extension,
    instruction_set,
    kinds_of,
    numerics_of,
    table_of,
    team,
    thread_count,
)
from specengine.models.families import Routes, Shape
from specengine.models.kv_cache import (
    LANES,
    CachedTarget,
    CacheLayout,
    KVCache,
    LaneTarget,
    Logits,
    Rows,
    counted,
    in_own_dtype,
)
from specengine.models.mtp import Assistant, AssistantHead, Blocks, MtpHead, of_head
from specengine.models.native.weights import (
    KIND_OF,
    TINY_VOCABULARY,
    FirstLayer,
    PackedModel,
    Source,
    Weight,
    add_weight,
)
from specengine.ops.tree import TokenTree

# prompts are run in pieces of this many tokens, which bounds the memory of a long prompt
PREFILL_ROWS = 512
# Distance of hidden states from the model's own, as a share of their length: rounding stays far below. After the first
# layer, and after all of them, where rounding has added up. Rounding activations to int8 moves them by 1 to 3 %, more
# than another rotary base would in some models: so the first layer is also checked in float32. That of int8 weights
# comes on top.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "integer": 0.1, "int8": 0.2}
TOLERANCE_AT_THE_END = {"float32": 1e-2, "bfloat16": 0.5}
_CHECKED = (1, 2, 3, 5, 7)  # tokens
_FARTHEST = 4095  # position that is tried


class NativeLM:
    """Compute logits of tree rows, with the interface of CausalLM.

    quantize: `int8` keeps linear weights as int8 with a scale per output; None keeps them as the source has them.
    numerics: auto, integer, or the name of the source's dtype; the attribute is never auto.
    version: of the weights; another one where those of a loaded model were changed.
    UnsupportedModelError, with the reason, where the model is none that csrc/cpu runs or its results are not the
    model's own. That is tried on a few tokens at early and late positions: against a loaded model itself, or against
    the first layer of the source's.
    """

    attention = "native"
    packed, joins = False, True
    device = torch.device("cpu")

    def __init__(
        self, source: Source, *, quantize: str | None = None, numerics: str = "auto"
    ) -> None:
        require("quantize", repr(quantize), "int8 or none", quantize in (None, "int8"))
        require_supported(
            f"native: weights of {source.dtype}, known are bfloat16 and float32",
            source.dtype in KIND_OF,
        )
        self.source, self.config, self.quantize = source, source.config, quantize
        self.numerics = numerics_of(
            numerics,
            self.dtype,
            whole=quantize is not None or not kinds_of("integer").keys().isdisjoint(source.blocks),
        )
        self.instruction_set = instruction_set(self.numerics)
        self.shape: Shape = shape_of(self.config)
        self.max_context = context_limit(self.config)
        self.version = 0
        self.seconds = 0.0  # spent in model forwards, ever
        # distinct ones that the last forward read, over all layers; shared ones are left out
        self.experts = 0
        # forwards share one workspace, and engines in several threads may share this
        self._turn = threading.RLock()
        self._take()
        if not (self.source.own_modules or isinstance(self.source, FirstLayer)):
            # one layer of each other kind, in float32
            kinds = kinds_of_layers(self.config)
            for number, kind in enumerate(kinds):
                if kinds.index(kind) == number > 0:
                    self._checked_layer(number)

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """Return the same model on transformers; it is loaded on first use."""
        return self.source.model()

    def widen(self, context: int) -> None:
        """Accept texts of up to `context` tokens, whatever the config says."""
        self.max_context = max(self.max_context, context)

    @property
    def stored(self) -> str:
        return self.packing.stored

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def vocab_size(self) -> int:
        return self.shape.vocabulary

    @property
    def routes(self) -> Routes:
        """Return how many experts there are, over all layers."""
        return family_of(self.config).routes(self.config)

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.source.shapes().values())

    @property
    def weight_bytes(self) -> int:
        return int(self.packing.weights.bytes)

    def new_cache(self, capacity: int) -> KVCache:
        family = family_of(self.config)
        attention, keeps = family.attention_of(self.config), self.packing.keeps
        slabs = tuple((attention.kept(count), *kind) for kind, count in keeps.items())
        states = [self.packing.decoder.memory()] if family.recurrence(self.config) else []
        return KVCache(CacheLayout(slabs, self.dtype), capacity, states)

    def require_same(self) -> None:
        """Raise UnsupportedModelError if a loaded model has changed in more than the values of its weights."""
        if changed := self.source.changed():
            raise UnsupportedModelError(
                f"{self.name}: {changed} was changed since it was loaded; make a new engine"
            )

    def refresh(self) -> None:
        """Re-pack weights of a loaded model that changed since the last call.

        UnsupportedModelError as `require_same`, and where the model with these weights is none that csrc/cpu runs.
        """
        self.require_same()
        with self._turn:
            if self.source.state != self.packing.state:
                self._take()
                self.version += 1

    def prepare_features(self, ids: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError if the model lacks these hidden states."""
        require_supported(
            f"{self.name}: hidden states {', '.join(map(str, ids))} were asked for, it gives {self.layers + 1}",
            all(0 <= i <= self.layers for i in ids),
        )

    def head(self, states: Tensor) -> Tensor:
        """Apply the language-model head to normed states. Returns float32 logits, [rows, vocabulary]."""
        rows = states.float().contiguous()
        logits = torch.empty(rows.shape[0], self.vocab_size, dtype=torch.float32, device="cpu")
        with self._turn:
            self.packing.decoder.read(rows, logits, thread_count())
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings, float32 [rows, hidden size]."""
        embeddings = torch.empty(
            tokens.shape[0], self.shape.hidden, dtype=torch.float32, device="cpu"
        )
        self.packing.decoder.embedding(tokens.contiguous(), embeddings)
        return embeddings

    def _embed_own(self, tokens: Tensor) -> Tensor | None:
        """Return the embeddings that are inputs of single layers, float32 [rows, layers * size], if there are any."""
        if not (width := self.packing.decoder.own_channels):
            return None
        embeddings = torch.empty(tokens.shape[0], width, dtype=torch.float32, device="cpu")
        self.packing.decoder.own_embedding(tokens.contiguous(), embeddings)
        return embeddings

    def extend(
        self,
        cache: KVCache,
        tokens: list[int],
        features: tuple[int, ...] = (),
        *,
        logits: Logits = "last",
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run and commit `tokens`. Returns logits of the last token or of all, and features of all."""
        rated: list[Tensor] = []
        states: list[Tensor] = []
        for first in range(0, len(tokens), PREFILL_ROWS):
            piece = self.rows_of(tokens[first : first + PREFILL_ROWS], cache, features)
            rows = len(piece.tokens)
            count = {"all": rows, "last": first + rows == len(tokens), "none": 0}[logits]
            rated.append(
                torch.empty(int(count), self.vocab_size, dtype=torch.float32, device="cpu")
            )
            piece.logits = rated[-1] if count else None
            self.run(piece)
            states += [] if piece.states is None else [piece.states]
            cache.length += rows
        return (
            torch.cat(rated) if rated and logits != "none" else None,
            torch.cat(states) if states else None,
        )

    def forward(
        self,
        rows: Rows,
        cache: KVCache,
        features: tuple[int, ...] = (),
        *,
        one: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run tree rows as CausalLM.forward does; logits and features are float32. `one` may only be the last row."""
        live = int(rows.live)
        logits = torch.empty(
            live if one is None else 1, self.vocab_size, dtype=torch.float32, device="cpu"
        )
        batch = RowBatch(
            self,
            rows.tokens[:live],
            rows.positions[:live],
            cache,
            (int(rows.slot), int(rows.prefix), rows.words[:live]),
            features,
            logits if live else None,
        )
        self.run(batch)
        return logits, batch.states

    def run(
        self,
        batch: "RowBatch",
        *,
        layers: int | None = None,
        added: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> None:
        """Run rows of a text in one C++ call, and fill their results.

        layers   number of layers to run; all by default
        added    int32 [rows], filled with the number of experts that each row uses and none before it does, over all
                 layers; they add up to `experts`
        routing  int32 [layers with experts, rows, experts of a row], filled with the numbers of experts
        """
        (start, prefix, words), cache, best = batch.seen, batch.cache, batch.best
        tokens, positions, features = batch.tokens, batch.positions, batch.features
        if features:
            batch.states = torch.empty(
                len(tokens), len(features) * self.shape.hidden, dtype=torch.float32, device="cpu"
            )
        if start + tokens.shape[0] > self.max_context:  # no row's position is beyond its slot
            positions = positions.clamp(max=self.max_context - 1)
        began = time.perf_counter()
        with self._turn:
            self.experts = self.packing.decoder.forward(
                positions.contiguous(),
                prefix,
                start,
                None if words is None else words.contiguous(),
                tokens.contiguous(),
                cache.slabs,
                features,
                batch.states,
                batch.logits,
                None if best is None else best.tokens,
                None if best is None else best.logits,
                self.shape.layers if layers is None else layers,
                team.get() or torch.get_num_threads(),
                next(iter(cache.states), None),
                cache.length if cache.states else 0,
                added,
                routing,
            )
        self.seconds += time.perf_counter() - began

    def rows_of(
        self, tokens: list[int], cache: KVCache, features: tuple[int, ...] = ()
    ) -> "RowBatch":
        """Return the next tokens of a text as rows for `run_lanes`, with room in its cache."""
        start, end = cache.length, cache.length + len(tokens)
        cache.reserve(end)
        positions = torch.arange(start, end, dtype=torch.int64, device="cpu")
        ids = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        return RowBatch(self, ids, positions, cache, (start, start, None), features)

    def run_lanes(self, batch: "Sequence[RowBatch]") -> Tensor | None:
        """Run rows of several texts in one C++ call, and fill their results. Caches are the texts' own.

        Returns the logits of all that want them, float32 [rows, vocabulary], of which theirs are views.
        """
        # logits are those of the last rows
        batch = sorted(batch, key=lambda rows: rows.logits is not None)
        tokens = torch.cat([rows.tokens for rows in batch])
        features = max((rows.features for rows in batch), key=len)
        rated = sum(len(rows.logits) for rows in batch if rows.logits is not None)
        count = max(0 if rows.best is None else rows.best.tokens.shape[1] for rows in batch)
        plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        states = (
            torch.empty(len(tokens), len(features) * self.shape.hidden, **plain)
            if features
            else None
        )
        logits = torch.empty(rated, self.vocab_size, **plain) if rated else None
        best = torch.empty(len(tokens), count, dtype=torch.int64, device="cpu") if count else None
        values = torch.empty(len(tokens), count, **plain) if count else None
        starts, prefixes, words = zip(*(rows.seen for rows in batch), strict=True)
        memories = [memory for rows in batch for memory in rows.cache.states]
        with counted(self), self._turn:
            self.packing.decoder.forward_lanes(
                tuple(rows.positions.clamp(max=self.max_context - 1) for rows in batch),
                prefixes,
                starts,
                words,
                tokens,
                tuple(rows.cache.slabs for rows in batch),
                features,
                states,
                logits,
                best,
                values,
                team.get() or torch.get_num_threads(),
                memories,
                [rows.cache.length for rows in batch][: len(memories)],
            )
        row = rated = 0
        for rows in batch:
            end = row + len(rows.tokens)
            if rows.features and states is not None:
                rows.states = states[row:end]
            if rows.logits is not None and logits is not None:
                rows.logits = logits[rated : rated + len(rows.logits)]
                rated += len(rows.logits)
            if rows.best is not None and best is not None and values is not None:
                width = rows.best.tokens.shape[1]
                rows.best = Successors(best[row:end, :width], values[row:end, :width])
            row = end
        return logits

    def _take(self) -> None:
        """Pack the source's weights and try them; after a failure nothing counts as packed."""
        state = self.source.state
        self.packing = PackedModel(
            self.source,
            self.shape,
            numerics=self.numerics,
            instruction_set=self.instruction_set,
            quantize=self.quantize,
        )
        # Rotary positions, norms, their epsilon and the order of heads may change states by less than int8 does.
        rounds = self.quantize is not None or self.numerics == "integer"
        first = self._checked_layer() if rounds or self._amplifies else self.source
        self._check(self.source if self.source.own_modules else first)
        self.packing.state = state

    @torch.inference_mode()
    def _checked_layer(self, number: int = 0) -> FirstLayer:
        """Return a layer after its own module and the forward in float32 have run it, one after the other.

        Raise UnsupportedModelError if they differ.
        """
        tokens = torch.arange(TINY_VOCABULARY, dtype=torch.int64, device="cpu") % self.vocab_size
        first = FirstLayer(self.source, self.embed(tokens), self._embed_own(tokens), number)
        tokens, positions = self._checked_rows()
        first.states(tokens, positions, (), self.embed(tokens), self._embed_own(tokens))
        NativeLM(first)
        return first

    def _checked_rows(self) -> tuple[Tensor, Tensor]:
        """Return tokens that are tried, and their positions."""
        tokens = torch.tensor(_CHECKED, dtype=torch.int64, device="cpu") % self.vocab_size
        queries = family_of(self.config).attention.query_factors(self.config)
        far = min(
            self.max_context - 1, _FARTHEST if queries is None else max(_FARTHEST, queries.every)
        )
        return tokens, torch.tensor(
            [0, 1, 2, far // 2, far], dtype=torch.int64, device="cpu"
        ).clamp(max=far)

    @torch.inference_mode()
    def _check(self, source: Source) -> None:
        """Raise UnsupportedModelError if hidden states differ from those of the source's own modules."""
        spent, whole = self.seconds, source.own_modules
        layers = self.layers if whole else source.tried
        tokens, positions = self._checked_rows()
        # after the first layer, and after the final norm
        ids = tuple(sorted({1, layers})) if whole else (self.layers,)
        batch = RowBatch(
            self, tokens, positions, self.new_cache(len(tokens)), (0, 0, None), features=ids
        )
        self.run(batch, layers=layers)
        ours = cast(Tensor, batch.states)
        theirs = source.states(tokens, positions, ids, self.embed(tokens), self._embed_own(tokens))
        self.seconds = spent
        for layer, computed, other in zip(ids, ours.chunk(len(ids), dim=-1), theirs, strict=True):
            last = whole and layer == layers > 1
            limit = (TOLERANCE_AT_THE_END if last else TOLERANCE).get(
                self.quantize or self.numerics, math.inf
            )
            dim = -1 if self._amplifies else None  # then the distance of most tokens counts
            distance = float(((computed - other).norm(dim=dim) / other.norm(dim=dim)).median())
            require_supported(
                f"native: {self.name} gives other hidden states than its own modules (distance {distance:.3g} of "
                f"their length after {min(layer, layers)} layers, at most {limit:g} is rounding)",
                distance <= limit,
            )

    @property
    def _amplifies(self) -> bool:
        """Whether rounding may move a single token far; such a model is tried in float32 as well.

        It goes to other experts, or a recurrence all but forgets it: its output, near zero, is normed. Weights in int8
        were seen to move one such token by 0.9 of its length, in transformers' modules by 0.6, and the others by 0.1.
        """
        return self.numerics != "float32" and (
            self.routes.layers > 0
            or isinstance(family_of(self.config).mixer(self.config), families.GatedDelta)
        )


def packed_head(tensors: Mapping[str, Tensor], target: NativeLM) -> Any:
    """Return a head's tensors as Weights of csrc/cpu, with a bfloat16 target as int8 with a scale per output."""
    packed = extension().Weights(thread_count())
    kinds = kinds_of(target.numerics, quantize=target.dtype is torch.bfloat16)
    weights = [Weight.of(name, tensor.to(target.dtype)) for name, tensor in tensors.items()]
    for weight, following in zip(weights, [*weights[1:], None], strict=True):
        add_weight(packed, weight, kinds, following)
    return packed


def run_from(
    decoder: Any,
    inputs: Tensor,
    positions: Tensor,
    cache: KVCache,
    visible: tuple[int, int, Tensor | None],
) -> Tensor:
    """Run rows of states, float32 [rows, hidden size], in the place of embeddings, on a Decoder of csrc/cpu.

    visible: start, prefix and words, as in RowBatch. Returns the states after the final norm, of the same shape. Layers
    have no states or inputs of their own.
    """
    start, prefix, words = visible
    states = torch.empty_like(inputs)
    decoder.forward_from(
        (positions.contiguous(),),
        [prefix],
        [start],
        (None if words is None else words.contiguous(),),
        inputs,
        (cache.slabs,),
        states,
        None,
        thread_count(),
    )
    return states


class NativeHead(EagleRunner):
    """Run an EAGLE head for a NativeLM. States and logits are float32, the cache is in the target's dtype.

    With a bfloat16 target its matrices are kept as int8 with a scale per output: a pass waits for its weights, and no
    answer hangs on how they are rounded.

    UnsupportedModelError for heads that csrc/cpu does not run: EAGLE-1, embeddings of their own, no vocabulary
    head, norms before the fusion, biases of the fusion, other activations than silu.
    """

    dtype = torch.float32
    shares = True

    def __init__(self, config: EagleConfig, state: Mapping[str, Tensor], target: NativeLM) -> None:
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
            require_supported(f"native: an EAGLE head with {reason}", not holds)
        super().__init__(config, target, target.dtype)
        self._target = target
        offsets = state.get("d2t")
        self.target_ids = (
            None
            if offsets is None
            else offsets + torch.arange(config.draft_vocab_size, dtype=torch.int64, device="cpu")
        )
        weights = packed_head({key: state[key] for key in state if key != "d2t"}, target)
        frequencies, scale = rope_frequencies(config)
        self.weights_of = extension().Eagle(
            target.instruction_set,
            table_of(target.numerics),
            [
                config.hidden_size,
                config.draft_vocab_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.sliding_window,
            ],
            [config.norm_before_residual, config.norm_logits, config.norm_recurrent],
            config.rms_norm_eps,
            weights,
            frequencies.tolist(),
            scale,
        )

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        start = self.cache.length
        self.weights_of.forward(
            self._target.packing.decoder,
            positions,
            start,
            start,
            None,
            tokens,
            features.contiguous(),
            None,
            None,
            self.cache.slab,
            torch.empty(len(tokens), self.config.hidden_size, dtype=torch.float32, device="cpu"),
            None,
            thread_count(),
        )

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run rows; `one` may only be the last one."""
        count = rows.tokens.shape[0]
        rated = count if one is None else 1
        out = states.new_empty(count, self.config.hidden_size)
        logits = states.new_empty(rated, self.config.draft_vocab_size)
        self.weights_of.forward(
            self._target.packing.decoder,
            rows.positions.contiguous(),
            int(rows.prefix),
            int(rows.slot),
            rows.words.contiguous(),
            rows.tokens.contiguous(),
            features,
            states,
            sources,
            self.cache.slab,
            out,
            logits,
            team.get() or torch.get_num_threads(),
        )
        return logits, out[-rated:]

    def run_lanes(self, lanes: Sequence[HeadRows]) -> None:
        """Run rows of several texts in one C++ call; their caches are of heads with these weights."""
        rows = [lane.rows for lane in lanes]
        counts = [len(lane_rows) for lane_rows in rows]
        out = torch.empty(sum(counts), self.config.hidden_size, dtype=torch.float32, device="cpu")
        logits = torch.empty(
            sum(counts), self.config.draft_vocab_size, dtype=torch.float32, device="cpu"
        )
        self.weights_of.forward_lanes(
            self._target.packing.decoder,
            tuple(lane_rows.positions.contiguous() for lane_rows in rows),
            [int(lane_rows.prefix) for lane_rows in rows],
            [int(lane_rows.slot) for lane_rows in rows],
            tuple(lane_rows.words.contiguous() for lane_rows in rows),
            torch.cat([lane_rows.tokens for lane_rows in rows]),
            tuple(lane.features for lane in lanes),
            tuple(lane.states for lane in lanes),
            tuple(lane.sources for lane in lanes),
            tuple(lane.model.cache.slab for lane in lanes),
            out,
            logits,
            team.get() or torch.get_num_threads(),
        )
        for lane, states, rated in zip(lanes, out.split(counts), logits.split(counts), strict=True):
            lane.out, lane.logits = states[-lane.rated :], rated[-lane.rated :]


class BlockSource(Source):
    """The blocks of a head as a model of few layers, whose final norm is the head's; its vocabulary does not count."""

    def __init__(
        self,
        config: PretrainedConfig,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        target: NativeLM,
    ) -> None:
        """config: of a model of whose layers the blocks are some; their weights are taken in the target's dtype."""
        self.name, self.dtype = f"the head of {target.name}", target.dtype
        self.tried = len(blocks)
        self.config = of_few_layers(config, TINY_VOCABULARY, tuple(range(self.tried)))
        family = family_of(self.config)
        some = target.embed(
            torch.arange(TINY_VOCABULARY, dtype=torch.int64, device="cpu") % target.vocab_size
        )
        above = {f"{family.layers.transformers}.{i}": block for i, block in enumerate(blocks)}
        self.tensors: dict[str, Tensor] = {
            f"{prefix}.{name}": tensor.to(self.dtype)
            for prefix, module in (above | {family.norm.transformers: norm}).items()
            for name, tensor in module.state_dict().items()
        }
        self.tensors[f"{family.embedding.transformers}.weight"] = some.to(self.dtype)
        self.tensors[f"{family.head.transformers}.weight"] = torch.zeros_like(
            some, dtype=self.dtype
        )

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


class NativeMtpHead(MtpHead):
    """Run an MTP head's blocks on the C++ forward, over a cache of their own; the rest is a product and three norms.

    UnsupportedModelError where csrc/cpu has no such blocks.
    """

    _target: NativeLM

    def _take_blocks(self) -> KVCache:
        net = self.module
        blocks = list(net.block) if isinstance(net.block, Blocks) else [net.block]
        source = BlockSource(of_head(self._target.config), blocks, net.norm, self._target)
        self._lm = NativeLM(source, quantize=self._target.quantize)
        source.tensors.clear()
        self.module.block = nn.Identity()  # its weights are packed
        return self._lm.new_cache(1)

    def _run(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, tree: Rows | Prompt
    ) -> Tensor:
        inputs = self._inputs(hidden, tokens).float().contiguous()
        at = (positions + 1).clamp(max=self._last)
        visible = (
            (int(tree.slot), int(tree.prefix), tree.words)
            if isinstance(tree, Rows)
            else (self.cache.length, self.cache.length, None)
        )
        return run_from(self._lm.packing.decoder, inputs, at, self.cache, visible).to(self.dtype)


GEMMA4_NAMES = {  # of a layer, and csrc/cpu's names
    "layer_scalar": "scale",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


class NativeDflashHead(DflashHead):
    """Run a DFlash, DSpark or DFlash2 head on the C++ forward; torch corrects logits, in float32.

    With a bfloat16 target its matrices are kept as int8, as those of a NativeHead. UnsupportedModelError for
    activations that csrc/cpu lacks.
    """

    def __init__(self, config: DflashConfig, state: Mapping[str, Tensor], target: NativeLM) -> None:
        require_supported(
            f"native: a DFlash head with activation {config.hidden_act}",
            config.hidden_act in ACTIVATIONS,
        )
        net: Any = head_from(config, state, torch.float32, target.device)
        super().__init__(net, target, pack=False)
        self.cache = KVCache(self.cache.layout._replace(dtype=target.dtype), 1)
        # tokens are the target's: the table is the head's; a convolution's base is a vector
        table = state.get(
            "lm_head.weight", state["fc.weight"].new_zeros(TINY_VOCABULARY, config.hidden_size)
        )
        names = GEMMA4_NAMES if config.gemma4 else {}
        tensors = {"embed_tokens.weight": table} | {
            ".".join(names.get(module, module) for module in name.split(".")): (
                tensor.flatten() if tensor.ndim > 2 else tensor
            )
            for name, tensor in state.items()
            if name.startswith(("fc.", "hidden_norm.", "layers.", "norm."))
        }
        tensors |= {
            f"layers.{number}.self_attn.v_norm.weight": torch.ones(
                config.head_dim, dtype=torch.float32, device="cpu"
            )
            for number in range(config.num_layers * config.gemma4)
        }
        weights = packed_head({f"model.{key}": tensor for key, tensor in tensors.items()}, target)
        net.fc = net.layers = net.lm_head = None  # their weights are packed
        frequencies, scale = rope_frequencies(config)
        self.weights_of = extension().Decoder(
            target.instruction_set,
            table_of(target.numerics),
            [
                config.num_layers,
                config.hidden_size,
                len(table),
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
            ],
            ACTIVATIONS[config.hidden_act],
            # of scores, where not by the size of a head; no others
            [config.rms_norm_eps, float(config.gemma4), 1.0, 1.0, 1.0, 0.0, 1.0],
            weights,
            [(frequencies.tolist(), scale)],
            [(0, window) for window in config.windows],
            ("softmax", [1, 1, 1, 1], [0.0, 1.0]),  # no experts
            [],
            [],
            {"ahead": [float(not causal) for causal in config.causal]},
        )

    def _prefill(self, features: Tensor, tokens: Tensor, positions: Tensor) -> None:
        self.weights_of.remember(
            positions.contiguous(),
            int(positions[0]),
            features.contiguous(),
            self.cache.slab,
            thread_count(),
        )

    def _run_block(self, embeddings: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + len(embeddings), dtype=torch.int64, device="cpu")
        return run_from(self.weights_of, embeddings, positions, self.cache, (first, first, None))

    def _logits(self, states: Tensor) -> Tensor:
        if not self.config.own_head:
            return super()._logits(states)
        logits = states.new_empty(len(states), self.config.draft_vocab_size)
        self.weights_of.read(states.contiguous(), logits, thread_count())
        return logits


class AssistantSource(BlockSource):
    """The layers of an assistant. Their windows have no place for the row itself, which no row sees.

    Its vocabulary head is tied to its embeddings; where it scores clusters of tokens, its vocabulary does not count.
    """

    def __init__(self, net: Assistant, target: NativeLM) -> None:
        self.name, self.dtype = f"the assistant of {target.name}", target.dtype
        self.config = copy.deepcopy(net.text_config)
        tokens = self.config.vocab_size if net.masked_embedding is None else TINY_VOCABULARY
        self.config.update(
            {
                "tie_word_embeddings": True,
                "pad_token_id": None,
                "vocab_size": tokens,
                "sliding_window": self.config.sliding_window + 1,
            }
        )
        self.tensors = {
            f"model.{name}": value[:tokens] if name.startswith("embed_tokens.") else value
            for name, value in net.model.state_dict().items()
        }

    def template(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


class NativeAssistant(AssistantHead):
    """Run an assistant's layers on the C++ forward, over the target's keys and values; torch multiplies the rest.

    That is two projections, and the scores of clusters. With a bfloat16 target its matrices are kept as int8, as those
    of a NativeHead. UnsupportedModelError where csrc/cpu has no such layers.
    """

    _target: NativeLM
    shares = True

    def __init__(self, net: Assistant, target: CachedTarget) -> None:
        super().__init__(net, target)
        lm, source = self._target, AssistantSource(net, self._target)
        self.weights_of = PackedModel(
            source,
            shape_of(source.config),
            numerics=lm.numerics,
            instruction_set=lm.instruction_set,
            quantize="int8" if lm.dtype is torch.bfloat16 else lm.quantize,
        )
        source.tensors.clear()
        # of the rest the weights are packed
        net.model = None if net.masked_embedding is None else net.model.embed_tokens

    def forward(
        self,
        states: Tensor,
        sources: Tensor,
        rows: Rows,
        one: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run rows; `one` may only be the last one."""
        batch = HeadRows(
            self, rows, states, sources, features, rated=len(rows) if one is None else 1
        )
        self.run_lanes([batch])
        return batch.logits, batch.out

    def run_lanes(self, lanes: Sequence[HeadRows]) -> None:
        """Run rows of several texts in one C++ call, each over the cache of its own target."""
        counts = [lane.rated for lane in lanes]
        hidden = [
            (lane.states if lane.features is None else lane.features)[lane.sources[-lane.rated :]]
            for lane in lanes
        ]
        tokens = torch.cat([lane.rows.tokens[-lane.rated :] for lane in lanes])
        inputs = self._inputs(torch.cat(hidden), tokens).float()
        caches = [cast(NativeAssistant, lane.model).followed.cache for lane in lanes]
        lengths = [cache.length for cache in caches]
        embeddings, states = self._net.model, torch.empty_like(inputs)
        logits = (
            inputs.new_empty(len(inputs), self._target.vocab_size) if embeddings is None else None
        )
        self.weights_of.decoder.forward_from(
            tuple(tokens.new_full((n,), at) for n, at in zip(counts, lengths, strict=True)),
            lengths,
            lengths,
            (None,) * len(lanes),
            inputs,
            tuple(
                tuple(cache.slabs[slab][layer, None] for slab, layer in self._slabs.values())
                for cache in caches
            ),
            states,
            logits,
            team.get() or torch.get_num_threads(),
        )
        states = states.to(self.dtype)
        if logits is None:
            logits = self._net.masked_embedding(states, embeddings.weight).float()
        out = self._net.post_projection(states).split(counts)
        for lane, rated, recurrent in zip(lanes, logits.split(counts), out, strict=True):
            lane.logits, lane.out = rated, recurrent


_before: list[int] = []  # torch's number of threads before each `one_torch_thread` that is entered


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread within the context.

    After an operation on several threads OpenMP's wait for the next one, spinning for some milliseconds on the cores
    that the forward needs; the tensors between two forwards are too small to gain from them.
    """
    # torch gives a thread that is begun meanwhile the number that is set here
    before = max([torch.get_num_threads(), *_before])
    mark = team.set(team.get() or before)
    _before.append(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _before.remove(before)
        team.reset(mark)


class NativeTarget(CachedTarget):
    """Run `lm` with a KV cache of its own. Logits and features are float32, the cache is in the model's dtype."""

    device = torch.device("cpu")
    lm: NativeLM

    def __init__(self, lm: NativeLM) -> None:
        super().__init__(lm)
        self.name = lm.name
        self.counts = lm.routes.layers > 0  # whether the experts of trees are counted

    @property
    def backend(self) -> str:  # type: ignore[override]
        lm = self.lm
        return f"native ({lm.instruction_set}, {lm.numerics}, {lm.weight_bytes / 1e6:.0f} MB of weights as {lm.stored})"

    @property
    def generation_config(self) -> Any:
        return self.lm.source.generation_config

    def running(self) -> AbstractContextManager[None]:
        return in_own_dtype(one_torch_thread(), "cpu")

    def choose(self, tree: TokenTree) -> Chosen:
        rows = self._run(tree, greedy=True)
        best = cast(Successors, rows.best)
        return Chosen(best.tokens[:, 0].tolist(), rows.states, best if self.successors else None)

    def _rows(self, tree: TokenTree, *, greedy: bool) -> "RowBatch":
        """Return the nodes of a tree as rows after the committed tokens, with room for their results."""
        cache, live = self.cache, int(tree.size)
        start = int(cache.filled)
        if start + live > cache.slab.shape[3]:  # mostly there is room
            cache.reserve(start + live)
        arrays = tree.tokens, tree.depths, tree.ancestors
        tokens, depths, words = (
            arrays if tree.capacity == live else (array[:live] for array in arrays)
        )
        tokens, depths, words = tokens.cpu(), depths.cpu(), words.cpu()
        rows = RowBatch(
            self.lm, tokens, depths + start, cache, (start, start, words), self._features
        )
        if greedy:
            shape = live, max(1, self.successors)
            rows.best = Successors(
                torch.empty(shape, dtype=torch.int64, device="cpu"),
                torch.empty(shape, dtype=torch.float32, device="cpu"),
            )
        else:
            rows.logits = torch.empty(live, self.vocab_size, dtype=torch.float32, device="cpu")
        return rows

    def _run(self, tree: TokenTree, *, greedy: bool) -> "RowBatch":
        rows = self._rows(tree, greedy=greedy)
        if self.counts:
            self.experts = torch.empty(len(rows.tokens), dtype=torch.int32, device="cpu")
        self.lm.run(rows, added=self.experts)
        return rows


@dataclass(eq=False)
class RowBatch(SharedRows):
    """Rows of one text that a model is to run, and where its results go.

    tokens, positions  int64 [rows]
    seen               start, prefix and words: keys and values go to cache slots start to start + rows. All rows see
                       the slots before `prefix`; bit j of a row's int64 words says whether it sees slot prefix + j.
                       Without words each row sees all slots up to its own
    features           hidden states that are asked for, numbered as in transformers
    logits             float32 [n, vocabulary], filled with those of the last n rows
    best               [rows, count], filled with the largest finite logits and their tokens
    states             float32 [rows, features * hidden size], the hidden states found
    """

    model: NativeLM
    tokens: Tensor
    positions: Tensor
    cache: KVCache
    seen: tuple[int, int, Tensor | None]
    features: tuple[int, ...] = ()
    logits: Tensor | None = None
    best: Successors | None = None
    states: Tensor | None = None


class NativeLane(LaneTarget, NativeTarget):
    """One of several NativeTargets over a NativeLM."""


LANES[NativeTarget] = NativeLane

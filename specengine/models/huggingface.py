"""Any Hugging Face causal LM, as a function from tree rows to logits and as the target."""

import inspect
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import ROPE_INIT_FUNCTIONS, Cache, DynamicCache, PreTrainedModel

from specengine import ops
from specengine.errors import (
    SpecEngineError,
    UnsupportedModelError,
    require_or,
    require_supported,
)
from specengine.models import SharedRows, fused
from specengine.models.attention import (
    ATTENTION,
    Joined,
    NeedsDenseMask,
    Prompt,
    additive,
    note_places,
    seen_by,
)
from specengine.models.configs import (
    NO_MEMORY,
    SLIDING,
    as_model_logits,
    context_limit,
    window_of,
)
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
from specengine.models.loaded import Watch
from specengine.models.recurrent import RecurrentStates, serve, sizes_of
from specengine.models.refusals import (
    NoTreesError,
    errors_named,
    mixing,
    model_name,
    refuse_absent,
    refuse_looking_ahead,
    refuse_unsupported,
)
from specengine.models.twins import Packed, evaluating, set_attention, worth_packing
from specengine.ops import Slabs, TokenTree
from specengine.ops.cuda_graphs import room

# prompts are run in pieces of this many tokens, which bounds the memory of a long prompt
PREFILL_ROWS = 1024


class _SlabView(Cache):
    """View of a KVCache for one forward: `update` writes rows at `start` and concatenates nothing."""

    def __init__(self, cache: KVCache, start: int, rows: int) -> None:
        super().__init__(layers=[])
        self.cache, self.start, self.stop = cache, start, start + rows
        self.recurrent = next(iter(cache.states), None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        keys, values = self.cache.layer(layer_idx, end=self.stop)
        keys[:, :, self.start :] = key_states
        values[:, :, self.start :] = value_states
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.stop, 0


class _PaddedSlabView(_SlabView):
    """The same with static shapes: `update` writes at a slot that the device knows, and gives the whole slab."""

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        super().__init__(cache, 0, cache.capacity)
        self.slots = rows.slot + torch.arange(
            len(rows), device=cache.slab.device, dtype=torch.int64
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        keys, values = self.cache.layer(layer_idx)
        keys[0].index_copy_(1, self.slots, key_states[0])
        values[0].index_copy_(1, self.slots, value_states[0])
        return keys, values


class _JoinedView(_SlabView):
    """Views of the caches of several texts: `update` writes the rows of each, and gives them as they came."""

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined.caches[0], 0, 0)
        self._joined = joined
        texts = zip(joined.caches, joined.trees, joined.counts, strict=True)
        self._views = [slab_view(*text, dense=False) for text in texts]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        both = (states.split(self._joined.counts, 2) for states in (key_states, value_states))
        texts = zip(self._views, *both, strict=True)
        self._joined.stored = [view.update(*states, layer_idx) for view, *states in texts]
        return key_states, value_states


def recorded(cache: DynamicCache) -> dict[int, tuple[Any, ...]]:
    """Return by layer what it has put there: heads, sizes of a key and of a value, their dtype and device."""
    return {
        number: (
            layer.keys.shape[1],
            layer.keys.shape[-1],
            layer.values.shape[-1],
            layer.keys.dtype,
            layer.keys.device,
        )
        for number, layer in enumerate(cast(Any, cache).layers)
        if getattr(layer, "keys", None) is not None
    }


def slab_view(cache: KVCache, tree: Rows | Prompt | Joined, rows: int, *, dense: bool) -> _SlabView:
    """Return the view for a forward of `rows` rows; dense: of static shapes on no device, as its mask is not."""
    if isinstance(tree, Joined):
        return _JoinedView(tree)
    if isinstance(tree, Prompt):
        return _SlabView(cache, tree.before, rows)
    return (
        _SlabView(cache, int(tree.slot), rows)
        if dense or ops.is_free(tree.slot)
        else _PaddedSlabView(cache, tree)
    )


@dataclass(eq=False)
class ModuleRows(SharedRows):
    """Rows of one text for `CausalLM.run_lanes`, which fills their results; their slots in the cache are free.

    tokens, positions  int64 [rows]
    tree               what they see
    features           hidden states that are asked for, as in `CausalLM.forward`
    rated              whether logits are wanted
    logits, states     the results, as of `CausalLM.forward`
    """

    model: "CausalLM"
    tokens: Tensor
    positions: Tensor
    cache: KVCache
    tree: Rows | Prompt
    features: tuple[int, ...] = ()
    rated: bool = False
    logits: Tensor | None = None
    states: Tensor | None = None


class TwinModules:
    """Run rows through the modules of a model's twin.

    modules     the twin; `runs` is it, or its packed twin, made where the weights were as in `contents`
    accepts     arguments of its forward
    keeps_rows  whether the forward can leave out logits
    own_keys    whether each layer reads keys of its own
    window      positions that layers which slide see; None without any
    dense       whether its attention runs with a dense mask; by_type: with one for each type of layers
    """

    def __init__(self, modules: PreTrainedModel, packed: Packed | None, contents: Any) -> None:
        self.modules, self.packed = modules, packed
        self.config = modules.config.get_text_config(decoder=True)
        self.window = window_of(self.config)
        self.accepts = frozenset(inspect.signature(modules.forward).parameters)
        self.own_keys = not getattr(self.config, "num_kv_shared_layers", 0)
        # transformers runs layers that share keys over the rows whose logits are kept alone
        self.keeps_rows = "logits_to_keep" in self.accepts and self.own_keys
        self.dummy_mask = torch.ones(
            1, 1, 1, 1, dtype=torch.bool, device=modules.get_input_embeddings().weight.device
        )
        self.dense = self.by_type = False
        self.take(contents)

    def take(self, contents: Any) -> None:
        """Take in weights that were changed to these contents."""
        self.runs: Any = self.modules if self.packed is None else self.packed.model(contents)
        self.contents = contents  # only now: what failed is taken in by the next call

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        tree: Rows | Prompt | Joined,
        features: tuple[int, ...] = (),
        keep: Tensor | slice | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and features as Fused.run does; of a prompt, logits may be of more rows than are to be kept."""
        # A 4D mask makes the model skip its own mask building; `tree` carries the real one.
        arguments: dict[str, Any] = (
            {"attention_mask": self._mask(cast(Any, tree), len(tokens))}
            if self.dense
            else {"attention_mask": self.dummy_mask, "tree": tree}
        )
        if keep is not None and self.keeps_rows:
            arguments["logits_to_keep"] = 1 if isinstance(keep, slice) else keep
        if features:
            arguments["output_hidden_states"] = True
        if "position_ids" in self.accepts:
            arguments["position_ids"] = positions[None]
        view = slab_view(cache, tree, len(tokens), dense=self.dense)
        for each in cache.states:
            each.begin(tree if isinstance(tree, Rows) else None, len(tokens), cache.filled)
        out = self.runs(input_ids=tokens[None], past_key_values=view, use_cache=True, **arguments)
        logits = out.logits[0]
        states = torch.cat([out.hidden_states[i][0] for i in features], -1) if features else None
        left_in = isinstance(keep, Tensor) and not self.keeps_rows
        return logits.index_select(0, keep) if left_in else logits, states

    def _mask(self, tree: Rows | Prompt, rows: int) -> Any:
        """Return the mask as the modules take it: one, or one per type of their layers."""
        device, dtype = self.dummy_mask.device, self.modules.dtype
        whole = sliding = additive(seen_by(tree, rows, device), dtype)
        if self.window is not None and (isinstance(tree, Prompt) or tree.places is not None):
            sliding = additive(seen_by(tree, rows, device, self.window), dtype)
        if not self.by_type:
            return sliding
        return {
            kind: sliding if kind == SLIDING else whole
            for kind in (SLIDING, *self.config.layer_types)
        }


class CausalLM:
    """A loaded Hugging Face model as a function from tree rows to logits.

    Raises UnsupportedModelError, with the reason, for a model that cannot roll back (recurrent or hybrid state),
    is an encoder-decoder, is split over devices, or whose attention does not honour a tree mask: that is tried on
    four tokens at construction.

    The model stays as it is, in training or not and with its own attention: a twin over the same parameters is run.

    pack: run the linear layers with packed weights; None decides by the device, the dtype and the free memory.
    merge: the model is this object's own: weights of products over one input may become views of one tensor, and no
    changes by others are looked for, for which each answer reads all weights.
    version: of the model; another one where it was changed.
    layers_note: why the layers run as the model's modules where fused ones were tried; empty otherwise.
    """

    fuses = True
    _refuse = staticmethod(refuse_unsupported)
    layers_note = ""
    widest = 0  # context that was asked for beyond the config's

    def __init__(
        self, model: PreTrainedModel, *, pack: bool | None = None, merge: bool = False
    ) -> None:
        self._refuse(model)
        refuse_absent(model)
        with errors_named(f"{model_name(model)}: its forward fails on a few tokens"):
            refuse_looking_ahead(model)
        self.model, self.version = model, 0
        self.seconds = 0.0  # spent in model forwards, ever
        self._watch = None if merge else Watch(model)
        twin = self._own_twin()
        contents = [] if self._watch is None else self._watch.contents()
        packed = Packed(twin) if worth_packing(model, pack) else None
        self._twin = TwinModules(twin, packed, contents)
        self._runner: TwinModules | fused.Fused = self._twin
        self.config = self._twin.config
        self.max_context = context_limit(self.config)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._choose_attention()
        if self.fuses and self.device.type in fused.DEVICES:
            self._fuse()

    def widen(self, context: int) -> None:
        """Accept texts of up to `context` tokens, whatever the config says."""
        self.widest = context
        self.max_context = max(self.max_context, context)

    def _own_twin(self) -> PreTrainedModel:
        return serve(evaluating(self.model))

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.get_input_embeddings().weight.device)

    @property
    def packed(self) -> bool:
        """True if the linear layers run with weights packed for oneDNN (see specengine.models.twins)."""
        return self._twin.packed is not None

    def require_same(self) -> None:
        """Take in modules and settings that were changed since the last call.

        UnsupportedModelError where sizes, the dtype or the device are others: caches and drafts were made for them.
        """
        changed = self._watch.changed() if self._watch is not None else ""
        if not changed:
            return
        fresh = type(self)(self.model, pack=self.packed)
        fresh.widen(self.widest)
        require_supported(
            f"{model_name(self.model)}: {changed} was changed since it was loaded; make a new engine",
            fresh.sizes == self.sizes,
        )
        self.__dict__.update(fresh.__dict__, version=self.version + 1, seconds=self.seconds)

    def refresh(self) -> None:
        """Take in what was changed since the last call, weights too; UnsupportedModelError as `require_same`."""
        self.require_same()
        if self._watch is not None and (contents := self._watch.contents()) != self._twin.contents:
            self.version += 1
            self._twin.take(contents)

    @property
    def sizes(self) -> tuple[Any, ...]:
        return (
            self.vocab_size,
            self.max_context,
            self.dtype,
            self.device,
            self._twin.dense,
            self.layers,
            self._layout,
        )

    @property
    def modules(self) -> str:
        """Return how layers run: `fused`, `fused, merged products`, or `the model's own`."""
        runner = self._runner
        fused_layers = "fused, merged products" if getattr(runner, "merged", False) else "fused"
        return "the model's own" if isinstance(runner, TwinModules) else fused_layers

    def _fuse(self) -> None:
        """Take fused layers where the family has them, a backend runs their ops, and they give what the modules do."""
        reason = fused.why_not(self._twin.modules)
        taken = self._twin.dense or bool(self._layout.shapes) or self.packed
        if taken or reason == "" or not ops.is_served(fused.OPS, self.device):
            return
        try:
            if reason is None:
                fused_layers = fused.Fused(self._twin.modules, merge=self._watch is None)
                reason = self._difference(fused_layers)
        except (SpecEngineError, *NO_MEMORY):
            raise
        except Exception as error:  # of a compiler, a driver, or modules of another transformers
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        if reason:
            self.layers_note = f"layers: not fused, {reason}"
        else:
            self._runner = fused_layers

    @torch.inference_mode()
    def _difference(self, fused_layers: fused.Fused) -> str:
        """Run a few tokens and a tree after them through the modules and the fused layers; return what differs."""
        cache, count = self.new_cache(2 * TRIED), TRIED // 2
        tokens = torch.arange(TRIED, device=self.device, dtype=torch.int64) * 13 % self.vocab_size
        positions = torch.arange(count, device=self.device, dtype=torch.int64)
        cache.length = count
        drafted = TokenTree.of_lists(
            tokens[count:].tolist(), [-1, 0, 0, 1, 1, 2, 3, 6], self.device
        )
        rows = Rows.of(drafted, cache.filled)
        self._note_places(cache, rows)
        prompt = tokens[:count], positions, _SlabView(cache, 0, count), Prompt(0)
        tree = rows.tokens, rows.positions, _PaddedSlabView(cache, rows), rows
        for start, (ids, places, view, visibility) in ((0, prompt), (count, tree)):
            cache.length = start
            out = self._twin.modules(
                input_ids=ids[None],
                position_ids=places[None],
                past_key_values=view,
                use_cache=True,
                attention_mask=self._twin.dummy_mask,
                tree=visibility,
                output_hidden_states=True,
            )
            cache.slab[:, :, :, start : start + count] = 0.0
            if reason := fused_layers.difference(
                [states[0] for states in out.hidden_states], places, cache, visibility
            ):
                return reason
        return ""

    def _note_places(self, cache: KVCache, rows: Rows) -> None:
        window = self._twin.window
        if window is not None and rows.paths is None and cache.capacity > window:
            note_places(cache, rows)

    @property
    def joins(self) -> bool:
        """Return whether rows of several texts can be one forward: layers read their own keys, by positions."""
        twin = self._twin
        return (
            twin.own_keys and not (twin.dense or self.recurrent) and "position_ids" in twin.accepts
        )

    @property
    def recurrent(self) -> bool:
        """Return whether its layers have states, which its caches keep."""
        return self._layout.mixers is not None

    @property
    def attention(self) -> str:
        """`tree` (ops.tree_attention) or `dense mask` (the model's own eager attention)."""
        return "dense mask" if self._twin.dense else "tree"

    def new_cache(self, capacity: int) -> KVCache:
        sizes = self._layout.mixers
        states = [RecurrentStates(sizes, self.dtype, self.device)] if sizes else ()
        return KVCache(self._layout, capacity, states)

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that its weights take."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    @property
    def layers(self) -> int:
        return (
            # layers that share keys keep none of their own
            self._layout.slabs[0][0] + (getattr(self.config, "num_kv_shared_layers", 0) or 0)
            if self._layout.slabs and not self.recurrent
            else int(getattr(self.config, "num_hidden_layers", 0))
        )

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.model.dtype)

    def head(self, states: Tensor) -> Tensor:
        """Return logits, [..., vocabulary], of states after the final norm, with the model's own factor and cap."""
        return as_model_logits(self._head_product(states.to(self.dtype)), self.config)

    def _head_product(self, states: Tensor) -> Tensor:
        return cast(Tensor, self._twin.runs.get_output_embeddings()(states))

    @property
    def table(self) -> Tensor:
        """Token embeddings, [vocabulary, hidden size], without a scale that the model may have."""
        return cast(Tensor, self.model.get_input_embeddings().weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return rows of `table`, [..., hidden size]."""
        return embedding(tokens, self.table)

    @torch.inference_mode()
    def prepare_features(self, ids: tuple[int, ...]) -> None:
        """Make ready for `features=ids`; UnsupportedModelError where the model does not give these hidden states."""
        # The first such call may install hooks. On the twin: a packed twin of it would install them a second time.
        out = self._twin.modules(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device),
            output_hidden_states=True,
        )
        count = len(getattr(out, "hidden_states", None) or ())
        require_supported(
            f"{model_name(self.model)}: hidden states {', '.join(map(str, ids))} were asked for, it gives {count}; "
            f"the draft needs a model of {self.layers} layers that gives {self.layers + 1}",
            count == self.layers + 1 and all(0 <= i < count for i in ids),
        )
        if self._twin.packed is not None:
            self._twin.packed.copy_again()
        self._twin.take(self._twin.contents)

    def extend(
        self,
        cache: KVCache,
        tokens: list[int],
        features: tuple[int, ...] = (),
        *,
        logits: Logits = "last",
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run `tokens` after the committed ones and commit them.

        Returns logits, [rows, vocabulary], of the last token or of all, if any, and the features of all, as `forward`.
        """
        logit_pieces: list[Tensor] = []
        feature_pieces: list[Tensor] = []
        for first in range(0, len(tokens), PREFILL_ROWS):
            piece = self.rows_of(tokens[first : first + PREFILL_ROWS], cache, features)
            places = piece.positions.clamp(max=self.max_context - 1)
            with counted(self):
                rated, states = self._runner.run(
                    piece.tokens,
                    places,
                    cache,
                    piece.tree,
                    features,
                    None if logits == "all" else slice(-1, None),
                )
            cache.filled += len(places)
            logit_pieces = [*logit_pieces, rated] if logits == "all" else [rated[-1:]]
            feature_pieces += [] if states is None else [states]
        all_logits = torch.cat(logit_pieces) if logit_pieces and logits != "none" else None
        return all_logits, torch.cat(feature_pieces) if feature_pieces else None

    def forward(
        self,
        rows: Rows,
        cache: KVCache,
        features: tuple[int, ...] = (),
        *,
        one: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the rows, [n, vocabulary], or of row `one`, int64 [1], and all features, in the model's
        dtype. Positions past the context end are clamped: such rows can never be committed.

        features: indices of transformers' `hidden_states` (i: what layer i reads, 0-based; the last: after the final
        norm), given side by side as [n, len(features) * hidden size], or None where there are none.

        On another device than a CPU all shapes are static and nothing is read by the host, so it can be captured.
        """
        with counted(self):
            self._note_places(cache, rows)
            places = rows.positions.clamp(max=self.max_context - 1)
            return self._runner.run(rows.tokens, places, cache, rows, features, one)

    def rows_of(
        self, tokens: list[int], cache: KVCache, features: tuple[int, ...] = ()
    ) -> ModuleRows:
        """Return the next tokens of a text as rows for `run_lanes`, with room in its cache."""
        start, end = cache.length, cache.length + len(tokens)
        cache.reserve(end)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(start, end, dtype=torch.int64, device=self.device)
        return ModuleRows(self, ids, positions, cache, Prompt(start), features)

    def run_lanes(
        self, batch: Sequence[ModuleRows], slabs: Sequence[Slabs] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows of several texts in one forward, and fill their results. Caches are the texts' own.

        slabs: by layer, where each text has as many rows, and their logits are wanted. Returns the logits of all that
        want them, and the features of all.
        """
        batch = sorted(batch, key=lambda rows: rows.rated)  # logits are those of the last rows
        counts = [len(rows.tokens) for rows in batch]
        for rows in batch:
            if isinstance(rows.tree, Rows):
                self._note_places(rows.cache, rows.tree)
        tokens = torch.cat([rows.tokens for rows in batch])
        positions = torch.cat([rows.positions for rows in batch]).clamp(max=self.max_context - 1)
        caches, trees = ([getattr(rows, name) for rows in batch] for name in ("cache", "tree"))
        joined = Joined(caches, trees, counts, slabs)
        features = max((rows.features for rows in batch), key=len)
        unrated = sum(len(rows.tokens) for rows in batch if not rows.rated)
        keep = torch.arange(unrated, len(tokens), dtype=torch.int64, device=self.device)
        with counted(self):
            logits, states = self._runner.run(
                tokens, positions, batch[0].cache, joined, features, keep if unrated else None
            )
        end = 0
        for rows, count in zip(batch, counts, strict=True):
            first, end = end, end + count
            if rows.features and states is not None:
                rows.states = states[first:end]
            if rows.rated:
                rows.logits = logits[first - unrated : end - unrated]
        return logits, states

    def require_capture(self) -> None:
        """Raise UnsupportedModelError, with the reason, where `forward` cannot be captured in a graph."""
        require_supported(
            f"graphs: the attention of {model_name(self.model)} runs with a dense mask, whose shape changes with "
            "the cache; load without graphs=True",
            not self._twin.dense,
        )
        kind = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type")
        require_supported(
            f"graphs: {model_name(self.model)} has {kind} positions, which the host reads in every forward",
            kind not in ("dynamic", "longrope"),
        )

    def _choose_attention(self) -> None:
        """Take the tree attention where the model honours it, else a dense mask; raise where that fails too."""
        twin, faults = self._twin, list[str]()
        mixed = mixing(twin.modules)
        require_or(NoTreesError, f"{model_name(self.model)}: {mixed}", not mixed)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        ways = {  # whether the mask is dense, and whether there is one for each type of layers
            (False, False): twin.modules._can_set_attn_implementation(),
            (True, True): bool(kinds),
            (True, False): twin.window is None or len(kinds) <= 1,
        }
        for dense, by_type in (way for way, suits in ways.items() if suits):
            set_attention(twin.modules, "eager" if dense else ATTENTION)
            if (self.config._attn_implementation == ATTENTION) is dense:
                continue
            twin.dense, twin.by_type = dense, by_type
            if (fault := self._fault()) is None:
                return
            faults.append(fault)
        raise NoTreesError(
            f"{model_name(self.model)}: its attention does not honour a tree mask ({'; '.join(faults)})"
        )

    @torch.inference_mode()
    def _fault(self) -> str | None:
        """Run a small tree; return what went wrong, or None."""
        try:
            self._layout = self._record_layout()
            return self._tree_fault() or self._window_fault() or self._states_fault()
        except (SpecEngineError, *NO_MEMORY):
            raise
        except NeedsDenseMask as error:
            return str(error)
        except Exception as error:  # modules of any kind may raise anything
            return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"

    def _record_layout(self) -> CacheLayout:
        sizes = sizes_of(self.model)
        cache = DynamicCache(config=self.config if sizes else None)
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._twin.modules(input_ids=token, past_key_values=cache, use_cache=True)
        by_layer = recorded(cache)
        shapes = list(by_layer.values())
        require_or(
            NoTreesError,
            f"{model_name(self.model)}: it has no cache of keys and values",
            bool(shapes),
        )
        stored = {shape[3:] for shape in shapes}
        require_or(
            NoTreesError,
            f"{model_name(self.model)}: its layers keep keys and values of different kinds or on different devices "
            f"({sorted(map(str, stored))}); one dtype and device for all layers is needed",
            len(stored) == 1 and (sizes is not None or list(by_layer) == list(range(len(shapes)))),
        )
        layout = CacheLayout.of([shape[:3] for shape in shapes], shapes[0][3], self.device)
        return layout._replace(layers=tuple(by_layer), mixers=sizes) if sizes else layout

    def _tree_fault(self) -> str | None:
        # The tree is 0-(1-3, 2): node 3 must depend on its ancestors and on nothing else.
        one, two, three, other = 1, 2 % self.vocab_size, 3 % self.vocab_size, 5 % self.vocab_size
        tree = self._last_logits([one, two, three, other], parents=[-1, 0, 0, 1])
        sibling_changed = self._last_logits([one, two, three - 1, other], parents=[-1, 0, 0, 1])
        ancestor_changed = self._last_logits([one, two - 1, three, other], parents=[-1, 0, 0, 1])
        path = self._last_logits([one, two, other], parents=[-1, 0, 1])
        effect = (tree - ancestor_changed).abs().max()
        if not (sibling_changed - tree).abs().max() <= 1e-3 * effect:
            return "a node's logits change with its sibling"
        # of rounding, half precision has plenty
        tolerance = 0.01 if self._layout.dtype == torch.float32 else 0.25
        return (
            None
            if (path - tree).abs().max() <= tolerance * effect
            else "a node's logits differ from those of its path alone"
        )

    def _window_fault(self) -> str | None:
        """Return what is wrong with the windows: a layer that slides must hand its window to the tree attention."""
        if self._twin.dense:
            return None
        prompt = Prompt(0)
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._twin.run(token, token, self.new_cache(1), prompt)
        kinds = getattr(self.config, "layer_types", None) or [SLIDING] * len(prompt.windows)
        kinds = [kinds[layer] for layer in self._layout.layers] or kinds
        expected = [self._twin.window if kind == SLIDING else None for kind in kinds]
        return (
            None
            if prompt.windows == expected
            else "its layers do not hand their windows to the attention"
        )

    def _states_fault(self) -> str | None:
        """Return how recurrent layers differ from their modules, over a prompt and the accepted path of a tree."""
        if not self.recurrent:
            return None
        ids = [token % self.vocab_size for token in (1, 2, 3, 5, 7, 4, 6)]
        cache = self.new_cache(len(ids))
        self.extend(cache, ids[:2])
        tree = TokenTree.of_lists([ids[2], ids[0], ids[3], ids[4]], [-1, 0, 0, 2], self.device)
        logits, _ = self.forward(Rows.of(tree, cache.filled), cache)
        cache.commit([0, 2])
        after, _ = self.extend(cache, ids[4:], logits="all")
        expected = self._twin.modules(
            input_ids=torch.tensor([ids], dtype=torch.int64, device=self.device)
        ).logits[0, [2, 3, 4, 4, 5, 6]]
        computed = torch.cat([logits[[0, 2, 3]], cast(Tensor, after)])
        close = sum(map(self.is_close, computed, expected))
        return (
            None  # in half precision rounding moves a token far, now and then
            if close >= (len(expected) if self.dtype == torch.float32 else 4)
            else "its recurrent layers give other logits than their modules"
        )

    def _last_logits(self, tokens: list[int], parents: list[int]) -> Tensor:
        tree = TokenTree.of_lists(tokens, parents, self.device)
        cache = self.new_cache(len(tokens))
        logits, _ = self.forward(Rows.of(tree, cache.filled), cache)
        return logits[-1].float().nan_to_num(0.0, 0.0, 0.0)  # models may mark unused ids with -inf

    def is_close(self, computed: Tensor, expected: Tensor) -> bool:
        """Return whether logits agree but for the model's rounding, whatever dtype it gives them in."""
        rounding = 1e-3 if self.dtype == torch.float32 else 0.1
        computed, expected = (
            logits.float().nan_to_num(0.0, 0.0, 0.0) for logits in (computed, expected)
        )
        return bool((computed - expected).abs().max() <= rounding * expected.std().clamp(min=1e-6))


class HuggingFaceTarget(CachedTarget):
    """`model` (an AutoModelForCausalLM) with its own KV cache; the model itself stays usable as before.

    strict    a node's logits have the bits that plain decoding of its path gives, in half precision too
    captured  its cycles run as graphs; without a CUDA device the same functions run uncaptured
    UnsupportedModelError where this model on this device cannot keep what is asked for.
    """

    makes: type[CausalLM] = CausalLM
    lm: CausalLM

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool | None = None,
        strict: bool = False,
        captured: bool = False,
        merge: bool = False,
        reason: str = "",
    ) -> None:
        """merge: see CausalLM; reason: why it is not the native forward, or not graphs, that run this model, for
        people."""
        self.reason, self.captured, self.pads = reason, captured, captured
        super().__init__(self.makes(model, pack=pack, merge=merge))
        if captured:
            self.lm.require_capture()
        self.strict_rows = strict_rows(self.lm, padded=captured) if strict else 0  # of each forward
        if strict and (window := window_of(self.lm.config)) is not None:
            # strict attention masks by path, not by position
            self.max_context = min(self.max_context, window)

    @property
    def notes(self) -> list[str]:
        short = self.max_context < self.lm.max_context
        return [
            note
            for note, holds in {
                "graphs: without a CUDA device the padded forwards run uncaptured": self.captured
                and self.device.type != "cuda",
                f"strict: the context ends with the model's sliding window of {self.max_context} tokens": short,
                self.lm.layers_note: bool(self.lm.layers_note),
            }.items()
            if holds
        ]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.lm.device

    @property
    def backend(self) -> str:  # type: ignore[override]
        return "huggingface" + (f" ({self.reason})" if self.reason else "")

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self.lm.model.config._name_or_path)

    @property
    def generation_config(self) -> Any:
        return self.lm.model.generation_config

    def running(self) -> AbstractContextManager[None]:
        running = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        return in_own_dtype(running, self.device.type)

    def _rows(self, tree: TokenTree, *, greedy: bool) -> ModuleRows:
        """Return the nodes of a tree as rows after the committed tokens."""
        if ops.is_free(tree.size):
            tree = tree.trimmed()
        if ops.is_free(self.cache.filled):
            self.cache.reserve(self.cache.length + tree.capacity + self.strict_rows)
        rows = Rows.of(tree, self.cache.filled)
        return ModuleRows(
            self.lm, rows.tokens, rows.positions, self.cache, rows, self._features, rated=True
        )

    def _run(self, tree: TokenTree, *, greedy: bool) -> ModuleRows:
        batch = self._rows(tree, greedy=greedy)
        rows, most = cast(Rows, batch.tree), self.strict_rows
        if not most:
            batch.logits, batch.states = self.lm.forward(rows, self.cache, self._features)
            return batch
        outputs = [
            self.lm.forward(
                rows.strict_piece(first, most, padded=self.pads), self.cache, self._features
            )
            for first in range(0, len(rows), most)
        ]
        logits, features = zip(*outputs, strict=True)
        batch.logits = torch.cat(logits)[: len(rows)]
        batch.states = torch.cat(features)[: len(rows)] if self._features else None
        return batch

    def _extend(self, tokens: list[int]) -> Tensor | None:
        """Run the rest of a prompt; under graphs in rows of few numbers, as libraries plan each number anew."""
        padding = -len(tokens) % PADDED_ROWS if self.pads and not self.cache.states else 0
        features = super()._extend([*tokens, *[0] * padding])
        self.cache.crop(self.cache.length - padding)
        return features if features is None else features[: len(tokens)]


class ModuleLane(LaneTarget, HuggingFaceTarget):
    """One of several HuggingFaceTargets over a CausalLM. What is strict runs alone, and copies no other's cache.

    joined: what runs rows of all of them in its place, an engine.joined.CapturedLanes, or None
    """

    joined: Any = None

    def ask(self, tree: TokenTree, *, greedy: bool) -> SharedRows | None:
        if self.strict_rows:
            return None
        rows = super().ask(tree, greedy=greedy)
        cast(SharedRows, rows).model = self.joined or self.lm
        return rows

    def reserve(self, tokens: int, scratch: int) -> None:
        # a larger cache means another capture; a strict piece is padded
        super().reserve(room(tokens + padded_width(scratch) + self.strict_rows), 0)

    def cached(self, tokens: list[int]) -> int:
        count = super().cached(tokens)
        if self.joined is not None:
            self.joined.graphs.require_same(self.lm.model)
        return count

    def take_in(
        self, tokens: list[int], keep: int, size: Callable[[int], int]
    ) -> Generator[Any, None, Tensor | None]:
        if self.strict_rows:
            return self.prefill(tokens, keep)
        return (yield from super().take_in(tokens, keep, size))

    def shares(self, other: LaneTarget, tokens: list[int]) -> int:
        return 0 if self.strict_rows else super().shares(other, tokens)


LANES[HuggingFaceTarget] = ModuleLane
STRICT_ROWS = (32, 16, 8, 4, 2)
# of every strict forward under graphs: products of one shape give a row the same bits
PADDED_ROWS = 64
MIN_TREE_ROWS = 8  # of a tree in a graph of several texts
TRIED = 16  # tokens


def padded_width(rows: int) -> int:
    """Return how many rows a tree of this number has in a graph of several texts."""
    return rows if rows < 2 else max(MIN_TREE_ROWS, 1 << (rows - 1).bit_length())


@torch.inference_mode()
def strict_rows(lm: CausalLM, *, padded: bool) -> int:
    """Return how many rows a forward of `lm` can hold without changing the bits of any of them.

    padded: every forward has PADDED_ROWS rows, plain decoding's too.
    Tried on a few tokens, alone and among others. UnsupportedModelError where the bits change.
    """
    require_supported(
        "strict: this model's attention runs with a dense mask, so its sums depend on the cache's layout",
        lm.attention == "tree",
    )
    require_supported(
        "strict: not with recurrent layers on transformers' modules", not lm.recurrent
    )
    cache = lm.new_cache(64 + PADDED_ROWS)
    lm.extend(cache, [token % lm.vocab_size for token in (1, 2, 3, 5, 7)])
    tokens = torch.arange(11, 11 + TRIED, dtype=torch.int64, device="cpu") * 13 % lm.vocab_size
    alone = torch.cat([_siblings(lm, cache, token[None], padded) for token in tokens])
    for most in (PADDED_ROWS,) if padded else STRICT_ROWS:
        samples = [  # others, and elsewhere, for each size
            (torch.arange(size, dtype=torch.int64, device="cpu") * 5 + size) % TRIED
            for size in (2, 3, 5, 8, 12, 16, 24, 31, 32, PADDED_ROWS)
            if size <= most
        ]
        if all(
            torch.equal(
                _siblings(lm, cache, tokens[places], padded), alone[places.to(alone.device)]
            )
            for places in samples
        ):
            return most
    require_supported(
        f"strict: on this {lm.device.type} a row of a {lm.dtype} matrix product changes with its place among "
        f"{PADDED_ROWS} rows, so a tree cannot have the bits of plain decoding",
        not padded,
    )
    raise UnsupportedModelError(
        f"strict: on this {lm.device.type} the matrix products of {lm.dtype} change with the number of rows, so "
        "a tree cannot have the bits of plain decoding; use bfloat16 on a CPU with AMX, or graphs=True, which gives "
        "all forwards the same number of rows"
    )


def _siblings(lm: CausalLM, cache: KVCache, tokens: Tensor, padded: bool) -> Tensor:
    """Return the logits of `tokens`, each as the next token after the cached ones."""
    count, filled = len(tokens), cache.filled
    own_words = ops.own_bits(count, filled.device)
    positions, live = torch.full_like(tokens, cache.length), torch.full_like(filled, count)
    rows = Rows(
        tokens.to(filled.device),
        positions.to(filled.device),
        own_words,
        filled.long(),
        filled,
        live,
    )
    piece = rows.strict_piece(0, PADDED_ROWS if padded else count, padded=padded)
    return lm.forward(piece, cache)[0][:count]


# ---- LongRoPE: models whose frequencies are others once a text passes their original context (Phi-3.5, Phi-4-mini)

# transformers then turns all positions by the long frequencies: a text up to the original context keeps the short ones,
# and the step that passes it runs everything again.
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

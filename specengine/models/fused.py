"""Decoder layers by few operations: 9 to 12 launches a layer on a device instead of 41.

Between its products a layer is an RMS norm with the residual sum, the rotation with the cache write, attention, another
norm with the sum, and the gate of its MLP: one op each, in the arithmetic of the modules, row by row. Embeddings,
rotary frequencies, products and the head stay the model's own modules. Products over one input are one where their
weights may become views of one tensor, which takes no memory.

Families whose modules are known are served. The layers are compared with the modules before they are taken.
"""

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from specengine import ops
from specengine.models.attention import (
    Joined,
    JoinedRows,
    Prompt,
    attend,
    tree_attention_forward,
)
from specengine.models.configs import STEADY_ROPES
from specengine.models.kv_cache import KVCache, Rows
from specengine.models.twins import QuantizedLinear, is_changed
from specengine.ops import Rotation, Slabs
from specengine.ops.cuda_graphs import side_by_side

DEVICES: tuple[str, ...] = ("cuda",)
OPS = ("add_rms_norm", "rope_store", "silu_mul")
OF_HEADS = ("gather_norms", *OPS)
# by transformers' model type
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
ACTIVATIONS = (type(ACT2FN["silu"]), nn.SiLU)
# How far a layer may be from its modules: a share of what it changes, and the rounding of each number
SHARES = {
    torch.float32: (1e-4, 2.0**-20),
    torch.float16: (1e-2, 2.0**-10),
    torch.bfloat16: (5e-2, 2.0**-7),
}


def why_not(model: Any) -> str | None:
    """Return why this model's layers cannot be fused: empty for a family that is not served; None where they can."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        return ""
    if model.dtype not in SHARES:
        return f"its dtype is {model.dtype}"
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    classes: dict[str, Any] = {
        name: getattr(module, FAMILIES[kind] + name)
        for name in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
    }
    if type(model) is not classes["ForCausalLM"]:
        return (
            f"it is a {type(model).__name__}, not transformers' {classes['ForCausalLM'].__name__}"
        )
    decoder = model.model
    whole = (model, "ForCausalLM"), (decoder, "Model"), (decoder.norm, "RMSNorm")
    faults = [_fault(submodule, classes[name]) for submodule, name in whole]
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(attention)]
        parts = (
            (layer, classes["DecoderLayer"]),
            (attention, classes["Attention"]),
            (mlp, classes["MLP"]),
            *((norm, classes["RMSNorm"]) for norm in norms),
            (mlp.act_fn, *ACTIVATIONS),
        )
        faults += [_fault(*piece) for piece in parts]
        if any(norm.weight.dtype is not model.dtype for norm in norms):
            faults.append("its norms have another dtype")
    return next((fault for fault in faults if fault), None)


def _fault(module: nn.Module, *known: type) -> str:
    """Return what is unknown of a module that would not be called; empty where there is nothing."""
    if type(module) not in known:
        return f"it has a {type(module).__name__} where a {known[0].__name__} was expected"
    return f"a {type(module).__name__} was changed" if is_changed(module) else ""


def _head_norms(attention: nn.Module) -> list[Any]:
    return [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]


class Products:
    """Linear layers over one input; merged: as one product, of whose weight theirs become views."""

    def __init__(self, parts: Sequence[nn.Module], *, merge: bool) -> None:
        self._parts = parts
        stored = {  # class, and names, dtypes and widths of tensors
            (
                type(layer),
                *(
                    (name, tensor.dtype, tensor.shape[1:])
                    for name, tensor in layer.named_parameters()
                ),
            )
            for layer in parts
        }
        plain = type(parts[0]) in (nn.Linear, QuantizedLinear) and not any(map(is_changed, parts))
        self.merged = merge and plain and len(stored) == 1
        if self.merged:
            self._product = copy.copy(parts[0])
            vars(self._product)["_parameters"] = {
                name: tensor if tensor is None else self._joined(name)
                for name, tensor in vars(parts[0])["_parameters"].items()
            }

    def _joined(self, name: str) -> Tensor:
        tensors: list[Any] = [getattr(layer, name) for layer in self._parts]
        with torch.inference_mode(False), torch.no_grad():
            joined = torch.cat([tensor.detach() for tensor in tensors])
            for layer, tensor, place in zip(
                self._parts, tensors, joined.split([len(t) for t in tensors]), strict=True
            ):
                layer.register_parameter(
                    name, nn.Parameter(place, requires_grad=tensor.requires_grad)
                )
        return joined

    def __call__(self, states: Tensor) -> Sequence[Tensor]:
        if not self.merged:
            return [layer(states) for layer in self._parts]
        sizes = [cast(nn.Linear, layer).out_features for layer in self._parts]
        return torch.split(self._product(states), sizes, -1)

    def heads(self, states: Tensor, size: int) -> list[Tensor]:
        """Return the products of rows as heads of `size` channels, [heads, rows, size] each."""
        return [product.view(len(states), -1, size).transpose(0, 1) for product in self(states)]


@dataclass
class _Layer:
    index: int
    module: Any
    projections: Products
    gates: Products
    window: int | None


@dataclass
class _Place:
    """Where the rows of one forward stand: what they see, their slots in the cache, and their rotation.

    slab: by layer; of several texts whose rows are run at once Slabs, where `tree` is JoinedRows
    """

    slab: Tensor | Sequence[Slabs]
    tree: Rows | Prompt | JoinedRows
    slot: Tensor
    live: Tensor
    end: int  # of a prompt
    index: Tensor
    cosines: Tensor
    sines: Tensor

    @property
    def rows(self) -> int:
        return len(self.index)


class Fused:
    """The fused forward of a model, a twin of which has the modules. merge: see Products."""

    def __init__(self, model: PreTrainedModel, *, merge: bool) -> None:
        self._model, self._decoder = model, cast(Any, model).model
        rope = getattr(model.config, "rope_parameters", None) or {}
        self._steady = rope.get("rope_type") in STEADY_ROPES
        # tables of all positions, by cache: a position is never beyond its slot, and graphs read them with its slots
        self._lasting = WeakKeyDictionary[KVCache, tuple[Tensor, Tensor]]()
        self._layers = []
        for index, layer in enumerate(self._decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            inputs = Products([attention.q_proj, attention.k_proj, attention.v_proj], merge=merge)
            gates = Products([mlp.gate_proj, mlp.up_proj], merge=merge)
            self._layers.append(_Layer(index, layer, inputs, gates, _window(attention)))

    @property
    def merged(self) -> bool:
        """Return whether products over one input are one in all layers."""
        return all(layer.projections.merged and layer.gates.merged for layer in self._layers)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        tree: Rows | Prompt | Joined,
        features: tuple[int, ...] = (),
        keep: Tensor | slice | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the rows to keep, by default all, and the features of all, as CausalLM.forward does."""
        states = self._decoder.embed_tokens(tokens)
        places = (
            self._places(states, positions, tree)
            if isinstance(tree, Joined)
            else [self._place(states, positions, cache, tree)]
        )
        residual: Tensor | None = None
        hidden_states = list[Tensor]()
        for layer in self._layers:
            states, residual, entered = self._layer(layer, states, residual, places)
            hidden_states.append(entered)
        normed = self._last(states, residual)
        hidden_states.append(normed)
        rows = slice(None) if keep is None else keep
        kept_states = normed[rows] if isinstance(rows, slice) else normed.index_select(0, rows)
        selected_features = (
            torch.cat([hidden_states[i] for i in features], dim=-1) if features else None
        )
        return self._model.get_output_embeddings()(kept_states), selected_features

    def _places(self, states: Tensor, positions: Tensor, tree: Joined) -> list[_Place]:
        """Return where the rows of several texts stand: one place where attention is one operation for all."""
        lanes = JoinedRows.of(tree.trees) if tree.slabs and self._steady else None
        if lanes is None:
            pieces = (rows.split(tree.counts) for rows in (states, positions))
            return [*map(self._place, *pieces, tree.caches, tree.trees)]
        longest = max(tree.caches, key=lambda each: each.capacity)
        tables = self._lasting_tables(states, longest)
        return [_Place(tree.slabs, lanes, lanes.slot, lanes.live, 0, positions, *tables)]

    def _place(
        self, states: Tensor, positions: Tensor, cache: KVCache, tree: Rows | Prompt
    ) -> _Place:
        rows, device = len(states), states.device
        if self._steady and isinstance(tree, Rows):
            tables = self._lasting_tables(states, cache)
            return _Place(cache.slab, tree, tree.slot, tree.live, 0, positions, *tables)
        tables = self._tables(states, positions)
        index = torch.arange(rows, device=device, dtype=torch.int64)  # the tables are of these rows
        if isinstance(tree, Rows):
            return _Place(cache.slab, tree, tree.slot, tree.live, 0, index, *tables)
        live = torch.full((1,), rows, dtype=torch.int32, device=device)
        return _Place(
            cache.slab, tree, cache.filled.long(), live, tree.before + rows, index, *tables
        )

    def _lasting_tables(self, states: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all positions of a cache."""
        tables = self._lasting.get(cache)
        if tables is None or len(tables[0]) != cache.capacity:
            every = torch.arange(cache.capacity, device=states.device, dtype=torch.int64)
            tables = self._lasting[cache] = self._tables(states, every)
        return tables

    def _tables(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines as the modules have them at these positions, float32 [positions, size / 2]."""
        tables = self._decoder.rotary_emb(states[None], positions[None])
        cosines, sines = (table[0].chunk(2, -1)[0].float().contiguous() for table in tables)
        return cosines, sines

    def _layer(
        self, layer: _Layer, states: Tensor, residual: Tensor | None, places: list[_Place]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the MLP adds, the sum that it is added to, and the sum that the layer began with."""
        before, after = layer.module.input_layernorm, layer.module.post_attention_layernorm
        normed, entered = ops.add_rms_norm(states, residual, before.weight, before.variance_epsilon)
        normed, total = ops.add_rms_norm(
            self._attended(layer, normed, places), entered, after.weight, after.variance_epsilon
        )
        return layer.module.mlp.down_proj(ops.silu_mul(*layer.gates(normed))), total, entered

    def _attended(self, layer: _Layer, normed: Tensor, places: list[_Place]) -> Tensor:
        attention = layer.module.self_attn
        query, key, value = layer.projections.heads(normed, attention.head_dim)
        if len(places) == 1:
            wide = self._attend(layer, query, key, value, places[0])
        else:
            counts = [place.rows for place in places]
            queries, keys, values = (states.split(counts, 1) for states in (query, key, value))
            texts = zip(queries, keys, values, places, strict=True)
            wide = torch.cat([self._attend(layer, q, k, v, place) for q, k, v, place in texts])
        return cast(Tensor, attention.o_proj(wide.reshape(len(normed), -1)))

    def _attend(
        self, layer: _Layer, query: Tensor, key: Tensor, value: Tensor, place: _Place
    ) -> Tensor:
        """Store the keys and values of a text's rows, and attend from them; returns [rows, heads, head size]."""
        attention = layer.module.self_attn
        norms = _head_norms(attention)
        eps = norms[0].variance_epsilon if norms else 0.0
        q_weight, k_weight = [norm.weight for norm in norms] or (None, None)
        turn = Rotation(place.cosines, place.sines, q_weight, k_weight, eps, stepwise=True)
        slab = place.slab[layer.index]
        query = ops.rope_store(query, key, value, place.index, turn, slab, place.slot, place.live)
        if isinstance(slab, Slabs):
            lanes = cast(JoinedRows, place.tree)
            return lanes.attend(query, slab, attention.scaling).transpose(0, 1)
        if isinstance(place.tree, Rows):
            return attend(
                query, slab[0], slab[1], place.tree, attention.scaling, layer.window
            ).transpose(0, 1)
        keys, values = slab[:, None, :, : place.end]
        return tree_attention_forward(
            attention,
            query[None],
            keys,
            values,
            None,
            scaling=attention.scaling,
            tree=cast(Prompt, place.tree),
            sliding_window=layer.window,
        )[0][0]

    def _last(self, states: Tensor, residual: Tensor | None) -> Tensor:
        norm = self._decoder.norm
        return ops.add_rms_norm(states, residual, norm.weight, norm.variance_epsilon)[0]

    def difference(
        self, hidden: Sequence[Tensor], positions: Tensor, cache: KVCache, tree: Rows | Prompt
    ) -> str:
        """Return how a layer differs from its modules, which give hidden states [n, channels]; empty if none does."""
        if len(hidden) != len(self._layers) + 1:
            return f"its modules give {len(hidden)} hidden states"
        place = self._place(hidden[0], positions, cache, tree)
        share, rounding = SHARES[hidden[0].dtype]
        for layer, entered, expected in zip(self._layers, hidden, hidden[1:], strict=False):
            added, total, _ = self._layer(layer, entered, None, [place])
            last = layer is self._layers[-1]
            fused = (self._last(added, total) if last else total + added).float()
            change = expected.float() if last else expected.float() - entered.float()
            over = (
                ((fused - expected.float()).abs() - rounding * expected.float().abs())
                .clamp_(min=0)
                .norm()
            )
            if not over <= share * change.norm():  # NaN too
                return (
                    f"layer {layer.index} differs from its modules by "
                    f"{float(over / change.norm()):.2g} of its change"
                )
        return ""


class FusedHead:
    """The fused rows of an EAGLE head, whose products over one input become one; see models.eagle for its network."""

    def __init__(self, head: Any) -> None:
        self._head, self._layer = head, head.layers[0]
        attention, mlp = self._layer.self_attn, self._layer.mlp
        self._projections = Products(
            [attention.q_proj, attention.k_proj, attention.v_proj], merge=True
        )
        self._gates = Products([mlp.gate_proj, mlp.up_proj], merge=True)

    def run(
        self, batch: Sequence[Any], table: Tensor, attends: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the recurrent states of the rows that are used, and what the vocabulary head reads of them.

        batch: HeadRows of several texts; table: of embeddings; attends: as models.eagle has it for rows.
        """
        head, attention = self._head, self._layer.self_attn
        inputs, residual = self._entered(batch, table)
        states = self._projections.heads(inputs, attention.head_dim)
        norms: dict[str, Any] = {}
        if head.config.qk_norm:
            first, second = attention.q_norm, attention.k_norm
            norms = {"q_norm": first.weight, "k_norm": second.weight, "eps": first.eps}
        heads = attends(*(each[None] for each in states), **norms)[0]
        attended = attention.o_proj(heads.transpose(0, 1).reshape(len(inputs), -1))
        after = self._layer.post_attention_layernorm
        normed, total = ops.add_rms_norm(attended, residual, after.weight, after.eps)
        added = self._layer.mlp.down_proj(ops.silu_mul(*self._gates(normed)))
        added, total = rated(batch, added, total)
        if head.config.version == 1 or not (head.config.norm_recurrent or head.config.norm_logits):
            total = total + added
            return total, total
        normed, total = ops.add_rms_norm(added, total, head.norm.weight, head.norm.eps)
        return normed if head.config.norm_recurrent else total, normed

    def _entered(self, batch: Sequence[Any], table: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention reads, [n, width], and the residual, [n, hidden size]."""
        sources = [(each.states, each.sources, table, each.rows.tokens) for each in batch]
        if self._head.config.version == 1:
            rows = [torch.cat(ops.gather_rows(*source)[::-1], -1) for source in sources]
            fused = self._head.fc(joined(rows))
            return fused, fused
        first, second = self._layer.input_layernorm, self._layer.hidden_norm
        norms = (first.weight, second.weight), first.eps
        each = [partial(ops.gather_norms, *source, *norms) for source in sources]
        normed = side_by_side(table.device, each)
        inputs, hidden = map(joined, zip(*normed, strict=True))
        return inputs, inputs.chunk(2, -1)[1] if self._layer.norm_before_residual else hidden


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the rows of several texts as one tensor, those of one as they are."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def rated(batch: Sequence[Any], *states: Tensor) -> Sequence[Tensor]:
    """Return the rows of HeadRows whose results are used, of each of some states."""
    if all(each.one is None for each in batch):
        return states
    places, end = list[Tensor](), 0
    for each in batch:
        first, end = end, end + len(each.rows)
        if each.one is None:
            places.append(torch.arange(first, end, dtype=torch.int64, device=states[0].device))
        else:
            places.append(each.one + first if first else each.one)
    index = joined(places)
    return [rows.index_select(0, index) for rows in states]


def _window(attention: nn.Module) -> int | None:
    """Return the sliding window that the module hands to its attention."""
    in_config = type(attention).__name__ == "MistralAttention"
    return getattr(attention.config if in_config else attention, "sliding_window", None)

"""The weights of a native model: read one tensor at a time, and packed, so that no second copy is made."""

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, logging

from specengine.errors import require_supported
from specengine.models.configs import (
    ACTIVATIONS,
    activation_of,
    empty_model,
    family_of,
    layer_template,
    layers_for,
    of_few_layers,
    rope_of,
    stored_tensors,
    with_buffers,
)
from specengine.models.extension import (
    INTEGER,
    WITH_PAIRS,
    extension,
    kinds_of,
    table_of,
    thread_count,
)
from specengine.models.families import (
    CONVOLUTIONS,
    ROUTER_NORM,
    Factors,
    Latent,
    Mamba2,
    Shape,
)
from specengine.models.twins import BLOCKS, linear_layers, quantize, quantized_blocks
from specengine.ops import QuantizedWeight

TINY_VOCABULARY = 8  # of a model whose tokens do not count
VECTORS = (".bias", ".choice")  # the ends of names of vectors in csrc/cpu
_LOOKED_UP = (  # of which a forward reads the rows of tokens; the first is multiplied too where it is tied to the head
    "model.embed_tokens.weight",
    "model.own_embedding.weight",
)
KIND_OF = {torch.bfloat16: "bf16", torch.float32: "f32"}
# matrices that are few numbers, on which much hangs
_UNROUNDED = ".router.weight", ".shared.gate.weight"
# read at a time, a multiple of 16: a large tensor's second copy never stands in memory
PACKED_ROWS = 1024
# of factors, as csrc/cpu_binding.cpp has them
_NUMBERS = "scores", "embedding", "residual", "divisor", "cap", "own"


class Weight(NamedTuple):
    """One tensor, read a few rows at a time: `rows(first, last)` gives contiguous CPU data.

    kind   of the data: f32, bf16, or blocks of a GGUF file as uint8
    shape  as in torch
    order  int32 [rows], the row of the data for each row of the tensor, or None
    place  descriptor, byte offset and path of the file in which all rows stand as they are, or None
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    order: Tensor | None = None
    place: tuple[int, int, str] | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Weight":
        """Return the weight of a tensor in float32 or bfloat16 that is in memory; of a stack of matrices, all rows."""
        tensor = tensor.flatten(0, -2) if tensor.ndim > 2 else tensor
        return cls(
            name,
            KIND_OF[tensor.dtype],
            tuple(tensor.shape),
            lambda first, last: tensor[first:last].contiguous(),
        )

    def parts(self, sizes: Mapping[str, int]) -> "Iterator[Weight]":
        """Split this weight by rows: yield one weight for each name in `sizes`, in their order."""
        if len(self.shape) > 1 and all(
            name.endswith(VECTORS) for name in sizes
        ):  # a stack of vectors
            yield from Weight.of(self.name, self.rows(0, self.shape[0]).flatten()).parts(sizes)
            return
        if len(sizes) == 1:  # whatever its size is: the shapes have been compared
            yield self._replace(name=next(iter(sizes)))
            return
        begin = 0
        for name, size in sizes.items():
            order = None if self.order is None else self.order[begin : begin + size] - begin

            def rows(first: int, last: int, begin: int = begin) -> Tensor:
                return self.rows(begin + first, begin + last)

            yield Weight(name, self.kind, (size, *self.shape[1:]), rows, order)
            begin += size


def upright(config: PretrainedConfig, weight: Weight) -> Weight:
    """Return a weight of transformers' with its outputs as rows, those of gates before those of ups."""
    name, experts = (
        weight.name.rpartition(".")[2],
        weight.name.rpartition(".")[0].endswith(".experts"),
    )
    if not (family_of(config).alternating and experts):
        return weight
    halves = name.startswith("gate_up")
    if name.endswith("_bias"):
        numbers = weight.rows(0, weight.shape[0])
        return Weight.of(
            weight.name,
            torch.cat((numbers[:, 0::2], numbers[:, 1::2]), dim=1) if halves else numbers,
        )
    layers = family_of(config).layers_of(config)
    count, outputs = (
        next(layer.experts for layer in layers if layer.experts is not None).count,
        weight.shape[1],
    )
    inputs = weight.shape[0] // count
    last: dict[int, Tensor] = {}  # the expert that was read last

    def rows(first: int, last_row: int) -> Tensor:
        number = first // outputs
        if number not in last:
            last.clear()
            read = weight.rows(number * inputs, (number + 1) * inputs).T
            last[number] = (torch.cat((read[0::2], read[1::2])) if halves else read).contiguous()
        return last[number][first - number * outputs : last_row - number * outputs]

    return Weight(weight.name, weight.kind, (count * outputs, inputs), rows)


class Source(ABC):
    """The weights of one model, under Hugging Face's names."""

    name: str  # of the model, for people
    config: PretrainedConfig
    dtype: torch.dtype  # of the model that these weights are; GGUF blocks stand for bfloat16
    rounded = ""  # which stored numbers this dtype does not hold, for people; empty for none
    blocks: Collection[str] = ()  # the kinds of blocks that matrices are stored in
    state: Any = None  # changes when the weights do
    # whether `states` come from all layers of a model that is there, else from the first ones
    own_modules = False
    tried = 1  # layers that `states` runs, the first ones, unless they come from all

    def template(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors by name; a tied head has none."""
        return layer_template(self.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stored tensors by name, without reading them."""
        return self.template()

    def weights(self, *, blocks: Collection[str] = ()) -> Iterator[Weight]:
        """Yield all tensors: matrices in blocks of these kinds as they are stored, all others in `dtype`."""
        for name in self.shapes():
            yield upright(self.config, Weight.of(name, self.tensor(name)))

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return one tensor in `dtype`."""

    def is_exact(self, name: str) -> bool:
        """Return whether a tensor is float32 in models of any dtype."""
        return name.endswith(family_of(self.config).exact)

    def model(self, *, packed: bool = False) -> PreTrainedModel:
        """Return the whole model as transformers runs it, in `dtype`; packed: linear layers stay in their blocks."""
        model, matrices = empty_model(self.config, self.dtype), dict[str, QuantizedWeight]()
        tensors = (
            dict(self._unpacked(linear_layers(model), matrices))
            if packed and not family_of(self.config).alternating
            else {name: self.tensor(name) for name in self.shapes()}
        )
        # a tied head has no tensor of its own
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
        quantize(model, matrices.items())
        model.generation_config = self.generation_config
        model.config.name_or_path = self.name
        return with_buffers(model).eval()

    def _unpacked(
        self, layers: Collection[str], matrices: dict[str, QuantizedWeight]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are no blocks of these layers; those are added to `matrices`, by their layer."""
        shapes, family = self.shapes(), family_of(self.config)
        for weight in self.weights(blocks=BLOCKS):
            layer, packed = weight.name.removesuffix(".weight"), weight.kind in BLOCKS
            tied = layer == family.embedding.transformers and self.config.tie_word_embeddings
            if packed and (tied or layer in layers):
                order = slice(None) if weight.order is None else weight.order.long()
                rows = weight.rows(0, weight.shape[0]).view(weight.shape[0], -1)[order]
                matrices[family.head.transformers if tied else layer] = quantized_blocks(
                    weight.kind, rows
                )
            if not packed or layer not in layers:
                numbers = self.tensor(weight.name) if packed else weight.rows(0, weight.shape[0])
                yield weight.name, numbers.view(shapes[weight.name])

    @functools.cached_property
    def generation_config(self) -> GenerationConfig:
        """The model's own defaults."""
        return GenerationConfig.from_model_config(self.config)

    def changed(self) -> str:
        """Return the first thing, numbers apart, that is not as it was at loading; empty where there is none."""
        return ""

    def rope(self, key: str = "") -> tuple[Tensor, float]:
        """Return the radians per position and the factor on cosines and sines, as `rope_of`."""
        return rope_of(self.config, key)

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        ids: tuple[int, ...],
        embeddings: Tensor,
        layer_inputs: Tensor | None,
    ) -> list[Tensor]:
        """Return hidden states of transformers' own modules for tokens of which each sees those before it.

        ids: as transformers numbers them; embeddings: of the tokens, float32 [tokens, hidden size]; layer_inputs:
        float32 [tokens, layers * size], or None. Where the first layers alone are run, returns the states after the
        final norm.
        """
        family = family_of(self.config)
        factors, inputs = family.factors(self.config), {"inputs_embeds": embeddings[None]}
        if family.normed:
            inputs["inputs_embeds"] = torch.rms_norm(
                embeddings[None], embeddings.shape[-1:], eps=family.shape(self.config).eps
            )
        if factors.in_module or factors.by_token:
            inputs["inputs_embeds"] = inputs["inputs_embeds"] * factors.embedding
        if layer_inputs is not None and (of := family.own_inputs(self.config)) is not None:
            inputs["per_layer_inputs"] = (
                layer_inputs.unflatten(1, (-1, of.size))[:, : self.tried] * factors.own
            )[None]
        return states_of(_first_layers(self), positions, (self.tried,), **inputs)


def states_of(
    model: PreTrainedModel, positions: Tensor, ids: tuple[int, ...], **inputs: Tensor
) -> list[Tensor]:
    """Return hidden states `ids`, float32 [tokens, hidden size] each, of tokens that see those before them."""
    model.config._attn_implementation = model.config._experts_implementation = "eager"  # noqa: SLF001
    mask = torch.full(
        (len(positions), len(positions)),
        torch.finfo(model.dtype).min,
        dtype=model.dtype,
        device=positions.device,
    ).triu(1)
    out = model.get_decoder()(
        **inputs,
        position_ids=positions[None],
        attention_mask=mask[None, None],
        use_cache=False,
        output_hidden_states=True,
    )
    return [out.hidden_states[i][0].float() for i in ids]


def _first_layers(source: Source) -> PreTrainedModel:
    """Return the model of the source's first layers and final norm, in float32 and with a tiny vocabulary."""
    config, family, count = source.config, family_of(source.config), source.tried
    model = empty_model(of_few_layers(config, TINY_VOCABULARY, tuple(range(count))), torch.float32)
    layer_inputs = family.own_inputs(config)
    outside = [
        f"{name.transformers}."
        for name in (
            family.embedding,
            family.head,
            *([layer_inputs.embedding] if layer_inputs else []),
        )
    ]
    expected = {
        name: tensor
        for name, tensor in stored_tensors(model)
        if not name.startswith(tuple(outside))
    }
    axes = {} if layer_inputs is None else layer_inputs.axes
    tensors = {name: source.tensor(name) for name in expected}
    tensors |= {
        name: tensors[name].narrow(axes[name], 0, expected[name].shape[axes[name]])
        for name in axes.keys() & expected.keys()
    }
    model.load_state_dict(
        {name: tensor.float() for name, tensor in tensors.items()}, strict=False, assign=True
    )
    return with_buffers(model).eval()


class FirstLayer(Source):
    """The embeddings of a few tokens, first layer or another, and final norm of a model, in float32; its head is zero.

    A layer that reads another one's keys and values comes after that one. Read once, and run once by transformers'
    modules: `states` gives those of the first call, and each tensor is freed when it is asked for after that.
    """

    dtype = torch.float32

    def __init__(
        self, source: Source, embeddings: Tensor, layer_inputs: Tensor | None, number: int = 0
    ) -> None:
        """embeddings, layer_inputs: float32 [tokens, hidden size], [tokens, layers * size]; number: of the layer."""
        self.name, self._source, self._embeddings = source.name, source, embeddings
        self._numbers = layers_for(source.config, number)
        self.tried = len(self._numbers)
        self.config = of_few_layers(source.config, len(embeddings), self._numbers)
        self._own = None if layer_inputs is None else self._of_layers(layer_inputs, 1)
        self._tensors: dict[str, Tensor] = {}
        self._states: list[Tensor] | None = None

    def _of_layers(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the parts of its layers, of all that stand side by side."""
        size = (
            tensor.shape[axis] // family_of(self._source.config).shape(self._source.config).layers
        )
        return torch.cat(
            [tensor.narrow(axis, number * size, size) for number in self._numbers], dim=axis
        ).contiguous()

    def tensor(self, name: str) -> Tensor:
        family = family_of(self.config)
        layer_inputs = family.own_inputs(self.config)
        if name == f"{family.embedding.transformers}.weight":
            return self._embeddings
        if (
            layer_inputs is not None
            and self._own is not None
            and name == f"{layer_inputs.embedding.transformers}.weight"
        ):
            return self._own
        if name.startswith(f"{family.head.transformers}."):
            return torch.zeros_like(
                self._embeddings if name.endswith(".weight") else self._embeddings[:, 0]
            )
        if name not in self._tensors:
            layers, stored = family.layers.transformers, name
            for i, number in enumerate(self._numbers):
                if name.startswith(f"{layers}.{i}."):
                    stored = name.replace(f"{layers}.{i}.", f"{layers}.{number}.", 1)
            tensor = self._source.tensor(stored).float()
            axes = {} if layer_inputs is None else layer_inputs.axes
            self._tensors[name] = self._of_layers(tensor, axes[name]) if name in axes else tensor
        return self._tensors[name] if self._states is None else self._tensors.pop(name)

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        ids: tuple[int, ...],
        embeddings: Tensor,
        layer_inputs: Tensor | None,
    ) -> list[Tensor]:
        if self._states is None:
            inputs = family_of(self.config).own_inputs(self.config)
            if (
                layer_inputs is not None
                and inputs is not None
                and layer_inputs.shape[1] != self.tried * inputs.size
            ):
                layer_inputs = self._of_layers(layer_inputs, 1)
            self._states = super().states(tokens, positions, ids, embeddings, layer_inputs)
        return self._states

    def rope(self, key: str = "") -> tuple[Tensor, float]:
        # a loaded model's frequencies may be rounded as its weights are
        return super().rope(key) if self._source.own_modules else self._source.rope(key)


class PackedModel:
    """Pack the weights of `source`, and make the decoder that runs them.

    weights, decoder  the extension's
    stored            kinds that matrices are packed as, in words
    keeps             number of layers by their KV heads and the size of these
    state             of the source, once the packed weights were tried

    UnsupportedModelError if a tensor belongs to no block of the family, or has another shape.
    """

    def __init__(
        self,
        source: Source,
        shape: Shape,
        *,
        numerics: str,
        instruction_set: str,
        quantize: str | None,
    ) -> None:
        self.source, self.config, self.shape = source, source.config, shape
        self.state: Any = None
        self.family = family = family_of(self.config)
        self.instruction_set = instruction_set
        shapes = self._shapes()
        places = family.places(self.config)
        factors = self._factors()
        at = [family.shape_at(self.config, number) for number in range(shape.layers)]
        self.keeps = family.keeps(self.config) or {(shape.kv_heads, shape.head_dim): 0}
        ropes = {
            place.rope: self._rope(place.rope, one.head_dim)
            for place, one in zip(places, at, strict=True)
            if place.rope is not None
        }
        turned = next((2 * len(frequencies) for frequencies, _ in ropes.values()), 0)
        parts, orders = _parts_of(self.config, shapes), family.orders(self.config)
        self.weights = extension().Weights(thread_count())
        kinds = kinds_of(numerics, quantize=quantize is not None)
        packed = (
            self._packed(part, turned)
            for weight in progress_bar(
                self.source.weights(blocks=kinds), "Loading weights", len(shapes)
            )
            if weight.name in shapes
            for part in self._in_order(
                self._as_it_is_read(weight, parts[weight.name]),
                orders.get(weight.name.rpartition(".")[0]),
            ).parts(parts[weight.name])
        )
        self.stored = ", ".join(
            filter(
                None,
                dict.fromkeys(
                    add_weight(self.weights, weight, kinds, following)
                    for weight, following in pairwise(chain(packed, (None,)))
                    if weight is not None
                ),
            )
        )
        sizes = {
            f"model.layers.{number}.self_attn.{name}.weight": at[number].head_dim
            for number, layer in enumerate(self.family.layers_of(self.config))
            if layer.attention is not None
            for name in layer.attention.unweighted
        }
        if self.family.normed:
            sizes["model.embed_norm.weight"] = self.shape.hidden
        for name, size in sizes.items():
            self.weights.add_vector(name, torch.ones(size, dtype=torch.float32, device="cpu"))
        for name, scaled in family.scaled(self.config).items():
            factor = torch.tensor(
                [scaled.inputs * scaled.outputs], dtype=torch.float32, device="cpu"
            )
            for number in range(shape.layers):
                self.weights.add_vector(f"model.layers.{number}.{name}.factor", factor)
        keys, routing = list(ropes), family.routing(self.config)
        self.decoder = extension().Decoder(
            self.instruction_set,
            table_of(numerics),
            [
                shape.layers,
                shape.hidden,
                shape.vocabulary,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
            ],
            family.activation or ACTIVATIONS[activation_of(self.config)],
            [shape.eps, *(getattr(factors, name) for name in _NUMBERS)],
            self.weights,
            list(ropes.values()),
            [
                (-1 if place.rope is None else keys.index(place.rope), place.window or 0)
                for place in places
            ],
            (
                routing.scores,
                [routing.chosen, routing.groups, routing.kept, routing.rated],
                [routing.least, routing.factor],
            ),
            family.recurrence(self.config),
            [
                (one.kv_heads, one.head_dim, -1 if place.reads is None else place.reads)
                for place, one in zip(places, at, strict=True)
            ],
            self._traits(),
        )

    def _traits(self) -> dict[str, list[float]]:
        """Return what few families have, as csrc/cpu_binding.cpp lists it."""
        family = self.family
        queries = family.attention.query_factors(self.config)
        attention = family.attention_of(self.config)
        mixer, added_eps = family.mixer(self.config), family.fields.added_eps
        traits = {
            "added epsilon": [getattr(self.config, added_eps)] if added_eps else None,
            "latent": attention.sizes if isinstance(attention, Latent) else None,
            "query factors": None if queries is None else [queries.every, *queries.factors],
            "layer norms": [] if family.layer_norms else None,
            "parallel": [] if family.parallel(self.config) else None,
            "gated last": [] if isinstance(mixer, Mamba2) and mixer.gated_last else None,
        }
        return {name: values for name, values in traits.items() if values is not None}

    def _as_it_is_read(self, weight: Weight, parts: Iterable[str]) -> Weight:
        """Return a weight as numbers where it stays unrounded, in a dtype that is multiplied."""
        if not any(part.endswith(_UNROUNDED) for part in parts):
            return weight
        numbers = self.source.tensor(weight.name)
        return Weight.of(
            weight.name, numbers.bfloat16() if self.instruction_set in WITH_PAIRS else numbers
        )

    def _factors(self) -> Factors:
        """Return the family's factors, in the dtype that transformers' modules multiply in."""
        factors = self.family.factors(self.config)
        if not factors.in_module:
            return factors
        embedding, layer_inputs = (
            float(torch.tensor(factor, dtype=self.source.dtype, device="cpu"))
            for factor in (factors.embedding, factors.own)
        )
        return factors._replace(embedding=embedding, own=layer_inputs)

    def _rope(self, key: str, head_dim: int) -> tuple[list[float], float]:
        """Return the source's frequencies and factor. Raises UnsupportedModelError if a head has other channels."""
        frequencies, scale = self.source.rope(key)
        count = len(frequencies)
        whole = self.family.attention_of(self.config).turnable(head_dim) // 2
        require_supported(
            f"native: the config gives {count} rotary frequencies for {2 * whole} channels of a head",
            count == whole or (self.family.attention.partial and 0 < count < whole),
        )
        return frequencies.tolist(), scale

    def _packed(self, weight: Weight, turned: int) -> Weight:
        """Return a weight as csrc/cpu has it.

        Norms multiply by their numbers, and channels that are turned together stand half of the `turned` ones apart.
        Tables of which rows are looked up keep their place in the file.
        """
        tables = _LOOKED_UP[1:] if self.config.tie_word_embeddings else _LOOKED_UP
        weight = weight if weight.name in tables else weight._replace(place=None)
        module, _, kind = weight.name.rpartition(".")
        if module.endswith(CONVOLUTIONS):  # by taps
            count, mixer = weight.shape[0], self.family.mixer(self.config)
            taps = weight.rows(0, count).float().reshape(count, -1)
            if kind == "weight" and mixer is not None and (factors := mixer.convolved(self.shape)):
                taps = taps * torch.tensor(factors, dtype=torch.float32, device="cpu")[:, None]
            return Weight.of(weight.name, taps.T.flatten())
        scaled = self.family.scaled(self.config).get(module.split(".", 3)[-1])
        if scaled is not None and kind == "bias":  # which both factors multiply in csrc/cpu
            return Weight.of(weight.name, weight.rows(0, weight.shape[0]).float() / scaled.inputs)
        if (
            self.family.one_is_zero
            and len(weight.shape) == 1
            and kind == "weight"
            and not f".{module}".endswith(self.family.plain_norms)
        ):
            return Weight.of(weight.name, weight.rows(0, weight.shape[0]).float() + 1.0)
        if weight.name.endswith(f".{ROUTER_NORM}"):
            return Weight.of(
                weight.name, weight.rows(0, weight.shape[0]).float() * self.shape.hidden**-0.5
            )
        if ".k_b." in module:  # of queries it makes such over latents
            return Weight.of(weight.name, weight.rows(0, weight.shape[0]).T.contiguous())
        attention = self.family.attention_of(self.config)
        head = (
            attention.turned_rows(module.rpartition(".")[2], self.shape)
            if ".self_attn." in module
            else None
        )
        if head is None or not attention.neighbours:
            return weight
        size, first = head
        rows = (
            torch.arange(weight.shape[0], dtype=torch.int32, device="cpu")
            if weight.order is None
            else weight.order
        )
        heads, behind = rows.view(-1, size), first + turned
        pairs = heads[:, first:behind].reshape(len(heads), -1, 2).transpose(1, 2).flatten(1)
        return weight._replace(
            order=torch.cat((heads[:, :first], pairs, heads[:, behind:]), dim=1).flatten()
        )

    def _in_order(self, weight: Weight, rows: list[int] | None) -> Weight:
        """Return a weight with its rows in the order of its parts, which a file may have by head."""
        if rows is None:
            return weight
        order = torch.tensor(rows, dtype=torch.int64, device="cpu")
        order = order if weight.order is None else weight.order.long()[order]
        whole = functools.cache(lambda: weight.rows(0, len(order)).view(len(order), -1)[order])
        # blocks are bytes
        shape = (-1,) if weight.kind not in KIND_OF.values() else (-1, *weight.shape[1:])
        return weight._replace(rows=lambda first, last: whole()[first:last].view(shape), order=None)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors. Raises UnsupportedModelError if the source's differ."""
        shapes = self.source.template()
        stored = self.source.shapes()
        if self.config.tie_word_embeddings and stored.pop(
            f"{self.family.head.transformers}.weight", None
        ):
            embedding = f"{self.family.embedding.transformers}.weight"
            require_supported(
                "native: it stores lm_head without the embeddings that the config ties it to",
                embedding in stored,
            )
            head = self.source.tensor(f"{self.family.head.transformers}.weight")
            require_supported(
                "native: lm_head has weights of its own, and the config ties it to the embeddings",
                torch.equal(head, self.source.tensor(embedding)),
            )
        differing = [
            name
            for name in sorted(shapes.keys() | stored.keys())
            if shapes.get(name) != stored.get(name) and not name.endswith("rotary_emb.inv_freq")
        ]
        shown = ", ".join(
            f"{name} {stored.get(name)}, not {shapes.get(name)}" for name in differing[:4]
        )
        require_supported(
            f"native: {len(differing)} tensors differ from {self.config.model_type}'s: {shown}",
            not differing,
        )
        return shapes


def _parts_of(config: PretrainedConfig, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Map each tensor to native parts and their rows. Raises UnsupportedModelError if a tensor belongs to no block."""
    modules: dict[str, dict[str, int]] = {}
    for part in family_of(config).parts(config):
        modules.setdefault(part.name.transformers, {})[part.native] = part.size
    parts_by_tensor: dict[str, dict[str, int]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        require_supported(
            f"native: {name} is in none of the blocks that {config.model_type} has",
            name in modules or module in modules,
        )
        parts_by_tensor[name] = modules.get(name) or {
            f"{native}.{kind}": size for native, size in modules[module].items()
        }
    return parts_by_tensor


def add_weight(
    weights: Any, weight: Weight, kinds: Mapping[str, str], following: Weight | None = None
) -> str:
    """Pack one tensor as `kinds` says and return its kind; empty for a vector, which is kept in float32.

    A table with a place in a file stays in the file. following: the tensor that comes next; a network's gate
    leaves room for it where both are read together.
    """
    count = weight.shape[0]
    if len(weight.shape) == 1:
        order = slice(None) if weight.order is None else weight.order.long()
        weights.add_vector(weight.name, weight.rows(0, count).float()[order].contiguous())
        return ""
    kind = weight.kind if weight.name.endswith(_UNROUNDED) else kinds[weight.kind]
    if weight.place is not None:
        weights.add_rows(weight.name, kind, *weight.shape, *weight.place)
        return kind.removeprefix(INTEGER)
    alike = weight.name.replace("gate_proj.", "up_proj."), weight.kind, weight.shape
    weights.add_matrix(
        weight.name,
        kind,
        *weight.shape,
        following.name if following and following[:3] == alike else "",
    )
    step = count if weight.order is not None else PACKED_ROWS
    for first in range(0, count, step):
        weights.pack(
            weight.name,
            weight.kind if weight.kind in ("f32", "bf16") else kind,
            first,
            weight.rows(first, min(first + step, count)),
            weight.order,
        )
    return kind.removeprefix(INTEGER)


# ---- bars over what takes long


T = TypeVar("T")


def bar_options() -> dict[str, Any]:
    """Return the options of a tqdm bar that is shown on a terminal and in a notebook, after a second, and then goes."""
    hides = "ipykernel" not in sys.modules and not (sys.stderr and sys.stderr.isatty())
    return {"disable": hides, "delay": 1, "leave": False}


def progress_bar(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """Return the items, with a bar; transformers' `logging.disable_progress_bar()` hides it. total: of the items."""
    return cast(Iterable[T], logging.tqdm(items, desc=title, total=total or None, **bar_options()))

"""The weights of a native model, one tensor at a time, so that packing needs no second copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from specengine.models.configs import empty_model, family_of, rope_of

_BY_LAYER = ("layer_types", "no_rope_layers")  # what configs list by layer
TINY_VOCABULARY = 8  # of a model whose tokens do not count
VECTORS = (".bias", ".choice")  # the ends of names of vectors in csrc/cpu
KIND_OF = {torch.bfloat16: "bf16", torch.float32: "f32"}


class Weight(NamedTuple):
    """One tensor, read a few rows at a time: `rows(first, last)` gives contiguous CPU data.

    kind   of the data: f32, bf16, or blocks of a GGUF file as uint8
    shape  as in torch
    order  int32 [rows], the row of the data for each row of the tensor, or None
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    order: Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Weight:
        """Return the weight of a tensor in float32 or bfloat16 that is in memory; of a stack of matrices, all rows."""
        tensor = tensor.flatten(0, -2) if tensor.ndim > 2 else tensor
        return cls(
            name,
            KIND_OF[tensor.dtype],
            tuple(tensor.shape),
            lambda first, last: tensor[first:last].contiguous(),
        )

    def parts(self, sizes: Mapping[str, int]) -> Iterator[Weight]:
        """Yield the weights that this one is made of: so many rows for each name, in their order."""
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

    @property
    def rounded(self) -> str:
        """Say for people which stored numbers this dtype does not hold; empty for none."""
        return ""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stored tensors by name, without reading them."""
        return layer_template(self.config)

    @property
    def blocks(self) -> Collection[str]:
        """The kinds of blocks that matrices are stored in."""
        return ()

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

    @abstractmethod
    def model(self) -> PreTrainedModel:
        """Return the whole model as transformers runs it, in `dtype`."""

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The model's own defaults."""
        return GenerationConfig.from_model_config(self.config)

    @property
    def state(self) -> Any:
        """Changes when the weights do."""
        return None

    own_modules = False  # whether `states` come from all layers of a model that is there, else from the first one

    def changed(self) -> str:
        """Return the first thing, numbers apart, that is not as it was at loading; empty where there is none."""
        return ""

    def rope(self, key: str = "") -> tuple[Tensor, float]:
        """Return the radians per position and the factor on cosines and sines, as `rope_of`."""
        return rope_of(self.config, key)

    tried = 1  # layers that `states` runs, the first ones, unless they come from all

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        ids: tuple[int, ...],
        embeddings: Tensor,
        own: Tensor | None,
    ) -> list[Tensor]:
        """Return hidden states of transformers' own modules for tokens of which each sees those before it.

        ids: as transformers numbers them; embeddings: of the tokens, float32 [tokens, hidden size]; own: those that are
        inputs of single layers, [tokens, layers * size], or None. float32 each. Here those behind the final norm when
        the first layers alone are run.
        """
        del tokens, ids
        family = family_of(self.config)
        factors, inputs = family.factors(self.config), {"inputs_embeds": embeddings[None]}
        if factors.in_module or factors.by_token:
            inputs["inputs_embeds"] = inputs["inputs_embeds"] * factors.embedding
        if own is not None and (of := family.own_inputs(self.config)) is not None:
            by_layer = own.unflatten(1, (-1, of.size))[:, : self.tried] * factors.own
            inputs["per_layer_inputs"] = by_layer[None]
        return states_of(_first_layers(self), positions, (self.tried,), **inputs)


def states_of(
    model: PreTrainedModel, positions: Tensor, ids: tuple[int, ...], **inputs: Tensor
) -> list[Tensor]:
    """Return hidden states `ids`, float32 [tokens, hidden size] each, of tokens that see those before them."""
    model.config._attn_implementation = model.config._experts_implementation = "eager"  # noqa: SLF001
    size = (len(positions),) * 2
    mask = torch.full(
        size, torch.finfo(model.dtype).min, dtype=model.dtype, device=positions.device
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
    own = family.own_inputs(config)
    outside = [
        f"{name.transformers}."
        for name in (family.embedding, family.head, *([own.embedding] if own else []))
    ]
    wanted = {
        name: tensor
        for name, tensor in stored_tensors(model)
        if not name.startswith(tuple(outside))
    }
    axes = {} if own is None else own.axes
    found = {name: source.tensor(name) for name in wanted}
    for name in axes.keys() & wanted.keys():
        found[name] = found[name].narrow(axes[name], 0, wanted[name].shape[axes[name]])
    model.load_state_dict(
        {name: tensor.float() for name, tensor in found.items()}, strict=False, assign=True
    )
    return with_buffers(model).eval()


def layers_for(config: PretrainedConfig, number: int) -> tuple[int, ...]:
    """Return the layers without which a layer cannot run, and itself: one whose keys and values it reads."""
    reads = family_of(config).places(config)[number].reads
    return (number,) if reads is None else (reads, number)


def of_few_layers(
    config: PretrainedConfig, vocabulary: int, numbers: tuple[int, ...]
) -> PretrainedConfig:
    """Return the config of these layers alone, with a vocabulary of so many tokens."""
    family, given, lists = family_of(config), config.to_dict(), {}
    for name in _BY_LAYER:
        # without lists that a config makes of other fields
        if config.attribute_map.get(name, name) in given and (kinds := getattr(config, name, None)):
            lists[name] = [kinds[number] for number in numbers]
    sizes: dict[str, Any] = {
        family.fields.layers: len(numbers),
        family.fields.vocabulary: vocabulary,
    }
    sizes |= lists | family.alone(config, numbers[-1])
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if (by_layer := given.get("per_layer_config")) is not None:
        sizes["per_layer_config"] = {
            i: by_layer.get(str(number), {}) for i, number in enumerate(numbers)
        }
    found = type(config).from_dict(given | sizes | ids)
    for name, kinds in lists.items():  # of which some classes make others
        setattr(found, name, kinds)
    return found


class FirstLayer(Source):
    """The embeddings of a few tokens, first layer or another, and final norm of a model, in float32; its head is zero.

    A layer that reads another one's keys and values comes behind that one. Read once, and run once by transformers'
    modules: `states` gives those of the first call.
    """

    dtype = torch.float32

    def __init__(
        self, source: Source, embeddings: Tensor, own: Tensor | None, number: int = 0
    ) -> None:
        """embeddings, own: float32 [tokens, hidden size], [tokens, layers * size] or None; number: of the layer."""
        self.name, self._source, self._embeddings = source.name, source, embeddings
        self._numbers = layers_for(source.config, number)
        self.tried = len(self._numbers)
        self.config = of_few_layers(source.config, len(embeddings), self._numbers)
        self._own = None if own is None else self._of_layers(own, 1)
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
        own = family.own_inputs(self.config)
        if name == f"{family.embedding.transformers}.weight":
            return self._embeddings
        if (
            own is not None
            and self._own is not None
            and name == f"{own.embedding.transformers}.weight"
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
            axes = {} if own is None else own.axes
            self._tensors[name] = self._of_layers(tensor, axes[name]) if name in axes else tensor
        return self._tensors[name]

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        ids: tuple[int, ...],
        embeddings: Tensor,
        own: Tensor | None,
    ) -> list[Tensor]:
        if self._states is None:
            inputs = family_of(self.config).own_inputs(self.config)
            if own is not None and inputs is not None and own.shape[1] != self.tried * inputs.size:
                own = self._of_layers(own, 1)
            self._states = super().states(tokens, positions, ids, embeddings, own)
        return self._states

    def model(self) -> PreTrainedModel:
        return _first_layers(self)

    def rope(self, key: str = "") -> tuple[Tensor, float]:
        # a loaded model's frequencies may be rounded as its weights are
        return super().rope(key) if self._source.own_modules else self._source.rope(key)


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield what checkpoints hold of a model: parameters, and the buffers that are kept with them."""
    yield from model.named_parameters()
    for above, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield f"{above}.{name}" if above else name, buffer


def with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with what no checkpoint holds made outside the meta device: rotary frequencies, factors."""
    filled_by_decoder = False
    for module in model.modules():
        lacking = {
            key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta
        }
        if not lacking:
            continue
        if hasattr(module, "layer_idx"):  # of a layer
            filled_by_decoder = True
            fresh = {key: torch.empty_like(buffer, device="cpu") for key, buffer in lacking.items()}
        else:
            with torch.device("cpu"):
                factor = getattr(module, "scalar_embed_scale", None)  # of embeddings
                made = (
                    type(module)(config=model.config)
                    if factor is None
                    else type(module)(1, 1, None, factor)
                )
            fresh = dict(made.named_buffers(recurse=False))
        for key, buffer in fresh.items():
            setattr(module, key, buffer)
    if filled_by_decoder:
        model._init_weights(model.get_decoder())  # noqa: SLF001
    return model


def layer_template(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, those of all layers included; a tied head has none."""
    family, own = family_of(config), family_of(config).own_inputs(config)
    kinds, axes = kinds_of_layers(config), {} if own is None else own.axes
    layers, tied = family.layers.transformers, config.tie_word_embeddings
    shapes: dict[str, tuple[int, ...]] = {}
    for kind in dict.fromkeys(kinds):
        needed = layers_for(config, kinds.index(kind))
        small = of_few_layers(config, getattr(config, family.fields.vocabulary), needed)
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        last = f"{layers}.{len(needed) - 1}."
        for name, weight in stored_tensors(empty_model(small, torch.float32)):
            if name.startswith(last):
                inside = name.removeprefix(last)
                every = [f"{layers}.{number}.{inside}" for number in numbers]
                shapes |= dict.fromkeys(every, tuple(weight.shape))
            elif not (
                name.startswith(f"{layers}.")
                or (tied and name == f"{family.head.transformers}.weight")
            ):
                shape = list(weight.shape)
                if name in axes:
                    shape[axes[name]] = shape[axes[name]] // len(needed) * len(kinds)
                shapes[name] = tuple(shape)
    return shapes


def kinds_of_layers(config: PretrainedConfig) -> list[Any]:
    """Return values for layers that are equal where these have the same blocks, sizes and places."""
    family = family_of(config)
    shapes = [family.shape_at(config, number) for number in range(family.shape(config).layers)]
    return list(zip(family.layers_of(config), family.places(config), shapes, strict=True))

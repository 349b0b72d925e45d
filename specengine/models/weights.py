"""The weights of a native model, one tensor at a time, so that packing needs no second copy."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from specengine.models.configs import empty_model
from specengine.models.families import Shape

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
        """A tensor in float32 or bfloat16 that is in memory."""
        return cls(
            name, KIND_OF[tensor.dtype], tuple(tensor.shape), lambda first, last: tensor[first:last].contiguous()
        )


class Source(ABC):
    """The weights of one model, under Hugging Face's names."""

    name: str  # of the model, for people
    config: PretrainedConfig
    dtype: torch.dtype  # of the model that these weights are; GGUF blocks stand for bfloat16

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that there are, without reading them."""

    @abstractmethod
    def weights(self, *, blocks: bool = True) -> Iterator[Weight]:
        """All tensors, one after the other, in `dtype`, or with `blocks` as they are stored where that is packed."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One tensor in `dtype`."""

    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The whole model as transformers runs it, in `dtype`."""

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

    def rope(self, shape: Shape) -> tuple[Tensor, float]:
        """Return the frequencies of its positions, and the scale on cosines and sines; see Shape."""
        return shape.frequencies, shape.rope_scale

    def states(self, tokens: Tensor, positions: Tensor, ids: tuple[int, ...], embeddings: Tensor) -> list[Tensor]:
        """Return hidden states of transformers' own modules for tokens of which each sees those before it.

        ids: as transformers numbers them; embeddings: of the tokens, float32 [tokens, hidden size]. float32 each. Here
        those behind the final norm when the first layer alone is run.
        """
        del tokens, ids
        return states_of(_first_layer(self), positions, (1,), inputs_embeds=embeddings[None])


def states_of(model: PreTrainedModel, positions: Tensor, ids: tuple[int, ...], **inputs: Tensor) -> list[Tensor]:
    """Return hidden states `ids`, float32 [tokens, hidden size] each, of tokens that see those before them."""
    model.config._attn_implementation = "eager"
    size = (len(positions),) * 2
    mask = torch.full(size, torch.finfo(model.dtype).min, dtype=model.dtype, device=positions.device).triu(1)
    out = model.get_decoder()(
        **inputs,
        position_ids=positions[None],
        attention_mask=mask[None, None],
        use_cache=False,
        output_hidden_states=True,
    )
    return [out.hidden_states[i][0].float() for i in ids]


def _first_layer(source: Source) -> PreTrainedModel:
    """Return the model of the source's first layer and final norm, in float32 and with a tiny vocabulary."""
    config = source.config
    known = {"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    kinds = getattr(config, "layer_types", None)
    small = type(config).from_dict(config.to_dict() | known | {"layer_types": kinds and kinds[:1]})
    model = empty_model(small, torch.float32)
    wanted = {name for name, _ in model.named_parameters() if ".layers." in name or name.endswith("model.norm.weight")}
    model.load_state_dict({name: source.tensor(name).float() for name in wanted}, strict=False, assign=True)
    return with_buffers(model).eval()


def with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """The rotary frequencies, which no checkpoint holds, made again outside the meta device."""
    for module in model.modules():
        if any(buffer.is_meta for buffer in itertools.chain(module.buffers(recurse=False))):
            with torch.device("cpu"):
                fresh = type(module)(config=model.config)
            for key, buffer in fresh.named_buffers(recurse=False):
                setattr(module, key, buffer)
    return model


def layer_template(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model with this config, those of all layers included; a tied head has none."""
    layers = config.num_hidden_layers
    small = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 1, "layer_types": None})
    shapes = {name: tuple(weight.shape) for name, weight in empty_model(small, torch.float32).named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".layers.0." in name:
            found |= {name.replace(".layers.0.", f".layers.{number}."): shape for number in range(layers)}
        else:
            found[name] = shape
    return found

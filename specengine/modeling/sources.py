"""Where the weights of a native model come from: a folder of safetensors, a GGUF file, or a loaded model.

Each gives the tensors one at a time, so that no second copy of the weights stands in memory while they are packed.
"""

from __future__ import annotations

import copy
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from specengine.checkpoints import gguf
from specengine.checkpoints.files import safetensors_files
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.modeling.bars import no_loading_bars
from specengine.modeling.configs import empty_model
from specengine.modeling.families import Shape
from specengine.modeling.loaded import Watch
from specengine.modeling.twins import evaluating
from specengine.text_files import read_text

KIND_OF = {torch.bfloat16: "bf16", torch.float32: "f32"}
BLOCKS = ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k")  # of GGUF files, kept packed


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


class FolderSource(Source):
    """A folder with config.json and safetensors files.

    UnsupportedModelError where it holds its weights otherwise, CheckpointError where a file is damaged.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, name: str) -> None:
        self.folder, self.config, self.dtype, self.name = folder, config, dtype, name
        self._tensors = {key: tensor for file in _require_files(folder) for key, tensor in _tensors_of(file)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._tensors.items()}

    def weights(self, *, blocks: bool = True) -> Iterator[Weight]:
        for name, stored in self._tensors.items():

            def rows(first: int, last: int, stored: _Stored = stored) -> Tensor:
                return stored.read(first, last).to(self.dtype)

            yield Weight(name, KIND_OF[self.dtype], stored.shape, rows)

    def tensor(self, name: str) -> Tensor:
        stored = self._tensors[name]
        return stored.read(0, stored.shape[0]).to(self.dtype)

    def model(self) -> PreTrainedModel:
        with no_loading_bars(), torch.device("cpu"):
            return AutoModelForCausalLM.from_pretrained(self.folder, config=self.config, dtype=self.dtype)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        return generation_config_of(self.folder)


def generation_config_of(folder: Path) -> GenerationConfig:
    """The defaults that transformers gives a folder's model: of generation_config.json, or of config.json where that
    is not there or no JSON. CheckpointError where it holds what makes no such config.
    """
    file = folder / "generation_config.json"
    try:
        try:
            fields = json.loads(read_text(file))
        except (OSError, ValueError):
            return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
        return GenerationConfig.from_dict(fields)
    except Exception as error:  # over values of other types; transformers' loading fails by them as well
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: generation_config.json: its values make no generation config, correct or remove it "
            f"({type(error).__name__}: {text:.300})"
        ) from error


class GGUFSource(Source):
    """A GGUF file, its blocks kept as they are; in float32 each weight is the bfloat16 number that it stands for."""

    def __init__(self, file: gguf.GGUFFile, config: PretrainedConfig, dtype: torch.dtype, *, name: str) -> None:
        self.file, self.config, self.dtype, self.name = file, config, dtype, name
        gguf.require_complete(file, config)
        self._names = {theirs: ours for ours, theirs in gguf.tensor_names(config.num_hidden_layers).items()}
        self._suppressed = gguf.suppressed_ids(file, config.vocab_size)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        found = GenerationConfig.from_model_config(self.config)
        found.suppress_tokens = self._suppressed
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        ours = {ours: theirs for theirs, ours in self._names.items()}
        return {ours[name]: tensor.shape for name, tensor in self.file.tensors.items() if name in ours}

    def weights(self, *, blocks: bool = True) -> Iterator[Weight]:
        for name in self.shapes():
            stored = self.file.tensors[self._names[name]]
            if blocks and self.dtype is torch.bfloat16 and stored.kind in BLOCKS and len(stored.shape) == 2:
                order = gguf.row_order(self.config, stored.name)

                def rows(first: int, last: int, name: str = stored.name) -> Tensor:
                    return torch.from_numpy(self.file.read_rows(name, first, last))

                given = None if order is None else torch.from_numpy(order)
                yield Weight(name, stored.kind, stored.shape, rows, given)
            else:
                yield Weight.of(name, self.tensor(name))

    def tensor(self, name: str) -> Tensor:
        stored = self._names[name]
        numbers, order = self.file.numbers(stored), gguf.row_order(self.config, stored)
        ordered = numbers if order is None else np.ascontiguousarray(numbers[order])
        return torch.from_numpy(ordered).to(torch.bfloat16).to(self.dtype)

    def model(self) -> PreTrainedModel:
        model = empty_model(self.config, self.dtype)
        state = {name: self.tensor(name) for name in self.shapes()}
        model.load_state_dict(state, strict=False, assign=True)  # a tied head has no tensor of its own
        model.tie_weights()
        model.generation_config = self.generation_config
        model.config._name_or_path = self.name
        return with_buffers(model).eval()


class ModelSource(Source):
    """A loaded model, whose own weights stay with it."""

    own_modules = True

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config, self.dtype = model, copy.deepcopy(model.config), model.dtype
        self.name = model.config._name_or_path or type(model).__name__
        self._watch = Watch(model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self._model.named_parameters()}

    def weights(self, *, blocks: bool = True) -> Iterator[Weight]:
        for name, weight in self._model.named_parameters():
            yield Weight.of(name, weight.detach())

    def tensor(self, name: str) -> Tensor:
        return self._model.get_parameter(name).detach()

    def model(self) -> PreTrainedModel:
        return self._model

    @property
    def generation_config(self) -> GenerationConfig:
        return self._model.generation_config

    @property
    def state(self) -> Any:
        return self._watch.contents()

    def changed(self) -> str:
        return self._watch.changed()

    def rope(self, shape: Shape) -> tuple[Tensor, float]:
        rotary: Any = self._model.get_decoder().rotary_emb  # whose buffer a cast of the model rounds
        return rotary.inv_freq.detach().to(torch.float32), float(rotary.attention_scaling)

    def states(self, tokens: Tensor, positions: Tensor, ids: tuple[int, ...], embeddings: Tensor) -> list[Tensor]:
        del embeddings
        return states_of(evaluating(self._model), positions, ids, input_ids=tokens[None])


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


class _Stored(NamedTuple):
    """Where a tensor lies in a safetensors file."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int, last: int) -> Tensor:
        """Rows [first, last). Read rather than mapped: a mapped file's pages count as memory until it is let go."""
        each = self.nbytes // self.shape[0]
        data = bytearray((last - first) * each)
        with self.file.open("rb") as stream:
            stream.seek(self.offset + first * each)
            if stream.readinto(data) != len(data):
                raise CheckpointError(f"{self.file}: it has become shorter while it was read")
        return torch.frombuffer(data, dtype=self.dtype).reshape(last - first, *self.shape[1:])


_STORED_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


def _tensors_of(file: Path) -> Iterator[tuple[str, _Stored]]:
    """CheckpointError where `file` is damaged, UnsupportedModelError where it holds numbers of another kind."""
    try:
        with safe_open(file, framework="pt"):  # which checks the header against the file's size
            pass
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file}: is damaged, fetch it again ({error})") from error
    except OSError as error:
        raise UnsupportedModelError(f"{file}: cannot be read ({error})") from error
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not entry["shape"] or 0 in entry["shape"]:
            raise UnsupportedModelError(f"{file}: {name} has shape {entry['shape']}")
        if entry["dtype"] not in _STORED_DTYPES:
            raise UnsupportedModelError(f"{file}: {name} is stored as {entry['dtype']}")
        begin, end = entry["data_offsets"]
        place = 8 + size + begin
        yield name, _Stored(file, place, end - begin, _STORED_DTYPES[entry["dtype"]], tuple(entry["shape"]))


def stored_dtype(folder: Path) -> torch.dtype:
    """Of the first tensor, as transformers' `auto` takes it where the config says nothing."""
    return next((stored.dtype for _, stored in _tensors_of(_require_files(folder)[0])), torch.float32)


def _require_files(folder: Path) -> list[Path]:
    files = safetensors_files(folder)
    if not files:
        raise UnsupportedModelError(f"{folder}: has no safetensors file that transformers would read")
    return files


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

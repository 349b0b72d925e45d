"""Weights from a folder of safetensors or from a GGUF file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.files import read_text, safetensors_files
from specengine.models.configs import empty_model
from specengine.models.weights import KIND_OF, Source, Weight, with_buffers

BLOCKS = ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k")  # of GGUF files, kept packed


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
        model.config.name_or_path = self.name
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


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """Without the bars over reading weights, which take seconds; those over downloads stay as they are."""
    loading, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # both kinds
    _show_downloads(downloads)
    try:
        yield
    finally:
        if loading:
            logging.enable_progress_bar()
        _show_downloads(downloads)


def _show_downloads(shown: bool) -> None:
    (enable_progress_bars if shown else disable_progress_bars)()

"""Opening a model for the native forward by its name: the embedded default, a GGUF file, a folder, a Hub id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PretrainedConfig

from specengine import checkpoints as models
from specengine.checkpoints import gguf
from specengine.checkpoints.embedded import Progress
from specengine.errors import InputError, UnsupportedModelError
from specengine.modeling.configs import config_of
from specengine.modeling.families import refuse_config
from specengine.modeling.sources import FolderSource, GGUFSource, Source, stored_dtype

WEIGHT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


class Opened(NamedTuple):
    """The weights, and how their tokenizer is had."""

    source: Source
    tokenizer: Callable[[], Any]


def is_gguf(name: str | None) -> bool:
    """Whether this is the path of a GGUF file."""
    return name is not None and (name.lower().endswith(".gguf") or (Path(name).is_file() and _has_magic(Path(name))))


def open_gguf(name: str, dtype: Any) -> Opened:
    """A GGUF file. CheckpointError where it is damaged, UnsupportedModelError where its model is none that is known."""
    path = Path(name)
    if not path.is_file():
        raise InputError(f"model: {name} is no file")
    return _opened_gguf(path, dtype, path.name)


def open_native(
    name: str | None, *, dtype: Any = "auto", offline: bool = False, progress: Progress | None = None
) -> Opened:
    """The weights of a model by name, None for the embedded default; nothing is packed yet.

    dtype: auto (as stored; GGUF blocks stand for bfloat16), or a torch.dtype. UnsupportedModelError, with the reason,
    where the native forward does not know the model or how its weights are stored; CheckpointError for damaged files.
    """
    if name is None or name == models.embedded.NAME:
        folder = models.embedded.kept_folder()
        if folder is not None:
            return _opened_folder(folder, config_of(folder), dtype, models.embedded.NAME)
        return _opened_gguf(models.embedded.gguf(offline=offline, progress=progress), dtype, models.embedded.NAME)
    if is_gguf(name):
        return open_gguf(name, dtype)
    try:
        config = config_of(name, local_files_only=offline)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"native: {error}") from error
    refuse_config(config)
    return _opened_folder(Path(name) if Path(name).is_dir() else _fetched(name, offline), config, dtype, name)


def _opened_gguf(path: Path, dtype: Any, name: str) -> Opened:
    file = gguf.read(path, gguf.architecture_of)
    config = gguf.config(file)
    config._name_or_path = name
    chosen = torch.bfloat16 if dtype == "auto" else dtype
    return Opened(GGUFSource(file, config, chosen, name=name), lambda: gguf.tokenizer(file))


def _opened_folder(folder: Path, config: PretrainedConfig, dtype: Any, name: str) -> Opened:
    if getattr(config, "transformers_weights", None) is not None:
        raise UnsupportedModelError("native: its config names a file of weights (transformers_weights)")
    source = FolderSource(folder, config, _dtype(folder, config, dtype), name=name)
    _ = source.generation_config  # raises over a damaged file before any weights are read
    return Opened(source, lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _fetched(name: str, offline: bool) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(WEIGHT_FILES), local_files_only=offline))
    except Exception as error:  # the hub's own errors, of many kinds; transformers' loading says more
        raise UnsupportedModelError(f"native: {name} cannot be fetched ({str(error).splitlines()[0]})") from error


def _dtype(folder: Path, config: PretrainedConfig, dtype: Any) -> torch.dtype:
    if dtype != "auto":
        return dtype
    return getattr(config, "dtype", None) or stored_dtype(folder)


def _has_magic(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"

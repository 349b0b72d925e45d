"""Models by name: which forward runs them, with which weights and tokenizer."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from specengine import checkpoints as models
from specengine.checkpoints import gguf
from specengine.checkpoints.checks import (
    Adapter,
    adapter_of,
    config_of,
    looks_like_path,
    refuse_other_shapes,
    why_absent,
)
from specengine.checkpoints.embedded import Progress
from specengine.checkpoints.sources import FolderSource, GGUFSource, generation_config_of, no_loading_bars, stored_dtype
from specengine.errors import CheckpointError, InputError, SpecEngineError, UnsupportedModelError, shown
from specengine.models import native
from specengine.models.configs import NO_MEMORY, unsupported
from specengine.models.extension import NOT_BUILT
from specengine.models.families import refuse_config
from specengine.models.native import NativeLM
from specengine.models.tensor_parallel import splitting
from specengine.models.weights import Source
from specengine.options import LoadOptions

_MASKS = (".attn.bias", ".attention.bias", ".masked_bias", ".inv_freq")


class LoadedModel(NamedTuple):
    """A model, its tokenizer, and why it is not the native forward that runs it."""

    model: PreTrainedModel | NativeLM
    tokenizer: Any
    reason: str = ""


def load_model(model: str | PreTrainedModel | None, options: LoadOptions, tokenizer: Any = None) -> LoadedModel:
    """The model, loaded where it is a name, and its tokenizer, unless one is given."""
    if not isinstance(model, str | None | PreTrainedModel):
        raise InputError(f"model: got {type(model).__name__}, accepted a name, a path or a loaded transformers model")
    named = isinstance(model, str) and model != models.embedded.NAME
    if named and (missing := why_absent(str(model), offline=options.offline)) is not None:
        raise InputError(f"model: got {model!r:.300}, accepted a path or a Hub id; {missing}")
    adapter = adapter_of(str(model), offline=options.offline) if named else None
    reason = _not_native(model, options) or (adapter and adapter.reason)
    if reason is None:
        try:
            return LoadedModel(*_native(model, options, tokenizer))
        except UnsupportedModelError as error:
            if options.backend == "native" or options.quantize:
                raise
            reason = str(error)
    elif options.backend == "native" or options.quantize:
        raise InputError(f"backend, quantize: the native forward was asked for, but {reason}")
    return LoadedModel(*_huggingface(model, options, tokenizer, adapter), reason)


def _not_native(model: str | PreTrainedModel | None, options: LoadOptions) -> str | None:
    """Why the native forward is out of the question whatever the model; None where it may be tried."""
    on_cpu = (options.device is None and not torch.cuda.is_available()) or options.device == torch.device("cpu")
    if isinstance(model, PreTrainedModel):
        on_cpu = model.device.type == "cpu"
    reasons = {
        "backend='huggingface' was asked for": options.backend == "huggingface",
        "its weights are split over ranks": options.tp_plan is not None,
        "it runs on a CPU alone": not on_cpu,
        "graphs are made of the model's own modules": bool(options.graphs),
        "pack= is an option of the Hugging Face backend": options.pack is not None,
        NOT_BUILT: not native.instruction_sets(),
        f"dtype {options.dtype} is none of bfloat16 and float32": options.dtype == torch.float16,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _native(model: str | PreTrainedModel | None, options: LoadOptions, tokenizer: Any) -> tuple[NativeLM, Any]:
    if isinstance(model, PreTrainedModel):
        name = model.config.name_or_path
        lm = native.from_model(model, quantize=options.quantize)
        return lm, tokenizer or (_tokenizer(name, options) if name else None)
    opened = open_native(model, dtype=options.dtype, offline=options.offline, progress=options.progress)
    return NativeLM(opened.source, quantize=options.quantize), tokenizer or _tokenizer_of(opened)


def _huggingface(
    model: str | PreTrainedModel | None, options: LoadOptions, tokenizer: Any, adapter: Adapter | None = None
) -> tuple[PreTrainedModel, Any]:
    if isinstance(model, PreTrainedModel):
        name = model.config.name_or_path
        return model, tokenizer or (_tokenizer(name, options) if name else None)
    if model is not None and is_gguf(model):
        opened = open_gguf(model, options.dtype)
        return opened.source.model().to(options.device or default_device()), tokenizer or _tokenizer_of(opened)
    path = models.resolve(model, offline=options.offline, progress=options.progress)
    common = {"local_files_only": options.offline, "trust_remote_code": options.trust_remote_code}
    base = path if adapter is None else adapter.base
    config = config_of(base, **common)
    refuse_other_shapes(base, config)
    if Path(base).is_dir():
        generation_config_of(Path(base))  # which transformers reads last, and names no file over
    if options.tp_plan is not None:
        common["distributed_config"] = splitting(config)
    try:
        with no_loading_bars(), torch.device("cpu"):
            loaded, found = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=options.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **common,
            )
    except SafetensorError as error:
        raise CheckpointError(f"model {path!r}: its weights are damaged, fetch them again ({error})") from error
    except NO_MEMORY:
        raise
    except Exception as error:  # a model's class may raise anything over a config of other types than it expects
        if adapter is not None:
            raise adapter.unfit(" ".join(str(error).split())[:300]) from error
        raise unsupported(path, error, "it cannot be loaded") from error
    _require_weights(path, loaded, found, adapter)
    if options.tp_plan is None:
        loaded = loaded.to(options.device or default_device())
    return loaded, tokenizer or _tokenizer(path if adapter is None else adapter.tokenizer, options)


def _require_weights(path: str, model: PreTrainedModel, found: dict[str, Any], adapter: Adapter | None) -> None:
    """Raise CheckpointError where the model is not that of its files: they lack weights or have them in another shape,
    so that it would hold random ones, or have more of its parts (layers, biases) than the config asks for."""
    problems = {
        "missing": sorted({name for name, _ in model.named_parameters()} & set(found["missing_keys"])),
        "of another shape": sorted(
            f"{name} {list(has)}, not {list(wants)}" for name, has, wants in found["mismatched_keys"]
        ),
        "unexpected": sorted(_left_out(model, found["unexpected_keys"])),
    }
    listed = [f"{what}: {', '.join(names[:4])}" for what, names in problems.items() if names]
    if listed and adapter is not None:
        raise adapter.unfit(f"to {adapter.base}: {'; '.join(listed)}")
    if listed:
        raise CheckpointError(f"model {path!r}: its weights do not fit its config.json; {'; '.join(listed)}")


def _left_out(model: PreTrainedModel, unexpected: Iterable[str]) -> Iterator[str]:
    """Of a file's tensors that the model has no place for, those of parts that it has, in whichever layer.

    The others (towers for pictures, heads for predicting several tokens, values) are no part of what answers, and
    neither are the causal masks that old files hold.
    """
    has = {_any_layer(name) for name, _ in model.named_modules()} - {""}
    for name in unexpected:
        part = _any_layer(name.rpartition(".")[0])
        held = part in has or f"{model.base_model_prefix}.{part}" in has
        if held and not name.endswith(_MASKS):
            yield name


def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f".{name}")[1:]


def _tokenizer_of(opened: Opened) -> Any:
    try:
        return opened.tokenizer()
    except (OSError, ValueError, KeyError, SpecEngineError) as error:
        print(f"no tokenizer for {opened.source.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _tokenizer(path: str, options: LoadOptions) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=options.offline, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        print(f"no tokenizer for {path}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def given_tokenizer(options: LoadOptions) -> Any:
    """The tokenizer that the options hold or name; InputError where there is none of that name."""
    given = options.tokenizer
    if not isinstance(given, str | os.PathLike):
        return given
    name = os.fspath(given)
    try:
        if name == models.embedded.NAME or is_gguf(name):
            own = name == models.embedded.NAME
            path = models.embedded.gguf(offline=options.offline, progress=options.progress) if own else Path(name)
            with gguf.read(path) as file:
                return gguf.tokenizer(file)
        if looks_like_path(name) and not Path(name).exists():
            raise InputError("there is no such file or folder")
        return AutoTokenizer.from_pretrained(
            name, local_files_only=options.offline, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:  # transformers raises of many kinds over files that hold none
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"tokenizer: got {shown(given, 300)}, accepted a tokenizer of transformers, or a path or Hub id of one; "
            f"{reason}"
        ) from error


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    config.name_or_path = name
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

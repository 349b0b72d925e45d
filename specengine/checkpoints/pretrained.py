"""Models by name: which forward runs them, the source of their weights, and their tokenizer."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from specengine import checkpoints as models
from specengine.checkpoints import gguf
from specengine.checkpoints.checks import (
    Adapter,
    adapter_of,
    config_of,
    looks_like_path,
    refuse_other_shapes,
    why_absent,
    wrapped,
)
from specengine.checkpoints.eagle import is_head
from specengine.checkpoints.folder import (
    FolderSource,
    generation_config_of,
    left_out,
    quiet_loading_bars,
)
from specengine.checkpoints.gguf_source import GGUFSource
from specengine.checkpoints.quantized import take_format
from specengine.checkpoints.safetensors_file import WEIGHT_FILES, require_files, tensors_of
from specengine.errors import (
    CheckpointError,
    InputError,
    SpecEngineError,
    UnsupportedModelError,
    require,
    require_input,
    require_or,
    require_supported,
    restating,
    shown,
)
from specengine.files import read_object
from specengine.models.configs import (
    NO_MEMORY,
    auto_class,
    refuse_config,
    refuse_short,
    text_config,
    unsupported,
    why,
)
from specengine.models.extension import NOT_BUILT, extension, instruction_sets
from specengine.models.native import NativeLM, from_model
from specengine.models.tensor_parallel import splitting
from specengine.models.twins import linear_layers, quantize, quantized_rows
from specengine.request.prompts import filled
from specengine.request.readers import FILLERS

if TYPE_CHECKING:
    from specengine.models.native.weights import Source
    from specengine.options import LoadOptions

_OF_PROCESSORS = ("processor_config.json", "chat_template.json")  # in the order of transformers
_PROBE = "specengine"
_AS_PARTS = (
    "{%- set as_parts = namespace(all=[]) -%}{%- for message in messages -%}{%- if message.content is string -%}"
    "{%- set message = dict(message, content=[dict(type='text', text=message.content)]) -%}{%- endif -%}"
    "{%- set as_parts.all = as_parts.all + [message] -%}{%- endfor -%}{%- set messages = as_parts.all %}\n"
)


class LoadedModel(NamedTuple):
    """A model, its tokenizer, why the native forward does not run it, and whether nobody else has it."""

    model: PreTrainedModel | NativeLM
    tokenizer: Any
    reason: str = ""
    own: bool = False


def load_model(
    model: str | PreTrainedModel | None, options: "LoadOptions", tokenizer: Any = None
) -> LoadedModel:
    """Return the model, loaded where it is a name, and its tokenizer, unless one is given."""
    require(
        "model",
        type(model).__name__,
        "a name, a path or a loaded transformers model",
        isinstance(model, str | None | PreTrainedModel),
    )
    named = isinstance(model, str) and model != models.embedded.NAME
    if named:
        _require_there(str(model), options.offline)
    if not isinstance(model, PreTrainedModel):
        FILLERS.start()  # which takes as long as a small model's weights
    adapter = adapter_of(str(model), offline=options.offline) if named else None
    reason = _not_native(model, options) or (adapter and adapter.reason)
    native_options = {
        "backend": options.backend == "native",
        "quantize": options.quantize is not None and not _on_cuda(model, options),
        "numerics": options.numerics != "auto",
    }
    requested = [name for name, asks in native_options.items() if asks]
    if reason is None:
        try:
            return LoadedModel(*_native(model, options, tokenizer, short=bool(requested)))
        except UnsupportedModelError as error:
            if requested:
                raise
            reason = str(error)
    elif requested:
        raise InputError(f"{', '.join(requested)}: the native forward was asked for, but {reason}")
    try:
        return LoadedModel(
            *_huggingface(model, options, tokenizer, adapter),
            reason,
            own=not isinstance(model, PreTrainedModel),
        )
    except SpecEngineError as error:
        if named and is_head(str(model)):
            raise InputError(
                f"model: {model} is a draft head, accepted a whole model; give it as draft="
            ) from error
        raise


def check_model(name: str, *, offline: bool = False, trust_remote_code: bool = False) -> None:
    """Raise the errors of loading a model that its name, config or GGUF header show; no weights are read.

    InputError where there is no such model, UnsupportedModelError or CheckpointError where it can be none.
    """
    _require_there(name, offline)
    if is_gguf(name):
        gguf.read(Path(name)).close()
    elif Path(name).exists():
        adapter = adapter_of(name, offline=offline)
        config_of(
            name if adapter is None else adapter.base,
            offline=offline,
            trust_remote_code=trust_remote_code,
        )
        require(
            "model",
            f"{name!r:.300}",
            "a folder with .safetensors or .bin files",
            any(file.suffix in (".safetensors", ".bin") for file in Path(name).iterdir()),
        )


def _require_there(name: str, offline: bool) -> None:
    missing = why_absent(name, offline=offline)
    require("model", f"{name!r:.300}", f"a path or a Hub id; {missing}", missing is None)


def _not_native(model: str | PreTrainedModel | None, options: "LoadOptions") -> str | None:
    """Return why no model could run on the native forward; None where it may be tried."""
    device = model.device if isinstance(model, PreTrainedModel) else options.device
    on_cpu = device == torch.device("cpu") or (device is None and not torch.cuda.is_available())
    reasons = {
        "backend='huggingface' was asked for": options.backend == "huggingface",
        "its weights are split over ranks": options.tp_plan is not None,
        "it runs on a CPU alone": not on_cpu,
        "graphs are made of the model's own modules": bool(options.graphs),
        "pack= is an option of the Hugging Face backend": options.pack is not None,
        NOT_BUILT: not instruction_sets(),
        f"dtype {options.dtype} is neither bfloat16 nor float32": options.dtype == torch.float16,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _native(
    model: str | PreTrainedModel | None, options: "LoadOptions", tokenizer: Any, *, short: bool
) -> tuple[NativeLM, Any]:
    """Return the model on the native forward; short: also where it holds less of a text than the model does."""
    if isinstance(model, PreTrainedModel):
        if not short:
            refuse_short(model.config)
        lm = from_model(model, quantize=options.quantize, numerics=options.numerics)
        return lm, tokenizer or _tokenizer(model.config.name_or_path, options)
    opened = open_native(
        model,
        dtype=options.dtype,
        offline=options.offline,
        trust_remote_code=options.trust_remote_code,
        progress=options.progress,
    )
    if not short:
        refuse_short(opened.source.config)
    lm = NativeLM(opened.source, quantize=options.quantize, numerics=options.numerics)
    tokenizer = tokenizer or _noted(opened.source.name, opened.tokenizer)
    extension().return_freed_memory()  # of checks and vocabularies, a tenth of the weights
    return lm, tokenizer


def _huggingface(
    model: str | PreTrainedModel | None,
    options: "LoadOptions",
    tokenizer: Any,
    adapter: Adapter | None = None,
) -> tuple[PreTrainedModel, Any]:
    if isinstance(model, PreTrainedModel):
        return model, tokenizer or _tokenizer(model.config.name_or_path, options)
    require_bfloat16(options, torch.bfloat16 if model is not None and is_gguf(model) else None)
    if model is not None and is_gguf(model):
        return _from_gguf(model, options, tokenizer)
    path = models.resolve(model, offline=options.offline, progress=options.progress)
    base = path if adapter is None else adapter.base
    config = config_of(base, offline=options.offline, trust_remote_code=options.trust_remote_code)
    require_bfloat16(options, getattr(config.get_text_config(decoder=True), "dtype", None))
    if (
        _on_cuda(model, options)
        and adapter is None
        and getattr(config, "quantization_config", None)
    ):
        with suppress(UnsupportedModelError):  # transformers may have the library that wrote it
            return _packed(
                open_native(path, dtype=options.dtype, offline=options.offline), options, tokenizer
            )
    refuse_other_shapes(base, config)
    if Path(base).is_dir():
        generation_config_of(Path(base))  # which transformers reads last, and names no file over
    split = (
        {}
        if options.tp_plan is None
        else {"distributed_config": splitting(config, options.trust_remote_code)}
    )
    damaged = restating(
        SafetensorError,
        lambda error: CheckpointError(
            f"model {path!r}: its weights are damaged, fetch them again ({error})"
        ),
    )
    # a model's class may raise anything over a config of other types than it expects
    unfit = restating(
        Exception,
        lambda error: (
            unsupported(path, error, "it cannot be loaded")
            if adapter is None
            else adapter.unfit(" ".join(str(error).split())[:300])
        ),
        (CheckpointError, UnsupportedModelError, *NO_MEMORY),
    )
    with unfit, damaged, quiet_loading_bars(), torch.device("cpu"):
        loaded, report = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=options.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=options.offline,
            trust_remote_code=options.trust_remote_code,
            **split,
        )
    _require_weights(path, loaded, report, adapter)
    if options.tp_plan is None:
        loaded = _placed(loaded, options)
    return loaded, tokenizer or _tokenizer(path if adapter is None else adapter.tokenizer, options)


def _from_gguf(model: str, options: "LoadOptions", tokenizer: Any) -> tuple[PreTrainedModel, Any]:
    try:
        opened = open_gguf(Path(model), options.dtype)
    except UnsupportedModelError as error:
        return _read_by_transformers(Path(model), options, tokenizer, error)
    return _packed(opened, options, tokenizer)


def _packed(
    opened: "Opened", options: "LoadOptions", tokenizer: Any
) -> tuple[PreTrainedModel, Any]:
    """Return the model of these weights; on a CUDA device its linear layers keep their blocks."""
    model = opened.source.model(packed=_on_cuda(opened.source.name, options))
    return _placed(model, options), tokenizer or _noted(opened.source.name, opened.tokenizer)


def _on_cuda(model: str | PreTrainedModel | None, options: "LoadOptions") -> bool:
    """Return whether a model by name goes to a CUDA device, where its linear layers may stay quantised."""
    return (
        not isinstance(model, PreTrainedModel)
        and options.backend != "native"
        and (options.device or default_device()).type == "cuda"
    )


def _placed(model: PreTrainedModel, options: "LoadOptions") -> PreTrainedModel:
    """Return the model on its device, quantised before, as the device may not have room for it else."""
    if options.quantize is not None:
        several = next((name for name, one in model.named_parameters() if one.dim() > 2), None)
        require_supported(
            f"quantize: on a CUDA device it takes matrices of linear layers, got {several} of more dimensions",
            several is None,
        )
        quantize(
            model,
            (
                (name, quantized_rows(model.get_parameter(f"{name}.weight")))
                for name in linear_layers(model)
            ),
        )
    return model.to(options.device or default_device())


def _read_by_transformers(
    path: Path, options: "LoadOptions", tokenizer: Any, refused: UnsupportedModelError
) -> tuple[PreTrainedModel, Any]:
    """Return the model of a GGUF file whose architecture transformers' own reader knows, its blocks unpacked.

    Raises `refused` where that reader does not know it either, or this package does and refuses the file's settings.
    """
    with restating(CheckpointError, lambda _: refused):
        file = gguf.read(path)
    with file:
        if len(file.parts) > 1 or gguf.is_known(file.metadata):
            raise refused
        # its reader may raise anything over a file that it does not know
        with (
            restating(Exception, lambda _: refused, NO_MEMORY),
            quiet_loading_bars(),
            torch.device("cpu"),
        ):
            model, report = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.bfloat16 if options.dtype == "auto" else options.dtype,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=options.trust_remote_code,
            )
        _require_weights(path.name, model, report, None)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        model.generation_config.eos_token_id = gguf.end_ids(file, vocabulary)
        model.generation_config.suppress_tokens = gguf.suppressed_ids(file, vocabulary)
        model.config.name_or_path = path.name
        return _placed(model, options), tokenizer or taking_texts(gguf.tokenizer(file))


def _require_weights(
    path: str, model: PreTrainedModel, report: dict[str, Any], adapter: Adapter | None
) -> None:
    """Raise CheckpointError where config and files do not fit.

    The files lack weights, so that the model would hold random ones, have them in another shape, or have more parts
    (layers, biases) than the config asks for.
    """
    problems = {
        "missing": sorted(
            {name for name, _ in model.named_parameters()} & set(report["missing_keys"])
        ),
        "of another shape": sorted(
            f"{name} {list(has)}, not {list(wants)}"
            for name, has, wants in report["mismatched_keys"]
        ),
        "unexpected": sorted(left_out(model, report["unexpected_keys"])),
    }
    listed = [f"{problem}: {', '.join(names[:4])}" for problem, names in problems.items() if names]
    if listed and adapter is not None:
        raise adapter.unfit(f"to {adapter.base}: {'; '.join(listed)}")
    if listed:
        listed += wrapped(problems["missing"], report["unexpected_keys"])
        raise CheckpointError(
            f"model {path!r}: its weights do not fit its config.json; {'; '.join(listed)}"
        )


def _tokenizer(name: str, options: "LoadOptions") -> Any:
    return (
        _noted(name, partial(tokenizer_at, name, options.offline, options.trust_remote_code))
        if name
        else None
    )


def _noted(name: str, load: Callable[[], Any]) -> Any:
    """Return a tokenizer; None, with a note on stderr that says why, where it cannot be made."""
    try:
        return taking_texts(load())
    except NO_MEMORY:
        raise
    except Exception as error:  # tokenizers' classes may raise anything over files that are missing
        print(f"no tokenizer for {name}: {' '.join(why(error).split())[:300]}", file=sys.stderr)
        return None


def tokenizer_at(name: str | Path, offline: bool, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a folder or Hub id, with its processor's chat templates where it has no default one.

    Raises what transformers raises.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        name, local_files_only=offline, trust_remote_code=trust_remote_code
    )
    templates = named_templates(getattr(tokenizer, "chat_template", None))
    quiet = {
        f"_raise_exceptions_for_{fault}": False
        for fault in ("missing_entries", "connection_errors")
    }
    for file in _OF_PROCESSORS if "default" not in templates else ():
        try:
            path = cached_file(str(name), file, local_files_only=offline, **quiet)
            stored = {} if path is None else read_object(Path(path))
            templates = named_templates(stored.get("chat_template")) | templates
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"no chat template from {file} of {name}: {error}", file=sys.stderr)
    if templates:
        tokenizer.chat_template = (
            templates["default"] if templates.keys() == {"default"} else templates
        )
    return tokenizer


def named_templates(stored: Any) -> dict[str, str]:
    """Return chat templates by name, of a text, a mapping or a list as files have them; ValueError for others."""
    if isinstance(stored, list):
        stored = {one["name"]: one["template"] for one in stored}
    templates = {"default": stored} if isinstance(stored, str) else stored or {}
    require_or(
        ValueError,
        f"chat_template: got {shown(stored)}, accepted a text, or texts by name",
        isinstance(templates, dict) and all(isinstance(text, str) for text in templates.values()),
    )
    return dict(templates)


def taking_texts(tokenizer: Any) -> Any:
    """Return a tokenizer whose chat templates take contents that are texts.

    Templates of models that read pictures may read lists of parts alone, and pass over a text, or fail.
    """
    templates = named_templates(getattr(tokenizer, "chat_template", None))

    def shows(template: str, content: Any) -> bool:
        try:
            return _PROBE in filled(
                tokenizer, [{"role": "user", "content": content}], chat_template=template
            )
        except InputError:
            return False

    for name, template in templates.items():
        of_parts = "text" in template and not shows(template, _PROBE)
        if of_parts and shows(template, [{"type": "text", "text": _PROBE}]):
            templates[name] = _AS_PARTS + template
            tokenizer.chat_template = (
                templates["default"] if templates.keys() == {"default"} else templates
            )
    return tokenizer


def load_tokenizer(options: "LoadOptions") -> Any:
    """Return the tokenizer that the options hold or name; InputError where there is none of that name."""
    tokenizer = options.tokenizer
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    name = os.fspath(tokenizer)
    # transformers raises of many kinds over files that hold none
    with restating(
        Exception,
        lambda error: InputError(
            f"tokenizer: got {shown(tokenizer, 300)}, accepted a tokenizer of transformers, or a path or Hub id of "
            f"one; {(why(error).splitlines() or [type(error).__name__])[0]}"
        ),
    ):
        if name == models.embedded.NAME or is_gguf(name):
            path = (
                models.embedded.gguf(offline=options.offline, progress=options.progress)
                if name == models.embedded.NAME
                else Path(name)
            )
            with gguf.read(path) as file:
                return taking_texts(gguf.tokenizer(file))
        require_input(
            "there is no such file or folder", not looks_like_path(name) or Path(name).exists()
        )
        return taking_texts(tokenizer_at(name, options.offline, options.trust_remote_code))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_bfloat16(options: "LoadOptions", stored: torch.dtype | None) -> None:
    """Raise UnsupportedModelError where bfloat16, asked for or stored, would run on a CUDA device without it."""
    device = options.device or default_device()
    dtype = stored if options.dtype == "auto" else options.dtype
    if (
        device.type == "cuda"
        and dtype is torch.bfloat16
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        major, minor = torch.cuda.get_device_capability(device)
        raise UnsupportedModelError(
            f"dtype: bfloat16 needs a CUDA device of compute capability 8.0 or newer, "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; give dtype='float16' or 'float32'"
        )


# ---- opening files


class Opened(NamedTuple):
    """Weights, and the function that makes their tokenizer."""

    source: "Source"
    tokenizer: Callable[[], Any]


def is_gguf(name: str | None) -> bool:
    """Return whether this is the path of a GGUF file."""
    return name is not None and (
        name.lower().endswith(".gguf") or (Path(name).is_file() and _has_magic(Path(name)))
    )


def open_gguf(path: Path, dtype: Any, name: str | None = None) -> Opened:
    """Open a GGUF file. CheckpointError where it is damaged, UnsupportedModelError where its model is unknown.

    name: of the model; by default the file's.
    """
    require_input(f"model: {path} is not a file", path.is_file())
    file = gguf.read(path, gguf.architecture_of)
    config = gguf.config(file)
    config.name_or_path = name = name or path.name
    return Opened(
        GGUFSource(file, config, torch.bfloat16 if dtype == "auto" else dtype, name=name),
        lambda: gguf.tokenizer(file),
    )


def open_native(
    name: str | None,
    *,
    dtype: Any = "auto",
    offline: bool = False,
    trust_remote_code: bool = False,
    progress: models.embedded.Progress | None = None,
) -> Opened:
    """Open the weights of a model by name, None for the embedded default; nothing is packed yet.

    dtype: auto (as stored; quantised folders and GGUF blocks stand for bfloat16), or a torch.dtype.
    UnsupportedModelError, with the reason, where the native forward does not know the model or how its weights are
    stored; CheckpointError for damaged files.
    """
    if name is None or name == models.embedded.NAME:
        return open_gguf(
            models.embedded.gguf(offline=offline, progress=progress), dtype, models.embedded.NAME
        )
    if is_gguf(name):
        return open_gguf(Path(name), dtype)
    with restating(UnsupportedModelError, lambda error: UnsupportedModelError(f"native: {error}")):
        config = config_of(name, offline=offline, trust_remote_code=trust_remote_code)
    quantized, text = take_format(config), text_config(config)
    refuse_config(text)
    folder = Path(name) if Path(name).is_dir() else _fetched(name, offline)
    require_supported(
        "native: its config names a file of weights (transformers_weights)",
        getattr(config, "transformers_weights", None) is None,
    )
    # codes stand for bfloat16, as blocks of GGUF do
    dtype = torch.bfloat16 if quantized and dtype == "auto" else _dtype(folder, text, dtype)
    source = FolderSource(folder, text, dtype, name=name, whole=config, quantized=quantized)
    _ = source.generation_config  # raises over a damaged file before any weights are read
    # code of a tokenizer is not among the files that were fetched
    place, local = (name, offline) if trust_remote_code else (folder, True)
    return Opened(source, partial(tokenizer_at, place, local, trust_remote_code))


def _fetched(name: str, offline: bool) -> Path:
    # the hub's own errors, of many kinds; transformers' loading says more
    with restating(
        Exception,
        lambda error: UnsupportedModelError(
            f"native: {name} cannot be fetched ({str(error).splitlines()[0]})"
        ),
    ):
        return Path(
            snapshot_download(name, allow_patterns=list(WEIGHT_FILES), local_files_only=offline)
        )


def _dtype(folder: Path, config: PretrainedConfig, dtype: Any) -> torch.dtype:
    if dtype != "auto":
        return dtype
    first = next(
        (stored.dtype for _, stored in tensors_of(require_files(folder)[0])), torch.float32
    )
    return getattr(config, "dtype", None) or first  # as transformers' `auto` does


def _has_magic(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"

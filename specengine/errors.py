"""Everything specengine raises on purpose; each message says what to do next."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class SpecEngineError(Exception):
    """Base of all specengine errors."""


class InputError(SpecEngineError, ValueError):
    """A given value is not accepted; the message names the field and the accepted values."""


class UnsupportedModelError(SpecEngineError):
    """The model cannot serve as a target or a draft; the message says which property is missing."""


class TokenizerMismatchError(SpecEngineError):
    """Draft and target do not share a vocabulary."""


class CheckpointError(SpecEngineError):
    """A draft head's files are damaged, incomplete or ambiguous; the message lists what is wrong."""


class ModelFetchError(SpecEngineError):
    """The embedded default model could not be fetched: offline, no pip, or not the expected file."""


class CorruptCacheError(SpecEngineError):
    """A cached model is damaged and could not be built again."""


class CacheFolderError(SpecEngineError, OSError):
    """The cache folder is full or cannot be written."""


class EngineBusyError(SpecEngineError, RuntimeError):
    """The engine is already generating; one engine serves one sequence at a time."""


class QueueFullError(SpecEngineError, RuntimeError):
    """As many requests wait for the engine as may; the message says when to come again."""


class ReplicaError(SpecEngineError, RuntimeError):
    """The process of a replica ended, again and again; the message says over what."""


class ProcessorError(SpecEngineError, RuntimeError):
    """A logits processor failed or returned scores of another shape; the message names the processor."""


class PolicyError(SpecEngineError, ValueError):
    """A policy broke what it promises; the message names the policy, its method or field, and what was wrong."""


class DrafterError(SpecEngineError, ValueError):
    """A drafter broke what it promises; the message names the draft, its method, and what was wrong."""


class NumericalError(SpecEngineError, ArithmeticError):
    """The target's logits are NaN or infinite, so no token can be chosen."""


class RankError(SpecEngineError, RuntimeError):
    """A rank of a tensor parallel run is gone; the message names it."""


class BackendError(SpecEngineError, RuntimeError):
    """The backend asked for is unknown or not built; the message names the accepted ones or the build command."""


class MissingExtraError(SpecEngineError, ImportError):
    """A package is missing that an extra of specengine brings; the message holds the command that installs it."""


# ---- what is missing

CHECKOUT = Path(__file__).parent.parent  # where this package lies in one


def is_fault(error: Exception) -> bool:
    """Return whether an error is not specengine's own: one from inside a policy or a drafter is its author's."""
    blamed = isinstance(error, PolicyError | DrafterError) and isinstance(error.__cause__, Exception)
    return not isinstance(error.__cause__ if blamed else error, SpecEngineError)


def missing_extra(what: str, extra: str, error: ImportError) -> MissingExtraError:
    """Return the error of `what`, which needs a package that the extra `extra` of specengine brings."""
    return MissingExtraError(f"{what}: {error.name} is not installed; it comes with: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of specengine needs, here: in a checkout, or beside a wheel."""
    if (CHECKOUT / "pyproject.toml").is_file():
        folder = "." if Path.cwd() == CHECKOUT else CHECKOUT
        return f"pip install -e '{folder}[{extra}]'"
    return "pip install " + " ".join(f"'{requirement}'" for requirement in _requirements(extra))


def _requirements(extra: str) -> list[str]:
    """Return what an extra needs by the metadata of the installed package, such as `fastapi>=0.115`."""
    from importlib import metadata

    ending = f'; extra == "{extra}"'
    lines = (line.replace("'", '"') for line in metadata.requires("specengine") or ())
    return [line.removesuffix(ending) for line in lines if line.endswith(ending)]


def why_not_loaded(error: Exception) -> str:
    """Why torch.load refused a file, in a line, without torch's advice to run what stands in it."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds more than tensors, and what a pickle would run is not run"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- what a value must hold


def require(field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError for a value outside its range."""
    if not holds:
        raise InputError(f"{field}: got {value if isinstance(value, str) else shown(value)}, accepted {accepted}")


def require_least(options: Any, **least: float) -> None:
    """Raise InputError where a field of `options` is below the number given for it."""
    for field, low in least.items():
        value = getattr(options, field)
        require(field, value, f"{low} or more", value >= low)


# By what other programs call things, what they are called here; the first one that is known in its place is meant.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_new_tokens",),
    "max_completion_tokens": ("max_new_tokens",),
    "max_length": ("max_new_tokens",),
    "n_predict": ("max_new_tokens",),
    "num_predict": ("max_new_tokens",),
    "stop": ("stop_strings",),
    "stop_strings": ("stop",),
    "stop_sequences": ("stop_strings", "stop"),
    "repeat_penalty": ("repetition_penalty",),
    "logit_bias": ("sequence_bias",),
    "response_format": ("json_schema",),
    "format": ("json_schema",),
    "top_logprobs": ("logprobs",),
    "speculative_model": ("draft",),
    "draft_model": ("draft",),
    "assistant_model": ("draft",),
    "torch_dtype": ("dtype",),
    "device_map": ("device",),
    "load_in_8bit": ("quantize",),
    "local_files_only": ("offline",),
    "run": ("chat",),
    "ask": ("generate",),
    "complete": ("generate",),
    "benchmark": ("bench",),
    "serving": ("serve",),
    "server": ("serve",),
    "info": ("inspect",),
    "show": ("inspect",),
    "list": ("inspect",),
}
SIMILAR = 0.6  # of difflib's ratio


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean NAME?`, or nothing where none is like it."""
    options = {_bare(option): option for option in known}
    given = _bare(name) if isinstance(name, str) else ""
    others = [option for option in ELSEWHERE.get(given, ()) if option in options]
    longer = [option for option in options if len(given) > 2 and option.startswith(f"{given}_")]
    close = others or longer or difflib.get_close_matches(given, options, n=1, cutoff=SIMILAR)
    return f"; did you mean {options[close[0]]}?" if close else ""


def _bare(name: str) -> str:
    """Return a name as an option of Python: --max-new-tokens is max_new_tokens."""
    return name.lstrip("-").replace("-", "_").lower()


def require_known(field: str, name: str, known: Mapping[str, T]) -> T:
    """The entry of this name; InputError listing the known ones where there is none."""
    require(field, repr(name), ", ".join(known) + did_you_mean(name, known), name in known)
    return known[name]


def require_suffix(field: str, file: Path, accepted: Iterable[str]) -> None:
    """Raise InputError for a file whose name says that something else is in it than what is written there."""
    if file.suffix.lower() not in accepted:
        raise InputError(f"{field}: got {file}, accepted a file whose name ends in {' or '.join(accepted)}")


def shown(value: Any, most: int = 60) -> str:
    """A value for a message, cut where it is long, whatever it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def kind_of(value: Any) -> str:
    """Return the kind of a value in a word or two; of a tensor its dtype and shape."""
    if hasattr(value, "untyped_storage"):  # a tensor, without importing torch
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"

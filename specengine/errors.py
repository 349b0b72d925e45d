"""The errors that specengine raises. Each message says what to do next."""

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
    """Raised for a value that is not accepted. The message names the field and the accepted values."""


class ContextLengthError(InputError):
    """Raised for a prompt that does not fit into the context.

    tokens: of the prompt; at_least: it may have more; context: in tokens; maximum: of a prompt.
    """

    tokens = context = maximum = 0
    at_least = False

    @classmethod
    def of(cls, message: str, tokens: int, context: int, maximum: int, *, at_least: bool = False) -> ContextLengthError:
        """Return the error with its figures."""
        error = cls(message)
        error.tokens, error.context, error.maximum, error.at_least = tokens, context, maximum, at_least
        return error


class UnsupportedModelError(SpecEngineError):
    """Raised for a model that cannot be a target or a draft. The message names the missing property."""


class TokenizerMismatchError(SpecEngineError):
    """Raised if draft and target do not share a vocabulary."""


class CheckpointError(SpecEngineError):
    """Raised if the files of a draft head are damaged, incomplete or ambiguous. The message lists the problems."""


class ModelFetchError(SpecEngineError):
    """Raised if the default model cannot be fetched: offline, no pip, or not the expected file."""


class CorruptCacheError(SpecEngineError):
    """Raised if a cached model is damaged and cannot be built again."""


class CacheFolderError(SpecEngineError, OSError):
    """Raised if the cache folder is full or cannot be written."""


class EngineBusyError(SpecEngineError, RuntimeError):
    """Raised if the engine is already generating. An engine serves one sequence at a time."""


class QueueFullError(SpecEngineError, RuntimeError):
    """Raised if the queue of requests is full. The message says when to retry."""


class ReplicaError(SpecEngineError, RuntimeError):
    """Raised if the process of a replica ended repeatedly. The message names the request."""


class ProcessorError(SpecEngineError, RuntimeError):
    """Raised if a logits processor fails or returns scores of another shape. The message names the processor."""


class PolicyError(SpecEngineError, ValueError):
    """Raised if a policy violates its interface. The message names the policy, the method or field, and the problem."""


class DrafterError(SpecEngineError, ValueError):
    """Raised if a drafter violates its interface. The message names the drafter, the method, and the problem."""


class NumericalError(SpecEngineError, ArithmeticError):
    """Raised if the target's logits are NaN or infinite, so that no token can be chosen."""


class RankError(SpecEngineError, RuntimeError):
    """Raised if a rank of a tensor parallel run has ended. The message names it."""


class BackendError(SpecEngineError, RuntimeError):
    """Raised for a backend that is unknown or not built. The message has the accepted ones or the build command."""


class MissingExtraError(SpecEngineError, ImportError):
    """Raised if a package of one of specengine's extras is missing. The message has the command that installs it."""


# ---- missing packages, and whose fault an error is

CHECKOUT = Path(__file__).parent.parent  # the root of the repository, if the package runs from a checkout


def is_fault(error: Exception) -> bool:
    """Return whether an error is a bug: not one of specengine's own, or raised inside a policy or drafter."""
    wraps = isinstance(error, PolicyError | DrafterError) and isinstance(error.__cause__, Exception)
    return not isinstance(error.__cause__ if wraps else error, SpecEngineError)


def missing_extra(feature: str, extra: str, error: ImportError) -> MissingExtraError:
    """Return the error for a feature that needs a package of the extra `extra`."""
    return MissingExtraError(f"{feature}: {error.name} is not installed; it comes with: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout, or package by package for an installed wheel."""
    if (CHECKOUT / "pyproject.toml").is_file():
        folder = "." if Path.cwd() == CHECKOUT else CHECKOUT
        return f"pip install -e '{folder}[{extra}]'"
    return "pip install " + " ".join(f"'{requirement}'" for requirement in _requirements(extra))


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, from the metadata of the installed package."""
    from importlib import metadata

    ending = f'; extra == "{extra}"'
    lines = (line.replace("'", '"') for line in metadata.requires("specengine") or ())
    return [line.removesuffix(ending) for line in lines if line.endswith(ending)]


def why_not_loaded(error: Exception) -> str:
    """Return in one line why torch.load refused a file, without torch's advice to run its code."""
    if isinstance(error, pickle.UnpicklingError):
        return "it contains more than tensors, and code in a pickle is never run"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- checks of values


def require(field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError unless `holds`. accepted: the accepted values, in words."""
    if not holds:
        raise InputError(f"{field}: got {value if isinstance(value, str) else shown(value)}, accepted {accepted}")


def require_value(field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError, with the value as Python writes it, unless `holds`."""
    if not holds:
        raise InputError(f"{field}: got {shown(value)}, accepted {accepted}")


def require_minimum(options: Any, owner: str = "", /, **minimums: float) -> None:
    """Raise InputError if a field of `options` is below its minimum. owner: stands before the field's name."""
    for field, minimum in minimums.items():
        value = getattr(options, field)
        require(f"{owner}{field}", value, f"{minimum} or more", value >= minimum)


# Names in other programs, and the names here. The first one that is known is suggested.
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
SIMILAR = 0.6  # cutoff of difflib's ratio


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean NAME?`, or "" if no name is similar."""
    options = {_bare(option): option for option in known}
    wanted = _bare(name) if isinstance(name, str) else ""
    others = [option for option in ELSEWHERE.get(wanted, ()) if option in options]
    longer = [option for option in options if len(wanted) > 2 and option.startswith(f"{wanted}_")]
    close = others or longer or difflib.get_close_matches(wanted, options, n=1, cutoff=SIMILAR)
    return f"; did you mean {options[close[0]]}?" if close else ""


def _bare(name: str) -> str:
    """Return the name of an option as in Python: --max-new-tokens becomes max_new_tokens."""
    return name.lstrip("-").replace("-", "_").lower()


def require_known(field: str, name: str, known: Mapping[str, T]) -> T:
    """Return the entry of this name. Raise InputError with the known names if there is none."""
    require(field, repr(name), ", ".join(known) + did_you_mean(name, known), name in known)
    return known[name]


def require_suffix(field: str, file: Path, accepted: Iterable[str]) -> None:
    """Raise InputError for a file name with another suffix than the accepted ones."""
    if file.suffix.lower() not in accepted:
        raise InputError(f"{field}: got {file}, accepted a file whose name ends in {' or '.join(accepted)}")


def shown(value: Any, limit: int = 60) -> str:
    """Return any value as text for a message, cut after `limit` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def kind_of(value: Any) -> str:
    """Return the kind of a value in a word or two; of a tensor its dtype and shape."""
    if hasattr(value, "untyped_storage"):  # a tensor, without importing torch
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"

"""The errors that specengine raises, and the checks of values and options that raise them.

Each message says what to do next.
"""

import dataclasses
import difflib
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_NUMBER = 1e30  # of any number: transformers would carry on with an infinite one
KEY = "declaration"  # of a field's metadata


class SpecEngineError(Exception):
    """Base of all specengine errors."""


class InputError(SpecEngineError, ValueError):
    """Raised for a value that is not accepted. The message names the field and the accepted values."""


class ContextLengthError(InputError):
    """Raised for a prompt that does not fit into the context.

    tokens: of the prompt; at_least: it may have more; context: in tokens; maximum: of a prompt.
    """

    def __init__(
        self,
        message: str,
        tokens: int = 0,
        context: int = 0,
        maximum: int = 0,
        *,
        at_least: bool = False,
    ) -> None:
        super().__init__(message)
        self.tokens, self.context = tokens, context
        self.maximum, self.at_least = maximum, at_least


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


class EngineClosedError(SpecEngineError, RuntimeError):
    """Raised if an engine is asked for something after it was closed."""


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

# the root of the repository, if the package runs from a checkout
CHECKOUT = Path(__file__).parent.parent


def is_fault(error: Exception) -> bool:
    """Return whether an error is a bug: not one of specengine's own, or raised inside a policy or drafter."""
    wraps = isinstance(error, PolicyError | DrafterError) and isinstance(error.__cause__, Exception)
    return not isinstance(error.__cause__ if wraps else error, SpecEngineError)


def missing_extra(feature: str, extra: str, error: ImportError) -> MissingExtraError:
    """Return the error for a feature that needs a package of the extra `extra`."""
    return MissingExtraError(
        f"{feature}: {error.name} is not installed; it comes with: {install_command(extra)}"
    )


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout, or package by package for an installed wheel."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '{'.' if Path.cwd() == CHECKOUT else CHECKOUT}[{extra}]'"
    from importlib import metadata

    ending = f'; extra == "{extra}"'
    lines = (line.replace("'", '"') for line in metadata.requires("specengine") or ())
    needed = (line.removesuffix(ending) for line in lines if line.endswith(ending))
    return "pip install " + " ".join(f"'{requirement}'" for requirement in needed)


def why_not_loaded(error: Exception) -> str:
    """Return in one line why torch.load refused a file, without torch's advice to run its code."""
    if isinstance(error, pickle.UnpicklingError):
        return "it contains more than tensors, and code in a pickle is never run"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def restating(
    caught: type[BaseException] | tuple[type[BaseException], ...],
    restated: Callable[[Any], Exception],
    passing: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Raise the error that `restated` makes of one of these kinds, which becomes its cause.

    passing: kinds among them that are raised as they are.
    """
    try:
        yield
    except passing:
        raise
    except caught as error:
        raise restated(error) from error


# ---- checks of values


def require(field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError unless `holds`. accepted: the accepted values, in words."""
    if not holds:
        raise InputError(
            f"{field}: got {value if isinstance(value, str) else shown(value)}, accepted {accepted}"
        )


def require_value(field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError, with the value as Python writes it, unless `holds`."""
    if not holds:
        raise InputError(f"{field}: got {shown(value)}, accepted {accepted}")


LISTED_TENSORS = 6  # tensors in an error


def refuse_misfits(
    what: str,
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
    others: str,
) -> None:
    """Raise CheckpointError, which lists them, where tensors are missing or of another shape, and for `others`."""
    problems = {
        "missing": [name for name in expected if name not in stored],
        "of another shape": [
            f"{name} {list(stored[name])}, not {list(shape)}"
            for name, shape in expected.items()
            if stored.get(name, shape) != shape
        ],
        others: [name for name in stored if name not in expected],
    }
    listed = [
        f"{problem}: {', '.join(name[:120] for name in names[:LISTED_TENSORS])}"
        f"{f' and {more} more' if (more := len(names) - LISTED_TENSORS) > 0 else ''}"
        for problem, names in problems.items()
        if names
    ]
    require_intact(f"{what}; {'; '.join(listed)}", not listed)


def require_or(kind: type[Exception], reason: str, holds: bool) -> None:
    """Raise an error of this kind with this text unless `holds`."""
    if not holds:
        raise kind(reason)


# (reason, holds), with the kinds that most checks raise
require_input = partial(require_or, InputError)
require_supported = partial(require_or, UnsupportedModelError)
require_intact = partial(require_or, CheckpointError)


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
    "info": ("doctor",),
    "show": ("doctor",),
}
SIMILAR = 0.6  # cutoff of difflib's ratio


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean NAME?`, or "" if no name is similar.

    For a file of Python, which names no class, it says how to name one.
    """
    if isinstance(name, str) and name.endswith(".py"):
        return f"; for a class of that file write {name}:CLASS"
    options = {_bare(option): option for option in known}
    bare = _bare(name) if isinstance(name, str) else ""
    others = [option for option in ELSEWHERE.get(bare, ()) if option in options]
    longer = [option for option in options if len(bare) > 2 and option.startswith(f"{bare}_")]
    close = others or longer or difflib.get_close_matches(bare, options, n=1, cutoff=SIMILAR)
    return f"; did you mean {options[close[0]]}?" if close else ""


def _bare(name: str) -> str:
    """Return the name of an option as in Python: --max-new-tokens becomes max_new_tokens."""
    return name.lstrip("-").replace("-", "_").lower()


def require_known(field: str, name: str, known: Mapping[str, T]) -> T:
    """Return the entry of this name. Raise InputError with the known names if there is none."""
    require(field, repr(name), ", ".join(known) + did_you_mean(name, known), name in known)
    return known[name]


def require_options(options: Iterable[str], accepted: Iterable[str], owner: str = "") -> None:
    """Raise InputError for a name of an option that is not known. owner: stands before it."""
    names = list(accepted)
    for name in options:
        if name not in names:
            raise InputError(
                f"{owner}unknown option {shown(name)}, known are {', '.join(names) or '(none)'}"
                f"{did_you_mean(name, names)}"
            )


def require_suffix(field: str, file: Path, accepted: Iterable[str]) -> None:
    """Raise InputError for a file name with another suffix than the accepted ones."""
    require(
        field,
        str(file),
        f"a file whose name ends in {' or '.join(accepted)}",
        file.suffix.lower() in accepted,
    )


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


# ---- readers: each refuses a value with InputError


@dataclass(frozen=True)
class Reader:
    """Check one value. `check` raises InputError, which names the option. None is accepted but for a truth value.

    kind     the type of a value on the command line and in a request, or what makes it of text
    limits   of a request's number: the keywords ge, gt, le and lt, as pydantic has them
    """

    check: Callable[[str, Any], None]
    kind: Callable[[str], Any] | None = None
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)


def reader(
    accepted: str, holds: Callable[[Any], bool], kind: type | None = None, **more: Any
) -> Reader:
    """Return a reader of the values for which `holds` is true. accepted: these values, in words."""
    return Reader(
        lambda name, value: require_value(name, value, accepted, holds(value)), kind, **more
    )


def number(
    low: float, high: float, accepted: str, *, open_low: bool = False, open_high: bool = False
) -> Reader:
    """Return a reader of finite numbers from `low` to `high`, which an open end does not include."""

    def holds(value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= MAX_NUMBER
            and (low < value if open_low else low <= value)
            and (value < high if open_high else value <= high)
        )

    return Reader(
        lambda name, value: require_value(
            name,
            value,
            accepted if type(value) in (int, float) else f"a number, {accepted}",
            holds(value),
        ),
        float,
        _finite({"gt" if open_low else "ge": low, "lt" if open_high else "le": high}),
    )


def whole(low: int, high: float = math.inf, accepted: str = "") -> Reader:
    """Return a reader of whole numbers from `low` to `high`. accepted: these, in other words."""
    accepted = accepted or "a whole number, " + (
        f"{low} or more" if high == math.inf else f"{low} to {high}"
    )
    return reader(
        accepted,
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        ),
        int,
        limits=_finite({"ge": low, "le": high}),
    )


def _finite(limits: dict[str, float]) -> dict[str, float]:
    return {name: bound for name, bound in limits.items() if math.isfinite(bound)}


def at_least(low: float) -> Reader:
    """Return a reader of numbers from `low` on."""
    return number(low, math.inf, f"{low} or more")


def one_of(choices: tuple[str, ...], more: str = "") -> Reader:
    """Return a reader of these names. more: what a message says of other values that are accepted."""
    return reader(", ".join(choices) + more, lambda value: value in choices, str)


TRUTH = reader("True or False", lambda value: isinstance(value, bool), bool)
MAYBE = reader("True, None or False", lambda value: isinstance(value, bool), bool)
NAMES = reader(
    "a dict of options by name",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
)
ABOVE_0 = number(0, math.inf, "above 0", open_low=True)


# ---- options: fields of dataclasses that say how a value is checked, its flag and its help


@dataclass(frozen=True)
class Declaration:
    """One option: how its value is checked, and where it can be given besides in Python.

    neutral   of an option that shapes draws: the values that leave them as they are, the plainest first
    help      the text of its flag in `--help`; None: it has no flag. The flag of a truth value has a `--no-` form
    flag      the flag's name without the dashes; by default the option's
    choices   the values that the flag takes, where they are few
    one_way   whether the flag of a truth value has no `--no-` form
    repeats   whether the flag may be given several times, so that its values make a list
    field     its field in a request to the server
    line      whether a line of `specengine batch` may have it in its "options"
    as_is     whether arrays in its value stay what they are
    """

    reader: Reader | None = None
    default: Any = None
    neutral: tuple[float, ...] = ()
    help: str | None = None
    flag: str = ""
    metavar: str | None = None
    repeats: bool = False
    choices: tuple[str, ...] = ()
    one_way: bool = False
    field: Any = None
    line: bool = True
    as_is: bool = False
    name: str = ""

    @property
    def kind(self) -> Any:
        """Return the type of its value on the command line."""
        return (self.reader and self.reader.kind) or str

    @property
    def dest(self) -> str:
        """Return the name of its value among parsed arguments."""
        return self.flag.replace("-", "_") or self.name

    @property
    def field_name(self) -> str:
        """Return its name in the body of a request."""
        return (self.field and self.field.name) or self.name


def option(reader: Reader | None = None, **declared: Any) -> Any:
    """Return the dataclass field of one option; the arguments are those of Declaration."""
    declaration = Declaration(reader, **declared)
    metadata = {KEY: declaration}
    return (
        dataclasses.field(default_factory=dict, metadata=metadata)
        if declaration.default is dict
        else dataclasses.field(default=declaration.default, metadata=metadata)
    )


def declared_in(options: Any) -> dict[str, Declaration]:
    """Return the declarations of a dataclass by name, in the order of its fields."""
    return {
        item.name: dataclasses.replace(item.metadata[KEY], name=item.name)
        for item in dataclasses.fields(options)
    }


class Checked:
    """Base of dataclasses whose fields are options. Raise InputError for a value that its reader refuses.

    None is for options whose default it is.
    """

    def __post_init__(self) -> None:
        for name, declared in declared_in(self).items():
            value = getattr(self, name)
            if declared.reader is not None and (value is not None or declared.default is not None):
                declared.reader.check(name, value)

"""Find variants (one file each, named after the file) and build them from options; options as Python's own values."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import numbers
import pkgutil
import types
import typing
from types import ModuleType
from typing import Any, TypeVar

from specengine.errors import InputError, did_you_mean, shown

T = TypeVar("T")


def names(package: ModuleType | str) -> list[str]:
    """Return the names of all variants in the package's folder, sorted. A package given by name is not imported."""
    if isinstance(package, str):
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations if spec is not None else None) or []
    else:
        folders = list(package.__path__)
    return sorted(module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_"))


def find(package: ModuleType, base: type[T], name: str, field: str) -> type[T]:
    """Return the subclass of `base` in file `name` of `package`. Raises InputError naming `field` if there is none."""
    known = names(package)
    if name not in known:
        listed = ", ".join(known)
        raise InputError(f"{field}: unknown name {shown(name)}, known are {listed}{did_you_mean(name, known)}")
    module = importlib.import_module(f"{package.__name__}.{name}")
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise InputError(f"{field}: {module.__name__} must define exactly one {base.__name__}, it has {len(found)}")
    return found[0]


def build(cls: type[T], options: dict[str, Any], field: str) -> T:
    """Make an instance of the dataclass `cls`. Raises InputError for unknown options and values of the wrong type.

    Values may be strings, as a command line gives them.
    """
    types_by_name = typing.get_type_hints(cls)
    known = {item.name: types_by_name[item.name] for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "(none)"
            raise InputError(f"{field}: unknown option {shown(name)}, known are {listed}{did_you_mean(name, known)}")
    values = {name: _convert(value, known[name], f"{field}.{name}") for name, value in options.items()}
    return cls(**values)


def _convert(value: Any, wanted: Any, field: str) -> Any:
    origin, arguments, value = typing.get_origin(wanted), typing.get_args(wanted), plain(value)
    if origin in (typing.Union, types.UnionType):
        if value is None or value == "none":
            return None
        if any(isinstance(value, kind) for kind in arguments if isinstance(kind, type) and kind is not type(None)):
            return value
        wanted = next(argument for argument in arguments if argument is not type(None))
        return _convert(value, wanted, field)
    if origin is typing.Literal:
        if value not in arguments:
            raise InputError(f"{field}: got {shown(value)}, accepted {', '.join(map(str, arguments))}")
        return value
    try:
        if origin is tuple:
            parts = value.split(",") if isinstance(value, str) and value else value
            return tuple(_convert(part, arguments[0], field) for part in parts)
        if wanted is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if wanted is int and (isinstance(value, bool) or float(value) != int(float(value))):
            raise ValueError
        return wanted(value)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        wanted_name = getattr(wanted, "__name__", str(wanted))
        raise InputError(f"{field}: got {shown(value)}, expected {wanted_name}") from error


# ---- values of numpy and torch as Python's own

DEEPEST = 4  # levels of lists and dicts; no option has more


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """Return numbers and arrays of numpy, torch and other libraries as Python's own, within lists and dicts too.

    Anything else stays as it is. An array keeps its nesting; one without dimensions is its number.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str) or not levels:
        return value
    if kind in (list, tuple):
        return kind([plain(item, levels - 1) for item in value])
    if kind is dict:
        return {plain(name, levels - 1): plain(item, levels - 1) for name, item in value.items()}
    if is_array(value):
        try:
            value = (value.detach() if hasattr(value, "detach") else value).tolist()
        except (RuntimeError, NotImplementedError):  # of a tensor without numbers
            return value
    if is_number(value) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def is_array(value: Any) -> bool:
    """Return whether a value has dimensions and a dtype: an array, a tensor, or a number of numpy."""
    return hasattr(value, "ndim") and hasattr(value, "dtype") and callable(getattr(value, "tolist", None))


def is_number(value: Any) -> bool:
    """Return whether a value is one real number, of Python or as an array without dimensions."""
    return isinstance(value, numbers.Real) or (is_array(value) and value.ndim == 0)

"""Find variants and build them from options; options as Python's own values.

A variant is a file or folder of its package, or of `baselines` in it, whose name is the variant's; a plug-in, which
another installed package offers as an entry point of the group named as our package; or a class in a file of the
user's, named as FILE.py:CLASS.
"""

import dataclasses
import inspect
import numbers
import pkgutil
import sys
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from specengine.errors import (
    InputError,
    did_you_mean,
    require_input,
    require_known,
    require_options,
    require_or,
    require_value,
    restating,
    shown,
)

# a folder in that of a package, whose files are variants of the package too
BASELINES = "baselines"

T = TypeVar("T")


def names(package: ModuleType | str) -> list[str]:
    """Return the names of all variants of the package, sorted. A package given by name is not imported."""
    return sorted(_modules(package))


def _modules(package: ModuleType | str) -> dict[str, str]:
    """Return by name the module of each variant, from the package on: those in its folder and in `baselines` there."""
    if isinstance(package, str):
        spec = util.find_spec(package)
        folders = (spec.submodule_search_locations if spec is not None else None) or []
    else:
        folders = list(package.__path__)
    shelves = {"": folders, f".{BASELINES}": [str(Path(folder, BASELINES)) for folder in folders]}
    return {
        module.name: f"{shelf}.{module.name}"
        for shelf, paths in shelves.items()
        for module in pkgutil.iter_modules(paths)
        if not module.name.startswith("_") and module.name != BASELINES
    }


def plugins(package: str) -> dict[str, metadata.EntryPoint]:
    """Return by name what other installed packages offer besides the variants of `package`, which come first."""
    built_in = names(package)
    return {
        point.name: point
        for point in metadata.entry_points(group=package)
        if point.name not in built_in
    }


def find(package: ModuleType, base: type[T], name: str, field: str) -> type[T]:
    """Return the subclass of `base` in file `name` of `package`, of a plug-in or of a user's file.

    Raises InputError naming `field` if there is none, or if the plug-in or file cannot be loaded.
    """
    if is_file(name):
        return _in_file(base, name, field)
    modules = _modules(package)
    if name not in modules:
        offered = plugins(package.__name__)
        accepted = [*sorted(modules), *sorted(offered)]
        require_input(
            f"{field}: unknown name {shown(name)}, known are {', '.join(accepted)}"
            f"{did_you_mean(name, accepted)}",
            name in offered,
        )
        point = offered[name]
        package_name = point.dist.name if point.dist else "a package"
        source = f"{field}: plug-in {point.name} of {package_name} ({point.value})"
        with restating(
            Exception,
            lambda error: InputError(f"{source} cannot be loaded: {type(error).__name__}: {error}"),
        ):
            variant = point.load()
        return _checked(base, variant, source, "it is")
    module = import_module(f"{package.__name__}{modules[name]}")
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]
    require_input(
        f"{field}: {module.__name__} must define exactly one {base.__name__}, it has {len(classes)}",
        len(classes) == 1,
    )
    return classes[0]


def is_file(name: str) -> bool:
    """Return whether this names a class in a file of the user's: FILE.py:CLASS."""
    return name.rpartition(":")[0].endswith(".py")


def split_file(name: str) -> tuple[Path, str]:
    """Return the file and the class of FILE.py:CLASS."""
    file, _, cls = name.rpartition(":")
    return Path(file), cls


def _in_file(base: type[T], name: str, field: str) -> type[T]:
    """Return the class. Its module is imported once, under a name that ends in the file's, as a package's would."""
    file, cls = split_file(name)
    require_input(f"{field}: got {name}, but there is no file {file}", file.is_file())
    full = f"{file.resolve().parent}.{file.stem}"
    module = sys.modules.get(full)
    if module is None:
        spec: Any = util.spec_from_file_location(full, file)
        module = util.module_from_spec(spec)
        sys.modules[full] = module  # where a dataclass looks its annotations up
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[full]
            raise InputError(
                f"{field}: {file} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and (key == cls or value.__module__ == full)
    }
    return _checked(
        base, require_known(f"{field}: {file}", cls, classes), f"{field}: {name}", f"{file} has"
    )


def _checked(base: type[T], variant: Any, named: str, has: str) -> type[T]:
    kind = f"class {variant.__name__}" if inspect.isclass(variant) else shown(variant)
    require_input(
        f"{named}: {has} {kind}, accepted a subclass of {base.__module__}.{base.__name__}",
        inspect.isclass(variant) and issubclass(variant, base),
    )
    return cast("type[T]", variant)


def build(cls: type[T], options: dict[str, Any], field: str) -> T:
    """Make an instance of the dataclass `cls`. Raises InputError for unknown options and values of the wrong type.

    Values may be strings, as a command line gives them.
    """
    types_by_name = get_type_hints(cls)
    types = {item.name: types_by_name[item.name] for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
    require_options(options, types, f"{field}: ")
    return cls(
        **{name: _convert(value, types[name], f"{field}.{name}") for name, value in options.items()}
    )


def _convert(value: Any, expected: Any, field: str) -> Any:
    origin, arguments, value = get_origin(expected), get_args(expected), plain(value)
    if origin in (Union, UnionType):
        if value is None or value == "none":
            return None
        if any(
            isinstance(value, kind)
            for kind in arguments
            if isinstance(kind, type) and kind is not type(None)
        ):
            return value
        expected = next(argument for argument in arguments if argument is not type(None))
        return _convert(value, expected, field)
    if origin is Literal:
        require_value(field, value, ", ".join(map(str, arguments)), value in arguments)
        return value
    with restating(
        (ValueError, TypeError, KeyError, OverflowError, RecursionError),
        lambda _: InputError(
            f"{field}: got {shown(value)}, expected {getattr(expected, '__name__', expected)}"
        ),
    ):
        if origin is tuple:
            parts = value.split(",") if isinstance(value, str) and value else value
            return tuple(_convert(item, arguments[0], field) for item in parts)
        if expected is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        require_or(
            ValueError,
            "it is no whole number",
            expected is not int
            or (not isinstance(value, bool) and float(value) == int(float(value))),
        )
        return expected(value)


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
    return (
        hasattr(value, "ndim")
        and hasattr(value, "dtype")
        and callable(getattr(value, "tolist", None))
    )


def is_number(value: Any) -> bool:
    """Return whether a value is one real number, of Python or as an array without dimensions."""
    return isinstance(value, numbers.Real) or (is_array(value) and value.ndim == 0)

"""Values of numpy and torch as Python's own."""

from __future__ import annotations

import numbers
from typing import Any

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

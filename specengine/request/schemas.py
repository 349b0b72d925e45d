"""Rewrites of JSON schemas: what llguidance rounds or reads loosely becomes what it keeps, or is refused.

It reads numbers as float64, takes the end of some open ranges for a part of them, and knows dates loosely.
"""

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, DecimalException
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any, cast
from urllib.parse import unquote

from specengine.errors import require_or, restating

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum")
_SIDES = ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum"))
# the farthest bounds of integers that float64 holds or saturates to
_MIN_INT, _MAX_INT = -(2**63) + 1024, 2**63 - 1
_MAX_DIVISOR = 10_000  # digits are counted modulo it, in as many states
_DIGITS = 14  # after the first one, of the number that is written next to an end that is open
_TINY = 18  # decimals of the number that is written next to 0
_INTEGERS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
_INTEGERS |= {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)} | {
    "uint": (0, 2**64 - 1)
}
_FLOATS = ("float", "double")

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAYS = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"({_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"  # without leap seconds, of which no rule tells when
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_SUFFIX = "[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
# with which it is never longer than 253 letters
_PATTERNS["hostname"] = rf"({_LABEL}\.){{0,2}}{_SUFFIX}"
_STRINGS = ("duration", "email", "ipv4", "ipv6", "uuid", "uri", *_PATTERNS)


def decoder() -> json.JSONDecoder:
    """Return a decoder of exact numbers: Decimal where they have a point or an exponent; it raises ValueError."""
    return json.JSONDecoder(parse_float=_decimal, parse_constant=_constant)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _decimal(text: str) -> Decimal:
    with restating(
        DecimalException,
        lambda _: ValueError(f"number {text:.40}: its exponent is too large"),
    ):
        return Decimal(text)


def rewritten(schema: Any) -> Any:
    """Return a schema of `decoder` for llguidance; ValueError that names the keyword which it cannot keep."""
    divisors: list[Fraction] = []
    result = _rewritten(schema, divisors)
    if divisors:
        reduce(_common_multiple, divisors)
    return result


def _rewritten(node: Any, divisors: list[Fraction]) -> Any:
    if isinstance(node, Decimal):
        return float(node)
    if isinstance(node, list):
        return [_rewritten(item, divisors) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: _member(key, value, divisors) for key, value in node.items()}
    stated = schema.get("type")
    types = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else None
    _keep_format(schema, types)
    _keep_bounds(schema, integer=types is not None and "number" not in types)
    if _is_number(schema.get("multipleOf")):
        divisors.append(_divisor(schema["multipleOf"]))
        schema["multipleOf"] = float(schema["multipleOf"])
    return {
        key: float(value) if isinstance(value, Decimal) else value for key, value in schema.items()
    }


def _member(key: str, value: Any, divisors: list[Fraction]) -> Any:
    if key in _VALUES:
        return _exact_values(key, value)
    if key in _MAPS and isinstance(value, dict):
        require_or(
            ValueError, f"{key}: a number is no schema", not any(map(_is_number, value.values()))
        )
        return {name: _rewritten(inner, divisors) for name, inner in value.items()}
    if key == "$ref" and isinstance(value, str):
        steps = unquote(value).split("/")
        require_or(
            ValueError,
            f"$ref: {value!r:.80} leads to a value, accepted are those that lead to a schema",
            not any(step in _VALUES and before not in _MAPS for before, step in pairwise(steps)),
        )
    return value if _is_number(value) else _rewritten(value, divisors)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _exact_values(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_exact_values(key, item) for item in value]
    if isinstance(value, dict):
        return {name: _exact_values(key, item) for name, item in value.items()}
    if not _is_number(value):
        return value
    return _exact_integer(key, value) if isinstance(value, int) else _exact_number(key, value)


def _require_exact(key: str, value: Any, holds: bool) -> None:
    require_or(
        ValueError,
        f"{key}: {value!s:.60} cannot be kept exactly, accepted are up to 15 digits, or float64",
        holds,
    )


def _exact_integer(key: str, value: int) -> int:
    """Return the value; ValueError where the library would round it."""
    inside = _MIN_INT <= value <= _MAX_INT
    _require_exact(key, value, inside and (value == _MAX_INT or int(float(value)) == value))
    return value


def _exact_number(key: str, value: Decimal | int) -> float:
    """Return the number whose shortest digits are these; ValueError where there is none, or it is read as another."""
    exact = Decimal(value)
    number = float(exact) if abs(exact) < 2**63 else math.inf
    is_exact = Decimal(repr(number)) == exact and (abs(number) <= 2**53 or number == exact)
    _require_exact(key, value, is_exact and number == _as_read(number))
    return number


def _as_read(number: float) -> float:
    """Return the number as the library reads its digits, which it rounds twice."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    power, whole = float(f"1e{abs(exponent)}"), float(int("".join(map(str, digits))))
    return (-1) ** sign * (whole / power if exponent < 0 else whole * power)


def _keep_bounds(schema: dict[str, Any], *, integer: bool) -> None:
    """Write the bounds of a schema as inclusive ones: an open end becomes the next number of 15 digits."""
    ends = [
        Decimal(schema[key]) for _, *keys in _SIDES for key in keys if _is_number(schema.get(key))
    ]
    nearest = min((abs(end) for end in ends if end), default=Decimal(1))
    for sign, closed, opened in _SIDES:
        bounds = []
        if schema.get(opened) is True and closed in schema:  # of draft 4
            schema[opened] = schema.pop(closed)
        for key in (closed, opened):
            bound = schema.pop(key, None)
            if _is_number(bound):
                bounds.append(
                    _bound(key, bound, sign, opened=key == opened, integer=integer, nearest=nearest)
                )
            else:
                require_or(
                    ValueError, f"{key}: it must be a number", isinstance(bound, bool | None)
                )
        if bounds:
            schema[closed] = max(bounds) if sign > 0 else min(bounds)


def _bound(
    key: str, value: Decimal | int, sign: int, *, opened: bool, integer: bool, nearest: Decimal
) -> float | int:
    """Return the inclusive bound; sign: 1 of a lower one, -1 of an upper one; nearest: the bound next to 0."""
    exact = Decimal(value)
    if not integer:
        if not opened or abs(exact) >= 2**63:
            return _exact_number(key, exact)
        last = exact.adjusted() - _DIGITS if exact else -max(_TINY, 4 - nearest.adjusted())
        steps = (
            exact + sign * Decimal(1).scaleb(last + fewer)
            for fewer in (range(7) if exact else (0,))
        )
        step = next((step for step in steps if float(step) == _as_read(float(step))), None)
        _require_exact(key, value, step is not None)
        return _exact_number(key, cast(Decimal, step))
    if exact * sign < -_MAX_INT:  # farther than integers are written here
        return _MIN_INT if sign > 0 else _MAX_INT
    _require_exact(key, value, abs(exact) < 2**63)
    whole = int(exact.to_integral_value(ROUND_CEILING if sign > 0 else ROUND_FLOOR))
    whole += sign if opened and whole == exact else 0
    return max(whole, _MIN_INT) if sign > 0 and whole < _MIN_INT else _exact_integer(key, whole)


def _divisor(value: Decimal | int) -> Fraction:
    """Return `multipleOf` as the library reads it; ValueError where that is another number."""
    number, decimals = float(value) if 0 < value < 2**53 else 0.0, 0
    while number % 1 and decimals < 300:
        number *= 10
        decimals += 1
    exact = Fraction(int(number), 10**decimals)
    require_or(
        ValueError,
        f"multipleOf: {value!s:.60} cannot be kept exactly",
        0 != exact == Fraction(value),
    )
    return _common_multiple(exact, exact)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    """Return the least number that both divide; ValueError where the library takes seconds for it, or overflows."""
    scale = next(
        (
            10**places
            for places in range(10)
            if not one * 10**places % 1 and not other * 10**places % 1
        ),
        0,
    )
    result = Fraction(math.lcm(int(one * scale), int(other * scale)), scale or 1)
    steps = next((result * 10**places for places in range(10) if not result * 10**places % 1), 0)
    require_or(
        ValueError,
        f"multipleOf: accepted are up to {_MAX_DIVISOR} steps, those of one schema together",
        0 < steps <= _MAX_DIVISOR and one * other * scale**2 < 2**32,
    )
    return result


def _keep_format(schema: dict[str, Any], types: list[Any] | None) -> None:
    """Replace a format by what it means; ValueError where that is unknown."""
    name = schema.get("format")
    texts = types is None or "string" in types
    numbers = types is not None and ("integer" in types or "number" in types)
    if not isinstance(name, str) or (texts and name in _STRINGS and name not in _PATTERNS):
        return
    if numbers and not texts and (name in _INTEGERS or name in _FLOATS):
        least, greatest = _INTEGERS.get(name, (None, None))
        if least is not None:
            added = {"type": "integer", "minimum": least, "maximum": greatest}
            _keep_bounds(added, integer=True)
            others = [{"type": kind} for kind in types or () if kind not in ("integer", "number")]
            schema["allOf"] = [
                *schema.get("allOf", ()),
                {"anyOf": [added, *others]} if others else added,
            ]
    else:
        require_or(
            ValueError,
            f"format: {name!r:.60} is unknown here, accepted are {', '.join(sorted(_STRINGS))}",
            name in _STRINGS,
        )
        if texts:
            pattern = f"^({_PATTERNS[name]})$"
            if "pattern" in schema:
                kind = {} if types is None else {"type": types}
                schema["allOf"] = [*schema.get("allOf", ()), {**kind, "pattern": pattern}]
            else:
                schema["pattern"] = pattern
    del schema["format"]

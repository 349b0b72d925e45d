"""Options given as KEY=VALUE, listed for `--help`: their defaults, and what their dataclass says of them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

COLUMN, WIDTH = 26, 112
_ENTRY = re.compile(r"(\w+)  +(\S.*)")


def documented(of: type) -> dict[str, str]:
    """By field, what the docstring of the dataclass says: lines `name  text`, and the indented ones behind them."""
    found: dict[str, str] = {}
    name = None
    for line in (inspect.getdoc(of) or "").splitlines():
        if entry := _ENTRY.fullmatch(line):
            name = entry[1]
            found[name] = entry[2]
        elif name is not None and line.startswith("  "):
            found[name] += " " + line.strip()
        else:
            name = None
    return found


def listing(title: str, of: type, values: Mapping[str, Any] | None = None, *, without: str = "") -> str:
    """A line per field of the dataclass `of`: its value in `values`, else its default, and what it means."""
    return "\n".join([f"{title}:", *_lines(of, values or {}, without)])


def _lines(of: type, values: Mapping[str, Any], without: str) -> Iterator[str]:
    meanings = documented(of)
    for field in fields(of):
        if field.name != without:
            value = values.get(field.name, field.default)
            assert value is not MISSING, f"{field.name} has no default"
            key = f"  {field.name}={as_typed(value)}"
            first = f"{key:<{COLUMN}}" if len(key) < COLUMN - 1 else f"{key}  "
            text = textwrap.wrap(
                meanings[field.name],
                WIDTH,
                initial_indent=first,
                subsequent_indent=" " * COLUMN,
                break_long_words=False,
            )
            yield from text


def changes(title: str, named: Mapping[str, Mapping[str, Any]]) -> str:
    """A paragraph per name with the options that it sets otherwise."""
    settings = {
        name: " ".join(f"{key}={as_typed(value)}" for key, value in given.items()) for name, given in named.items()
    }
    return "\n".join(
        [
            f"{title}:",
            *(
                textwrap.fill(
                    text or "none",
                    WIDTH,
                    initial_indent=f"  {name:<{COLUMN - 2}}",
                    subsequent_indent=" " * COLUMN,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                for name, text in settings.items()
            ),
        ]
    )


def as_typed(value: Any) -> str:
    """A value as KEY=VALUE takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

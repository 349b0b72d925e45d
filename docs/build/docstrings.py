"""Docstrings for the site: turn lists in columns, as docstrings have for options and fields, into markdown lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between a name and what it means


class Columns(griffe.Extension):
    """The extension that mkdocstrings runs on every object."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return the docstring with each paragraph in columns, `name   meaning`, as a list."""
    return "\n\n".join(_listed(paragraph) for paragraph in text.split("\n\n"))


def _listed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    column = _column(lines)
    if column is None:
        return paragraph
    items: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1].append(line.strip())
        elif gap := GAP.search(line):
            items.append([line[: gap.start()], line[gap.end() :]])
        elif (
            line[column - 1 : column] == " "
        ):  # the longest name: a single space before its meaning
            items.append([line[:column].strip(), line[column:]])
        else:  # a list of names, with their meaning on the next line
            items.append([line.strip()])
    return "\n".join(f"- `{name}`: {' '.join(words)}" for name, *words in items)


def _column(lines: list[str]) -> int | None:
    """Return where the second column begins, or None if there are no columns."""
    gaps = [gap.end() for line in lines if not line.startswith(" ") and (gap := GAP.search(line))]
    return min(gaps, default=None)

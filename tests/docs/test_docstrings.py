"""Docstrings in columns as the site shows them."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="needs pip install -e '.[docs]'")

from docs.build.docstrings import as_markdown


def test_columns_become_a_list() -> None:
    text = """What it is.

model   an id,
        or a path
options the longest name, with one space
first, second and third   as elsewhere
a, list, of, names, that, is, long
        as elsewhere too

Raises an error: no list."""
    assert (
        as_markdown(text)
        == """What it is.

- `model`: an id, or a path
- `options`: the longest name, with one space
- `first, second and third`: as elsewhere
- `a, list, of, names, that, is, long`: as elsewhere too

Raises an error: no list."""
    )


def test_prose_stays() -> None:
    text = "One sentence.\n\nAnother\nin two lines."
    assert as_markdown(text) == text

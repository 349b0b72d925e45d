"""Answers drawn as Markdown while they come: what is shown once, and what is drawn over."""

from __future__ import annotations

import io
import re
import sys

import pytest

from specengine.cli.terminal import Markdown, finished
from tests.cli.streams import Terminal

TEXT = """# Title

A paragraph of *several* words that is wider than the terminal, so that it is broken between words.

- one
- two

```python
x = 1

y = 2
```

The end."""


@pytest.mark.parametrize(
    ("text", "whole", "rest"),
    [
        ("one", "", "one"),
        ("one\n", "", "one\n"),
        ("one\n\ntwo", "one\n\n", "two"),
        ("one\n\n\ntwo\n", "one\n\n\n", "two\n"),
        ("```\na\n\nb", "", "```\na\n\nb"),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n", "c"),
        ("~~~\n```\n\n~~~\n\n", "~~~\n```\n\n~~~\n\n", ""),
        ("\n\n", "", ""),
    ],
)
def test_blocks_end_with_an_empty_line_outside_of_code(text: str, whole: str, rest: str) -> None:
    assert finished(text) == (whole, rest)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_of_any_size_come_to_the_same(size: int) -> None:
    pytest.importorskip("rich")
    drawn = []
    for pieces in ([TEXT], [TEXT[at : at + size] for at in range(0, len(TEXT), size)]):
        out = io.StringIO()
        view = Markdown(out)
        for _ in range(2):  # one answer after the other
            for piece in pieces:
                view.write(piece)
            view.end()
        drawn.append(
            "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
        )
    assert drawn[0] == drawn[1]
    assert "*several*" not in drawn[1]
    assert "several words" in drawn[1]
    assert drawn[1].count("The end.") == 2
    assert all(len(line) <= 80 for line in drawn[1].splitlines())


def test_without_rich_it_can_be_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"markdown: .*chat"):
        Markdown.where_wanted(True, interactive=True)


@pytest.mark.parametrize(("asked", "interactive"), [(None, False), (False, True), (None, True)])
def test_it_is_for_terminals(asked: bool | None, interactive: bool) -> None:
    """Standard output is none here."""
    assert Markdown.where_wanted(asked, interactive=interactive) is None


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminals_without_colours_get_text_unless_asked(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert Markdown.where_wanted(None, interactive=True)
    monkeypatch.setenv(name, value)
    assert Markdown.where_wanted(None, interactive=True) is None
    assert Markdown.where_wanted(True, interactive=True)


@pytest.mark.parametrize(
    ("variables", "colours", "escapes"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "NO_COLOR": "1"}, False, False),
    ],
)
def test_what_is_drawn_has_no_colours_where_none_are_wanted(
    variables: dict[str, str], colours: bool, escapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color"} | variables).items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    view = Markdown(out)
    view.write(TEXT)
    view.end()
    drawn = out.getvalue()
    assert bool(re.search(r"\x1b\[(\d+;)*[34][0-8]", drawn)) is colours
    assert ("\x1b" in drawn) is escapes
    assert "The end." in drawn

"""Answers drawn as Markdown while they come: what is shown once, and what is drawn over."""

from __future__ import annotations

import io
import re
import sys

import pytest

from specengine.cli import terminal
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


# ---- a window, in which a block may be taller than what is seen

WIDTH, HEIGHT = 50, 14


class Window(Terminal):
    """A terminal that keeps its lines: those in the window, and above them those that have left it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text: str) -> int:
        for command in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[^\x1b]", text):
            self._do(command)
        return len(text)

    def _do(self, command: str) -> None:
        if command.endswith("A") and len(command) > 1:
            top = max(0, len(self.lines) - HEIGHT)
            self.row = max(top, self.row - int(command[2:-1]))
        elif command == "\x1b[J":
            if self.column == 0 and self.row == len(self.lines) - HEIGHT:
                self.row += HEIGHT  # tmux keeps a window that is cleared from its first place
                self.lines += [""] * HEIGHT
            del self.lines[self.row + 1 :]
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif command == "\r":
            self.column = 0
        elif command == "\n":
            self._down()
        elif len(command) == 1:
            if self.column == WIDTH:
                self._down()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + command + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Window:
    pytest.importorskip("rich")
    for name, value in (("COLUMNS", WIDTH), ("LINES", HEIGHT), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(terminal, "REDRAWN_SECONDS", 0.0)
    return Window()


LISTED = "Numbers:\n\n" + "".join(f"{n}. the number {n}\n" for n in range(1, 31))
CODE = "```python\n" + "".join(f"x{n} = {n}\n" for n in range(40)) + "```\n"


@pytest.mark.parametrize("text", [LISTED, CODE, TEXT], ids=["list", "code", "blocks"])
@pytest.mark.parametrize("size", [3, 17])
def test_blocks_taller_than_the_window_scroll(window: Window, text: str, size: int) -> None:
    view, seen = Markdown(window), 0
    for at in range(0, len(text), size):
        view.write(text[at : at + size])
        written = [line.split() for line in text[:at].splitlines() if line.strip("`- ")]
        if at and text is LISTED and len(written) > 1:
            last = " ".join(window.lines).split()
            assert written[-2][-1] in last, "what was written before is on the screen"
            seen += 1
    view.end()
    assert seen or text is not LISTED
    assert once(window) == once(drawn_at_the_end(text))


@pytest.mark.parametrize("size", [3, 17])
def test_ctrl_c_doubles_no_line(window: Window, size: int) -> None:
    text = "The people were amazed by the magic of the lamp and went home at once, as it was late in the evening. "
    view = Markdown(window)
    for at in range(0, len(text), size):
        view.write(text[at : at + size])
    window.write("^C")  # as the terminal echoes it
    view.end()
    assert once(window) == once(drawn_at_the_end(text))


def drawn_at_the_end(text: str) -> Window:
    whole = Window()
    view = Markdown(whole)
    view.write(text)
    view.end()
    return whole


def once(window: Window) -> list[str]:
    """Return the words on the screen and above it, line by line."""
    return [" ".join(line.split()) for line in window.lines if line.strip()]

"""Lines typed at a terminal: fences, Ctrl-C, and the history that stays."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine.cli import terminal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(terminal, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(terminal, "has_toolkit", lambda: False)
    return tmp_path


def messages(
    monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]
) -> tuple[list[str], int]:
    """Return the messages of these lines, and how often Ctrl-C was answered."""
    waiting: Iterator[Any] = iter([*lines, EOFError])
    stops: list[int] = []

    def typed(prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    return list(terminal.typed(lambda: stops.append(1))), len(stops)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (("one", " two "), ["one", "two"]),
        (('"""one', "two", '"""', "three"), ["one\ntwo", "three"]),
        (('"""one"""',), ["one"]),
        (('"""', "  indented", '"""'), ["indented"]),
        (('"""one', KeyboardInterrupt, "two"), ["two"]),
        (('"""one', "two"), []),
    ],
)
def test_messages(cache: Path, monkeypatch: Any, lines: tuple[Any, ...], found: list[str]) -> None:
    assert messages(monkeypatch, *lines) == (found, lines.count(KeyboardInterrupt))


def test_the_history_stays_and_is_the_users_alone(cache: Path, monkeypatch: Any) -> None:
    readline = pytest.importorskip("readline")
    readline.clear_history()
    file = terminal.history_file("readline")
    assert file is not None
    monkeypatch.setattr(
        "builtins.input",
        lambda prompt: readline.add_history("typed before") or (_ for _ in ()).throw(EOFError),
    )
    list(terminal.typed(lambda: None))
    assert "typed before" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    readline.clear_history()
    messages(monkeypatch)
    assert readline.get_history_item(1) == "typed before"


def test_a_folder_that_cannot_be_written_keeps_no_history(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(terminal, "cache_dir", lambda: tmp_path / "file")
    monkeypatch.setattr(terminal, "has_toolkit", lambda: False)
    assert messages(monkeypatch, "one") == (["one"], 0)


def test_with_prompt_toolkit_pasted_lines_are_one_message(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("prompt_toolkit")
    pipes: Any = importlib.import_module("prompt_toolkit.input")
    outputs: Any = importlib.import_module("prompt_toolkit.output")
    application: Any = importlib.import_module("prompt_toolkit.application")
    monkeypatch.setattr(terminal, "cache_dir", lambda: tmp_path)
    with pipes.create_pipe_input() as keys:
        keys.send_text("\x1b[200~one\ntwo\x1b[201~\r" + "three\x1b\rfour\r" + "\x04")
        with application.create_app_session(input=keys, output=outputs.DummyOutput()):
            assert list(terminal.typed(lambda: None)) == ["one\ntwo", "three\nfour"]
    file = terminal.history_file("prompt_toolkit")
    assert file is not None
    assert "three" in file.read_text()
    assert sys.stdin is not None

"""What is typed at a terminal: lines, several at once between \"\"\", with a history that stays.

With prompt_toolkit a pasted text of several lines is one message, and Alt-Enter begins a new line. Without it Python's
readline edits the line, as far as it is there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specengine.cli.terminal import write
from specengine.files import cache_dir

PROMPT, CONTINUED = "> ", "... "
FENCE = '"""'  # around a message of several lines
REMEMBERED = 1000  # lines of readline's history


def history_file(name: str = "") -> Path:
    """Return the file of what was typed before, in the cache folder; name: of the library that writes it."""
    return cache_dir() / "history" / (name or ("prompt_toolkit" if _has_toolkit() else "readline"))


def typed(stopped: Callable[[], None]) -> Iterator[str]:
    """Yield messages until Ctrl-D. Ctrl-C drops the one that is being typed, and calls `stopped`."""
    with _by_toolkit() if _has_toolkit() else _by_readline() as read:
        while True:
            try:
                yield _message(read)
            except EOFError:
                write("\n")
                return
            except KeyboardInterrupt:
                stopped()


def _message(read: Callable[[str], str]) -> str:
    """Return one message: a line, or the lines up to the one that ends with a fence."""
    line = read(PROMPT).strip()
    if not line.startswith(FENCE):
        return line
    text = line.removeprefix(FENCE)
    while not text.rstrip().endswith(FENCE):
        text += "\n" + read(CONTINUED)
    return text.rstrip().removesuffix(FENCE).strip()


def _has_toolkit() -> bool:
    return importlib.util.find_spec("prompt_toolkit") is not None


@contextlib.contextmanager
def _by_toolkit() -> Iterator[Callable[[str], str]]:
    toolkit: Any = importlib.import_module("prompt_toolkit")
    history: Any = importlib.import_module("prompt_toolkit.history")
    bindings: Any = importlib.import_module("prompt_toolkit.key_binding").KeyBindings()

    @bindings.add("escape", "enter")  # as terminals send Alt-Enter
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    file = _prepared("prompt_toolkit")
    kept = history.InMemoryHistory() if file is None else history.FileHistory(str(file))
    asking = toolkit.PromptSession(history=kept, key_bindings=bindings, prompt_continuation=CONTINUED)
    yield asking.prompt


@contextlib.contextmanager
def _by_readline() -> Iterator[Callable[[str], str]]:
    readline: Any = None
    with contextlib.suppress(ImportError):  # which Windows lacks
        readline = importlib.import_module("readline")  # and input() edits lines by it
    file = None if readline is None else _prepared("readline")
    if file is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
        readline.set_history_length(REMEMBERED)
    try:
        yield input
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                readline.write_history_file(file)


def _prepared(name: str) -> Path | None:
    """Return the file of what was typed, which only this user may read; None where it cannot be written."""
    try:
        file = history_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return None
    return file

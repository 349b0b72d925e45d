"""A terminal: standard output and standard error, colours, lines that are typed, and answers drawn as Markdown.

With prompt_toolkit a pasted text of several lines is one message, and Alt-Enter begins a new line. Without it Python's
readline edits the line, as far as it is there.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from specengine.files import cache_dir

DRAFTED, OWN, FAINT, RESET = "\x1b[32m", "\x1b[35m", "\x1b[2m", "\x1b[0m"  # green, magenta


def prepare() -> None:
    """Let the streams take any text. A character that standard output cannot encode becomes a question mark.

    A stream that was closed before the program began is an empty one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
        for name in ("write", "flush"):
            setattr(sys.stdout, name, _blamed(getattr(io.TextIOWrapper, name).__get__(sys.stdout)))
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


class OutputError(OSError):
    """Raised if standard output cannot be written, other than by BrokenPipeError where its reader has gone."""


def _blamed(act: Callable[..., Any]) -> Callable[..., Any]:
    def acting(*given: Any) -> Any:
        try:
            return act(*given)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error

    return acting


def as_json(
    value: Any, encoding: str | None = None, *, default: Callable[[Any], Any] | None = None
) -> str:
    """Return one line of JSON for `encoding`, by default standard output's. It is escaped where the encoding needs it.

    default: as in json.dumps.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=default)
    try:
        text.encode(encoding or getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, default=default)
    return text


def say(line: str) -> None:
    """Write one line, or several, to standard error. At a terminal they are broken between words."""
    if sys.stderr.isatty():
        fill = textwrap.TextWrapper(shutil.get_terminal_size().columns, break_on_hyphens=False).fill
        line = "\n".join(map(fill, line.split("\n")))
    print(line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Write one line to standard error if it is a terminal."""
    if sys.stderr.isatty():
        say(line)


def write(text: str) -> None:
    """Write text to standard output and flush it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def why_no_colours(stream: str = "stdout") -> str | None:
    """Return why a stream takes no colours and no line that is written over, or None where it does.

    stream: its name in `sys`
    """
    if os.environ.get("NO_COLOR"):
        return "NO_COLOR is set"
    if os.environ.get("TERM") == "dumb":
        return "TERM is dumb"
    return None if getattr(sys, stream).isatty() else "standard output is not a terminal"


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread meanwhile. work: ends soon after the event that it gets is set."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Progress:
    """At a terminal, a line on standard error that says which of all steps is under way, and then is gone."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    @contextlib.contextmanager
    def step(self, what: str, share: Callable[[], float] | None = None) -> Iterator[None]:
        """Show a step meanwhile. share: returns how much of it is done, 0 to 1, to be shown as well."""
        self.done += 1
        if why_no_colours("stderr") is not None:
            yield
            return
        line = f"[{self.done}/{self.steps}] {what}"

        def draw(ended: threading.Event) -> None:
            print(line, end="", file=sys.stderr, flush=True)
            while share is not None and not ended.wait(UPDATE_SECONDS):
                print(f"\r\x1b[K{line}: {share():.0%}", end="", file=sys.stderr, flush=True)
            ended.wait()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

        with beside(draw):
            yield


UPDATE_SECONDS = 0.5  # between two looks at how much of a step is done
PROMPT, CONTINUED = "> ", "... "
FENCE = '"""'  # around a message of several lines
REMEMBERED = 1000  # lines of readline's history


def typed(stopped: Callable[[], None]) -> Iterator[str]:
    """Yield messages until Ctrl-D. Ctrl-C drops the one that is being typed, and calls `stopped`."""
    with _by_toolkit() if has_toolkit() else _by_readline() as read:
        while True:
            try:
                yield _message(read)
            except EOFError:
                write("\n")
                return
            except KeyboardInterrupt:
                say("")
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


def has_toolkit() -> bool:
    return importlib.util.find_spec("prompt_toolkit") is not None


@contextlib.contextmanager
def _by_toolkit() -> Iterator[Callable[[str], str]]:
    toolkit: Any = importlib.import_module("prompt_toolkit")
    history: Any = importlib.import_module("prompt_toolkit.history")
    bindings: Any = importlib.import_module("prompt_toolkit.key_binding").KeyBindings()

    @bindings.add("escape", "enter")  # as terminals send Alt-Enter
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    file = history_file("prompt_toolkit")
    typed_before = history.InMemoryHistory() if file is None else history.FileHistory(str(file))
    asking = toolkit.PromptSession(
        history=typed_before, key_bindings=bindings, prompt_continuation=CONTINUED
    )
    yield asking.prompt


@contextlib.contextmanager
def _by_readline() -> Iterator[Callable[[str], str]]:
    readline: Any = None
    with contextlib.suppress(ImportError):  # which Windows lacks
        readline = importlib.import_module("readline")  # and input() edits lines by it
    file = None if readline is None else history_file("readline")
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


def history_file(name: str) -> Path | None:
    """Return the file of what was typed, which only this user may read; None where it cannot be written.

    name: of the library that writes it
    """
    try:
        file = cache_dir() / "history" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return None
    return file


FENCES = ("```", "~~~")  # of code, in which an empty line ends no block


REDRAWN_SECONDS = 0.1  # between two looks of a block that is being written


class Markdown:
    """Draws the text of one answer after the other.

    A block that has ended stays; the last one is drawn anew, as far as the window holds it. What a taller one has
    scrolled out of the window stays as well, and so does the window's first line: terminals such as tmux keep a
    window that is cleared from there, and the lines would stand above twice.
    """

    def __init__(self, file: Any = None) -> None:
        self._console = importlib.import_module("rich.console").Console(file=file, highlight=False)
        self._drawn = importlib.import_module("rich.markdown").Markdown
        self._text, self._printed = "", False
        self._scrolled = self._shown = 0  # lines of the last block: out of the window, and in it
        self._drawn_at = 0.0
        self._redraws = self._console.is_terminal and not self._console.is_dumb_terminal

    @classmethod
    def where_wanted(cls, requested: bool | None, *, interactive: bool) -> Self | None:
        """Return one where it was asked for, or by default at a terminal with rich. MissingExtraError without rich."""
        shown = interactive and why_no_colours() is None
        if requested is False or (
            requested is None and not (shown and importlib.util.find_spec("rich"))
        ):
            return None
        try:
            return cls()
        except ImportError as error:
            from specengine.errors import missing_extra

            raise missing_extra("markdown", "chat", error) from error

    def write(self, text: str) -> None:
        self._text += text
        whole, rest = finished(self._text)
        if whole:
            self._draw(whole)
            self._text, self._printed = rest, True
            self._scrolled = self._shown = 0
        elif time.monotonic() - self._drawn_at < REDRAWN_SECONDS:
            return
        if self._text.strip() and self._redraws:
            self._draw(self._text)
            self._drawn_at = time.monotonic()

    def end(self) -> None:
        """End an answer, and be ready for the next one."""
        if self._text.strip():
            self._draw(self._text)
        self._text, self._printed = "", False
        self._scrolled = self._shown = 0

    def _draw(self, text: str) -> None:
        """Draw the last block in place of what is shown of it. The cursor is left below, where ^C breaks no line."""
        with self._console.capture() as captured:
            self._console.print(self._drawn(text.strip("\n")))
        lines = ["\n"] * self._printed + captured.get().splitlines(keepends=True)
        lines = lines[self._scrolled :]
        up = f"\x1b[{self._shown}A" if self._shown else ""
        self._console.file.write("".join([f"\r{up}\x1b[J" * self._redraws, *lines]))
        self._console.file.flush()
        self._shown = min(len(lines), max(0, self._console.height - 2))
        self._scrolled += len(lines) - self._shown


def finished(text: str) -> tuple[str, str]:
    """Split a text after its last block that an empty line has ended; whole code blocks count as one."""
    end, place, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        place += len(line)
        bare = line.strip()
        if fence:
            fence = "" if bare.startswith(fence) else fence
        elif bare.startswith(FENCES):
            fence = bare[:3]
        elif not bare and line.endswith("\n"):
            end = place
    return text[:end] if text[:end].strip() else "", text[end:]

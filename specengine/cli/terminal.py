"""Standard output and standard error, and whether they show colours."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

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


def as_json(value: Any, encoding: str | None = None, *, default: Callable[[Any], Any] | None = None) -> str:
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
    """Write one line to standard error."""
    print(line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Write one line to standard error if it is a terminal."""
    if sys.stderr.isatty():
        say(line)


def write(text: str) -> None:
    """Write text to standard output and flush it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def why_no_colours() -> str | None:
    """Return why standard output takes no colours, or None where it does."""
    if os.environ.get("NO_COLOR"):
        return "NO_COLOR is set"
    if os.environ.get("TERM") == "dumb":
        return "TERM is dumb"
    return None if sys.stdout.isatty() else "standard output is not a terminal"


def redraws() -> bool:
    """Return whether a line on standard error may be written over by escape sequences."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


class Progress:
    """At a terminal, a line on standard error that says which of so many steps is under way, and then is gone."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self.done += 1
        shown = redraws()
        if shown:
            print(f"[{self.done}/{self.steps}] {what}", end="", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            if shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

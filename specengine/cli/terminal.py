"""Standard output and standard error, and whether they show colours."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

DRAFTED, OWN, FAINT, RESET = "\x1b[32m", "\x1b[35m", "\x1b[2m", "\x1b[0m"  # green, magenta


def say(line: str) -> None:
    """One line to standard error."""
    print(line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """As `say`, to somebody who waits at a terminal; a file or a pipe gets no word of it."""
    if sys.stderr.isatty():
        say(line)


def write(text: str) -> None:
    """Text to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def why_no_colours() -> str | None:
    """Why standard output takes no colours; None where it does."""
    if os.environ.get("NO_COLOR"):
        return "NO_COLOR is set"
    if os.environ.get("TERM") == "dumb":
        return "TERM is dumb"
    return None if sys.stdout.isatty() else "standard output is no terminal"


class Progress:
    """At a terminal, a line on standard error that says which of so many steps is under way, and then is gone."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self.done += 1
        shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        if shown:
            print(f"[{self.done}/{self.steps}] {what}", end="", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            if shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

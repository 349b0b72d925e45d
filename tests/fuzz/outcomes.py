"""Outcomes of cases, and their texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from specengine.errors import SpecEngineError

ANSWERED, REFUSED = "answered", "refused"
MOST_LINE = 2000  # characters of an error on the command line


class Finding(Exception):
    """A failure that the fuzzer found."""


class Outcome(NamedTuple):
    """The outcome of a case: answered, or refused by the error of this name."""

    kind: str
    error: str = ""


def refused(error: SpecEngineError) -> Outcome:
    """By this error, whose message must be one that can be shown."""
    line = " ".join(str(error).split())
    line.encode("utf-8", "backslashreplace")
    if not line or len(line) > MOST_LINE:
        raise Finding(f"a message of {len(line)} characters: {line[:200]}")
    return Outcome(REFUSED, type(error).__name__)


def first_line(error: BaseException) -> str:
    """The error's class and what it says first."""
    said: Any = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:200]}"

"""Standard output and standard error, and the colours of drafted text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from specengine.engine import Engine
from specengine.generation.outputs import StreamPiece, decoder
from specengine.generation.prompts import TextStream

DRAFTED, OWN, RESET = "\x1b[32m", "\x1b[35m", "\x1b[0m"  # green, magenta


def say(line: str) -> None:
    """One line to standard error."""
    print(line, file=sys.stderr, flush=True)


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


class PlainText:
    """Shows pieces as they are."""

    def paint(self, piece: StreamPiece) -> str:
        return piece.text


class DraftColours:
    """Shows which text the draft proposed and the target accepted, and which the target added itself."""

    LEGEND = f"{DRAFTED}accepted draft tokens{RESET}, {OWN}the target's own tokens{RESET}"

    def __init__(self, engine: Engine) -> None:
        self._texts = TextStream(decoder(engine.tokenizer))
        self._spans: list[tuple[int, str]] = []  # characters still to come, and their colour

    def paint(self, piece: StreamPiece) -> str:
        """The piece's text with its colours; without them it is the same text."""
        cycle = piece.cycle
        for index, token in enumerate(cycle.tokens):
            colour = DRAFTED if index < cycle.accepted else OWN
            self._spans.append((len(self._texts.push([token])), colour))
        return "".join(f"{colour}{text}{RESET}" for text, colour in self._split(piece.text) if text)

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        colour = OWN
        while self._spans and text:
            length, colour = self._spans.pop(0)
            if length > len(text):
                self._spans.insert(0, (length - len(text), colour))
            yield text[:length], colour
            text = text[length:]
        yield text, colour  # half a character that the end of the answer left over

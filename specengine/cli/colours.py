"""The colours of drafted text."""

from __future__ import annotations

from collections.abc import Iterator

from specengine.cli.terminal import DRAFTED, OWN, RESET
from specengine.engine import Engine
from specengine.records import StreamPiece
from specengine.request.text import TextStream, decoder


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

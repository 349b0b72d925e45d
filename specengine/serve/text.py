"""A growing text of which some ends are not sent before it is known what follows."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `marks`."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    return next((count for count in range(longest, 0, -1) if _begins(text[-count:], marks)), 0)


def _begins(end: str, marks: Sequence[str]) -> bool:
    return any(mark.startswith(end) for mark in marks)


class StopText:
    """Takes stop strings out of a growing answer that ends with the first of them, as OpenAI's clients expect."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = list(stops)
        self._rest = ""
        self.hit = False

    def push(self, text: str) -> str:
        """What can be sent."""
        if self.hit:
            return ""
        self._rest += text
        found = [self._rest.find(stop) for stop in self.stops if stop in self._rest]
        if found:
            self.hit = True
            sent, self._rest = self._rest[: min(found)], ""
            return sent
        keep = held_back(self._rest, self.stops)
        sent, self._rest = self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
        return sent

    def end(self) -> str:
        """What was held back of an answer that ended otherwise."""
        rest, self._rest = self._rest, ""
        return rest

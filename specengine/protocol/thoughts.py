"""Thoughts that models write before their answers, between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specengine.protocol.tools import held_back

THOUGHT_MARKS = OPENING, CLOSING = "<think>", "</think>"
_LAST = 8  # tokens of a prompt that are looked at


@dataclass(frozen=True)
class Thought:
    """Text that a model thinks."""

    text: str


class ThoughtReader:
    """Split a growing answer into thoughts, which stand before everything else, and text.

    Blanks at both ends of the thoughts, and those before the text after them, are left out.

    separates: whether there may be thoughts; else everything is text
    """

    def __init__(self, separates: bool = True) -> None:
        self._rest = ""
        self._state = "before" if separates else "text"
        self._thought = False  # whether there was any text in the thoughts

    def begin(self, prompt: Sequence[int], tokenizer: Any) -> None:
        """Take the prompt, which may open the thoughts of the answer."""
        if self._state == "before" and tokenizer is not None and prompt_thinks(prompt, tokenizer):
            self._state = "inside"

    def push(self, text: str) -> list[str | Thought]:
        self._rest += text
        parts: list[str | Thought] = []
        if self._state == "before":
            begun = self._rest.lstrip()
            if begun.startswith(OPENING):
                self._state, self._rest = "inside", begun[len(OPENING) :]
            elif OPENING.startswith(begun):
                return parts  # it may come
            else:
                self._state = "text"
        if self._state == "inside":
            thought, closing, behind = self._rest.partition(CLOSING)
            if closing:
                self._state, self._rest = "behind", behind
            else:
                keep = held_back(thought, [CLOSING])
                thought = thought[: len(thought) - keep].rstrip()
                self._rest = self._rest[len(thought) :]
            self._think(parts, thought.rstrip())
        if self._state == "behind":
            self._rest = self._rest.lstrip()
            if self._rest:
                self._state = "text"
        if self._state == "text" and self._rest:
            parts.append(self._rest)
            self._rest = ""
        return parts

    def end(self) -> list[str | Thought]:
        """Return what was held back."""
        parts: list[str | Thought] = []
        if self._state == "inside":
            self._think(parts, self._rest.rstrip())
        elif self._rest:
            parts.append(self._rest)
        self._rest = ""
        return parts

    def _think(self, parts: list[str | Thought], text: str) -> None:
        text = text if self._thought else text.lstrip()
        if text:
            self._thought = True
            parts.append(Thought(text))


def prompt_thinks(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Return whether a prompt ends where thoughts begin, as those of some chat templates do."""
    try:
        end = tokenizer.decode(list(prompt[-_LAST:]), skip_special_tokens=False)
    except Exception:  # somebody else's tokenizer
        return False
    return isinstance(end, str) and end.rstrip().endswith(OPENING)


def thought_tokens(tokens: Sequence[int], tokenizer: Any) -> int:
    """Return how many of an answer's tokens are thoughts, their closing mark included; 0 where no one token is it."""
    closing = getattr(tokenizer, "convert_tokens_to_ids", lambda name: None)(CLOSING)
    return tokens.index(closing) + 1 if isinstance(closing, int) and closing in tokens else 0

"""Whether a text can have as few tokens as a context holds, found out without reading much more than that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from specengine.errors import InputError

LETTERS = 8  # for each token of the room: texts up to that are read at once
MARGIN = 1.25  # more tokens than this for each of the room's are too many, however pieces are joined
PIECE = 1 << 14  # characters that are read without looking up


@dataclass(frozen=True)
class Room:
    """For so many tokens.

    longest       characters of the longest token, where that is known already
    still_wanted  called before each piece of a long text is read; what it raises comes out
    """

    tokens: int
    longest: int | None = None
    still_wanted: Callable[[], None] = lambda: None

    def require(self, field: str, texts: Iterable[str], tokenizer: Any) -> None:
        """Raise InputError for texts that certainly do not fit; those that nearly do may pass.

        A text longer than so many of the longest tokens is refused unread. A long one is read in pieces, up to where
        there are too many.
        """
        texts = list(texts)
        letters = sum(map(len, texts))
        if letters <= LETTERS * self.tokens:
            return
        self.require_possible(field, letters, tokenizer)
        count = read = 0
        for piece in _pieces(texts, min(PIECE, LETTERS * self.tokens)):
            self.still_wanted()
            count += len(tokenizer(_readable(piece), add_special_tokens=False)["input_ids"])
            read += len(piece)
            if count > MARGIN * self.tokens:
                raise InputError(
                    f"{field}: its first {read} of {letters} characters have {count} tokens, "
                    f"accepted at most {self.tokens}"
                )

    def require_possible(self, field: str, letters: int, tokenizer: Any) -> None:
        """Raise InputError where so many characters fit into no text of so many tokens."""
        longest = self.longest or longest_token(tokenizer)
        if letters > longest * self.tokens:
            raise InputError(
                f"{field}: it has {letters} characters, accepted at most {self.tokens} tokens, "
                f"of which the longest has {longest} characters"
            )


def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token of the vocabulary; beyond any text where the tokenizer does not tell."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(map(len, vocabulary), default=0) or sys.maxsize


def _pieces(texts: Iterable[str], most: int) -> Iterator[str]:
    """The texts in pieces of at most so many characters, short ones together."""
    held: list[str] = []
    letters = 0
    for text in texts:
        for start in range(0, len(text), most):
            part = text[start : start + most]
            if letters + len(part) > most:
                yield "".join(held)
                held, letters = [], 0
            held.append(part)
            letters += len(part)
    if held:
        yield "".join(held)


def _readable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()

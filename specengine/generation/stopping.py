"""Deciding, token by token, where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from specengine.generation.prompts import TextStream
from specengine.generation.sampling import History


class Stopper:
    """Says after each committed token whether the answer ends there, and why.

    Reasons: `stop` (an end-of-sequence token, a stop string or the end of a grammar), `length` (max_new_tokens or the
    context is full), `criteria` (a StoppingCriteria).
    """

    def __init__(
        self,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        criteria: Sequence[Callable[..., Any]] = (),
        decode: Callable[[list[int]], str] | None = None,
        complete: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.left = max_new_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_strings = list(stop_strings)
        self.criteria = list(criteria)
        self.decode, self.complete = decode, complete
        self.tokens: list[int] = []
        self.last_reason: str | None = None
        self.overhang = 0  # characters of the text behind a stop string that holds a special token's text
        self._texts = _Tail(decode, self.stop_strings) if decode is not None and self.stop_strings else None
        self._shown = self._showing(decode) if self._texts is not None else None

    def reason(self, token: int, history: History) -> str | None:
        """The reason to end after `token`, which `history` already holds; None to go on."""
        self.tokens.append(token)
        self.left -= 1
        if token in self.eos_token_ids or self._is_complete() or (self.stop_strings and self._hit_stop_string()):
            self.last_reason = "stop"
        elif any(_is_true(criterion(history.ids, None)) for criterion in self.criteria):
            self.last_reason = "criteria"
        elif self.left <= 0:
            self.last_reason = "length"
        return self.last_reason

    def _is_complete(self) -> bool:
        return self.complete is not None and self.complete(self.tokens)

    def _hit_stop_string(self) -> bool:
        token = self.tokens[-1]
        hit = self._texts is not None and self._texts.push(token) is not None
        if self._shown is None:
            return hit
        behind = self._shown.push(token)
        if behind is not None and not hit:
            self.overhang = 0 if token in self._shown.shown else behind
        return hit or behind is not None

    def _showing(self, decode: Any) -> _Tail | None:
        """The text with those special tokens whose own text stands in a stop string; None where none does."""
        if not (tokens := getattr(decode, "specials_in", _no_specials)(self.stop_strings)):
            return None
        return _Tail(decode.showing(tokens), self.stop_strings, tokens)


class _Tail:
    """The end of a growing text, as far back as a stop string may begin.

    shown: special tokens that the text shows.
    """

    def __init__(self, decode: Callable[[list[int]], str], strings: Sequence[str], shown: Collection[int] = ()) -> None:
        self.shown = shown
        self._strings, self._stream, self._text = strings, TextStream(decode), ""
        self._most = max(map(len, strings))

    def push(self, token: int) -> int | None:
        """How many characters stand behind the stop string that ends first, a last token included; None: there is none.

        The text before was looked through when its tokens came.
        """
        self._text = self._text[-self._most :] + self._stream.push([token])
        text = self._text + self._stream.rest
        ends = [text.find(string) + len(string) for string in self._strings if string in text]
        return len(text) - min(ends) if ends else None


def _no_specials(strings: Sequence[str]) -> Collection[int]:
    return ()


def cut_after_stop(text: str, stop_strings: Sequence[str]) -> str:
    """`text` up to and including the stop string that ends first; the whole text where there is none."""
    ends = [text.find(string) + len(string) for string in stop_strings if string in text]
    return text[: min(ends)] if ends else text


def _is_true(verdict: bool | Tensor) -> bool:
    return bool(verdict.all()) if isinstance(verdict, Tensor) else bool(verdict)

"""Deciding, token by token, where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

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
        self._window = max((len(string.encode()) for string in self.stop_strings), default=0) + 8

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
        # A token is at least one byte of text, so a stop string ends within this many tokens.
        assert self.decode is not None
        text = self.decode(self.tokens[-self._window :])
        return any(string in text for string in self.stop_strings)


def cut_after_stop(text: str, stop_strings: Sequence[str]) -> str:
    """`text` up to and including the stop string that ends first; the whole text where there is none."""
    ends = [text.find(string) + len(string) for string in stop_strings if string in text]
    return text[: min(ends)] if ends else text


def _is_true(verdict: bool | Tensor) -> bool:
    return bool(verdict.all()) if isinstance(verdict, Tensor) else bool(verdict)

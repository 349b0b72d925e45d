"""Log-probabilities as OpenAI's clients read them."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specengine.records import TokenLogprob

LEAST = -9999.0  # instead of minus infinity, which JSON has not; as other servers do
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SINGLE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """What each token writes, a part of a character included; special tokens by their names."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        self._known: dict[int, bytes] = {}

    def written(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def shown(self, token: int) -> bytes:
        """As `written`, nothing for a special token: what an answer shows of it."""
        return b"" if token in self._special else self.written(token)

    def _read(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        once, twice = self._decoded([token]), self._decoded([token, token])
        text = twice[len(once) :] if twice.startswith(once) else once  # a first token may lose its blank
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode(errors="replace")
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if single := _SINGLE.fullmatch(piece):
            return bytes.fromhex(single[1])
        if all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return text.encode(errors="replace")

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class ChatLogprobs:
    """`choices[].logprobs` of chat."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def of(self, rated: Iterable[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._one(given.token, given.logprob) | {"top_logprobs": [self._one(*likely) for likely in given.top]}
            for given in rated
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        written = self._texts.written(token)
        return {"token": written.decode(errors="replace"), "logprob": bounded(logprob), "bytes": list(written)}


class TextLogprobs:
    """`choices[].logprobs` of completions, whose offsets count on from one part of an answer to the next.

    A token that is no whole characters is written as OpenAI does, `bytes:` and its bytes.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._reader = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, rated: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """first: a token before them, of which nothing is known."""
        tokens = [*([] if first is None else [first]), *(given.token for given in rated)]
        unknown = [None] * (len(tokens) - len(rated))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [*unknown, *(bounded(given.logprob) for given in rated)],
            "top_logprobs": [*unknown, *(self._top(given) for given in rated)],
            "text_offset": [self._place(token) for token in tokens],
        }

    def _top(self, given: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*given.top, (given.token, given.logprob)):
            top.setdefault(self._name(token), bounded(logprob))
        return top

    def _name(self, token: int) -> str:
        written = self._texts.written(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _place(self, token: int) -> int:
        place = self._offset
        self._offset += len(self._reader.decode(self._texts.shown(token)))
        return place


def bounded(logprob: float) -> float:
    return max(logprob, LEAST)

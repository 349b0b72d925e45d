"""Log-probabilities of an answer's tokens in OpenAI's shapes."""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specengine.records import TokenLogprob
from specengine.request.text import Decoder, TextStream

MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON has not; as other servers do
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_SINGLE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Return the text of each token, partial characters included; special tokens by their names."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decoded = Decoder(tokenizer, special=True, clean_up_tokenization_spaces=False)
        self.written = functools.cache(self._read)

    def _read(self, token: int) -> bytes:
        """Return a token's text; it is empty where the tokenizer has none."""
        once, twice = self._decoded([token]), self._decoded([token, token])
        # a first token may lose its blank
        text = twice[len(once) :] if twice.startswith(once) else once
        piece = self._decoded.name(token) if REPLACEMENT in text else None
        if isinstance(piece, str):
            if single := _SINGLE.fullmatch(piece):
                return bytes.fromhex(single[1])
            if all(letter in _BYTES for letter in piece):
                return bytes(_BYTES[letter] for letter in piece)
        return text.encode(errors="replace")


class ChatLogprobs:
    """`choices[].logprobs` of chat."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def of(self, rated: Iterable[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._one(each.token, each.logprob)
                | {"top_logprobs": [self._one(*likely) for likely in each.top]}
                for each in rated
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        written = self._texts.written(token)
        return {
            "token": written.decode(errors="replace"),
            "logprob": bounded(logprob),
            "bytes": list(written),
        }


class TextLogprobs:
    """`choices[].logprobs` of completions, whose offsets count on from one part of an answer to the next.

    An offset is the place in the text that the answer shows: special tokens, and ids without text, take none.
    A token that is no whole characters is written as OpenAI does, `bytes:` and its bytes.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._stream = TextStream(Decoder(texts.tokenizer))
        self._offset = 0

    def of(self, rated: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the shape of these tokens; first: a token before them, without a log-probability."""
        tokens = [*([] if first is None else [first]), *(each.token for each in rated)]
        unknown = [None] * (len(tokens) - len(rated))
        places = [self._place(token) for token in tokens]
        if first is not None:  # a prompt; the answer is a text of its own
            self._offset += len(self._stream.rest)
            self._stream = TextStream(Decoder(self._texts.tokenizer))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [*unknown, *(bounded(each.logprob) for each in rated)],
            "top_logprobs": [*unknown, *(self._top(each) for each in rated)],
            "text_offset": places,
        }

    def _top(self, rated: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*rated.top, (rated.token, rated.logprob)):
            top.setdefault(self._name(token), bounded(logprob))
        return top

    def _name(self, token: int) -> str:
        written = self._texts.written(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def _place(self, token: int) -> int:
        # what may become a character later
        place = self._offset + len(self._stream.rest.rstrip(REPLACEMENT))
        self._offset += len(self._stream.push([token]))
        return place


def bounded(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)

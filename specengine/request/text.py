"""Token ids as text: whole, and as it grows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


class Decoder:
    """Token ids to text, without special tokens but those of `shown`.

    Never raises: an id for which the tokenizer has no text, or none without an error, writes nothing, and without a
    tokenizer nothing does. special: whether all special tokens are shown.
    """

    def __init__(self, tokenizer: Any, shown: Collection[int] = (), *, special: bool = False, **options: Any) -> None:
        """options: further ones of the tokenizer's `decode`."""
        self.tokenizer, self.shown = tokenizer, frozenset(shown)
        self._options = {"skip_special_tokens": not special, **options} if _takes_options(tokenizer) else {}
        self._without_text: set[int] = set()
        self._bytes: dict[int, bool] = {}

    def __call__(self, tokens: list[int]) -> str:
        if self.shown.isdisjoint(tokens):
            return self._text(tokens)
        parts, start = [], 0
        for at, token in enumerate(tokens):
            if token in self.shown:
                parts += [self._text(tokens[start:at]), self._text([token], skip_special_tokens=False)]
                start = at + 1
        return "".join(parts) + self._text(tokens[start:])

    def is_byte(self, token: int) -> bool:
        """Whether it is one of SentencePiece's bytes: in a run of them a later one may change what the run writes."""
        if token not in self._bytes:
            name = self.name(token)
            self._bytes[token] = isinstance(name, str) and _BYTE.fullmatch(name) is not None
        return self._bytes[token]

    def specials_in(self, strings: Collection[str]) -> frozenset[int]:
        """The special tokens, hidden in the text, whose own text stands in one of these strings."""
        texts = special_texts(self.tokenizer).items() if strings else ()
        found = {token for token, text in texts if text and any(text in string for string in strings)}
        return frozenset(found - self.shown)

    def showing(self, tokens: Collection[int]) -> Decoder:
        """The same with further special tokens shown."""
        return Decoder(self.tokenizer, self.shown | frozenset(tokens))

    def _text(self, tokens: list[int], **changes: Any) -> str:
        if self.tokenizer is None or not tokens:
            return ""
        options = self._options | changes if self._options else {}
        if self._without_text:
            tokens = [token for token in tokens if token not in self._without_text]
        if (text := self._attempt(tokens, options)) is not None:
            return text
        self._without_text.update(token for token in set(tokens) if self._attempt([token], options) is None)
        tokens = [token for token in tokens if token not in self._without_text]
        text = self._attempt(tokens, options)
        return "".join(self._attempt([token], options) or "" for token in tokens) if text is None else text

    def _attempt(self, tokens: list[int], options: Mapping[str, Any]) -> str | None:
        """None where the tokenizer, somebody else's program, raises or gives something else than text."""
        try:
            text = self.tokenizer.decode(tokens, **options)
        except Exception:
            return None
        return text if isinstance(text, str) else None

    def name(self, token: int) -> Any:
        """The tokenizer's own name of it; None where it has none."""
        try:
            return self.tokenizer.convert_ids_to_tokens(token)
        except Exception:  # there is no such method, or no such token
            return None


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def decoder(tokenizer: Any, shown: Collection[int] = ()) -> Decoder:
    """Token ids to text without special tokens but those of `shown`; empty text where there is no tokenizer."""
    return Decoder(tokenizer, shown)


def special_texts(tokenizer: Any) -> dict[int, str]:
    """The text of each token that the tokenizer leaves out of what it writes."""
    named = (getattr(tokenizer, name, None) or () for name in ("all_special_ids", "all_special_tokens"))
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = {token: item.content for token, item in added.items() if getattr(item, "special", False)}
    return dict(zip(*named, strict=False)) | special


def _takes_options(tokenizer: Any) -> bool:
    """Whether its `decode` knows transformers' options."""
    try:
        parameters = inspect.signature(tokenizer.decode).parameters
    except (AttributeError, TypeError, ValueError):  # none, or of a kind that does not say
        return tokenizer is not None
    kinds = {parameter.kind for parameter in parameters.values()}
    return "skip_special_tokens" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


MOST_HELD_BACK = 256  # tokens
MOST_CONTEXT = 64  # tokens, where they write blanks alone


class TextStream:
    """Decodes a growing list of tokens piece by piece; the pieces add up to the decoded whole.

    Tokens that write nothing are left out, wherever they stand. Text is held back from where it ends in replacement
    characters, which the next bytes may make a character of, and from where SentencePiece's bytes begin, until they
    end: over at most MOST_HELD_BACK tokens, which no text needs.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """decode: an outputs.Decoder, or any function."""
        self._decode = decode
        self._is_byte: Callable[[int], bool] = getattr(decode, "is_byte", lambda token: False)
        self._tokens: list[int] = []  # settled ones as context, since spaces depend on it, then what is not settled
        self._end = 0  # of the settled ones
        self._given = ""  # of the text of all these, what was given
        self._writes: dict[int, bool] = {}
        self._visible: int | None = None  # a token that writes more than blanks

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        before = len(self._tokens)
        self._tokens.extend(filter(self._is_written, tokens))
        if len(self._tokens) == before:
            return ""
        held = len(self._tokens) - self._end < MOST_HELD_BACK
        stable = self._before_bytes() if held else len(self._tokens)
        if stable <= self._end:
            return ""
        now = self._decode(self._tokens[:stable])
        settled = now.rstrip("\N{REPLACEMENT CHARACTER}") if held else now
        piece = settled[len(self._given) :]
        if settled == now:
            self._settle(now, stable)
        else:
            self._given += piece
        return piece

    @property
    def rest(self) -> str:
        """The text behind what was given, as it would be if no token followed."""
        return self._decode(self._tokens)[len(self._given) :] if len(self._tokens) > self._end else ""

    def _settle(self, text: str, end: int) -> None:
        """The first `end` tokens have given their text. The last of them stay as context, if they are enough of it."""
        context = self._decode(self._tokens[self._end : end])
        if context.strip() or end > MOST_CONTEXT:
            del self._tokens[: self._end]
            text, end = context, end - self._end
        self._given, self._end = text, end

    def _before_bytes(self) -> int:
        end = len(self._tokens)
        while end > self._end and self._is_byte(self._tokens[end - 1]):
            end -= 1
        return end

    def _is_written(self, token: int) -> bool:
        """Whether a token writes anything between others; a blank that is left out at the beginning does."""
        if (known := self._writes.get(token)) is not None:
            return known
        alone = self._decode([token])
        if not alone:
            if (letter := self._visible) is None:
                return True  # to be seen later; at the beginning it stands in nobody's way
            self._writes[token] = self._decode([letter, token, letter]) != self._decode([letter, letter])
            return self._writes[token]
        if self._visible is None and alone.strip() and token not in getattr(self._decode, "shown", ()):
            self._visible = token
        self._writes[token] = True
        return True

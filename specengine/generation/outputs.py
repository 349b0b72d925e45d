"""What a generation gives: an answer, pieces of it, transformers' output."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.generation import GenerateDecoderOnlyOutput

from specengine.records import Cycle, Stats, TokenLogprob


@dataclass(frozen=True)
class GenerationResult:
    """An answer. `token_ids` are the new tokens only; `finish_reason` is stop, length or criteria; `logprobs` has an
    entry for each token, where they were asked for. A token for which the tokenizer has no text writes none."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None


class StreamPiece(NamedTuple):
    """A piece of streamed text and the cycle that committed its tokens; the pieces add up to the result's text."""

    text: str
    cycle: Cycle


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `return_dict_in_generate=True` gives: transformers' output with this engine's figures."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stats: Stats | None = None
    logprobs: list[TokenLogprob] | None = None


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

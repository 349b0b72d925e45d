"""Answers that keep to a JSON schema or a grammar: what is allowed and what is forced behind any tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from specengine.errors import InputError, MissingExtraError, shown
from specengine.targets import common_prefix

# JSON as json.dumps writes it: one way to write each value forces more tokens, and no model gets lost in blanks.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_STRICT = {"lenient": False, "coerce_one_of": False}
MOST_TEXT, MOST_REFERENCES = 1 << 18, 500  # of a schema or a grammar; the library follows references by recursion


def library() -> Any:
    """llguidance; MissingExtraError where it is not installed."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise MissingExtraError(
            f"json_schema, json_object, grammar: {error.name} is not installed; it comes with: "
            "pip install 'specengine[grammar]'"
        ) from error
    return llguidance


def compiled(field: str, given: Any) -> str:
    """What llguidance reads, of the value of json_schema, json_object or grammar; InputError for what is not taken."""
    text = _text_of(field, given)
    references = text.count('"$ref"') if field == "json_schema" else 0
    if len(text) > MOST_TEXT or references > MOST_REFERENCES:
        accepted = f"up to {MOST_TEXT} characters and {MOST_REFERENCES} references"
        raise InputError(f"{field}: got {len(text)} characters and {references} references, accepted {accepted}")
    matcher = library().LLMatcher
    try:
        if field == "grammar":
            made = library().grammar_from("grammar", text)
        else:
            made = matcher.grammar_from_json_schema(text, defaults=_WRITTEN, overrides=_STRICT)
        fault, messages = matcher.validate_grammar_with_warnings(made)
    except ValueError as error:
        fault, messages = True, [str(error)]
    if fault:
        raise refused(field, messages[0])
    return made


def refused(field: str, why: str) -> InputError:
    return InputError(f"{field}: it is not accepted ({' '.join(why.split()):.300})")


def _text_of(field: str, given: Any) -> str:
    if field == "json_object":
        return '{"type": "object"}'
    if field == "json_schema" and isinstance(given, Mapping):
        try:
            return json.dumps(dict(given), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise refused(field, str(error)) from error
    if not isinstance(given, str) or not given.strip():
        accepted = (
            "a schema, as a dict or as JSON text" if field == "json_schema" else "a grammar, as Lark or GBNF text"
        )
        raise InputError(f"{field}: got {shown(given)}, accepted {accepted}")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{field}: character {error.start} is no Unicode text") from error
    return given


class Vocabularies:
    """A tokenizer as llguidance reads it, made once for each set of tokens that end an answer.

    vocab_size: of the target's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._made: dict[tuple[int, ...], Any] = {}

    def constraint(self, field: str, made: str, ends: Sequence[int]) -> Constraint:
        """The constraint of a grammar as `compiled` gives it; ends: ids that end an answer, which may be none.

        InputError where the grammar does not fit the tokenizer, or is met by no text.
        """
        matcher = library().LLMatcher(self._vocabulary(field, tuple(ends)), made, log_level=0)
        if matcher.is_error():
            raise refused(field, matcher.get_error())
        found = Constraint(matcher, self._size, None if ends else self._stand_in)
        if not found.allowed([]).any():
            raise refused(field, matcher.get_error() or "no text meets it")
        return found

    @property
    def _stand_in(self) -> int:
        """Instead of a token that ends answers, as the library wants one: never allowed, and no text if it can be."""
        return (list(self._tokenizer.all_special_ids) or [len(self._tokenizer) - 1])[-1]

    def _vocabulary(self, field: str, ends: tuple[int, ...]) -> Any:
        if self._tokenizer is None:
            raise InputError(f"{field}: it needs a tokenizer, pass tokenizer= when loading the engine")
        if ends not in self._made:
            size = max(self._size, len(self._tokenizer))
            given = list(ends) or [self._stand_in]
            try:
                self._made[ends] = library().hf.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=given)
            except ValueError as error:
                raise InputError(f"{field}: the tokenizer cannot be read for it ({error!s:.200})") from error
        return self._made[ends]


class Constraint:
    """What an answer may go on with, behind any of its beginnings; it goes back and forth between them.

    A beginning is the list of tokens generated so far. What depends on it is a function of it alone.
    never: a token that is not allowed anywhere.
    """

    def __init__(self, matcher: Any, vocab_size: int, never: int | None = None) -> None:
        self._matcher, self._size, self._never = matcher, vocab_size, never
        self._tokens: list[int] = []

    def allowed(self, tokens: Sequence[int]) -> np.ndarray:
        """bool [vocabulary]: the tokens that may follow; none behind what the grammar does not allow."""
        if not self._go(tokens) or self._matcher.is_error():
            return np.zeros(self._size, bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask = np.pad(mask, (0, self._size - len(mask)))
        if self._never is not None:
            mask[self._never] = False
        return mask

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that write the text that must follow, as the tokenizer would; [] where there is a choice."""
        return list(self._matcher.compute_ff_tokens()) if self._go(tokens) else []

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        """Whether this token may follow these."""
        return token != self._never and self._go(tokens) and bool(self._matcher.validate_tokens([token]))

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether nothing can follow."""
        return self._go(tokens) and bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _go(self, tokens: Sequence[int]) -> bool:
        """Stand behind these; False where the grammar does not allow them, and then behind an earlier place."""
        tokens = list(tokens)
        agreed = common_prefix(self._tokens, tokens)
        if agreed < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - agreed)
            del self._tokens[agreed:]
        taken = self._matcher.try_consume_tokens(tokens[agreed:])
        self._tokens += tokens[agreed : agreed + taken]
        return len(self._tokens) == len(tokens)


class ConstraintProcessor(LogitsProcessor):
    """Forbids what `constraint` does not allow behind the tokens since `prompt_length`."""

    def __init__(self, constraint: Constraint, prompt_length: int) -> None:
        self.constraint, self.prompt_length = constraint, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.from_numpy(self.constraint.allowed(input_ids[0, self.prompt_length :].tolist()))
        return scores.masked_fill(~allowed.to(scores.device), -float("inf"))

"""Answers that keep to a JSON schema or a grammar: what is allowed and what is forced after any tokens."""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from specengine.errors import (
    InputError,
    missing_extra,
    require,
    require_input,
    require_value,
    restating,
)
from specengine.files import MARK
from specengine.models import common_prefix
from specengine.request import schemas
from specengine.request.readers import READERS, STACK_BYTES, NoReaderError

T = TypeVar("T")

# JSON as json.dumps writes it: one way to write each value forces more tokens, and no model gets lost in blanks.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STRICT = {"lenient": False, "coerce_one_of": False}
MAX_TEXT = 1 << 18  # characters of a schema or a grammar
# Of a schema, all its objects together: the library compares each with each.
MAX_PROPERTIES, MAX_PATTERNS = 1500, 50
LIMITS = {"max_grammar_size": 100_000, "verbose_errors": False}
MAX_SECONDS = 3.0  # of reading a schema or a grammar
_LARGE = 1 << 14  # characters that take more than a few milliseconds to read
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
# of the library's messages
_INTERNAL = re.compile(r"<(non-verbose|backtrace|state)>?.*", re.DOTALL)
_setting_stack = threading.Lock()

log = logging.getLogger(__name__)


def library() -> Any:
    """Return llguidance; MissingExtraError where it is not installed."""
    if "llguidance" not in sys.modules:
        READERS.start()  # while this imports
    with restating(
        ImportError,
        lambda error: missing_extra("json_schema, json_object, grammar", "grammar", error),
    ):
        import llguidance
        import llguidance.hf
    return llguidance


def compiled(field: str, value: Any) -> str:
    """Return llguidance's form of json_schema, json_object or grammar; InputError for a value that is not supported."""
    return _compiled(field, _text_of(field, value))


@lru_cache(maxsize=32)  # an option is checked before there is a model, and again with it
def _compiled(field: str, text: str) -> str:
    with restating(
        (ValueError, RecursionError, TimeoutError, MemoryError),
        lambda error: refused(field, str(error)),
        (InputError,),
    ):
        text = _exact(field, text)
        grammar = (
            library().grammar_from("grammar", text)
            if field == "grammar"
            else library().LLMatcher.grammar_from_json_schema(text, overrides=WRITTEN | STRICT)
        )
        try:
            fault = str(READERS.answer([grammar, LIMITS], MAX_SECONDS))
        except NoReaderError:
            log.warning("schemas and grammars are read in this process, as no other can be started")
            is_wrong, messages = _deeply(
                lambda: library().LLMatcher.validate_grammar_with_warnings(
                    grammar, limits=library().LLParserLimits(**LIMITS)
                ),
                len(grammar),
            )
            fault = str(messages[0]) if is_wrong else ""
    if fault:
        raise refused(field, fault)
    return str(grammar)


def refused(field: str, why: str) -> InputError:
    words = " ".join(_INTERNAL.sub("", why).split())
    return InputError(f"{field}: it is not accepted ({words:.300})")


def _text_of(field: str, value: Any) -> str:
    if field == "json_object":
        return '{"type": "object"}'
    if field == "json_schema" and isinstance(value, Mapping):
        with restating(
            (TypeError, ValueError, RecursionError), lambda error: refused(field, str(error))
        ):
            value = json.dumps(dict(value), allow_nan=False)
    value = value.removeprefix(MARK) if isinstance(value, str) else value
    require_value(
        field,
        value,
        "a schema, as a dict or as JSON text"
        if field == "json_schema"
        else "a grammar, as Lark or GBNF text",
        isinstance(value, str) and value.strip() != "",
    )
    require(field, f"{len(value)} characters", f"up to {MAX_TEXT}", len(value) <= MAX_TEXT)
    with restating(
        UnicodeEncodeError,
        lambda error: InputError(f"{field}: character {error.start} is not Unicode text"),
    ):
        value.encode()
    return value


def _exact(field: str, text: str) -> str:
    """Return the grammar, or the schema as JSON text, with its schemas checked for size and rewritten; ValueError."""
    if field != "grammar":
        return _written(field, schemas.decoder().decode(text))
    parts, end = [], 0
    for embedded in _EMBEDDED.finditer(text):
        if embedded.start() >= end:
            schema, after = schemas.decoder().raw_decode(text, embedded.end())
            parts += [text[end : embedded.end()], _written(field, schema)]
            end = after
    return "".join([*parts, text[end:]])


def _written(field: str, schema: Any) -> str:
    # over more the library takes seconds
    most = {"properties": MAX_PROPERTIES, "patternProperties": MAX_PATTERNS}
    parts = [schema]
    counted = dict.fromkeys(most, 0)
    while parts:
        schema_part = parts.pop()
        if isinstance(schema_part, dict):
            for name in most:
                counted[name] += (
                    len(value) if isinstance(value := schema_part.get(name), dict) else 0
                )
            parts += schema_part.values()
        elif isinstance(schema_part, list):
            parts += schema_part
    for name, accepted in most.items():
        require(
            field,
            f"{counted[name]} {name}",
            f"up to {accepted} in all",
            counted[name] <= accepted,
        )
    return json.dumps(schemas.rewritten(schema), allow_nan=False)


def _deeply(call: Callable[[], T], size: int) -> T:
    """Return the result of `call` on a stack that is deep enough for the library's recursion over references.

    size: characters of the text; a large one is read while other work goes on.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            if (
                size > _LARGE and sys.platform == "linux"
            ):  # where a thread has a niceness of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    with _setting_stack:
        before = threading.stack_size(2 * STACK_BYTES)
        try:
            threading.Thread(target=run, daemon=True).start()
        finally:
            threading.stack_size(before)
    return answer.result()


class Vocabularies:
    """A tokenizer as llguidance reads it, made once for each set of tokens that end an answer.

    vocab_size: of the target's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._made: dict[tuple[int, ...], Any] = {}

    def constraint(self, field: str, grammar: str, ends: Sequence[int]) -> "Constraint":
        """Return the constraint of a grammar of `compiled`; ends: ids that end an answer, possibly none.

        InputError where the grammar does not fit the tokenizer, or is met by no text.
        """
        vocabulary = self._vocabulary(field, tuple(ends))
        matcher = _deeply(
            lambda: library().LLMatcher(
                vocabulary, grammar, log_level=0, limits=library().LLParserLimits(**LIMITS)
            ),
            len(grammar),
        )
        if matcher.is_error():
            raise refused(field, matcher.get_error())
        constraint = Constraint(
            field, matcher, vocabulary, self._size, None if ends else self._stand_in
        )
        for beginning in ([], constraint.forced([])):
            allowed, fault = constraint.allowed(beginning).any(), constraint.fault
            if fault is not None or not (allowed or constraint.complete(beginning)):
                raise fault or refused(field, "no text meets it")
        return constraint

    @property
    def _stand_in(self) -> int:
        """Return a token for the end of answers, which the library needs: never allowed, without text if possible."""
        return (list(self._tokenizer.all_special_ids) or [len(self._tokenizer) - 1])[-1]

    def _vocabulary(self, field: str, ends: tuple[int, ...]) -> Any:
        require_input(
            f"{field}: it needs a tokenizer, pass tokenizer= when loading the engine",
            self._tokenizer is not None,
        )
        if ends not in self._made:
            size = max(self._size, len(self._tokenizer))
            end_ids = list(ends) or [self._stand_in]
            with restating(
                ValueError,
                lambda error: InputError(
                    f"{field}: the tokenizer cannot be read for it ({error!s:.200})"
                ),
            ):
                self._made[ends] = library().hf.from_tokenizer(
                    self._tokenizer, n_vocab=size, eos_token=end_ids
                )
        return self._made[ends]


class Constraint:
    """Find the allowed continuations of any beginning of an answer; it goes back and forth between them.

    A beginning is the list of tokens generated so far. What depends on it is a function of it alone.
    field: that it was given by; size: of the target's logits; never: a token that is not allowed anywhere.
    """

    def __init__(
        self, field: str, matcher: Any, vocabulary: Any, size: int, never: int | None = None
    ) -> None:
        self._field, self._new, self._vocabulary = field, matcher, vocabulary
        self._matcher = matcher.deep_copy()
        self._size, self._never = size, never
        self._tokens: list[int] = []
        self._asked = 0
        # why the last call found nothing, where the library gave up
        self.fault: InputError | None = None

    def allowed(self, tokens: Sequence[int]) -> np.ndarray:
        """Return bool [vocabulary]: the tokens that may follow; none after a text that the grammar does not allow."""
        none = np.zeros(self._size, bool)
        if not self._go(tokens):
            return none
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._gave_up():
            return none
        mask = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask = np.pad(mask, (0, self._size - len(mask)))
        if (
            mask.sum() == 1
            and not self._matcher.is_stopped()
            and not self._takes(int(mask.argmax()))
        ):
            # Text like a special token's must follow: the library offers that token, and would not take it.
            mask[:] = False
            letter = self._vocabulary.tokenize_bytes(self._matcher.compute_ff_bytes()[:1])
            mask[[token for token in letter[:1] if self._takes(token)]] = True
        if self._never is not None:
            mask[self._never] = False
        return mask

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the text that must follow, as the tokenizer writes it; [] where there is a choice."""
        if not self._go(tokens):
            return []
        forced_ids = list(self._matcher.compute_ff_tokens())
        # text like a special token's is not that token
        return [] if self._gave_up() else forced_ids[: self._matcher.validate_tokens(forced_ids)]

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        """Return whether this token may follow these."""
        return (
            token != self._never and self._go(tokens) and self._takes(token) and not self._gave_up()
        )

    def complete(self, tokens: Sequence[int]) -> bool:
        """Return whether nothing can follow."""
        return self._go(tokens) and bool(self._matcher.is_stopped()) and not self._gave_up()

    def _takes(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]))

    def _go(self, tokens: Sequence[int]) -> bool:
        """Move to the place after these tokens; False, at an earlier place, where the grammar does not allow them."""
        tokens, self._asked, self.fault = list(tokens), len(tokens), None
        agreed = common_prefix(self._tokens, tokens)
        if agreed < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - agreed)
            del self._tokens[agreed:]
        self._tokens += tokens[agreed:][: self._matcher.try_consume_tokens(tokens[agreed:])]
        return not self._gave_up() and len(self._tokens) == len(tokens)

    def _gave_up(self) -> bool:
        """Return whether the library met a limit of its own; it is then reset for other beginnings."""
        if not self._matcher.is_error():
            return False
        place = f"behind {self._asked} tokens: " if self._asked else ""
        why = self._matcher.get_error()
        self.fault = refused(
            self._field, place + ("no text meets it" if why.startswith("NoExtension") else why)
        )
        self._matcher, self._tokens = self._new.deep_copy(), []
        return True


class ConstraintProcessor(LogitsProcessor):
    """Forbids what `constraint` does not allow after the tokens since `prompt_length`."""

    def __init__(self, constraint: Constraint, prompt_length: int) -> None:
        self.constraint, self.prompt_length = constraint, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.from_numpy(
            self.constraint.allowed(input_ids[0, self.prompt_length :].tolist())
        )
        if self.constraint.fault is not None:
            raise self.constraint.fault
        return scores.masked_fill(~allowed.to(scores.device), -float("inf"))

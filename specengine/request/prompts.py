"""Turning a prompt into token ids, and token ids into text."""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specengine.errors import (
    ContextLengthError,
    InputError,
    require,
    require_input,
    require_or,
    require_value,
    restating,
    shown,
)
from specengine.registry import is_array, is_number, plain
from specengine.request.readers import FILLERS, NoReaderError
from specengine.request.text import SharedTokenizer

MAX_NESTED = 32  # levels of a message's fields
ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE = re.compile(r"[\w-]+")
_QUOTED = re.compile(r"[\"']([\w-]+)")
_AS_TEXT = {"split_special_tokens": True}
_ENDED = {"add_generation_prompt": True}
_WHOLE_DTYPE = re.compile(r"(torch\.)?u?int\d+")
# of Unicode, for private use: hardly ever in a text
_PRIVATE = [chr(code) for code in range(0xE000, 0xE100)]
MAX_SECONDS = 10.0  # of filling a chat template
ACCEPTED = "accepted a string, a list of chat messages (role, content) or a list of token ids"

Ids = Sequence[int] | torch.Tensor | np.ndarray[Any, Any]
Prompt = str | Sequence[Mapping[str, str]] | Ids | Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Template = Mapping[str, Any] | None
Messages = Sequence[Mapping[str, Any]]

log = logging.getLogger(__name__)


# ---- room


LETTERS = 8  # for each token of the room: texts up to that are read at once
# more tokens than this for each of the room's are too many, however pieces are joined
MARGIN = 1.25
PIECE = 1 << 14  # characters that are read without looking up


@dataclass(frozen=True)
class Room:
    """A prompt's limit: a number of tokens.

    longest       characters of the longest token, where that is known already
    still_wanted  called before each piece of a long text is read; what it raises comes out
    """

    tokens: int
    longest: int | None = None
    still_wanted: Callable[[], None] = lambda: None

    def require(self, field: str, texts: Iterable[str], tokenizer: Any) -> None:
        """Raise InputError for texts that certainly do not fit; those that nearly do may pass.

        A text longer than that many of the longest tokens is refused unread. A long one is read in pieces, up to where
        there are too many.
        """
        text = "".join(texts)
        if len(text) <= LETTERS * self.tokens:
            return
        self.require_possible(field, len(text), tokenizer)
        count = 0
        size = min(PIECE, LETTERS * self.tokens)
        for start in range(0, len(text), size):
            self.still_wanted()
            piece = text[start : start + size].encode("utf-8", "replace").decode()
            count += len(tokenizer(piece, add_special_tokens=False)["input_ids"])
            if count > MARGIN * self.tokens:
                raise self._too_long(
                    field,
                    f"its first {min(start + size, len(text))} of {len(text)} characters have "
                    f"{count} tokens, accepted at most {self.tokens}",
                    count,
                )

    def require_possible(self, field: str, letters: int, tokenizer: Any) -> None:
        """Raise InputError where a text of that many tokens cannot hold that many characters."""
        longest = self.longest or longest_token(tokenizer)
        if letters > longest * self.tokens:
            raise self._too_long(
                field,
                f"it has {letters} characters, accepted at most {self.tokens} tokens, "
                f"of which the longest has {longest} characters",
                -(-letters // longest),
            )

    def _too_long(self, field: str, message: str, tokens: int) -> InputError:
        """Return the error for a text of at least that many tokens."""
        message = f"{field}: {message}"
        return (
            ContextLengthError(message, tokens, self.tokens, self.tokens - 1, at_least=True)
            if field == "prompt"
            else InputError(message)
        )


def longest_token(tokenizer: Any) -> int:
    """Return the characters of the vocabulary's longest token; sys.maxsize where the tokenizer does not tell."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(map(len, vocabulary), default=0) or sys.maxsize


# ---- prompts


def token_ids(  # noqa: PLR0913
    prompt: Prompt,
    tokenizer: Any,
    *,
    raw: bool,
    vocab_size: int,
    max_context: int,
    allow_special_text: bool = True,
    tools: Tools = None,
    template: Template = None,
    room: Room | None = None,
) -> list[int]:
    """Return the ids of `prompt`: a string, chat messages, ids, or an id tensor or array [length] or [1, length].

    A string becomes one user message where the tokenizer has a chat template, unless `raw`. InputError for an
    empty prompt, ids outside the vocabulary, more than one sequence, or no room for a token after the prompt.
    allow_special_text: the text of a special token is that token wherever it stands, as transformers reads it; else it
    is text like any other in what the caller gives, and InputError where the tokenizer cannot write it so.
    tools: functions for the chat template, as in transformers; of messages alone.
    template: what else the chat template is given; of messages alone.
    room: for the tokens of texts, by default that of the context.
    """
    room = room or Room(max_context)
    if tokenizer is not None:
        room.require("prompt", texts_in([prompt, tools, template]), tokenizer)
    ids = _encode(prompt, tokenizer, raw, allow_special_text, room, tools, template)
    require_input("prompt: it is empty, at least one token is needed", ids != [])
    require_tokens("prompt", ids, vocab_size)
    if len(ids) >= max_context:
        raise ContextLengthError(
            f"prompt: it has {len(ids)} tokens, accepted at most {max_context - 1}: the context here is "
            f"{max_context} and an answer needs room; {CONTEXT_SOURCES}",
            len(ids),
            max_context,
            max_context - 1,
        )
    return ids


CONTEXT_SOURCES = (
    "it is the config's max_position_embeddings unless the option context says otherwise"
)


def texts_in(value: Any, deepest: int | None = None) -> Iterator[str]:
    """Yield all text in prompts, messages and tools, in any field, as deep as messages may be nested.

    deepest: InputError for what is nested deeper; by default it is left out, and so are lists of token ids.
    """
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, str):
            yield part
            continue
        require_input(f"prompt: messages are nested deeper than {deepest} levels", depth != deepest)
        if depth <= MAX_NESTED + 1 and isinstance(part, Mapping):
            waiting += [(inner, depth + 1) for pair in part.items() for inner in pair]
        elif (
            depth <= MAX_NESTED + 1
            and isinstance(part, list | tuple)
            and (deepest is not None or not (part and type(part[0]) is int))
        ):
            waiting += [(inner, depth + 1) for inner in part]


def predicted_ids(
    prediction: str | Sequence[int] | None, tokenizer: Any, vocab_size: int
) -> list[int]:
    """Return the ids of a prediction, a text or ids, without special tokens; [] for None.

    InputError for anything else, ids outside the vocabulary and text without a tokenizer.
    """
    if prediction is None:
        return []
    if isinstance(prediction, str):
        _require(tokenizer, "a string", "prediction")
        _require_unicode("prediction", prediction)
        return _tokenized(tokenizer, prediction, add_special_tokens=False)
    prediction = _from_array(prediction, "prediction") if is_array(prediction) else prediction
    require_value(
        "prediction",
        prediction,
        "a string or a list of token ids",
        isinstance(prediction, list | tuple) and all(type(token) is int for token in prediction),
    )
    require_tokens("prediction", prediction, vocab_size)
    return list(prediction)


def _encode(
    prompt: Prompt,
    tokenizer: Any,
    raw: bool,
    live: bool,
    room: Room,
    tools: Tools,
    template: Template,
) -> list[int]:
    if is_array(prompt):
        return _from_array(prompt)
    if isinstance(prompt, str):
        require_input("prompt: it is empty, at least one token is needed", prompt != "")
        _require(tokenizer, "a string prompt")
        _require_unicode("prompt", prompt)
        if raw or not getattr(tokenizer, "chat_template", None):
            return _tokenized(tokenizer, prompt, **({} if live else _AS_TEXT))
        return _from_messages([{"role": "user", "content": prompt}], tokenizer, live, room)
    require_input(
        f"prompt: got {type(prompt).__name__}, {ACCEPTED}; of what a tokenizer returns pass its input_ids",
        isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | Mapping),
    )
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        _require(tokenizer, "chat messages")
        return _from_messages(items, tokenizer, live, room, tools, template)
    ids = [plain(item) if is_number(item) else item for item in items]
    if all(type(item) is int for item in ids):
        return ids
    wrong = next(item for item in ids if type(item) is not int)
    reason = (
        "for several prompts call generate_many"
        if isinstance(wrong, str | list | tuple | Mapping)
        else f"got {shown(wrong)} in a list"
    )
    raise InputError(f"prompt: {ACCEPTED}; {reason}")


def _tokenized(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Return the ids of a text by transformers' interface, or by an `encode` without its options."""
    if callable(tokenizer):
        return list(tokenizer(text, **options)["input_ids"])
    require_input(
        "allow_special_text: this tokenizer cannot tell special tokens from text, accepted True",
        "split_special_tokens" not in options,
    )
    ids = tokenizer.encode(text)
    return list(getattr(ids, "ids", ids))  # those of the library tokenizers say more than ids


def _from_array(prompt: Any, field: str = "prompt") -> list[int]:
    """Return the ids of a tensor or an array of whole numbers, on any device."""
    shape, dtype = tuple(prompt.shape), str(prompt.dtype)
    require_input(
        f"{field}: got a batch of {shape[0] if shape else 0}, accepted one sequence; for several "
        "call generate_many",
        len(shape) != 2 or shape[0] == 1,
    )
    require(
        field,
        f"{dtype} {shape}",
        "int64 [length] or [1, length], or narrower integers",
        len(shape) in (1, 2)
        and _WHOLE_DTYPE.fullmatch(dtype) is not None
        and isinstance(plain(prompt), list),
    )
    return list(plain(prompt.reshape(-1)))


def _from_messages(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    live: bool,
    room: Room,
    tools: Tools = None,
    template: Template = None,
) -> list[int]:
    require(
        "prompt",
        "messages, but this tokenizer has no chat template",
        "a string or token ids",
        bool(getattr(tokenizer, "chat_template", None)),
    )
    for message in messages:
        require_value(
            "prompt: a message",
            list(message),
            "role and content",
            {"role", "content"} <= message.keys(),
        )
        role = message["role"]
        require_value(
            "prompt: a message's role",
            role,
            f"{', '.join(ROLES)}, or one that the chat template names",
            isinstance(role, str)
            and (
                role in ROLES or role.split(" ")[0] in _QUOTED.findall(str(tokenizer.chat_template))
            ),
        )
        # another one could make marks of the template
        require_value(
            "prompt: a message's role",
            role,
            "letters, digits, _ and -",
            live or _ROLE.fullmatch(role) is not None,
        )
        _require_unicode("prompt", message)
    _require_unicode("tools", list(tools or []))
    _require_unicode("chat_template_kwargs", dict(template or {}))
    texts = [{**message, "content": _text_of(message["content"])} for message in messages]
    special = None if live else SpecialText.of(tokenizer)
    values = [*texts, *(tools or []), dict(template or {})]
    if special is not None and any(map(special.pattern.search, texts_in(values, MAX_NESTED))):
        return special.encode(texts, room, tools, template)
    tools, options = None if tools is None else list(tools), _ENDED | dict(template or {})
    if fills_itself(tokenizer):  # it may read other text as special tokens
        with _refusing("prompt"):
            filled_in: Any = tokenizer.apply_chat_template(
                texts, tools=tools, return_dict=True, **options
            )
            return list(filled_in["input_ids"])
    text = filled(tokenizer, texts, tools, "prompt", **options)
    room.require("prompt", [text], tokenizer)
    return _tokenized(tokenizer, text, add_special_tokens=False)


def _text_of(content: Any) -> str:
    """Return the text of a message: a string, or OpenAI's content parts of type text."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            require("prompt: a content part", f"type {shown(kind)}", "'text'", kind == "text")
            require(
                "prompt: a content part",
                "type 'text' without a text",
                "a string in it",
                isinstance(part.get("text"), str),
            )
        content = "".join(part["text"] for part in content)
    require(
        "prompt: a message's content",
        type(content).__name__,
        "a string or a list of text parts",
        isinstance(content, str),
    )
    return content


class SpecialText(NamedTuple):
    """Writes the text of special tokens as plain text: it is replaced in messages while the template is filled.

    texts: of the tokenizer's special tokens, the longest first. Special tokens are where every tokenizer cuts a text
    before it reads the pieces, so the pieces of a filled template can be read one by one; that this tokenizer does so
    is tried on the prompt itself.
    """

    tokenizer: Any
    texts: list[str]
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """Return the texts of a tokenizer, or None where it has no special tokens."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = sorted({token.content for token in added if token.special}, key=len, reverse=True)
        return (
            cls(tokenizer, texts, re.compile(f"({'|'.join(map(re.escape, texts))})"))
            if texts
            else None
        )

    def encode(
        self, messages: list[dict[str, Any]], room: Room, tools: Tools, template: Template
    ) -> list[int]:
        """Return the ids of the filled template, with special tokens only where the template has put them."""
        options = dict(template or {})
        strings = list(texts_in([*messages, *(tools or []), options], MAX_NESTED))
        mark = next((char for char in _PRIVATE if not any(char in text for text in strings)), None)
        require_input(
            "prompt: allow_special_text=False needs a private-use character that no message holds",
            mark is not None,
        )

        def marked(value: Any) -> Any:
            return _with(
                value,
                lambda text: self.pattern.sub(
                    lambda match: f"{mark}{self.texts.index(match[0])}{mark}", text
                ),
            )

        tools = tools and marked(list(tools))
        text = filled(self.tokenizer, marked(messages), tools, "prompt", **_ENDED | marked(options))
        room.require("prompt", [text], self.tokenizer)
        if self._pieces(text) != list(self.tokenizer(text, add_special_tokens=False)["input_ids"]):
            found = next(text for text in self.texts if any(text in part for part in strings))
            raise InputError(
                f"prompt: this tokenizer cannot write {found!r} as text; pass allow_special_text=True"
            )
        names = re.compile(f"{mark}(\\d+){mark}")
        return self._pieces(
            text, lambda piece: names.sub(lambda found: self.texts[int(found[1])], piece)
        )

    def _pieces(self, text: str, restored: Callable[[str], str] = str) -> list[int]:
        ids = []
        for place, piece in enumerate(self.pattern.split(text)):
            if place % 2:  # a special token
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                ids += self.tokenizer(restored(piece), add_special_tokens=False, **_AS_TEXT)[
                    "input_ids"
                ]
        return ids


def _with(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of messages with all their text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with(name, change): _with(part, change) for name, part in value.items()}
    return [_with(part, change) for part in value] if isinstance(value, list) else value


def _require_unicode(field: str, value: Any) -> None:
    """Raise InputError for text in a value, as deep as `texts_in` looks, that is not Unicode."""
    with restating(
        UnicodeEncodeError,
        lambda error: InputError(
            f"{field}: character {error.start} is not Unicode text ({error.object[error.start]!r}); was it read as "
            "UTF-8?"
        ),
    ):
        for text in texts_in(value, MAX_NESTED):
            text.encode("utf-8")


def require_tokens(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InputError for a token id that the vocabulary does not have."""
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    require_input(
        f"{field}: token id {outside} is out of range, accepted 0 to {vocab_size - 1}",
        outside is None,
    )


def _require(tokenizer: Any, what: str, field: str = "prompt") -> None:
    require_input(
        f"{field}: {what} needs a tokenizer, pass tokenizer= or token ids", tokenizer is not None
    )


# ---- chat templates: each is a program of the model's folder, which may loop without end or take all memory


def filled(
    tokenizer: Any, messages: Messages, tools: Any = None, field: str = "messages", **options: Any
) -> str:
    """Return the text of messages by the tokenizer's chat template, as its `apply_chat_template` does.

    InputError, which names the field, where the template does not take them or has no bounds. options: what else the
    template is given.
    """
    with _refusing(field):
        if fills_itself(tokenizer):
            return str(
                tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
            )
        options = {**tokenizer.special_tokens_map, "tools": tools, **options}
        options["chat_template"] = tokenizer.get_chat_template(options.get("chat_template"), tools)
        conversation = [
            {name: value for name, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            answer = FILLERS.answer([conversation, options], MAX_SECONDS)
        except NoReaderError:
            log.warning("chat templates are filled in this process, as no other can be started")
            return str(render_jinja_template([conversation], **options)[0][0])
        require_or(ValueError, answer.get("fault", ""), "fault" not in answer)
        return str(answer["text"])


def fills_itself(tokenizer: Any) -> bool:
    """Return whether a tokenizer fills templates by code of its own, which its user trusts, or of its library."""
    kind = tokenizer.kind if isinstance(tokenizer, SharedTokenizer) else type(tokenizer)
    return (
        getattr(kind, "apply_chat_template", None)
        is not PreTrainedTokenizerBase.apply_chat_template
    )


def _refusing(field: str) -> AbstractContextManager[None]:
    # a template raises what it likes over roles and fields that it does not know
    return restating(
        Exception,
        lambda error: InputError(
            f"{field}: the chat template does not take these messages ({' '.join(str(error).split()):.300})"
        ),
    )

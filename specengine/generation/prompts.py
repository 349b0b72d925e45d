"""Turning a prompt into token ids, and token ids into text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from specengine.errors import InputError

MOST_HELD_BACK = 8
LETTERS = 8  # for each token of the context, of a text whose beginning is read first
MARGIN = 1.25  # more tokens than this for each of the context's are too many, however the text goes on
ACCEPTED = "accepted are a string, a list of chat messages (role, content) or a list of token ids"

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | torch.Tensor


def token_ids(prompt: Prompt, tokenizer: Any, *, raw: bool, vocab_size: int, max_context: int) -> list[int]:
    """Ids of `prompt`: a string, a list of chat messages, ids, or an id tensor [length] or [1, length].

    A string becomes one user message where the tokenizer has a chat template, unless `raw`. InputError for an
    empty prompt, ids outside the vocabulary, more than one sequence, or no room for a token behind the prompt.
    """
    _refuse_far_too_long(prompt, tokenizer, max_context)
    ids = _encode(prompt, tokenizer, raw)
    if not ids:
        raise InputError("prompt: it is empty, at least one token is needed")
    _require_known("prompt", ids, vocab_size)
    if len(ids) >= max_context:
        raise InputError(
            f"prompt: it has {len(ids)} tokens, accepted at most {max_context - 1}: "
            f"the model's context is {max_context} and an answer needs room"
        )
    return ids


def _refuse_far_too_long(prompt: Prompt, tokenizer: Any, max_context: int) -> None:
    """Raise InputError for text whose beginning alone has too many tokens: the whole would be read for long."""
    if tokenizer is None:
        return
    texts = [prompt] if isinstance(prompt, str) else [item.get("content") for item in _messages_in(prompt)]
    for text in texts:
        if isinstance(text, str) and len(text) > LETTERS * max_context:
            beginning = text[: LETTERS * max_context]
            _require_unicode("prompt", beginning)
            count = len(tokenizer(beginning, add_special_tokens=False)["input_ids"])
            if count > MARGIN * max_context:
                raise InputError(
                    f"prompt: its first {len(beginning)} of {len(text)} characters have {count} tokens, accepted at "
                    f"most {max_context - 1}: the model's context is {max_context} and an answer needs room"
                )


def _messages_in(prompt: Prompt) -> list[Mapping[str, Any]]:
    return [item for item in prompt if isinstance(item, Mapping)] if isinstance(prompt, list | tuple) else []


def predicted_ids(prediction: str | Sequence[int] | None, tokenizer: Any, vocab_size: int) -> list[int]:
    """Ids of the text, or ids, that an answer is expected to be like, without special tokens; None is none.

    InputError for anything else, ids outside the vocabulary and text without a tokenizer.
    """
    if prediction is None:
        return []
    if isinstance(prediction, str):
        _require(tokenizer, "a string", "prediction")
        _require_unicode("prediction", prediction)
        return list(tokenizer(prediction, add_special_tokens=False)["input_ids"])
    if not isinstance(prediction, list | tuple) or not all(type(token) is int for token in prediction):
        raise InputError(f"prediction: got {prediction!r:.80}, accepted a string or a list of token ids")
    _require_known("prediction", prediction, vocab_size)
    return list(prediction)


def _encode(prompt: Prompt, tokenizer: Any, raw: bool) -> list[int]:
    if isinstance(prompt, torch.Tensor):
        return _from_tensor(prompt)
    if isinstance(prompt, str):
        if not prompt:
            raise InputError("prompt: it is empty, at least one token is needed")
        _require(tokenizer, "a string prompt")
        _require_unicode("prompt", prompt)
        if raw or not getattr(tokenizer, "chat_template", None):
            return list(tokenizer(prompt)["input_ids"])
        return _from_messages([{"role": "user", "content": prompt}], tokenizer)
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
        raise InputError(f"prompt: got {type(prompt).__name__}, {ACCEPTED}")
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        _require(tokenizer, "chat messages")
        return _from_messages(items, tokenizer)  # type: ignore[arg-type]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return items  # type: ignore[return-value]
    raise InputError(f"prompt: {ACCEPTED}")


def _from_tensor(prompt: torch.Tensor) -> list[int]:
    if prompt.ndim == 2 and prompt.shape[0] != 1:
        raise InputError(
            f"prompt: got a batch of {prompt.shape[0]}, this engine serves one sequence; call generate for each"
        )
    if prompt.ndim not in (1, 2) or prompt.dtype not in (torch.int64, torch.int32):
        raise InputError(f"prompt: got {prompt.dtype} {tuple(prompt.shape)}, accepted int64 [length] or [1, length]")
    return prompt.reshape(-1).tolist()


def _from_messages(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("prompt: this tokenizer has no chat template, pass a string or token ids")
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise InputError(f"prompt: each message needs role and content, got {sorted(message)}")
    texts = [{**message, "content": _text_of(message["content"])} for message in messages]
    encoded = tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def _text_of(content: Any) -> str:
    """The text of a message: a string, or OpenAI's content parts of type text."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InputError(f"prompt: a content part of type {kind!r}, accepted are parts of type 'text'")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise InputError(
            f"prompt: a message's content is {type(content).__name__}, accepted are a string or a list of text parts"
        )
    _require_unicode("prompt", content)
    return content


def _require_unicode(field: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{field}: character {error.start} is no Unicode text ({text[error.start]!r}); was it read as UTF-8?"
        ) from error


def _require_known(field: str, ids: Sequence[int], vocab_size: int) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InputError(f"{field}: token id {outside} is out of range, accepted 0 to {vocab_size - 1}")


def _require(tokenizer: Any, what: str, field: str = "prompt") -> None:
    if tokenizer is None:
        raise InputError(f"{field}: {what} needs a tokenizer, pass tokenizer= or token ids")


class TextStream:
    """Decodes a growing list of tokens piece by piece; the pieces add up to the decoded whole.

    Text is held back while it ends inside a character, which is at most MOST_HELD_BACK tokens long.
    """

    def __init__(self, decode: Any) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0  # the tokens before are settled; some context is kept, spaces depend on it
        self._end = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._tokens.extend(tokens)
        before = self._decode(self._tokens[self._start : self._end])
        now = self._decode(self._tokens[self._start :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and len(self._tokens) - self._end < MOST_HELD_BACK:
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return now[len(before) :]

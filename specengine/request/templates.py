"""Filling chat templates: each is a program of the model's folder, which may loop without end or take all memory."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specengine.errors import InputError
from specengine.request.readers import FILLERS, NoReaderError
from specengine.request.text import SharedTokenizer

Messages = Sequence[Mapping[str, Any]]
MAX_SECONDS = 10.0

log = logging.getLogger(__name__)


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
        return _filled(tokenizer, messages, tools, options)


def filled_ids(tokenizer: Any, messages: Messages, tools: Any = None, **options: Any) -> list[int]:
    """Return the token ids of messages by a tokenizer that `fills_itself`: it may read other text as special tokens."""
    with _refusing("prompt"):
        return list(
            tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, **options)[
                "input_ids"
            ]
        )


def fills_itself(tokenizer: Any) -> bool:
    """Return whether a tokenizer fills templates by code of its own, which its user trusts, or of its library."""
    kind = tokenizer.kind if isinstance(tokenizer, SharedTokenizer) else type(tokenizer)
    return (
        getattr(kind, "apply_chat_template", None)
        is not PreTrainedTokenizerBase.apply_chat_template
    )


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    try:
        yield
    except (
        Exception
    ) as error:  # a template raises what it likes over roles and fields that it does not know
        text = " ".join(str(error).split())
        raise InputError(
            f"{field}: the chat template does not take these messages ({text:.300})"
        ) from error


def _filled(tokenizer: Any, messages: Messages, tools: Any, options: dict[str, Any]) -> str:
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
    if "fault" in answer:
        raise ValueError(answer["fault"])
    return str(answer["text"])

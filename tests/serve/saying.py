"""A server whose model says what a test wants it to say, with a chat template that takes tools and thoughts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from specengine import Engine
from specengine.drafters.ngram import NGram
from specengine.protocol import preparing
from specengine.protocol.requests import Sampling
from tests.backend import target_of
from tests.engine.engines import forced
from tests.serve.served import Served, served
from tests.serve.tiny_model import TOOLS as TEMPLATE
from tests.toy import byte_tokenizer, policy_for, tiny

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"text": "rivers"}}\n</tool_call>'


class Saying:
    """`server`, whose answers are `said` and then end, if it is not None; `prompt` is the last prompt that it had.

    said: a text, or what returns the text for a request
    """

    def __init__(self, server: Served) -> None:
        self.server = server
        self.said: str | Callable[[Sampling], str | None] | None = None
        self.prompt = ""


@contextlib.contextmanager
def saying(extra: Sequence[str] = (), context: int = 2048, **settings: Any) -> Iterator[Saying]:
    """extra: further special tokens."""
    tokenizer = byte_tokenizer(TEMPLATE, extra)
    end = tokenizer.convert_tokens_to_ids("<|end|>")

    def engine() -> Engine:
        model = tiny(max_position_embeddings=context, vocab_size=len(tokenizer))
        model.generation_config.eos_token_id = end
        return Engine(
            target_of(model), NGram(longest=3, shortest=1), policy_for("chain"), tokenizer
        )

    own_options, own_prompt = preparing._options, preparing.CheckedRequest.prompt_ids
    with served(engine, **settings) as server:
        made = Saying(server)

        def options(request: Sampling) -> dict[str, object]:
            found, said = own_options(request), made.said
            said = said(request) if callable(said) else said
            if said is None:
                return found
            return found | {"logits_processor": [forced([*tokenizer(said)["input_ids"], end])]}

        def prompt(self: object, *given: object) -> list[int]:
            ids = own_prompt(self, *given)  # type: ignore[arg-type]
            made.prompt = tokenizer.decode(ids)
            return ids

        with (
            mock.patch.object(preparing, "_options", options),
            mock.patch.object(preparing.CheckedRequest, "prompt_ids", prompt),
        ):
            yield made

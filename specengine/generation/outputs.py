"""What a generation gives: an answer, pieces of it, transformers' output."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.generation import GenerateDecoderOnlyOutput

from specengine.records import Cycle, Stats, TokenLogprob


@dataclass(frozen=True)
class GenerationResult:
    """An answer. `token_ids` are the new tokens only; `finish_reason` is stop, length or criteria; `logprobs` has an
    entry for each token, where they were asked for."""

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


def decoder(tokenizer: Any, shown: Collection[int] = ()) -> Callable[[list[int]], str]:
    """Token ids to text without special tokens but those of `shown`; empty text where there is no tokenizer."""
    if tokenizer is None:
        return lambda tokens: ""

    def decode(tokens: list[int]) -> str:
        at = next((at for at, token in enumerate(tokens) if token in shown), len(tokens))
        text = tokenizer.decode(tokens[:at], skip_special_tokens=True)
        return text if at == len(tokens) else text + tokenizer.decode([tokens[at]]) + decode(tokens[at + 1 :])

    return decode

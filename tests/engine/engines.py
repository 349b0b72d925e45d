"""Engines over tiny random models, what transformers answers instead, and processors that must not be confused."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from specengine import Engine
from specengine.drafters import Drafter
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from tests import toy
from tests.backend import lm_of, target_of
from tests.toy import byte_tokenizer, policy_for, tiny

PROMPT = [*range(40, 56), *range(40, 50)]


@cache
def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny(family)


@cache
def untouched(family: str = "llama") -> PreTrainedModel:
    """The same weights, never seen by an engine."""
    return tiny(family)


near_copy = cache(toy.near_copy)


def plainly(family: str, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return the answer of transformers' own greedy generate."""
    if not options:
        return list(_without_options(family, tuple(prompt), count))
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, **options}
    out = untouched(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options
    )
    return out[0, len(prompt) :].tolist()


@cache  # every policy is compared with the same answers
def _without_options(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    return plainly(family, list(prompt), count, do_sample=False)


def engine_of(
    family: str = "llama", draft: str = "small_model", policy: str = "eagle", tokenizer: Any = None
) -> Engine:
    """A new engine over the shared model of that family; draft `none` decodes plainly."""
    target = target_of(model_of(family))
    if draft == "none":
        return Engine(target, None, None, tokenizer)
    return Engine(target, _drafter_of(draft, family), policy_for(policy, 3), tokenizer)


def _drafter_of(draft: str, family: str) -> Drafter:
    if draft == "ngram":
        return NGram(longest=3, shortest=1)
    return Recycling() if draft == "recycling" else SmallModel(lm_of(near_copy(family)))


class DependsOnThePath(LogitsProcessor):
    """A bias that changes with every token before: wrong as soon as a node is given another path than its own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        weights = torch.arange(1, input_ids.shape[1] + 1)
        key = int((input_ids[0] * weights).sum())
        return scores + 3.0 * torch.sin(torch.arange(scores.shape[1]) * (key % 97 + 1.0))


class InPlace(LogitsProcessor):
    """Changes the scores it is given, as some processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] = -float("inf")
        return scores


@cache
def tokenizer() -> Any:
    return byte_tokenizer()


def forced(text: str | list[int]) -> LogitsProcessor:
    """Makes the model answer `text`, byte by byte, or these tokens."""
    wanted = tokenizer()(text)["input_ids"] if isinstance(text, str) else text

    class Forced(LogitsProcessor):
        start: int | None = None

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if self.start is None:
                self.start = input_ids.shape[1]
            forced = torch.full_like(scores, -float("inf"))
            forced[0, wanted[(input_ids.shape[1] - self.start) % len(wanted)]] = 0.0
            return forced

    return Forced()

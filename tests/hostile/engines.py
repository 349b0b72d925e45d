"""One engine over a tiny model, its plain answer, and the check that whatever went wrong left it usable."""

from functools import cache
from typing import Any

from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters.small_model import SmallModel
from tests import toy
from tests.backend import lm_of, target_of
from tests.toy import LetterTokenizer, Tables, ToyDrafter, ToyTarget, policy_for, tiny

PROMPT = [*range(40, 56)]


@cache
def model() -> PreTrainedModel:
    return tiny("llama")


near_copy = cache(toy.near_copy)


def engine_of(policy: str = "eagle", tokenizer: Any = None) -> Engine:
    return Engine(target_of(model()), SmallModel(lm_of(near_copy())), policy_for(policy), tokenizer)


def plainly(count: int = 20, **options: Any) -> list[int]:
    return (
        Engine(target_of(model()), None, None)
        .generate(PROMPT, max_new_tokens=count, **options)
        .token_ids
    )


def toy_engine() -> Engine:
    tables = Tables(6, 1)
    return Engine(ToyTarget(tables), ToyDrafter(tables), policy_for("eagle"), LetterTokenizer())


def stream_into(seen: list[int], engine: Engine, **options: Any) -> None:
    """Stream 40 tokens and note each as it comes, so that what came before an error is known."""
    for piece in engine.stream(PROMPT, max_new_tokens=40, **options):
        seen += piece.cycle.tokens


def check_usable(engine: Engine) -> None:
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(20)

"""A speculative engine and a plain one over the same toy target, and plain decoding without the engine."""

from typing import Any

import numpy as np

from specengine.engine import Engine
from specengine.request.options import GenerationOptions
from specengine.request.sampling import History
from tests.toy import CPU, LetterTokenizer, Tables, ToyDrafter, ToyTarget, policy_for


def engines(world: dict[str, Any], policy: str, draft: str = "toy") -> tuple[Engine, Engine]:
    """A speculative engine and a plain one over the same toy target."""
    vocabulary, seed = world["vocabulary"], world["seed"]
    shape = {"concentration": world["concentration"], "exact": world["exact"]}
    tables = Tables(vocabulary, seed, **shape)
    like = Tables(vocabulary, seed + 1, like=tables, share=world["share"], **shape)
    columns = np.random.default_rng(seed).permutation(vocabulary)[: max(1, vocabulary - 2)].tolist()
    drafter = {
        "toy": ToyDrafter(like),
        "normalized": ToyDrafter(like, normalized=True),
        "columns": ToyDrafter(like, columns=columns),
    }[draft]
    speculative = Engine(ToyTarget(tables), drafter, policy_for(policy, seed), LetterTokenizer())
    return speculative, Engine(ToyTarget(tables), None, None, LetterTokenizer())


def prompt_of(world: dict[str, Any]) -> list[int]:
    return np.random.default_rng(world["seed"]).integers(0, world["vocabulary"], 3).tolist()


def by_hand(target: ToyTarget, prompt: list[int], options: dict[str, Any], count: int) -> list[int]:
    """Plain decoding without the engine: one choice after another."""
    sampler = GenerationOptions.of(dict(options), None, len(prompt), 1000).sampler(len(prompt), CPU)
    history = History(prompt, len(prompt) + count)
    for _ in range(count):
        token = sampler.choose(target.tables.logits(history.ids[0].tolist()), history)
        assert token is not None
        history.append(token)
    return history.ids[0, len(prompt) :].tolist()

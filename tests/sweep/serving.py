"""How a tiny model is served, held against transformers' own `generate`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.drafters import NO_HINTS, Drafter, Hints
from specengine.errors import SpecEngineError
from specengine.models.huggingface import CausalLM
from specengine.models.native import NativeLM
from specengine.models.own_cache import OwnCacheTarget
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies.baselines.eagle import Eagle
from specengine.records import Cycle
from tests.sweep.small import VOCABULARY, WINDOW, NotMadeError, model_of

NEW = 24
LENGTHS = (5, 4 * WINDOW)
TABLE = Path(__file__).with_name("verdicts.json")
DRAFTED = ("trees, native", "trees", "trees, dense mask", "trees by paths")
EXACT = (*DRAFTED, "plainly")


class Knowing(Drafter):
    """A draft that knows the text: mostly right, now and then second or wrong, with wrong tokens beside."""

    name = "knowing"

    def __init__(self, text: list[int]) -> None:
        self._text, self._tokens = text, list[int]()

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self._tokens = list(prompt)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        rows, root = [], int(tree.tokens[0])
        for node in frontier.alive().tolist():
            seen = [*self._tokens, root, *tree.path_tokens(node)]
            place = len(seen)
            logits = (
                torch.arange(VOCABULARY).mul(7).add(place * 31).remainder(VOCABULARY).float()
                / VOCABULARY
            )
            if self._text[:place] == seen and place < len(self._text) and place % 7:
                logits[self._text[place]] = 0.97 if place % 5 == 0 else 3.0
            rows.append(logits)
        return Step(torch.stack(rows))

    def accept(self, cycle: Cycle) -> None:
        self._tokens += [int(cycle.tree.tokens[0]), *cycle.tokens[:-1]]

    def reset(self) -> None:
        self._tokens = []


def prompt_of(length: int) -> list[int]:
    return [(7 * place * place + 3 * place + 11) % (VOCABULARY - 3) + 3 for place in range(length)]


def generated(model: PreTrainedModel, prompt: list[int], *, cached: bool = True) -> list[int]:
    """Return what transformers itself answers, greedily."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW}
    options["use_cache"] = cached
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(prompt) :
    ].tolist()


def kind_of(engine: Engine) -> str:
    """Return how the engine's target runs."""
    if isinstance(engine.target, OwnCacheTarget):
        return "trees by paths" if engine.target.trees else "plainly"
    lm = engine.target.lm  # type: ignore[attr-defined]
    if isinstance(lm, NativeLM):
        return "trees, native"
    return (
        "trees, dense mask"
        if isinstance(lm, CausalLM) and lm.attention == "dense mask"
        else "trees"
    )


def verdict(model: PreTrainedModel) -> str:
    """Return how a model is served: where an answer is not that of `generate`, or plain decoding's, `WRONG: ...`."""
    try:
        engine = Engine.from_pretrained(model, policy="plain")
    except SpecEngineError as error:
        return f"not: {str(error).partition(': ')[2]}"
    kind = kind_of(engine)
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = generated(model, prompt)
        given = {"max_new_tokens": NEW, "eos_token_id": []}
        sampling = {**given, "do_sample": True, "temperature": 1.0, "seed": 3}
        plain = engine.generate(prompt, **given)
        if plain.token_ids != expected:
            return f"WRONG: plain, prompt of {length} ({kind})"
        sampled = engine.generate(prompt, **sampling).token_ids
        if kind == "plainly":
            default = Engine.from_pretrained(model)
            if default.generate(prompt, **given).token_ids != expected or not default.target.notes:
                return f"WRONG: default, prompt of {length} ({kind})"
            continue
        drafted = Engine.from_pretrained(
            model, Knowing([*prompt, *expected]), Eagle(width=3, expansions=3, budget=9)
        )
        answer = drafted.generate(prompt, **given)
        if answer.token_ids != expected:
            return f"WRONG: trees, prompt of {length} ({kind})"
        if (passes := answer.stats.num_spec_steps + answer.stats.num_plain_steps) > 0.75 * NEW:
            return f"WRONG: {passes} passes for {NEW} tokens ({kind})"
        again = Engine.from_pretrained(
            model, Knowing([*prompt, *sampled]), Eagle(width=3, expansions=3, budget=9)
        )
        if again.generate(prompt, **sampling).token_ids != sampled:
            return f"WRONG: sampled trees, prompt of {length} ({kind})"
    return kind


def verdict_of(kind: str) -> str:
    """Return the verdict on an entry of the mapping; `not made` where no tiny model of it can be."""
    try:
        model = model_of(kind)
    except NotMadeError:
        return "not made"
    return verdict(model)


def read() -> dict[str, Any]:
    """Return the table: the version of transformers, and verdicts by name."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def summary(verdicts: dict[str, str]) -> Counter[str]:
    """Return how many entries have each verdict."""
    return Counter(verdicts.values())

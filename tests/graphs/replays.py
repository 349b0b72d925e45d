"""Engines whose cycles replay on the pretended CUDA device, and the same engines on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from specengine import Engine
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.small_model import SmallModel
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops.cuda_graphs import Graphs
from tests import toy
from tests.graphs import pretended
from tests.ops.backends import choose

PROMPT = [*range(40, 56), *range(40, 50)]
# what that does depends on its own past
POLICIES = [name for name in toy.POLICIES if name != "random"]
DRAFTS = ("small_model", "eagle3")
COUNT = 7
Way = dict[str, Any]  # options of a generation
WAYS: list[Way] = [{}, {"temperature": 1.0, "seed": 5}]


LEAST = {"num_hidden_layers": 1, "num_key_value_heads": 1}  # for what costs by layers and heads


@cache
def on_the_host(draft: str, least: bool) -> tuple[Any, Any]:
    """A target and its draft."""
    if draft == "small_model":
        changes = LEAST if least else {"num_hidden_layers": 2}
        return toy.tiny("llama", **changes), toy.near_copy("llama", **changes)
    model = toy.tiny("llama", **(LEAST if least else {"num_hidden_layers": 4}))
    changes = {"num_heads": 2, "num_kv_heads": 1, "layer_ids": (0,)} if least else {}
    return model, toy.tiny_head(toy.head_config(3, model, **changes))


@cache
def on_the_device(draft: str, least: bool) -> tuple[Any, Any]:
    model, other = on_the_host.__wrapped__(draft, least)
    return pretended.moved(model), pretended.moved(other)


def engine_of(draft: str, policy: str, *, captured: bool, least: bool = False) -> Engine:
    model, other = (on_the_device if captured else on_the_host)(draft, least)
    target = HuggingFaceTarget(model, captured=captured)
    drafter = (
        SmallModel(other, target.vocab_size)
        if draft == "small_model"
        else EagleDraft(other, target.lm)
    )
    return Engine(target, drafter, toy.policy_for(policy, 3))


def answer(engine: Engine, options: Way, prompt: Sequence[int] = PROMPT) -> Any:
    """Tokens, each cycle's tree and path, and the counters."""
    stream = engine.stream(list(prompt), **({"max_new_tokens": COUNT} | options))
    cycles = [piece.cycle for piece in stream]
    trees = [
        (cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.path, cycle.tokens)
        for cycle in cycles
    ]
    stats = stream.result.stats
    counters = (
        stats.num_draft_tokens,
        stats.num_draft_passes,
        stats.acceptance_histogram,
        stats.reached_histogram,
    )
    return stream.result.token_ids, trees, counters, [cycle.drafted for cycle in cycles]


def check(
    draft: str,
    policy: str,
    ways: Sequence[Way] = WAYS,
    *,
    backends: str = "reference",
    least: bool = False,
    branches: bool = False,
) -> Graphs:
    """Replays, with ops by these backends, equal the eager engine by the ops' meanings; least: of the smallest models.

    branches: with graphs that have parts under a condition.

    Generations are those of one engine: a history outlives them. Returns what was captured.
    """
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, "reference")
        host = engine_of(draft, policy, captured=False, least=least)
        expected = [answer(host, way) for way in ways]
        choose(patch, backends)
        with pretended.cuda(branches=branches):
            engine = engine_of(draft, policy, captured=True, least=least)
            assert engine.drivers.own.captured is not None
            for way, wanted in zip(ways, expected, strict=True):
                assert answer(engine, way) == wanted
                assert all(
                    known.graph is not None
                    for known in engine.drivers.own.captured.graphs._captured.values()
                )
    return engine.drivers.own.captured.graphs

"""A prompt of up to the budget's tokens is a tree of one path, which the graph that verifies runs, once it is there."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine, policies
from specengine.drafters.small_model import SmallModel
from specengine.engine.captured import CapturedDriver
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.kv_cache import KVCache
from specengine.ops import cuda_graphs as graphs
from specengine.ops.tree import TokenTree
from tests import toy
from tests.graphs import engines, pretended
from tests.graphs.replays import PROMPT, engine_of
from tests.graphs.test_strict import strict_target
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
BUDGET = 24
SHORT, LONG = PROMPT[:20], PROMPT * 2


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)


def policy_of() -> Any:
    return policies.make("eagle", width=3, expansions=2, budget=BUDGET)


def with_budget(draft: str = "eagle3", *, captured: bool = True) -> Engine:
    engine = engine_of(draft, "eagle", captured=captured, least=True)
    engine.policy = policy_of()
    return engine


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    names, run = Counter[str](), CapturedDriver._run

    def noted(self: CapturedDriver, name: str) -> Any:
        names[name] += 1
        return run(self, name)

    monkeypatch.setattr(CapturedDriver, "_run", noted)
    return names


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_answers_after_short_prompts_are_those_of_the_host(draft: str, ran: Counter[str]) -> None:
    host = with_budget(draft, captured=False)
    prompts = [SHORT, SHORT[:7], SHORT[:2], SHORT[:1], LONG, SHORT]
    expected = [host.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
    with pretended.cuda():
        engine = with_budget(draft)
        answers = list[list[int]]()
        for prompt in prompts:
            answers.append(engine.generate(prompt, max_new_tokens=6).token_ids)
            ran["prompts"] += 1
            if ran["prompts"] == 1:
                assert not ran["verify"]  # the first prompt waits for no capture
        assert answers == expected
    assert ran["verify"] == 3  # of those with tokens before the root, and no more than the budget


def test_a_warmed_up_engine_runs_its_first_short_prompt_so(ran: Counter[str]) -> None:
    with pretended.cuda() as device:
        engine = with_budget()
        engine.warmup(64)
        ran.clear()
        before, stream = device.waits, engine.stream(SHORT, max_new_tokens=4)
        next(stream)
        assert ran["verify"] == 1
        assert device.waits > before
        stream.close()
        engine.generate(LONG, max_new_tokens=2)
        assert ran["verify"] == 1


def test_a_second_turn_of_few_tokens_runs_so(ran: Counter[str]) -> None:
    plain = engines.engine_of("none", "", captured=False)
    engine = engines.engine_of("eagle3", policy_of(), captured=True)
    engine.tokenizer = plain.tokenizer = toy.byte_tokenizer()
    ours, theirs = engine.session(), plain.session()
    for turn, text in enumerate(("a longer text than the budget has room for", "cd", "e")):
        turned = ours.generate(text, max_new_tokens=8, temperature=0.0)
        assert (
            turned.token_ids == theirs.generate(text, max_new_tokens=8, temperature=0.0).token_ids
        )
        assert (turned.stats.num_cached_prompt_tokens > 0) is (turn > 0)
        assert (ran["verify"] > 0) is (turn > 0)


def cached(engine: Engine, prompt: list[int], keep: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values, features, and logits of the next token after a prompt, all else of the cache NaN."""
    target: Any = engine.target
    eager, captured = engine.drivers.own
    (captured or eager).reserve(100)
    target.prefill(prompt[:keep])
    target.cache.slab[:, :, :, keep:] = math.nan
    features = (captured or target).prefill(prompt, keep)
    assert target.tokens == prompt
    assert target.cache.length == len(prompt)
    slots = target.cache.slab[:, :, :, : len(prompt)].clone()
    logits, _ = target.verify(TokenTree.root(5))
    assert features is not None
    return slots, features, logits[0]


@torch.inference_mode()
@pytest.mark.parametrize(("length", "keep"), [(20, 0), (1, 0), (50, 30), (50, 10)])
def test_what_a_prompt_leaves_is_what_it_leaves_eagerly(length: int, keep: int) -> None:
    prompt = [(7 * place) % 90 + 5 for place in range(length)]
    target = HuggingFaceTarget(engines.model())
    target.want((1, 2))
    expected = cached(Engine(target, None, None), prompt, keep)
    engine = engines.engine_of("eagle3", policy_of(), captured=True)
    engine.target.want((1, 2))
    with engines.frozen() as calls:
        engines.driver_of(engine).graphs.captures["another"] = 1  # of an earlier prompt
        by_graph = cached(engine, prompt, keep)
    for ours, theirs in zip(by_graph, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert any(name == "verify" for _, name in calls) is (length - keep <= BUDGET)


@torch.inference_mode()
def test_strict_targets_keep_the_bits_of_their_prompts() -> None:
    kept = list[KVCache]()
    for warm in (False, True):
        target = strict_target()
        drafter = SmallModel(target.model, target.vocab_size)
        engine = Engine(target, drafter, policy_of())
        if warm:
            engine.warmup(64)
        engines.driver_of(engine).reserve(100)
        engines.driver_of(engine).prefill(SHORT, 0)
        kept.append(target.cache)
    first, second = (cache.slab[:, :, :, : len(SHORT)] for cache in kept)
    assert torch.equal(first, second)


def test_moved_weights_are_captured_again() -> None:
    loaded = toy.tiny("llama").to(engines.DEVICE)
    drafter = SmallModel(engines.near_copy(), loaded.config.vocab_size)
    engine = Engine(HuggingFaceTarget(loaded, captured=True), drafter, policy_of())
    for _ in range(2):
        engine.generate(SHORT, max_new_tokens=4)
    captured = engines.driver_of(engine).graphs.captures["verify"]
    layer = loaded.lm_head
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0).clone(), requires_grad=False)
    after = engine.generate(SHORT, max_new_tokens=4).token_ids
    assert engines.driver_of(engine).graphs.captures["verify"] == captured + 1
    plain = Engine(HuggingFaceTarget(loaded), None, None)
    assert after == plain.generate(SHORT, max_new_tokens=4).token_ids

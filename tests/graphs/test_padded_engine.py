"""The engine over padded forwards: answers and trees of the eager engine, and nothing that a capture would freeze."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from specengine.drafters._captured_small_model import CapturedSmallModel
from specengine.targets.captured import CapturedTarget
from torch import Tensor

from specengine import Engine, ops
from specengine import cuda_graphs as graphs
from specengine.cuda_graphs import Graphs
from specengine.drafters import _passes
from specengine.errors import EngineBusyError, InputError
from specengine.modeling import kv_cache as cache
from specengine.tree import TokenTree
from tests import toy
from tests.graphs.engines import DEVICE, PROMPT, engine_of, frozen, model

pytestmark = pytest.mark.usefixtures("one_thread")
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
POLICIES = [name for name in toy.POLICIES if name != "random"]  # what that does depends on its own past


def answer(engine: Engine, options: dict[str, Any], prompt: list[int] = PROMPT, count: int = 10) -> Any:
    """The tokens, and each cycle's tree and path."""
    stream = engine.stream(prompt, max_new_tokens=count, **options)
    cycles = [piece.cycle for piece in stream]
    trees = [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.path) for cycle in cycles]
    return stream.result.token_ids, trees, [cycle.tree.log_probs.cpu() for cycle in cycles]


def check(draft: str, policy: str, prompt: list[int] = PROMPT, count: int = 10) -> None:
    with frozen() as calls:
        padded, eager = (engine_of(draft, policy, padded=value) for value in (True, False))
        for options in WAYS:
            found, wanted = (answer(engine, options, prompt, count) for engine in (padded, eager))
            assert found[:2] == wanted[:2]
            for ours, theirs in zip(found[2], wanted[2], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    parts = [part.graphs for part in (padded.target, padded.drafter) if hasattr(part, "graphs")]
    for part in parts:
        assert part.captures
        assert set(part.captures.values()) == {1}, "one capture for each size"
        names = [str(name) for name in part.captures]
        assert all(any(f"of {size} rows" in name for size in (1, 8, 16, 32, 64)) for name in names), names
        assert sum(calls[id(part), name] for name in part.captures) > len(part.captures)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_every_policy(draft: str, policy: str) -> None:
    check(draft, policy)


@pytest.mark.parametrize("policy", ["talon", "salf", "chain"])
@pytest.mark.parametrize("draft", ["eagle1", "ngram"])
def test_other_drafts(draft: str, policy: str) -> None:
    check(draft, policy)


@pytest.mark.parametrize("draft", ["small_model", "ngram"])
def test_trees_of_random_shape(draft: str) -> None:
    for options in WAYS:
        expected = answer(engine_of("none", "", padded=False), options)[0]
        with frozen():
            assert answer(engine_of(draft, "random", padded=True), options)[0] == expected


def test_plain_decoding() -> None:
    with frozen():
        padded = engine_of("none", "", padded=True)
        for options in WAYS:
            assert answer(padded, options)[0] == answer(engine_of("none", "", padded=False), options)[0]
    assert padded.target.graphs.captures == {"verification of 1 rows": 1}


@pytest.mark.parametrize("family", [name for name in toy.FAMILIES if name != "llama"])
def test_families(family: str) -> None:
    """Each model's own forward, as it is, with nothing that a capture would freeze or refuse."""
    loaded = toy.tiny(family).to(DEVICE)
    ids = torch.tensor([PROMPT], device=DEVICE)
    expected = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    with frozen():
        engine = Engine(CapturedTarget(loaded), CapturedSmallModel(loaded), toy.policy_for("eagle"))
        assert engine.generate(PROMPT, max_new_tokens=8).token_ids == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_a_frontier_wider_than_a_pass_is_run_in_pieces(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_passes, "MOST_ROWS", 8)
    monkeypatch.setattr(toy, "policy_for", lambda *_: toy.policies.make("eagle", width=12, expansions=2, budget=40))
    check(draft, "")


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_long_prompts_are_run_eagerly(draft: str) -> None:
    prompt = [token % 200 for token in range(3, 3 * 80, 3)]
    check(draft, "eagle", prompt)


@pytest.mark.parametrize("draft", ["small_model", "eagle3", "ngram"])
def test_sessions_reuse_the_caches(draft: str) -> None:
    for engine in (engine_of(draft, "talon", padded=True), engine_of("none", "", padded=True)):
        engine.tokenizer = toy.byte_tokenizer()
        session = engine.session()
        texts = [session.generate(text, max_new_tokens=8, temperature=0.0).token_ids for text in ("ab", "cd", "e")]
        plain = engine_of("none", "", padded=False)
        plain.tokenizer = engine.tokenizer
        fresh = plain.session()
        assert texts == [
            fresh.generate(text, max_new_tokens=8, temperature=0.0).token_ids for text in ("ab", "cd", "e")
        ]


def poison(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all of both caches' scratch before a tree is drafted or verified, and in all states of the last tree."""
    verify, step = engine.target.verify, engine.drafter.step

    def poisoned_verify(tree: TokenTree) -> Any:
        engine.target.cache.slab[:, :, :, engine.target.cache.length :] = math.nan
        return verify(tree)

    def poisoned_step(tree: TokenTree, nodes: Tensor) -> Any:
        if int(tree.passes) == 0:
            engine.drafter.cache.slab[:, :, :, engine.drafter.cache.length :] = math.nan
            if hasattr(engine.drafter, "_states"):
                engine.drafter._states.fill_(math.nan)
        return step(tree, nodes)

    monkeypatch.setattr(engine.target, "verify", poisoned_verify)
    monkeypatch.setattr(engine.drafter, "step", poisoned_step)


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_nothing_is_read_before_it_is_written(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, eager = (engine_of(draft, "salf", padded=padded) for padded in (True, False))
    poison(engine, monkeypatch)
    assert answer(engine, {})[:2] == answer(eager, {})[:2]


# ---- captures


def test_a_larger_cache_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 32)
    monkeypatch.setattr(cache, "GRANULE", 32)
    engine = engine_of("eagle3", "eagle", padded=True)
    for length in (8, 20, 60):
        prompt = PROMPT[:4] * (length // 4)
        assert answer(engine, {}, prompt)[0] == answer(engine_of("none", "", padded=False), {}, prompt)[0]
    assert max(engine.target.graphs.captures.values()) > 1


def test_moved_weights_are_captured_again() -> None:
    loaded = toy.tiny("llama").to(DEVICE)
    engine = Engine(CapturedTarget(loaded), None, None, loop="host")
    before = engine.generate(PROMPT, max_new_tokens=6).token_ids
    layer = loaded.lm_head
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0).clone(), requires_grad=False)
    after = engine.generate(PROMPT, max_new_tokens=6).token_ids
    assert after != before
    assert engine.target.graphs.captures == {"verification of 1 rows": 2}
    assert after == Engine(CapturedTarget(loaded), None, None).generate(PROMPT, max_new_tokens=6).token_ids


@pytest.mark.parametrize("draft", ["small_model", "eagle3", "ngram", "none"])
def test_warmup_captures_all_that_a_generation_needs(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 256)
    engine = engine_of(draft, "talon", padded=True)
    report = engine.warmup(tokens=100)
    assert report.captured
    assert report.cache_bytes >= engine.target.cache.slab.nbytes > 0
    assert str(report).startswith(f"{len(report.captured)} graphs in ")
    assert answer(engine, {})[0] == answer(engine_of("none", "", padded=False), {})[0]
    assert engine.warmup(tokens=100).captured == report.captured
    for part in (engine.target, engine.drafter):
        if hasattr(part, "graphs"):
            assert set(part.graphs.captures.values()) == {1}


def test_warmup_refuses() -> None:
    with pytest.raises(InputError, match="load it with graphs=True"):
        engine_of("eagle3", "eagle", padded=False).warmup()
    engine = engine_of("eagle3", "eagle", padded=True)
    for tokens in (0, 10**6):
        with pytest.raises(InputError, match="tokens: got"):
            engine.warmup(tokens)
    stream = engine.stream(PROMPT, max_new_tokens=8)
    next(stream)
    with pytest.raises(EngineBusyError):
        engine.warmup()


# ---- the checks can fail


def test_a_number_of_the_host_in_a_captured_function_is_seen() -> None:
    part, numbers = Graphs(DEVICE), iter([1, 1, 2])
    with frozen():
        part.run("f", [], lambda: torch.zeros(3) + next(numbers))
        with pytest.raises(AssertionError):
            part.run("f", [], lambda: torch.zeros(3) + next(numbers))


def test_a_shape_that_changes_is_seen() -> None:
    part, sizes = Graphs(DEVICE), iter([3, 3, 4])
    with frozen():
        part.run("f", [], lambda: torch.zeros(next(sizes)))
        with pytest.raises(AssertionError):
            part.run("f", [], lambda: torch.zeros(next(sizes)))


def test_a_host_read_is_seen() -> None:
    with frozen(), pytest.raises(AssertionError, match="the host would wait"):
        Graphs(DEVICE).run("f", [], lambda: torch.ones(1) * float(torch.ones(1)))


@pytest.mark.parametrize("make", [lambda: torch.ones(2).where(torch.ones(2).bool(), 0), lambda: torch.tensor([1.0])])
def test_a_constant_that_the_host_would_send_is_seen(make: Any) -> None:
    part = Graphs(DEVICE)
    with frozen(), pytest.raises(AssertionError, match="the host would send"):
        part.run("f", [], make)


def test_outputs_are_the_same_tensors_each_time() -> None:
    part, given = Graphs(DEVICE), torch.zeros(2, device=DEVICE)
    first = part.run("f", [given], lambda: given + 1)
    given += 5
    second = part.run("f", [given], lambda: given + 1)
    assert first is second
    assert first.tolist() == [6.0, 6.0]
    moved = given.clone()
    assert part.run("f", [moved], lambda: moved + 1) is not first
    assert part.captures == {"f": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["eagle", "talon", "salf", "chain", "opt_tree", "dynatree"])
@pytest.mark.parametrize("draft", ["small_model", "eagle3", "eagle1", "ngram"])
@pytest.mark.parametrize("backend", ["auto", "triton,cpp"])
def test_replays_equal_calls(draft: str, policy: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: captured engines answer as eager ones do, and a replay leaves what a call leaves."""
    monkeypatch.setenv(ops.VARIABLE, backend)
    for options in WAYS:
        padded, eager = (engine_of(draft, policy, padded=value) for value in (True, False))
        assert answer(padded, options)[:2] == answer(eager, options)[:2]
        assert padded.target.graphs.bytes >= 0
        assert padded.target.graphs.seconds > 0
        assert all(known.graph is not None for known in padded.target.graphs._captured.values())


def test_the_target_is_what_the_test_says() -> None:
    assert model().device.type == DEVICE.type

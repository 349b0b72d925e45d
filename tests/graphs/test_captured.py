"""Cycles that stay on the device: the answers and trees of the eager engine, and what the host may not do meanwhile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from specengine.captured_cycle import CapturedCycle

from specengine import Engine, policies
from specengine import cuda_graphs as graphs
from specengine.captured import LOOPS, CapturedDriver
from specengine.errors import InputError, NumericalError
from specengine.modeling import kv_cache as cache
from specengine.ops import _registry
from specengine.policies import TreePolicy, _classifier
from specengine.policies.eagle import Eagle
from tests import toy
from tests.graphs.engines import DEVICE, PROMPT, Operations, engine_of, frozen

pytestmark = pytest.mark.usefixtures("one_thread")
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
POLICIES = [name for name in toy.POLICIES if name != "random"]


def captured(draft: str, policy: str | TreePolicy, loop: str = "read") -> Engine:
    engine = engine_of(draft, policy, padded=True, loop=loop)
    assert isinstance(engine._captured, CapturedDriver)
    return engine


def answer(engine: Engine, options: dict[str, Any], prompt: list[int] = PROMPT, count: int = 12) -> Any:
    """Tokens, and each cycle's tree, path and counters."""
    stream = engine.stream(prompt, max_new_tokens=count, **options)
    cycles = [piece.cycle for piece in stream]
    trees = [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.path, cycle.tokens) for cycle in cycles]
    stats = stream.result.stats
    counters = stats.num_draft_tokens, stats.num_draft_passes, stats.acceptance_histogram, stats.reached_histogram
    return stream.result.token_ids, trees, counters, [cycle.drafted for cycle in cycles]


def check(draft: str, policy: str | TreePolicy, loop: str = "read", **options: Any) -> None:
    engine, eager = captured(draft, policy, loop), engine_of(draft, policy, padded=False)
    with frozen() as calls:
        for way in WAYS:
            assert answer(engine, way, **options) == answer(eager, way, **options)
    part = engine._captured.graphs
    assert set(part.captures.values()) == {1}, "one capture of each function"
    assert sum(calls[id(part), name] for name in part.captures) > 2 * len(part.captures)


def test_there_are_policies() -> None:
    assert set(POLICIES) == set(policies.names()) - {"plain"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_every_policy_that_can(draft: str, policy: str) -> None:
    check(draft, policy)


@pytest.mark.parametrize("policy", [name for name in POLICIES if toy.policy_for(name, 3).ends_early])
def test_a_level_too_many_changes_nothing(policy: str) -> None:
    check("eagle3", policy, "ahead")


@pytest.mark.parametrize("loop", ["read", "ahead"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddd", {"width": 3, "expansions": 4, "budget": 10, "checks": (1, 2, 3), "threshold": -2.0}),
        ("svip", {"width": 3, "expansions": 4, "budget": 10, "threshold": 0.7}),
        ("svip", {"width": 1, "expansions": 6, "budget": 8, "threshold": 0.7}),
        ("disco", {"width": 3, "expansions": 4, "budget": 10, "threshold": 0.6}),
        ("dymax", {"length": 5, "threshold": 0.2}),
        ("dyjoint", {"length": 5, "threshold": 0.01}),
        ("opt_tree", {"nodes": 7, "max_depth": 5, "threshold": 0.05}),
        ("opt_tree", {"nodes": 7, "max_depth": 5, "threshold": 0.05, "lag": True}),
        ("dynatree", {"history": False, "base_depth": 2, "max_depth": 4, "nodes": 20, "stop": 0.02, "deep": 0.1}),
    ],
)
def test_trees_end_at_the_heights_of_the_host(name: str, options: dict[str, Any], loop: str) -> None:
    policy = policies.make(name, **options)
    check("small_model", policy, loop)
    assert len(heights("small_model", policy)) > 1


@pytest.mark.parametrize("loop", ["read", "ahead"])
def test_a_head_reads_the_hidden_states_on_the_device(loop: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    net = _classifier.AcceptanceHead(32, 16).requires_grad_(False)
    net.output.weight.mul_(12.0)  # so that acceptances differ
    facts = {"depth_base": 0, "top": 10, "beta": 0.5, "hidden_size": 32, "width": 16, "blocks": 1}
    _classifier.save(tmp_path / "net.safetensors", "specdecpp", net, facts)
    shape = {"width": 3, "expansions": 4, "budget": 10, "threshold": 0.5}
    policy = policies.make("specdecpp", classifier=str(tmp_path / "net.safetensors"), **shape)
    check("eagle3", policy, loop)
    assert len(heights("eagle3", policy)) > 1
    without = captured("small_model", policy, loop)
    for run in (lambda: without.generate(PROMPT), lambda: without.warmup(tokens=100)):
        with pytest.raises(InputError, match="which only EAGLE heads give"):
            run()


def heights(draft: str, policy: TreePolicy) -> set[int]:
    """Draft passes of the trees of the answers above."""
    streams = [engine_of(draft, policy, padded=False).stream(PROMPT, max_new_tokens=12, **way) for way in WAYS]
    return {int(piece.cycle.tree.passes) for stream in streams for piece in stream}


def test_plain_decoding() -> None:
    engine, eager = (engine_of("none", "", padded=padded, loop=loop) for padded, loop in ((True, "read"), (False, "")))
    with frozen():
        for way in WAYS:
            assert answer(engine, way) == answer(eager, way)
    assert list(engine._captured.graphs.captures) == [
        "captured verify of 1 rows, greedy",
        "captured verify of 1 rows, sampled",
    ]


def test_an_older_head() -> None:
    check("eagle1", "eagle")


def test_a_long_prompt_and_ends_within_a_path() -> None:
    prompt = [token % 200 for token in range(3, 3 * 80, 3)]
    check("eagle3", "talon", prompt=prompt, count=7)
    engine, plain = captured("small_model", "eagle"), engine_of("none", "", padded=False)
    for eos in set(plain.generate(PROMPT, max_new_tokens=12).token_ids):
        given = {"max_new_tokens": 12, "eos_token_id": eos}
        assert engine.generate(PROMPT, **given).token_ids == plain.generate(PROMPT, **given).token_ids


def test_a_seed_beyond_int64() -> None:
    engine, eager = captured("eagle3", "eagle"), engine_of("eagle3", "eagle", padded=False)
    way = {"temperature": 0.7, "seed": 2**64 - 3}
    assert answer(engine, way) == answer(eager, way)


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_sessions_reuse_the_caches(draft: str) -> None:
    engine, plain = captured(draft, "talon"), engine_of("none", "", padded=False)
    engine.tokenizer = plain.tokenizer = toy.byte_tokenizer()
    ours, theirs = engine.session(), plain.session()
    for text in ("ab", "cd", "e"):
        found = ours.generate(text, max_new_tokens=8, temperature=0.0)
        assert found.token_ids == theirs.generate(text, max_new_tokens=8, temperature=0.0).token_ids
    assert found.stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_a_stream_that_is_closed_leaves_the_engine_usable(draft: str) -> None:
    engine = captured(draft, "eagle")
    expected = answer(engine_of("none", "", padded=False), {})[0]
    stream = engine.stream(PROMPT, max_new_tokens=12)
    for _ in range(3):
        next(stream)
    stream.close()
    assert answer(engine, {})[0] == expected


@pytest.mark.parametrize("policy", ["talon", "opt_tree", "fixed", "svip"])
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_nothing_is_read_before_it_is_written(draft: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all of both caches' scratch, and in all states of the last tree, before each cycle."""
    engine, eager = captured(draft, policy), engine_of(draft, policy, padded=False)
    launch = CapturedDriver.launch

    def poisoned(self: CapturedDriver) -> None:
        cycle, drafter = self.cycle, self.drafter
        length, taken = int(cycle.state.length), int(cycle.state.taken)
        self.target.cache.slab[:, :, :, length:] = math.nan
        drafter.cache.slab[:, :, :, length + drafter.ahead - taken :] = math.nan
        if hasattr(drafter, "_states"):
            drafter._states[: drafter.spare] = math.nan
            drafter._states[drafter.spare + 1 + taken :] = math.nan
        for array in (cycle.tree.log_probs, cycle.tree.path_log_probs):
            array[1:] = math.nan
        cycle.tree.parents[1:] = 0
        launch(self)

    monkeypatch.setattr(CapturedDriver, "launch", poisoned)
    assert answer(engine, {}) == answer(eager, {})


def test_a_larger_cache_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 32)
    monkeypatch.setattr(cache, "GRANULE", 32)
    engine = captured("eagle3", "eagle")
    for length in (8, 60, 120):
        prompt = PROMPT[:4] * (length // 4)
        assert answer(engine, {}, prompt)[0] == answer(engine_of("none", "", padded=False), {}, prompt)[0]
    assert max(engine._captured.graphs.captures.values()) > 1


def test_warmup_captures_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 256)
    engine = captured("eagle3", "talon")
    names = engine.warmup(tokens=100).captured
    ours = [name for name in names if name.startswith("captured")]
    assert len(ours) == 4, ours  # root, level, and verification, greedy and sampled
    for way in WAYS:
        assert answer(engine, way)[0] == answer(engine_of("none", "", padded=False), way)[0]
    assert set(engine._captured.graphs.captures.values()) == {1}


def test_no_read_before_the_record_and_that_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam's cycle starts without any read by the host, and the next one starts before its record is read."""
    engine, order = captured("eagle3", "eagle"), list[str]()
    launch, read = CapturedDriver.launch, CapturedCycle.read

    def launched(self: CapturedDriver) -> None:
        order.append("launch")
        with Operations():  # fails where the host waits for the device, or sends it a number
            launch(self)

    monkeypatch.setattr(CapturedDriver, "launch", launched)
    monkeypatch.setattr(CapturedCycle, "read", lambda self, values: order.append("read") or read(self, values))
    cycles = len(answer(engine, {})[1])
    assert order[:5] == ["launch", "launch", "read", "launch", "read"]
    assert order.count("read") == cycles - 1  # the first cycle is the engine's
    assert order.count("launch") <= cycles


def test_a_target_without_a_finite_logit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = captured("eagle3", "eagle")
    expected = answer(engine, {})[0]
    padded = type(engine.target).padded

    def undefined(self: Any, rows: Any) -> Any:
        logits, features = padded(self, rows)
        return logits * math.nan, features

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.target), "padded", undefined)
        engine._captured.graphs._captured.clear()
        with pytest.raises(NumericalError, match="NaN or infinite throughout"):
            answer(engine, {})
    engine._captured.graphs._captured.clear()
    assert answer(engine, {})[0] == expected


class Overgrown(Eagle):
    """A policy that states less room than it takes."""

    @property
    def capacity(self) -> int:
        return super().capacity - 1


def test_a_tree_without_room_is_an_error() -> None:
    engine = engine_of("small_model", Overgrown(width=3, expansions=2, budget=8), padded=False)
    with pytest.raises(ValueError, match="tree of capacity 21 cannot take 9 nodes more than 13"):
        engine.generate(PROMPT)
    engine.policy = policies.make("eagle", width=3, expansions=2, budget=8)
    assert answer(engine, {})[0] == answer(engine_of("none", "", padded=False), {})[0]


def test_on_a_device_a_tree_without_room_is_seen_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = captured("small_model", Overgrown(width=3, expansions=2, budget=8))
    cycle = engine._captured.cycle
    monkeypatch.setattr(_registry, "FREE", "none")
    with torch.inference_mode():
        engine.target.reserve(64, 32)
        engine.drafter.reserve(64, 32)
        cycle.state.taken.fill_(1)
        for part in (cycle.root, cycle.level, cycle.level, cycle.verify):
            part()
    with pytest.raises(ValueError, match="tree of capacity 21 cannot take more nodes than 13"):
        cycle.read(cycle.record)


def test_samplers_that_read_the_history_run_on_the_host() -> None:
    engine, eager = captured("eagle3", "eagle"), engine_of("eagle3", "eagle", padded=False)
    way = {"repetition_penalty": 1.3}
    assert answer(engine, way) == answer(eager, way)
    assert not engine._captured.graphs.captures


def test_loops_that_cannot_be_had_are_refused() -> None:
    for loop in LOOPS:
        with pytest.raises(InputError, match=rf"loop: got '{loop}', but randomshape: a policy states its rows to"):
            engine_of("eagle3", "random", padded=True, loop=loop)
        with pytest.raises(InputError, match="the target is not captured in graphs; accepted auto, host"):
            engine_of("eagle3", "eagle", padded=False, loop=loop)
        with pytest.raises(InputError, match="does not draft on the device"):
            engine_of("ngram", "eagle", padded=True, loop=loop)
    with pytest.raises(InputError, match="loop: got 'fast', accepted auto, host, read, ahead, while"):
        engine_of("eagle3", "eagle", padded=True, loop="fast")
    for policy in ("talon", "random"):
        assert (engine_of("eagle3", policy, padded=True, loop="auto")._captured is None) == (policy == "random")


@pytest.mark.gpu
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_replays_equal_calls(draft: str, policy: str, loop: str) -> None:
    """On a device: what is captured answers as the eager engine does."""
    engine, eager = captured(draft, policy, loop), engine_of(draft, policy, padded=False)
    assert DEVICE.type == "cuda"
    for way in WAYS:
        assert answer(engine, way)[:2] == answer(eager, way)[:2]
    torch.cuda.synchronize()

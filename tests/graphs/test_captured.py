"""Captured cycles: the answers and trees of the eager engine, and what the host may not do meanwhile.

Whole cycles stay on the device; where a choice reads the history, the host walks between verification and commit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import Engine, ops, policies
from specengine.drafters.small_model import SmallModel
from specengine.engine.captured import NOTE, CapturedDriver
from specengine.errors import EngineBusyError, InputError, NumericalError
from specengine.models import kv_cache as cache
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from specengine.ops.cuda_graphs import Graphs, _Captured
from specengine.policies import TreePolicy, _classifier
from specengine.policies.baselines.eagle import Eagle
from tests import toy
from tests.graphs.engines import (
    DEVICE,
    PROMPT,
    Operations,
    as_on_a_device,
    engine_of,
    frozen,
    near_copy,
)
from tests.ops.backends import choose

pytestmark = pytest.mark.usefixtures("one_thread")
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
WALKS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "typical_p": 0.9},
]  # by the host
FINISHES = {"finish greedy", "finish sampled", "finish truncated"}
# what that does depends on its own past
POLICIES = [name for name in toy.POLICIES if name != "random"]


def captured(draft: str, policy: str | TreePolicy) -> Engine:
    engine = engine_of(draft, policy, captured=True)
    assert isinstance(engine.drivers.own.captured, CapturedDriver)
    return engine


def answer(
    engine: Engine, options: dict[str, Any], prompt: list[int] = PROMPT, count: int = 12
) -> Any:
    """Tokens, and each cycle's tree, path and counters."""
    stream = engine.stream(prompt, max_new_tokens=count, **options)
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
    draft: str, policy: str | TreePolicy, ways: list[dict[str, Any]] = WAYS, **options: Any
) -> None:
    engine, eager = captured(draft, policy), engine_of(draft, policy, captured=False)
    with frozen() as calls:
        for way in ways:
            assert answer(engine, way, **options) == answer(eager, way, **options)
    part = engine.drivers.own.captured.graphs
    assert set(part.captures.values()) == {1}, "one capture of each function"
    assert sum(calls[id(part), name] for name in part.captures) > 2 * len(part.captures)


def test_there_are_policies() -> None:
    assert set(POLICIES) == set(policies.names()) - {"plain"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_every_policy(draft: str, policy: str) -> None:
    for ways in [*toy.histories(policy, WAYS), WALKS]:
        check(draft, policy, ways)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["talon", "salf", "chain"])
@pytest.mark.parametrize("draft", ["eagle1", "ngram", "recycling"])
def test_other_drafts(draft: str, policy: str) -> None:
    check(draft, policy, WAYS + WALKS)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("draft", ["small_model", "eagle3", "ngram"])
def test_trees_of_random_shape_grow_eagerly_and_are_verified_in_graphs(draft: str) -> None:
    for options in WAYS + WALKS:
        expected = answer(engine_of("none", "", captured=False), options)[0]
        with frozen():
            engine = captured(draft, "random")
            assert answer(engine, options)[0] == expected
        assert list(engine.drivers.own.captured.graphs.captures) == ["verify"]


@pytest.mark.slow
def test_wide_frontiers_and_long_paths_are_one_pass() -> None:
    check("eagle3", policies.make("eagle", width=12, expansions=2, budget=40), count=6)
    check("eagle3", policies.make("eagle", width=70, expansions=1, budget=100), count=4)
    check("small_model", policies.make("chain", length=66), count=4)


@pytest.mark.sliced(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "ddd",
            {"width": 3, "expansions": 4, "budget": 10, "checks": (1, 2, 3), "threshold": -2.0},
        ),
        ("svip", {"width": 3, "expansions": 4, "budget": 10, "threshold": 0.7}),
        ("svip", {"width": 1, "expansions": 6, "budget": 8, "threshold": 0.7}),
        ("disco", {"width": 3, "expansions": 4, "budget": 10, "threshold": 0.6}),
        ("dymax", {"length": 5, "threshold": 0.2}),
        ("dyjoint", {"length": 5, "threshold": 0.01}),
        ("opt_tree", {"nodes": 7, "max_depth": 5, "threshold": 0.05}),
        ("opt_tree", {"nodes": 7, "max_depth": 5, "threshold": 0.05, "lag": True}),
        (
            "dynatree",
            {
                "history": False,
                "base_depth": 2,
                "max_depth": 4,
                "nodes": 20,
                "stop": 0.02,
                "deep": 0.1,
            },
        ),
    ],
)
def test_trees_end_at_the_heights_of_the_host(name: str, options: dict[str, Any]) -> None:
    policy = policies.make(name, **options)
    check("small_model", policy)
    assert len(heights("small_model", policy)) > 1


@pytest.mark.slow
def test_a_head_reads_the_hidden_states_on_the_device(tmp_path: Path) -> None:
    torch.manual_seed(7)
    net = _classifier.AcceptanceHead(32, 16).requires_grad_(False)
    net.output.weight.mul_(12.0)  # so that acceptances differ
    facts = {"depth_base": 0, "top": 10, "beta": 0.5, "hidden_size": 32, "width": 16, "blocks": 1}
    _classifier.save(tmp_path / "net.safetensors", "specdecpp", net, facts)
    shape = {"width": 3, "expansions": 4, "budget": 10, "threshold": 0.5}
    policy = policies.make("specdecpp", classifier=str(tmp_path / "net.safetensors"), **shape)
    check("eagle3", policy)
    assert len(heights("eagle3", policy)) > 1
    without = captured("small_model", policy)
    for run in (lambda: without.generate(PROMPT), lambda: without.warmup(tokens=100)):
        with frozen(), pytest.raises(InputError, match="which only EAGLE heads give"):
            run()


def heights(draft: str, policy: TreePolicy) -> set[int]:
    """Draft passes of the trees of the answers above."""
    streams = [
        engine_of(draft, policy, captured=False).stream(PROMPT, max_new_tokens=12, **way)
        for way in WAYS
    ]
    return {int(piece.cycle.tree.passes) for stream in streams for piece in stream}


def test_plain_decoding() -> None:
    engine, eager = captured("none", ""), engine_of("none", "", captured=False)
    with frozen():
        for way in WAYS + WALKS:
            assert answer(engine, way) == answer(eager, way)
    assert list(engine.drivers.own.captured.graphs.captures) == [
        "finish greedy",
        "finish sampled",
        "verify",
    ]


@pytest.mark.parametrize("family", [name for name in toy.FAMILIES if name != "llama"])
def test_families(family: str) -> None:
    """Each model's own forward as it is, nothing that a capture would freeze or refuse; fresh memory holds NaN."""
    loaded = toy.tiny(family).to(DEVICE)
    ids = torch.tensor([PROMPT], device=DEVICE)
    expected = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills what it gives
    try:
        with frozen():
            drafter = SmallModel(loaded)
            engine = Engine(
                HuggingFaceTarget(loaded, captured=True), drafter, toy.policy_for("eagle")
            )
            assert (
                engine.generate(PROMPT, max_new_tokens=8).token_ids
                == expected[0, len(PROMPT) :].tolist()
            )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["small_model", "eagle3", "none"])
def test_truncated_answers_stay_on_the_device(draft: str) -> None:
    """One capture serves all values, and the tokens are those of plain sampling."""
    engine, plain = captured(draft, "talon"), engine_of("none", "", captured=False)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.6, "top_p": 0.9},  # of Llama 3's own config
        {"temperature": 0.6, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.7, "min_p": 0.01},
    ]
    with frozen():
        for way in ways:
            found = engine.generate(PROMPT, max_new_tokens=12, seed=5, **way)
            assert (
                found.token_ids
                == plain.generate(PROMPT, max_new_tokens=12, seed=5, **way).token_ids
            )
            assert NOTE in found.stats.notes
    names = engine.drivers.own.captured.graphs.captures
    assert names["finish truncated"] == 1
    assert not {"verify", "finish sampled"} & set(names)


def test_an_older_head() -> None:
    check("eagle1", "eagle")


def test_a_long_prompt_and_ends_within_a_path() -> None:
    prompt = [token % 200 for token in range(3, 3 * 80, 3)]
    check("eagle3", "talon", prompt=prompt, count=7)
    engine, plain = captured("small_model", "eagle"), engine_of("none", "", captured=False)
    for eos in set(plain.generate(PROMPT, max_new_tokens=12).token_ids):
        given = {"max_new_tokens": 12, "eos_token_id": eos}
        assert (
            engine.generate(PROMPT, **given).token_ids == plain.generate(PROMPT, **given).token_ids
        )


def test_prompts_of_all_lengths_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries plan attention anew for each shape: of the target, and of the head."""
    shapes, attend = set[Any](), torch.nn.functional.scaled_dot_product_attention

    def noted(query: Any, key: Any, *rest: Any, **named: Any) -> Any:
        shapes.add((query.shape, key.shape))
        return attend(query, key, *rest, **named)

    engine, plain = captured("eagle3", "eagle"), engine_of("none", "", captured=False)
    prompts = [[(7 * place + count) % 90 + 5 for place in range(count)] for count in (20, 21, 37)]
    wanted = [plain.generate(prompt, max_new_tokens=4).token_ids for prompt in prompts]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr("specengine.models.eagle.scaled_dot_product_attention", noted)
    assert engine.generate(prompts[0], max_new_tokens=4).token_ids == wanted[0]
    before = set(shapes)
    assert [engine.generate(prompt, max_new_tokens=4).token_ids for prompt in prompts] == wanted
    assert before
    assert shapes == before


def test_a_seed_beyond_int64() -> None:
    engine, eager = captured("eagle3", "eagle"), engine_of("eagle3", "eagle", captured=False)
    way = {"temperature": 0.7, "seed": 2**64 - 3}
    assert answer(engine, way) == answer(eager, way)


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_sessions_reuse_the_caches(draft: str) -> None:
    engine, plain = captured(draft, "talon"), engine_of("none", "", captured=False)
    engine.tokenizer = plain.tokenizer = toy.byte_tokenizer()
    ours, theirs = engine.session(), plain.session()
    for text in ("ab", "cd", "e"):
        found = ours.generate(text, max_new_tokens=8, temperature=0.0)
        assert found.token_ids == theirs.generate(text, max_new_tokens=8, temperature=0.0).token_ids
    assert found.stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_a_stream_that_is_closed_leaves_the_engine_usable(draft: str) -> None:
    engine = captured(draft, "eagle")
    expected = answer(engine_of("none", "", captured=False), {})[0]
    stream = engine.stream(PROMPT, max_new_tokens=12)
    for _ in range(3):
        next(stream)
    stream.close()
    assert answer(engine, {})[0] == expected


@pytest.mark.sliced(1)
@pytest.mark.parametrize("ways", [WAYS, WALKS], ids=["device", "host"])
@pytest.mark.parametrize("policy", ["talon", "opt_tree", "fixed", "svip"])
@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_nothing_is_read_before_it_is_written(
    draft: str, policy: str, ways: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all of both caches' scratch, and in all that belongs to the last tree, before each cycle."""
    engine, eager = captured(draft, policy), engine_of(draft, policy, captured=False)
    grow = CapturedDriver._grow

    def poisoned(self: CapturedDriver) -> str:
        drafter = self.drafter
        for part in (self.target.cache, drafter.cache):
            part.slab[:, :, :, part.length :] = math.nan
        taken = int(drafter.taken)
        drafter._seen[1:] = -1
        drafter.pending[max(taken - 1, 0) :] = 3
        if draft == "eagle3":
            drafter._states[:-1] = math.nan
            drafter._features[taken:] = math.nan
        for array in (self.tree.log_probs, self.tree.path_log_probs):
            array[1:] = math.nan
        self.tree.parents[1:] = 0
        return grow(self)

    monkeypatch.setattr(CapturedDriver, "_grow", poisoned)
    with frozen():
        for way in ways:
            assert answer(engine, way) == answer(eager, way)


def test_a_larger_cache_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_SLOTS", 32)
    monkeypatch.setattr(cache, "GRANULE", 32)
    engine = captured("eagle3", "eagle")
    for length in (8, 60, 120):
        prompt = PROMPT[:4] * (length // 4)
        assert (
            answer(engine, {}, prompt)[0]
            == answer(engine_of("none", "", captured=False), {}, prompt)[0]
        )
    assert max(engine.drivers.own.captured.graphs.captures.values()) > 1


GROWS = {"root", "level", "root coupled", "level coupled"}


@pytest.mark.parametrize(
    ("draft", "names"),
    [
        ("eagle3", {*GROWS, *FINISHES, "verify"}),
        ("small_model", {*GROWS, *FINISHES, "verify"}),
        ("ngram", {"verify"}),
        ("recycling", {"verify"}),
        ("none", {*FINISHES, "verify"}),
    ],
)
def test_warmup_captures_all_that_a_generation_needs(
    draft: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MIN_SLOTS", 256)
    engine = captured(draft, "talon")
    report = engine.warmup(tokens=100)
    assert set(report.captured) == names
    assert report.cache_bytes >= engine.target.cache.slab.nbytes > 0
    assert str(report).startswith(f"{len(report.captured)} graphs in ")
    for way in WAYS + WALKS:
        assert answer(engine, way)[0] == answer(engine_of("none", "", captured=False), way)[0]
    assert engine.warmup(tokens=100).captured == report.captured
    assert set(engine.drivers.own.captured.graphs.captures.values()) == {1}


def test_a_warmup_in_a_conversation_forgets_nothing() -> None:
    engine, plain = captured("eagle3", "eagle"), engine_of("none", "", captured=False)
    engine.tokenizer = plain.tokenizer = toy.byte_tokenizer()
    ours, theirs = engine.session(), plain.session()
    for text in ("ab", "cd"):
        found = ours.generate(text, max_new_tokens=8, temperature=0.0)
        assert found.token_ids == theirs.generate(text, max_new_tokens=8, temperature=0.0).token_ids
        engine.warmup(tokens=100)


def test_warmup_refuses() -> None:
    with pytest.raises(InputError, match="load it with graphs=True"):
        engine_of("eagle3", "eagle", captured=False).warmup()
    engine = captured("eagle3", "eagle")
    for tokens in (0, 10**6):
        with pytest.raises(InputError, match="tokens: got"):
            engine.warmup(tokens)
    stream = engine.stream(PROMPT, max_new_tokens=8)
    next(stream)
    with pytest.raises(EngineBusyError):
        engine.warmup()


def test_moved_weights_are_captured_again() -> None:
    loaded = toy.tiny("llama").to(DEVICE)
    engine = Engine(HuggingFaceTarget(loaded, captured=True), None, None)
    before = engine.generate(PROMPT, max_new_tokens=6).token_ids
    layer = loaded.lm_head
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0).clone(), requires_grad=False)
    after = engine.generate(PROMPT, max_new_tokens=6).token_ids
    assert after != before
    assert engine.drivers.own.captured.graphs.captures == {"finish greedy": 2}
    assert (
        after
        == Engine(HuggingFaceTarget(loaded), None, None)
        .generate(PROMPT, max_new_tokens=6)
        .token_ids
    )


def test_no_read_before_the_record_and_that_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam's cycle starts without any read by the host, and the next one starts before its record is read."""
    engine, order = captured("eagle3", "eagle"), list[str]()
    start, read = CapturedDriver._start, CapturedDriver._read

    def started(self: CapturedDriver, number: int) -> Any:
        order.append("start")
        with Operations():  # fails where the host waits for the device, or sends it a number
            return start(self, number)

    monkeypatch.setattr(CapturedDriver, "_start", started)
    monkeypatch.setattr(
        CapturedDriver, "_read", lambda self, values: order.append("read") or read(self, values)
    )
    cycles = len(answer(engine, {})[1])
    assert order[:5] == ["start", "start", "read", "start", "read"]
    assert order.count("read") == cycles
    assert order.count("start") <= cycles


@pytest.mark.parametrize(("policy", "looks"), [("auto", True), ("eagle", False)])
def test_the_first_token_waits_for_no_other_tree(
    policy: str, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host waits while trees grow, it reads the first record before the second tree."""
    engine, order = captured("eagle3", policy), list[str]()
    answer(engine, {})
    for name in ("_start", "_read"):
        run = getattr(CapturedDriver, name)

        def noted(self: CapturedDriver, value: Any, name: str = name, run: Any = run) -> Any:
            order.append(name)
            return run(self, value)

        monkeypatch.setattr(CapturedDriver, name, noted)
    answer(engine, {})
    first = ["_start", "_read", "_start"] if looks else ["_start", "_start", "_read"]
    assert order[:5] == [*first, "_start", "_read"]


def test_a_target_without_a_finite_logit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = captured("eagle3", "eagle")
    expected = answer(engine, {})[0]
    finish = CapturedDriver.run_finish

    def undefined(self: CapturedDriver) -> None:
        with pytest.MonkeyPatch.context() as patch:
            real = ops.choose_tokens
            patch.setattr(
                ops, "choose_tokens", lambda logits, *rest: real(logits * math.nan, *rest)
            )
            finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(CapturedDriver, "run_finish", undefined)
        engine.drivers.own.captured.graphs._captured.clear()
        with pytest.raises(NumericalError, match="NaN or infinite throughout"):
            answer(engine, {})
    engine.drivers.own.captured.graphs._captured.clear()
    assert answer(engine, {})[0] == expected


class Overgrown(Eagle):
    """A policy that states less room than it takes."""

    @property
    def capacity(self) -> int:
        return super().capacity - 1


def test_a_tree_without_room_is_an_error() -> None:
    engine = engine_of("small_model", Overgrown(width=3, expansions=2, budget=8), captured=False)
    with pytest.raises(
        ValueError,
        match=r"policy Overgrown\.capacity: .* 21 nodes, .* has 13 and cannot take 9 more",
    ):
        engine.generate(PROMPT)
    engine.policy = policies.make("eagle", width=3, expansions=2, budget=8)
    assert answer(engine, {})[0] == answer(engine_of("none", "", captured=False), {})[0]


def test_on_a_device_a_tree_without_room_is_seen_in_the_record() -> None:
    engine = captured("small_model", Overgrown(width=3, expansions=2, budget=8))
    driver = engine.drivers.own.captured
    driver.reserve(64)
    with torch.inference_mode(), as_on_a_device():
        engine.drafter.taken.fill_(1)
        driver.tree.restart()
        for part in (driver.run_root, driver.run_level, driver.run_level, driver.run_finish):
            part()
    with pytest.raises(
        ValueError, match=r"policy Overgrown\.capacity: .* 21 nodes, .* cannot take more"
    ):
        driver._read(driver.record)


def test_where_the_host_walks_a_tree_without_room_is_an_error_too() -> None:
    engine = captured("small_model", Overgrown(width=3, expansions=2, budget=8))
    with (
        frozen(),
        pytest.raises(
            ValueError, match=r"policy Overgrown\.capacity: .* 21 nodes, .* cannot take more"
        ),
    ):
        engine.generate(PROMPT, **WALKS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", ["small_model", "eagle3", "eagle1", "ngram", "recycling"])
@pytest.mark.parametrize("backend", ["auto", "triton,cpp"])
def test_replays_equal_calls(
    draft: str, policy: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device: what is captured answers as the eager engine does.

    Rules that weigh chances against costs take exponentials, whose last bits differ between the host and the device:
    there the trees are those of the same functions on the device, called without a capture.
    """
    choose(monkeypatch, backend)
    engine, eager = captured(draft, policy), engine_of(draft, policy, captured=False)
    assert DEVICE.type == "cuda"
    found, expected = ([answer(made, way) for way in WAYS + WALKS] for made in (engine, eager))
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    if policy in ("auto", "caddtree"):
        with monkeypatch.context() as patch:
            patch.setattr(
                Graphs,
                "_capture",
                lambda self, name, signature, function: _Captured(signature, None),
            )
            called = captured(draft, policy)
            expected = [answer(called, way) for way in WAYS + WALKS]
    assert [trees for _, trees, *_ in found] == [trees for _, trees, *_ in expected]
    torch.cuda.synchronize()
    assert engine.drivers.own.captured.graphs.bytes >= 0
    assert engine.drivers.own.captured.graphs.seconds > 0
    assert all(
        known.graph is not None for known in engine.drivers.own.captured.graphs._captured.values()
    )


def test_a_draft_holds_no_more_than_its_passes_have_run() -> None:
    """Cycles without a pass commit tokens that the draft has not seen."""
    drafter = SmallModel(near_copy())
    with torch.inference_mode():
        drafter.begin(PROMPT)
    drafter.ended([*PROMPT, 5, 6, 7], len(PROMPT) + 3)
    assert drafter.cache.length == len(PROMPT)
    drafter.ended([*PROMPT, 5, 6, 7], len(PROMPT) - 2)
    assert drafter.cache.length == len(drafter._tokens) == len(PROMPT) - 2

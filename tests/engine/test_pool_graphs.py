"""Whole cycles of a pool's texts in graphs of all of them, on the pretended device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine, ops
from specengine.drafters.small_model import SmallModel
from specengine.engine import Pool
from specengine.engine.captured import CapturedDriver
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops.cuda_graphs import CaptureError, Graphs
from tests.engine.lanes import prompts
from tests.engine.test_module_lanes import (
    LAYERS,
    MEMORY,
    alone,
    by_meanings as by_meanings,
    on_the_device,
    pretends,
    small,
    tokens,
)
from tests.graphs import pretended
from tests.toy import policy_for, tiny

pytestmark = [pytest.mark.usefixtures("one_thread", "by_meanings"), pretends]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
ANSWER: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": []}


def pool_of(policy: str = "eagle", count: int = 3, family: str = "llama") -> Pool:
    """Return a pool whose caches hold NaN where nothing was written."""
    pool = Pool(on_the_device("eagle3", policy, family), count, MEMORY)
    for engine in pool.engines:
        for part in (engine.target, engine.drafter):
            part.cache.slab.fill_(float("nan"))  # type: ignore[union-attr]
    return pool


def engines(pool: Pool) -> list[Any]:
    return [*pool.engines]


def drivers(pool: Pool) -> list[CapturedDriver]:
    captured = [engine.drivers.own.captured for engine in pool.engines]
    assert all(driver is not None and driver.joined is captured[0].joined for driver in captured)  # type: ignore[union-attr]
    return captured  # type: ignore[return-value]


@pytest.mark.sliced(4)
@pytest.mark.parametrize(
    "policy", ["eagle", "auto", "talon", "salf", "c2t", "dynatree", "ltd", "chain", "cast"]
)
@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, "top_p": 0.9}], ids=str)
def test_answers_are_those_given_alone(policy: str, options: dict[str, Any]) -> None:
    """Of more texts than there are lanes, which begin and end at different times."""
    asked, options = prompts(5), {**ANSWER, **options}
    expected = alone(asked, **options)
    with pretended.cuda():
        pool = pool_of(policy)
        results = pool.generate(asked, **options)
        graphs = drivers(pool)[0].joined.graphs
        assert tokens(results) == expected
        assert any(str(name).startswith("finish") for name in graphs.captures)
        assert all(known.graph is not None for known in graphs._captured.values())
    assert sum(result.stats.num_draft_passes for result in results) > 0


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_cycles_are_those_of_an_engine_alone(family: str) -> None:
    """As many, with as many accepted tokens: drafts lose nothing beside others."""
    asked = prompts(4)
    with pretended.cuda():
        engine = on_the_device("eagle3", "eagle", family)
        one_by_one = [engine.generate(prompt, **ANSWER) for prompt in asked]
        together = pool_of("eagle", 4, family).generate(asked, **ANSWER)
    assert tokens(together) == tokens(one_by_one)
    for result, expected in zip(together, one_by_one, strict=True):
        assert result.stats.num_spec_steps == expected.stats.num_spec_steps
        assert result.stats.acceptance_histogram == expected.stats.acceptance_histogram
        assert result.stats.num_draft_tokens == expected.stats.num_draft_tokens


def test_texts_that_choose_in_other_ways_are_answered_at_once() -> None:
    """Greedily, drawn, drawn of the likeliest, and with log-probabilities, which the host reads."""
    asked = prompts(4)
    ways: list[dict[str, Any]] = [{}, SAMPLED, {**SAMPLED, "top_p": 0.9}, {"logprobs": 1}]
    expected = [alone([one], **ANSWER, **way)[0] for one, way in zip(asked, ways, strict=True)]
    with pretended.cuda():
        pool = pool_of("auto", 4)
        streams = [
            engine.stream(one, **ANSWER, **way)
            for engine, one, way in zip(engines(pool), asked, ways, strict=True)
        ]
        assert [stream.run().token_ids for stream in streams] == expected
        driver = drivers(pool)[0]
        finishes = {str(name) for name in driver.joined.graphs.captures if "finish" in str(name)}
        assert {"finish greedy", "finish sampled", "finish truncated"} == finishes


@torch.inference_mode()
def test_a_text_that_is_not_under_way_stays_as_it_is() -> None:
    """Whatever waits in its draft, to the bit; with the masks taken away it does not."""
    with pretended.cuda():
        pool = pool_of("auto", 3)
        pool.generate(prompts(3), **ANSWER)
        parts = drivers(pool)
        joined = parts[0].joined
        for part in parts:
            part.drafter.taken.fill_(2)  # type: ignore[union-attr]
            part.plant(3)

        def state(part: CapturedDriver) -> list[Tensor]:
            held = (part.target.cache.filled, *part.drafter.state)  # type: ignore[union-attr]
            sizes = [int(held[0]), *[2] * len(held[1:])]
            return [
                tensor[: size or 1].cpu().clone() for tensor, size in zip(held, sizes, strict=True)
            ]

        joined.make_ready(parts[0].sampler.request)
        for masked in (True, False):
            before = state(parts[1])
            joined._flags.zero_() if masked else joined._flags.fill_(1)
            parts[0].plant(5)
            for name in ("first", "root", "level", "finish"):
                joined._run(name)
            same = all(map(torch.equal, before, state(parts[1])))
            assert same is masked


@pytest.mark.parametrize(("family", "at_once"), [("llama", True), ("mistral", False)])
@torch.inference_mode()
def test_attention_of_all_trees_is_one_operation(
    family: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count one for the head's rows of all texts, and one a layer for the target's where no layer slides."""
    calls = Counter[str]()
    with pretended.cuda():
        pool = pool_of("eagle", 3, family)
        joined = drivers(pool)[0].joined
        joined.locate()
        for name in ("lanes_attention", "cached_attention"):
            attend = getattr(ops, name)

            def counted(*given: Any, name: str = name, attend: Any = attend) -> Tensor:
                calls[name] += 1
                return attend(*given)

            monkeypatch.setattr(ops, name, counted)
        joined.run_root()
        joined.run_level()
        assert calls == {"lanes_attention": 2}
        calls.clear()
        joined.run_finish()
        assert calls["lanes_attention"] == (LAYERS if at_once else 0)
        assert calls["cached_attention"] == 0


@pytest.mark.parametrize("policy", [None, pytest.param("plain", marks=pytest.mark.slow)])
def test_texts_that_never_began_are_no_hindrance(policy: str | None) -> None:
    """Nor one that decodes plainly, and whose target is asked for no hidden states."""
    asked = prompts(3)
    expected = alone(asked, **ANSWER)
    with pretended.cuda():
        pool = pool_of("eagle", 4)
        options: list[dict[str, Any]] = [{}, {}, {"policy": policy}]
        streams = [
            engine.stream(one, **ANSWER, **way)
            for engine, one, way in zip(engines(pool)[1:], asked, options, strict=True)
        ]
        assert [stream.run().token_ids for stream in streams] == expected
        assert "finish greedy" in drivers(pool)[0].joined.graphs.captures


def test_an_answer_that_nobody_wants_any_more_leaves_the_others() -> None:
    asked = prompts(3)
    expected = alone(asked, **ANSWER)
    with pretended.cuda():
        pool = pool_of()
        streams = [
            engine.stream(one, **ANSWER) for engine, one in zip(engines(pool), asked, strict=True)
        ]
        for _ in range(2):
            next(streams[0])
        streams[0].close()
        assert [stream.run().token_ids for stream in streams[1:]] == expected[1:]
        assert tokens(pool.generate(asked, **ANSWER)) == expected  # of its caches too


def test_drafts_whose_rows_stand_alone_are_in_the_graph() -> None:
    """A small model's, here the target's copy, of whose trees paths of all lengths are accepted."""
    asked = prompts(4)

    def engine() -> Engine:
        target = HuggingFaceTarget(pretended.moved(small("llama")), captured=True)
        draft = SmallModel(pretended.moved(small("llama")), target.vocab_size)
        return Engine(target, draft, policy_for("eagle", 3))

    with pretended.cuda():
        one = engine()
        one_by_one = [one.generate(prompt, **ANSWER) for prompt in asked]
        pool = Pool(engine(), 3, MEMORY)
        together = pool.generate(asked, **ANSWER)
        assert "root" in drivers(pool)[0].joined.graphs.captures
    assert tokens(together) == tokens(one_by_one) == alone(asked, **ANSWER)
    for result, expected in zip(together, one_by_one, strict=True):
        assert result.stats.acceptance_histogram == expected.stats.acceptance_histogram
        assert result.stats.num_spec_steps < ANSWER["max_new_tokens"] - 2


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_capture_that_fails_leaves_the_answers(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first cycle, or where caches have grown; the draft goes on from what graphs took in."""
    asked, tried = prompts(3), list[Any]()
    expected = alone(asked, **ANSWER)
    run = CapturedDriver.run

    def failed(self: CapturedDriver, lanes: Any) -> Any:
        tried.append(len(lanes))
        if len(tried) > failing:
            raise CaptureError("graphs: tried")
        return run(self, lanes)

    with pretended.cuda():
        pool = pool_of()
        together = pool.generate(asked, **ANSWER)
        monkeypatch.setattr(CapturedDriver, "run", failed)
        results = pool.generate(asked, **ANSWER)
    assert tokens(results) == tokens(together) == expected
    assert all(any("graphs: tried" in note for note in one.stats.notes) for one in results)
    for one, other in zip(results, together, strict=True):
        assert one.stats.acceptance_histogram == other.stats.acceptance_histogram


def test_what_is_strict_has_no_graph_of_several_texts() -> None:
    with pretended.cuda():
        model = pretended.moved(tiny("llama", num_hidden_layers=LAYERS))
        target = HuggingFaceTarget(model, captured=True, strict=True)
        pool = Pool(Engine(target, None, None), 2, MEMORY)
        assert pool.engines[0].drivers.own.captured is None


def test_a_policy_named_by_a_call_runs_beside_the_others() -> None:
    asked = prompts(2)
    expected = alone(asked, **ANSWER)
    with pretended.cuda():
        pool = pool_of("eagle", 2)
        streams = [
            engines(pool)[0].stream(asked[0], **ANSWER, policy="chain"),
            engines(pool)[1].stream(asked[1], **ANSWER),
        ]
        assert [stream.run().token_ids for stream in streams] == expected


@pytest.mark.slow
def test_graphs_are_captured_once_for_a_way_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, capture = list[Any](), Graphs._capture

    def counted(self: Graphs, name: Any, *given: Any) -> Any:
        captures.append((id(self), name))
        return capture(self, name, *given)

    monkeypatch.setattr(Graphs, "_capture", counted)
    with pretended.cuda():
        pool = pool_of("auto", 3)
        for _ in range(2):
            pool.generate(prompts(6), **ANSWER)
            pool.generate(prompts(6), **ANSWER, **SAMPLED)
    assert len(captures) == len(set(captures))

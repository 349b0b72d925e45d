"""Answers side by side: each is, bit for bit, the one that is given alone, whatever stands beside it."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import Engine
from specengine.costs import PassCosts, SharedCosts
from specengine.drafters import another
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.engine import Pool, scheduler
from specengine.errors import InputError
from specengine.models.eagle import HeadRows
from specengine.models.extension import WITH_PAIRS
from specengine.models.kv_cache import Rows
from specengine.models.native import NativeHead, NativeLM, NativeTarget, RowBatch
from specengine.ops.tree import TokenTree
from tests.engine import schedules
from tests.engine.lanes import KINDS, engine_of, lm_of, prompts
from tests.examples import examples
from tests.models.native_engines import INSTRUCTION_SETS, native_lm, needs_extension
from tests.toy import (
    VOCABULARY,
    byte_tokenizer,
    head_config,
    policy_for,
    random_state,
    random_tree,
    tiny,
)

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


def texts(lm: NativeLM, seed: int) -> tuple[list[NativeTarget], list[TokenTree]]:
    """Return targets with prompts of several lengths in their caches, and a tree behind each."""
    chance = random.Random(seed)
    targets, trees = [], []
    for lane in range(chance.randint(2, 7)):
        target = NativeTarget(lm)
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 9, 30, 70]))]
        target.reserve(160, 40)
        target.prefill(prompt)
        targets.append(target)
        trees.append(
            random_tree(
                100 * seed + lane, chance.choice([1, 1, 2, 5, 17]), VOCABULARY, root=prompt[-1]
            )
        )
    return targets, trees


def together(
    lm: NativeLM, targets: list[NativeTarget], trees: list[TokenTree], off: int = 0
) -> list[Tensor]:
    """Return each tree's logits from one forward; off: of the first lane's cache, a slot too far."""
    batch = []
    for target, tree in zip(targets, trees, strict=True):
        start = target.cache.length + off * (target is targets[0])
        rows = RowBatch(
            lm, tree.tokens, tree.depths + start, target.cache, (start, start, tree.ancestors)
        )
        rows.logits = torch.empty(len(tree), lm.vocab_size)
        batch.append(rows)
    lm.run_lanes(batch)
    return [rows.logits for rows in batch]


@pytest.mark.sliced(10)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text"])
def test_a_rows_bits_do_not_depend_on_other_texts(
    family: str, kind: str, instructions: str
) -> None:
    if kind == "float32" and instructions in WITH_PAIRS:
        pytest.skip("has no products in float32")
    lm = lm_of(family, kind, instructions)
    for seed in range(6):
        targets, trees = texts(lm, seed)
        alone = [
            target.verify(tree)[0].clone() for target, tree in zip(targets, trees, strict=True)
        ]
        kept = [[slab.clone() for slab in target.cache.slabs] for target in targets]
        for target in targets:
            for slab in target.cache.slabs:
                slab[:, :, :, target.cache.length :] = float("nan")
        found = together(lm, targets, trees)
        for one, other, target, slabs, tree in zip(found, alone, targets, kept, trees, strict=True):
            assert torch.equal(one, other)
            end = target.cache.length + len(tree)
            for slab, before in zip(target.cache.slabs, slabs, strict=True):
                assert torch.equal(slab[:, :, :, :end], before[:, :, :, :end])


def test_a_cache_off_by_one_slot_is_seen() -> None:
    lm = lm_of("llama", "float32")
    targets, trees = texts(lm, 0)
    for target in targets:
        target.cache.slab[:, :, :, target.cache.length :] = 0.0
    right, wrong = together(lm, targets, trees), together(lm, targets, trees, off=1)
    assert not torch.equal(right[0], wrong[0])
    assert all(torch.equal(one, other) for one, other in zip(right[1:], wrong[1:], strict=True))


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_rows_do_not_depend_on_other_texts(kind: str, instructions: str) -> None:
    if kind == "float32" and instructions in WITH_PAIRS:
        pytest.skip("has no products in float32")
    config = head_config(layer_ids=(0, 1, 1))
    chance = torch.Generator().manual_seed(4)
    head = NativeHead(config, random_state(config), lm_of("llama", kind, instructions))
    width = config.num_features * config.target_hidden_size

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=chance)

    given, lanes = [], []
    for lane, count in enumerate((1, 3, 20, 2)):
        length = 5 * lane + 1
        own = copy.copy(head)
        own.cache.reserve(length + count)
        own.cache.slab[:, :, :, :length] = normal(1, 2, 2, length, 8)
        own.cache.slab[:, :, :, length:] = float("nan")
        tree = random_tree(lane, count, VOCABULARY)
        slot, live = torch.tensor([length]), torch.tensor([count], dtype=torch.int32)
        rows = Rows(tree.tokens, tree.depths + length, tree.ancestors, slot, slot.int(), live)
        one = torch.tensor([count - 1]) if lane == 1 else None
        features = normal(count, width) if lane % 2 else None
        states, sources = normal(count, 32), torch.arange(count) // 2
        given.append((own, (states, sources, rows, one, features)))
        rated = count if one is None else 1
        lanes.append(HeadRows(own, rows, states, sources, features, rated))
    slabs = [lane.model.cache.slab for lane in lanes]
    kept = [slab.clone() for slab in slabs]
    alone = [own.forward(*arguments) for own, arguments in given]
    left = [slab.clone() for slab in slabs]
    for lane, slab in zip(lanes, kept, strict=True):
        lane.model.cache.slab.copy_(slab)
    head.run_lanes(lanes)
    for lane, (logits, out), slab in zip(lanes, alone, left, strict=True):
        assert torch.isfinite(lane.out).all()
        assert torch.equal(lane.logits, logits)
        assert torch.equal(lane.out, out)
        assert torch.equal(lane.model.cache.slab.nan_to_num(7.0), slab.nan_to_num(7.0))


# ---- answers


@pytest.mark.sliced(3)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 5, "temperature": 0.9}, {"logprobs": 2}]
)
@pytest.mark.parametrize("draft", [None, "ngram", "plain"])
def test_many_answers_are_those_given_one_by_one(
    draft: str | None, options: dict[str, Any]
) -> None:
    engine = engine_of(draft=NGram() if draft == "ngram" else None)
    if draft == "plain":
        engine = Engine(engine.target, None, None)
    asked = prompts(11)
    options = {"max_new_tokens": 20, "eos_token_id": [], **options}
    alone = [engine.generate(prompt, **options) for prompt in asked]
    many = engine.generate_many(asked, parallel=4, **options)
    assert [result.token_ids for result in many] == [result.token_ids for result in alone]
    assert [result.logprobs for result in many] == [result.logprobs for result in alone]
    assert all(result.finish_reason == "length" for result in many)


@pytest.mark.slow
@examples(20)
@given(st.integers(0, schedules.BLOCK - 1))
def test_any_schedule_gives_the_same_answers(seed: int) -> None:
    """Requests begin at any forward, end early, are abandoned, go on in caches, and differ in their options."""
    assert schedules.run(seed).total() >= 3


def test_rows_of_several_texts_run_in_one_forward() -> None:
    engine = Engine(NativeTarget(lm_of("llama", "float32")), None, None)
    pool = Pool(engine, 4)
    pool.generate([[1, 2, 3]] * 4, max_new_tokens=40, eos_token_id=[])
    assert pool.scheduler.rows >= 4 * 40
    assert pool.scheduler.forwards <= 42  # 160 and more, one by one


def test_a_text_that_is_read_slowly_holds_nobody_up() -> None:
    engine = Engine(NativeTarget(lm_of("llama", "float32")), None, None)
    pool = Pool(engine, 2)
    slow = pool.engines[0].stream([1, 2, 3], max_new_tokens=30, eos_token_id=[])
    next(slow)
    began = time.perf_counter()
    answer = pool.engines[1].generate([4, 5], max_new_tokens=30, eos_token_id=[])
    assert len(answer.token_ids) == 30
    assert time.perf_counter() - began < 5
    slow.close()


def test_the_texts_of_a_pool_share_two_copies_of_the_tokenizer() -> None:
    engine = Engine(NativeTarget(lm_of("llama", "float32")), None, None, byte_tokenizer())
    copies: list[Any] = []

    class Counted(type(engine.tokenizer)):  # type: ignore[misc]
        def __deepcopy__(self, memo: Any) -> Any:
            copies.append(made := copy.copy(self))
            return made

    engine.tokenizer.__class__ = Counted
    alone = engine.generate("once", max_new_tokens=6).text
    pool = Pool(engine, 4)
    assert not copies
    assert [result.text for result in pool.generate(["once"] * 4, max_new_tokens=6)] == [alone] * 4
    assert len(copies) == 2
    assert all(one.tokenizer is pool.tokenizer is not engine.tokenizer for one in pool.engines)


def test_an_error_of_a_forward_reaches_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(NativeTarget(lm_of("llama", "float32")), None, None)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no forward")

    monkeypatch.setattr(NativeLM, "run", broken)
    monkeypatch.setattr(NativeLM, "run_lanes", broken)
    with pytest.raises(RuntimeError, match="no forward"):
        engine.generate_many([[1, 2], [3, 4], [5]], parallel=3, max_new_tokens=4)


def test_targets_of_other_kinds_answer_one_by_one() -> None:
    engine = Engine.from_pretrained(tiny("llama"), "ngram", "eagle", backend="huggingface")
    asked = prompts(3)
    alone = [engine.generate(prompt, max_new_tokens=6).token_ids for prompt in asked]
    assert [result.token_ids for result in engine.generate_many(asked, max_new_tokens=6)] == alone
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(InputError, match=r"parallel: got .*, accepted 1 or more"):
            engine.generate_many(asked, parallel=wrong)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("policy", ["eagle", "plain"])
@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5_text", "granitemoehybrid", "nemotron_h", "falcon_h1"]
)
def test_texts_of_a_hybrid_model_share_forwards(family: str, policy: str) -> None:
    lm = native_lm(tiny(family))
    draft = Recycling() if policy == "eagle" else None
    engine = Engine(NativeTarget(lm), draft, policy_for("eagle") if draft else None)
    # the last one is taken in by pieces
    asked = [*prompts(5), [(7 * i + 3) % VOCABULARY for i in range(150)]]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "logprobs": 1}
    alone = [engine.generate(prompt, **options) for prompt in asked]
    pool = Pool(engine, 3)
    many = pool.generate(asked, **options)
    assert [result.token_ids for result in many] == [result.token_ids for result in alone]
    found, wanted = (
        [[one.logprob for one in result.logprobs] for result in results]
        for results in (many, alone)
    )
    assert found == wanted  # to the bit
    assert pool.scheduler.rows > sum(result.stats.num_prompt_tokens for result in many)
    assert pool.scheduler.forwards < 0.7 * sum(result.stats.num_spec_steps for result in alone)
    again = pool.generate(asked[:3], **options)  # on states that were kept, or taken in anew
    assert [result.token_ids for result in again] == [result.token_ids for result in alone[:3]]


def test_the_further_behind_the_fewer_tokens_of_a_prompt_are_run_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [scheduler.piece_at(length) for length in (0, 2048, 4096, 100_000)] == [64, 64, 32, 16]
    engine = Engine(NativeTarget(lm_of("llama", "float32")), None, None)
    asked = [[(7 * i + 3) % VOCABULARY for i in range(150)], [1, 2, 3]]
    alone = [
        engine.generate(prompt, max_new_tokens=20, eos_token_id=[]).token_ids for prompt in asked
    ]
    monkeypatch.setattr(scheduler, "NEAR", 32)
    found = engine.generate_many(asked, max_new_tokens=20, eos_token_id=[])
    assert [result.token_ids for result in found] == alone


@pytest.mark.parametrize("policy", ["smart", "ddtree", "caddtree", "cast"])
def test_rules_that_keep_a_state_of_their_own_share_forwards(policy: str) -> None:
    engine = Engine(NativeTarget(native_lm(tiny("lfm2"))), Recycling(), policy_for(policy))
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "eos_token_id": [],
        "temperature": 1.0,
        "seed": 5,
    }
    alone = [engine.generate(prompt, **options).token_ids for prompt in prompts(4)]
    assert [
        result.token_ids for result in engine.generate_many(prompts(4), parallel=3, **options)
    ] == alone


def test_a_memory_belongs_to_one_lane() -> None:
    lm = native_lm(tiny("lfm2"))
    caches = [lm.new_cache(20) for _ in range(2)]
    tokens, places = torch.tensor([1, 2]), torch.tensor([0, 1])

    def run(*memories: Any) -> None:
        batch = [RowBatch(lm, tokens, places, cache, (0, 0, None)) for cache in caches]
        for cache, memory in zip(caches, memories, strict=True):
            cache.states[:] = [memory]
        batch[-1].logits = torch.empty(1, lm.vocab_size)
        lm.run_lanes(batch)

    first, second = (cache.states[0] for cache in caches)
    with pytest.raises(ValueError, match="memory: got 1, accepted one of each lane's own"):
        run(first, first)
    other = native_lm(tiny("qwen3_5_text")).new_cache(20).states[0]
    with pytest.raises(ValueError, match=r"memory: got .*, accepted one of this decoder"):
        run(first, other)
    broken = native_lm(tiny("lfm2")).new_cache(20)
    rows = RowBatch(lm, tokens[:1], places[:1], caches[0], (0, 0, None))
    others = RowBatch(lm, tokens[1:], places[1:], broken, (1, 1, None))
    with pytest.raises(ValueError, match="memory"):
        lm.run_lanes([rows, others])
    run(first, second)  # nothing was left half done
    assert first.folded == second.folded == 2


def test_drafts_beside_share_what_belongs_to_the_model() -> None:
    first = Recycling(successors=3)
    second = another(first)
    assert isinstance(second, Recycling)
    assert second.successors == 3
    assert second is not first
    assert second.table is first.table


def test_draft_passes_of_all_texts_are_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    config = head_config()
    lm = native_lm(tiny("llama", num_hidden_layers=4).bfloat16())
    head = NativeHead(config, random_state(config), lm)
    engine = Engine(NativeTarget(lm), EagleDraft(head, lm), policy_for("eagle"))
    asked = prompts(9)
    options = {"max_new_tokens": 40, "eos_token_id": []}
    alone = [engine.generate(prompt, **options) for prompt in asked]
    pool, passes, run = Pool(engine, 3), list[int](), NativeHead.run_lanes

    def counted(head: NativeHead, lanes: Any) -> None:
        passes.append(len(lanes))
        run(head, lanes)

    monkeypatch.setattr(NativeHead, "run_lanes", counted)
    many = pool.generate(asked, **options)
    assert [result.token_ids for result in many] == [result.token_ids for result in alone]
    assert [result.stats.acceptance_histogram for result in many] == [
        r.stats.acceptance_histogram for r in alone
    ]
    drafted = sum(result.stats.num_draft_passes for result in many)
    assert 0 < len(passes) < drafted
    assert pool.scheduler.forwards < sum(result.stats.num_spec_steps for result in many)


def test_an_error_in_a_shared_pass_is_raised_by_all_of_its_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = head_config()
    lm = native_lm(tiny("llama", num_hidden_layers=4).bfloat16())
    head = NativeHead(config, random_state(config), lm)
    pool = Pool(Engine(NativeTarget(lm), EagleDraft(head, lm), policy_for("eagle")), 3)
    monkeypatch.setattr(
        NativeHead, "run_lanes", lambda self, lanes: (_ for _ in ()).throw(MemoryError("none left"))
    )
    with pytest.raises(MemoryError, match="none left"):
        # some of them are drafted for at the same time
        pool.generate(prompts(9), max_new_tokens=60, eos_token_id=[])
    monkeypatch.undo()
    assert len(pool.generate(prompts(3), max_new_tokens=4, eos_token_id=[])) == 3


def test_costs_beside_others_price_nodes_as_if_each_text_brought_as_many() -> None:
    costs = PassCosts(
        "toy", {1: 2.0, 4: 2.1, 8: 2.2, 16: 6.0}, {1: 0.5, 4: 1.0}, measured=True, overhead=0.1
    )
    shared = costs.beside(3)
    assert isinstance(shared, SharedCosts)
    table, alone = shared.table(4, 4, 0), costs.table(16, 4, 0)
    assert torch.allclose(table.verify[:2], alone.verify[:8:4])
    assert torch.allclose(shared.table(16, 4, 0).verify[:5], alone.verify[::4])
    slope = float(alone.verify[7] - alone.verify[3]) / 4
    assert float(table.verify[2]) == pytest.approx(
        float(alone.verify[7]) + slope
    )  # rows beyond those in the table
    assert torch.allclose(table.draft[1:], 4 * alone.draft[1:])
    assert shared.overhead == pytest.approx(0.4)
    joined = costs.beside(3, joined=True).table(4, 4, 0)
    assert float(joined.draft[1]) == pytest.approx(
        float(costs.table(4, 4, 0).draft[4])
    )  # one pass of all four
    assert torch.equal(joined.verify, table.verify)


def test_texts_side_by_side_learn_the_same_successors() -> None:
    engine = Engine(NativeTarget(lm_of("llama", "float32")), Recycling(3), policy_for("eagle"))
    pool = Pool(engine, 2)
    first, second = (other.drafter for other in pool.engines)
    pool.engines[0].generate([1, 2, 3], max_new_tokens=20, eos_token_id=[])
    assert isinstance(first, Recycling)
    assert isinstance(second, Recycling)
    assert first is not second
    learnt = [first.row(token) for token in range(VOCABULARY)]
    assert any(learnt)
    assert [second.row(token) for token in range(VOCABULARY)] == learnt


def test_each_text_has_a_policy_of_its_own() -> None:
    engine = engine_of()
    policies_of_all = [engine.policy, *(own.policy for own in Pool(engine, 3).engines)]
    assert len(set(map(id, policies_of_all))) == 4
    assert len(set(map(repr, policies_of_all))) == 1


def test_asynchronous_streams_are_answered_at_once() -> None:
    engine, asked = engine_of(), prompts(6)
    alone = [engine_of().generate(prompt, max_new_tokens=16) for prompt in asked]

    async def one(prompt: list[int]) -> tuple[list[int], Any]:
        stream = engine.astream(prompt, parallel=3, max_new_tokens=16)
        pieces = [piece async for piece in stream]
        return [token for piece in pieces for token in piece.cycle.tokens], stream.result

    async def all_of_them() -> list[tuple[list[int], Any]]:
        return await asyncio.gather(*map(one, asked))

    for (tokens, result), own in zip(asyncio.run(all_of_them()), alone, strict=True):
        assert tokens == result.token_ids == own.token_ids
    assert len(engine._streams[1].engines) == 3


@pytest.mark.parametrize("backend", ["native", "huggingface"])
def test_leaving_an_asynchronous_stream_frees_its_place(backend: str) -> None:
    engine = Engine.from_pretrained(
        tiny("llama", num_hidden_layers=2), "recycling", backend=backend
    )

    async def several() -> None:
        for _ in range(3):
            async with engine.astream([1, 2, 3], parallel=1, max_new_tokens=200) as stream:
                async for _ in stream:
                    break
        with pytest.raises(InputError, match="max_new_tokens"):
            await anext(engine.astream([1, 2, 3], parallel=1, max_new_tokens=-1))
        stream = engine.astream([1, 2, 3], parallel=1, max_new_tokens=4)
        assert len([piece async for piece in stream])
        assert len(stream.result.token_ids) == 4
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(several())


def test_an_error_of_one_text_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    pool, asked = Pool(engine, 3), prompts(3)
    alone = [engine.generate(prompt, max_new_tokens=20).token_ids for prompt in asked]
    answers = [
        own.stream(prompt, max_new_tokens=20)
        for own, prompt in zip(pool.engines, asked, strict=True)
    ]
    broken = pool.engines[1].drafter
    monkeypatch.setattr(
        broken, "accept", lambda cycle: (_ for _ in ()).throw(MemoryError("none left"))
    )
    with pytest.raises(MemoryError, match="none left"):
        answers[1].run()
    assert [answers[number].run().token_ids for number in (0, 2)] == [alone[0], alone[2]]
    monkeypatch.undo()
    assert pool.engines[1].generate(asked[1], max_new_tokens=20).token_ids == alone[1]


def test_one_thread_can_read_several_answers_in_turn() -> None:
    engine = engine_of()
    pool, asked = Pool(engine, 3), prompts(3)
    alone = [
        engine.generate(prompt, max_new_tokens=30, eos_token_id=[]).token_ids for prompt in asked
    ]
    answers = [
        own.stream(prompt, max_new_tokens=30, eos_token_id=[])
        for own, prompt in zip(pool.engines, asked, strict=True)
    ]
    found: list[list[int]] = [[], [], []]
    while any(answer.result is None for answer in answers):
        for tokens, answer in zip(found, answers, strict=True):
            if (piece := next(answer, None)) is not None:
                tokens += piece.cycle.tokens
    assert found == alone
    assert pool.scheduler.forwards < 60  # some 20 each, one by one, and the prompts

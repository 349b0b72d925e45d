"""Answers side by side: each is, bit for bit, the one that is given alone, whatever stands beside it."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine import Engine
from specengine.costs import PassCosts, SharedCosts
from specengine.drafters import another, cache_of
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.engine import Pool, TextGeneration, Ticket, scheduler
from specengine.engine import pool as pool_module
from specengine.engine.pool import bytes_held, bytes_used
from specengine.engine.scheduler import LOOK, MAX_MIXED, SharedPace
from specengine.errors import InputError
from specengine.models.extension import WITH_PAIRS
from specengine.models.kv_cache import Rows
from specengine.models.native import LaneTarget, NativeHead, NativeLM, NativeTarget, RowBatch
from specengine.ops.tree import TokenTree
from tests.engine import schedules
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
KINDS = {"float32": {}, "bfloat16": {}, "int8": {"quantize": "int8", "numerics": "integer"}}


def lm_of(family: str, kind: str, instructions: str | None = None) -> NativeLM:
    model = tiny(family)
    model = model if kind == "float32" else model.bfloat16()
    return native_lm(model, instructions, **KINDS[kind])


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
    config, chance = head_config(), torch.Generator().manual_seed(4)
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
        given.append((own, (normal(count, 32), torch.arange(count) // 2, rows, one, features)))
        lanes.append(own.asked(*given[-1][1]))
    slabs = [lane.model.cache.slab for lane in lanes]
    kept = [slab.clone() for slab in slabs]
    alone = [own.forward(*arguments) for own, arguments in given]
    left = [slab.clone() for slab in slabs]
    for lane, slab in zip(lanes, kept, strict=True):
        lane.model.cache.slab.copy_(slab)
        lane.out.fill_(float("nan"))
        lane.logits.fill_(float("nan"))
    head.run_lanes(lanes)
    for lane, (logits, out), slab in zip(lanes, alone, left, strict=True):
        assert torch.isfinite(lane.out).all()
        assert torch.equal(lane.logits, logits)
        assert torch.equal(lane.out[-len(out) :], out)
        assert torch.equal(lane.model.cache.slab.nan_to_num(7.0), slab.nan_to_num(7.0))


# ---- answers


def engine_of(
    policy: str = "eagle", draft: Any = None, kind: str = "bfloat16", family: str = "llama"
) -> Engine:
    drafter = Recycling() if draft is None else draft
    return Engine(NativeTarget(lm_of(family, kind)), drafter, policy_for(policy))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 3, 12, 40, 90]))]
        for _ in range(count)
    ]


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


@settings(max_examples=20, deadline=None)
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
    with pytest.raises(InputError, match="parallel: got 2, accepted 1 on huggingface"):
        Pool(engine, 2)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(InputError, match=r"parallel: got .*, accepted 1 or more"):
            engine.generate_many(asked, parallel=wrong)


@pytest.mark.parametrize("policy", ["eagle", "plain"])
@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5_text", "granitemoehybrid", "nemotron_h", "falcon_h1"]
)
def test_texts_of_a_hybrid_model_share_forwards(family: str, policy: str) -> None:
    lm = native_lm(tiny(family))
    draft = Recycling() if policy == "eagle" else None
    engine = Engine(NativeTarget(lm), draft, policy_for("eagle") if draft else None)
    asked = [
        *prompts(5),
        [(7 * i + 3) % VOCABULARY for i in range(150)],
    ]  # the last one is taken in by pieces
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
            cache.memory = memory
        batch[-1].logits = torch.empty(1, lm.vocab_size)
        lm.run_lanes(batch)

    first, second = (cache.memory for cache in caches)
    with pytest.raises(ValueError, match="memory: got 1, accepted one of each lane's own"):
        run(first, first)
    other = native_lm(tiny("qwen3_5_text")).new_cache(20).memory
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
        pool.generate(
            prompts(9), max_new_tokens=60, eos_token_id=[]
        )  # some of them are drafted for at the same time
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


class Served:
    """Texts under a clock of its own: so many tokens per second, by whether they rest and how many they are."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rates: Callable[[bool, int], float]
    ) -> None:
        self.pace, self.now, self.rates = SharedPace(), 0.0, rates
        self.mixed: Callable[[], bool] = lambda: False  # whether a step has rows of prompts
        self.held: Callable[[], float] = lambda: 0.0  # seconds that a forward takes more
        monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def resting(self, texts: int, seconds: float, forward: float = 0.01) -> float:
        """Serve so many texts for a while; the share of time in which they rested."""
        rested, count = 0, round(seconds / forward)
        for _ in range(count):
            rested += self.pace.rests
            began, tokens = self.now, self.rates(self.pace.rests, texts) * forward
            self.now += forward + self.held()
            self.pace.observe(texts, tokens, began, self.mixed())  # type: ignore[arg-type]
        return rested / count


def test_the_faster_way_is_kept_and_the_other_one_seldom_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests == (texts > 4) else 70.0)
    served.pace.price = lambda texts: 0.2 * texts
    assert served.resting(8, 30.0) > 0.95
    assert 0 < 1 - served.resting(8, 90.0) < 0.02  # it is tried
    served.resting(16, 0.02)
    assert served.resting(16, 2.0) == 1.0
    assert served.resting(4, 30.0) < 0.05
    served.resting(2, 0.02)
    assert served.resting(2, 0.4) == 0.0
    assert served.resting(8, 2.0) > 0.8  # what was known


def test_a_way_that_became_slower_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = [False]
    served = Served(
        monkeypatch,
        lambda rests, texts: (100.0 if rests else 80.0) * (0.5 if slower[0] and rests else 1),
    )
    assert served.resting(8, 30.0) > 0.9
    slower[0] = True
    assert served.resting(8, 10.0) < 0.2


def test_time_without_texts_counts_for_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests else 90.0)
    for _ in range(20):
        served.resting(8, 0.2)
        served.now += 60.0
    timed = {rests: rate.tokens for (rests, _), rate in served.pace._rates.items()}
    assert timed == {True: pytest.approx(100.0), False: pytest.approx(90.0)}
    assert served.resting(8, 10.0) > 0.95  # it was not tried again for being old


def test_a_try_is_short_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests else 80.0)
    served.pace.price = lambda texts: 2.0
    drafted = round((1 - served.resting(16, 2.0)) * 200)
    assert drafted == 2  # the first of so many texts is not timed, and the second chooses
    assert served.resting(16, 30.0) == 1.0
    drafted = round((1 - served.resting(16, 30.0)) * 3000)
    assert 0 < drafted <= LOOK + 2  # costs that forbid it are believed for 48 seconds
    served.pace.price = lambda texts: 1.0
    served.resting(32, 2.0)
    drafted = round((1 - served.resting(32, 30.0)) * 3000)
    assert 0 < drafted <= 4 * (LOOK + 2)  # after 3, 6, 12 and 24 seconds


@pytest.mark.parametrize(
    ("cheap", "rested"), [({1: 1.0, 64: 1.2}, 0.0), ({1: 1.0, 4: 1.2, 8: 1.4, 16: 2.6}, 1.0)]
)
def test_the_first_way_is_the_one_that_costs_allow(
    monkeypatch: pytest.MonkeyPatch, cheap: dict[int, float], rested: float
) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0)
    served.pace.price = PassCosts("toy", cheap, {1: 0.1, 8: 0.2}, measured=True).over_plain
    served.resting(8, 0.02)  # the first of so many texts is not timed
    assert served.resting(8, 0.05) == rested


def test_steps_with_prompts_are_timed_only_where_they_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, lambda rests, texts: 100.0 if rests else 80.0)
    served.mixed = lambda: True
    served.resting(8, 0.01 * MAX_MIXED)
    assert not served.pace._rates
    served.resting(8, 30.0)
    assert served.resting(8, 30.0) > 0.9
    tokens = {rests: rate.tokens for (rests, _), rate in served.pace._rates.items()}
    assert tokens == {True: pytest.approx(100.0), False: pytest.approx(80.0)}


def test_a_text_learns_at_once_that_others_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(engine_of(policy="auto"), 2)
    policy = pool.engines[0].policy
    calls: list[int] = []
    monkeypatch.setattr(policy, "reprice", lambda: calls.append(pool.engines[0].target.others))  # type: ignore[union-attr]
    results = pool.generate(prompts(2), max_new_tokens=8, eos_token_id=[])
    assert len(results) == 2
    assert {0, 1} <= set(calls)


def test_forwards_that_were_held_up_speak_for_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    served, draw = (
        Served(monkeypatch, lambda rests, texts: 100.0 if rests else 85.0),
        random.Random(0),
    )
    served.held = lambda: 0.08 if draw.random() < 0.1 else 0.0
    assert served.resting(8, 30.0) > 0.9


def test_long_forwards_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda rests, texts: 10.0 if rests else 8.0)
    served.resting(8, 20.0, forward=0.4)
    assert served.resting(8, 40.0, forward=0.4) > 0.8


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "deepseek_v3"])
def test_a_beginning_that_another_text_has_is_copied(family: str) -> None:
    engine = engine_of(family=family)
    system = [(7 * i + 3) % VOCABULARY for i in range(90)]
    asked = [[*system, *range(number, number + 5)] for number in range(4)]
    alone = [
        engine_of(family=family).generate(prompt, max_new_tokens=12).token_ids for prompt in asked
    ]
    pool = Pool(engine, 4)
    results = pool.generate(asked, max_new_tokens=12)
    assert [result.token_ids for result in results] == alone
    cached = sorted(result.stats.num_cached_prompt_tokens for result in results)
    assert cached[0] == 0
    assert all(
        count >= len(system) - 1 for count in cached[1:]
    )  # one of them takes it in, the others wait


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


def test_a_copied_beginning_is_not_that_of_other_weights() -> None:
    model = tiny("llama", num_hidden_layers=2).bfloat16()
    engine = Engine.from_pretrained(model, None, "plain", backend="native")
    pool = Pool(engine, 2)
    prompt = [(5 * i + 1) % VOCABULARY for i in range(80)]
    pool.engines[0].generate(prompt, max_new_tokens=4)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    result = pool.engines[1].generate(prompt, max_new_tokens=4)
    assert result.stats.num_cached_prompt_tokens == 0
    assert (
        result.token_ids
        == Engine.from_pretrained(model, None, "plain").generate(prompt, max_new_tokens=4).token_ids
    )


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "deepseek_v3"])
def test_a_slot_has_the_bytes_of_all_layers(family: str) -> None:
    target = LaneTarget(lm_of(family, "bfloat16"))
    assert target.cache.slot_bytes * target.cache.capacity == target.cache.nbytes


def test_answers_wait_for_room_and_ended_ones_give_theirs() -> None:
    engine = engine_of()
    target = LaneTarget(engine.target.lm)
    asked = [[(number * i + 3) % VOCABULARY for i in range(30)] for number in range(6)]
    alone = [engine_of().generate(prompt, max_new_tokens=20).token_ids for prompt in asked]
    longest = target.cache.bytes_of(30 + 20 + engine.drivers.own.eager.budget)
    pool = Pool(engine, 6, memory=int(2.5 * longest))  # for two of six
    most = []

    def watched(place: Any, *given: Any) -> Any:
        most.append(len(pool._reserved))
        return place(*given)

    place = pool.place
    pool.place = lambda *given: watched(place, *given)  # type: ignore[method-assign]
    assert [result.token_ids for result in pool.generate(asked, max_new_tokens=20)] == alone
    assert max(most) <= 2
    assert not pool._reserved
    assert not pool.waiting
    assert sum(
        own.target.cache.nbytes for own in pool.engines
    ) <= pool.memory + 6 * target.cache.bytes_of(1)
    with pytest.raises(InputError, match=r"max_new_tokens: .* MB of cache"):
        Pool(engine, 2, memory=8 * target.cache.slot_bytes).generate(asked[:1], max_new_tokens=20)


def test_of_ended_answers_the_oldest_gives_its_room_first() -> None:
    engine = engine_of()
    asked = [[(number * i + 3) % VOCABULARY for i in range(200)] for number in range(3)]
    longest = LaneTarget(engine.target.lm).cache.bytes_of(200 + 8 + engine.drivers.own.eager.budget)
    pool = Pool(engine, 3, memory=int(2.5 * longest))
    for own, prompt in zip(pool.engines, asked, strict=True):
        own.generate(prompt, max_new_tokens=8)
    assert [bool(own.target.tokens) for own in pool.engines] == [False, True, True]


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
    assert len(engine._streams[1]._engines) == 3


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


def head_engine() -> Engine:
    config = head_config()
    lm = native_lm(tiny("llama", num_hidden_layers=4).bfloat16())
    return Engine(
        NativeTarget(lm),
        EagleDraft(NativeHead(config, random_state(config), lm), lm),
        policy_for("eagle"),
    )


def small_engine() -> Engine:
    lm = native_lm(tiny("llama", num_hidden_layers=4).bfloat16())
    return Engine(NativeTarget(lm), SmallModel(native_lm(tiny("llama"))), policy_for("eagle"))


@pytest.mark.parametrize("made", [head_engine, small_engine])
def test_caches_of_drafts_count_in_the_memory(made: Callable[[], Engine]) -> None:
    asked = [[(number * i + 3) % VOCABULARY for i in range(100)] for number in range(6)]
    alone = [made().generate(prompt, max_new_tokens=100).token_ids for prompt in asked]
    engine = made()
    target, draft = LaneTarget(engine.target.lm), cache_of(engine.drafter)
    assert draft is not None
    eager = engine.drivers.own.eager
    assert eager.policy is not None
    drafted = draft.bytes_of(200 + eager.policy.capacity + eager.unread)
    both = target.cache.bytes_of(200 + eager.budget) + drafted
    pool = Pool(
        engine, 3, memory=3 * both - drafted // 2
    )  # for two of three; for three without the drafts
    at_once: list[int] = []
    make_room = pool._make_room

    def watched(own: Engine, need: int) -> bool:
        at_once.append(len(pool._reserved))
        assert need >= both
        assert sum(map(bytes_held, pool._reserved)) <= pool.memory
        return make_room(own, need)

    pool._make_room = watched  # type: ignore[method-assign]
    assert [result.token_ids for result in pool.generate(asked, max_new_tokens=100)] == alone
    assert max(at_once) == 2
    least = target.cache.bytes_of(1) + engine_draft_bytes(made())
    assert sum(map(bytes_held, pool.engines)) <= pool.memory + 3 * least
    assert all(bytes_used(own) <= bytes_held(own) for own in pool.engines)
    small = Pool(engine, 2, memory=both - 1)
    with pytest.raises(InputError, match=r"max_new_tokens: .* MB of cache"):
        small.generate(asked[:1], max_new_tokens=100)


def engine_draft_bytes(engine: Engine) -> int:
    cache = cache_of(engine.drafter)
    return 0 if cache is None else cache.nbytes


@pytest.mark.parametrize("kind", ["same heads", "other heads", "recurrent"])
def test_a_cache_gives_back_its_memory(kind: str) -> None:
    family = {"same heads": "llama", "other heads": "gemma4_text", "recurrent": "lfm2"}[kind]
    cache = lm_of(family, "float32").new_cache(1)
    least, filled = cache.nbytes, cache.filled
    cache.reserve(2000)
    assert cache.nbytes == cache.bytes_of(1) > least
    assert cache.bytes_of(3000) > cache.nbytes
    cache.release()
    assert cache.nbytes == least
    assert cache.length == 0
    assert cache.filled is filled  # which others hold
    cache.reserve(600)
    assert all(slab.shape[3] == cache.capacity for slab in cache.slabs)


def test_an_answer_that_has_ended_is_not_counted_beside_the_next() -> None:
    pool = Pool(engine_of(), 2)
    for engine, other in (pool.engines, pool.engines[::-1]):
        with engine.target.running():
            engine.generate([1, 2, 3], max_new_tokens=6)
        assert other.target.others == 0  # type: ignore[attr-defined]


# ---- answers that wait


def engine_without_room() -> tuple[Pool, Any]:
    """Return a pool of two with room for one answer, which is under way."""
    engine = engine_of()
    room = LaneTarget(engine.target.lm).cache.bytes_of(3 + 60 + engine.drivers.own.eager.budget)
    pool = Pool(engine, 2, memory=room)
    first = pool.engines[0].stream([1, 2, 3], max_new_tokens=60, eos_token_id=[])
    next(first)
    return pool, first


def waiting_answer(pool: Pool, ticket: Ticket) -> tuple[threading.Thread, TextGeneration]:
    answer = TextGeneration(
        pool.engines[1], [4, 5, 6], {"max_new_tokens": 60, "eos_token_id": []}, ticket=ticket
    )
    thread = threading.Thread(target=lambda: [*answer])
    thread.start()
    return thread, answer


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_an_answer_that_waits_for_room_is_given_up_at_once(how: str) -> None:
    pool, first = engine_without_room()
    ticket = Ticket(deadline=time.perf_counter() + 0.3) if how == "too late" else Ticket()
    thread, answer = waiting_answer(pool, ticket)
    if how == "cancelled":
        until(lambda: bool(pool.waiting))
        ticket.cancel()
    thread.join(20)
    assert not thread.is_alive()
    assert answer.result is None
    assert not answer.stats.num_generated_tokens
    assert not pool.waiting
    assert list(pool._reserved) == [pool.engines[0]]
    assert not pool.engines[1].is_busy
    rest = [token for piece in first for token in piece.cycle.tokens]
    assert len(rest) > 30  # the answer under way goes on
    alone = engine_of().generate([4, 5, 6], max_new_tokens=60, eos_token_id=[]).token_ids
    assert (
        pool.engines[1].generate([4, 5, 6], max_new_tokens=60, eos_token_id=[]).token_ids == alone
    )
    assert not pool._reserved


def test_an_answer_that_waits_goes_on_without_being_told() -> None:
    pool, first = engine_without_room()
    thread, answer = waiting_answer(pool, Ticket(deadline=time.perf_counter() + 60))
    until(lambda: bool(pool.waiting))
    first.close()
    thread.join(20)
    assert answer.result is not None
    assert len(answer.result.token_ids) == 60


def test_letting_an_answer_go_frees_its_engine_and_its_room() -> None:
    pool, first = engine_without_room()
    assert pool.engines[0].is_busy
    del first
    assert not pool.engines[0].is_busy
    assert not pool._reserved
    assert (
        len(pool.engines[1].generate([4, 5, 6], max_new_tokens=60, eos_token_id=[]).token_ids) == 60
    )


def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "PREFILL_ROWS", 64)
    pool = Pool(engine_of(), 2)
    prompt = [(7 * i + 3) % VOCABULARY for i in range(240)]
    ticket = Ticket()
    answer = TextGeneration(pool.engines[0], prompt, {"max_new_tokens": 8}, ticket=ticket)
    assert not answer.is_ready
    while pool.scheduler.rows < 128:
        pool.scheduler.step()
    ticket.cancel()
    assert [*answer] == []
    assert pool.scheduler.rows == 128
    assert not pool._reserved
    alone = engine_of().generate(prompt, max_new_tokens=8)
    for engine in pool.engines:  # both find what was read
        result = engine.generate(prompt, max_new_tokens=8)
        assert result.token_ids == alone.token_ids
        assert result.stats.num_cached_prompt_tokens >= 128


def test_a_prompt_that_waits_for_another_one_with_its_beginning_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "PREFILL_ROWS", 16)
    pool = Pool(engine_of(), 2)
    prompt = [(7 * i + 3) % VOCABULARY for i in range(90)]
    first = TextGeneration(pool.engines[0], prompt, {"max_new_tokens": 4})
    ticket = Ticket()
    second = TextGeneration(pool.engines[1], prompt, {"max_new_tokens": 4}, ticket=ticket)
    assert not first.is_ready
    assert not second.is_ready
    pool.scheduler.step()
    assert list(pool._reading) == [pool.engines[0]]
    ticket.cancel()
    assert [*second] == []
    assert len(first.run().token_ids) == 4
    assert len(pool.engines[1].generate(prompt, max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("lacks", ["engine", "room"])
def test_leaving_an_asynchronous_stream_that_waits_ends_it(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    room = LaneTarget(engine.target.lm).cache.bytes_of(3 + 200 + engine.drivers.own.eager.budget)
    monkeypatch.setattr(pool_module, "free_memory", lambda: 2 * room)

    def threads() -> int:
        return sum(thread.name == "specengine-astream" for thread in threading.enumerate())

    async def several() -> None:
        options = {
            "max_new_tokens": 200,
            "eos_token_id": [],
            "parallel": 1 if lacks == "engine" else 2,
        }
        async with engine.astream([1, 2, 3], **options) as first:
            await anext(first)
            second = engine.astream([4, 5, 6], **options)
            assert threads() == 1
            await second.aclose()
            assert [piece async for piece in second] == []
            assert second.result is None
        await asyncio.to_thread(until, lambda: threads() == 0)

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


def until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)

"""The memory that the caches of several texts share: copied beginnings, room, and answers that wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.drafters import cache_of
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.small_model import SmallModel
from specengine.engine import Pool, TextGeneration, Ticket, parts
from specengine.engine.parts import bytes_held, bytes_used
from specengine.errors import InputError
from specengine.models.native import NativeHead, NativeLane, NativeTarget
from tests.engine.lanes import engine_of, lm_of, until
from tests.models.native_engines import native_lm, needs_extension
from tests.toy import VOCABULARY, head_config, policy_for, random_state, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


@pytest.mark.sliced(1)
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
    target = NativeLane(NativeTarget(lm_of(family, "bfloat16")))
    assert target.cache.slot_bytes * target.cache.capacity == target.cache.nbytes


def test_answers_wait_for_room_and_ended_ones_give_theirs() -> None:
    engine = engine_of()
    target = NativeLane(engine.target)
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
    longest = NativeLane(engine.target).cache.bytes_of(200 + 8 + engine.drivers.own.eager.budget)
    pool = Pool(engine, 3, memory=int(2.5 * longest))
    for own, prompt in zip(pool.engines, asked, strict=True):
        own.generate(prompt, max_new_tokens=8)
    assert [bool(own.target.tokens) for own in pool.engines] == [False, True, True]


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


@pytest.mark.slow
@pytest.mark.parametrize("made", [head_engine, small_engine])
def test_caches_of_drafts_count_in_the_memory(made: Callable[[], Engine]) -> None:
    asked = [[(number * i + 3) % VOCABULARY for i in range(100)] for number in range(6)]
    alone = [made().generate(prompt, max_new_tokens=100).token_ids for prompt in asked]
    engine = made()
    target, draft = NativeLane(engine.target), cache_of(engine.drafter)
    assert draft is not None
    eager = engine.drivers.own.eager
    assert eager.policy is not None
    drafted = draft.bytes_of(200 + eager.policy.capacity + eager.unread)
    both = target.cache.bytes_of(200 + eager.budget) + drafted
    # for two of three; for three without the drafts
    pool = Pool(engine, 3, memory=3 * both - drafted // 2)
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
    room = NativeLane(engine.target).cache.bytes_of(3 + 60 + engine.drivers.own.eager.budget)
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
    monkeypatch.setattr(parts, "PREFILL_ROWS", 64)
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
    monkeypatch.setattr(parts, "PREFILL_ROWS", 16)
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
    room = NativeLane(engine.target).cache.bytes_of(3 + 200 + engine.drivers.own.eager.budget)
    monkeypatch.setattr(parts, "free_memory", lambda *_: 2 * room)

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

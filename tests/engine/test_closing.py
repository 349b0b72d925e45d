"""Closing an engine, and what may not be done with one: leave it without a target, copy it, pickle it."""

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from specengine import Engine
from specengine.errors import EngineBusyError, EngineClosedError, InputError
from tests.engine import lanes
from tests.engine.engines import PROMPT, engine_of, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

USES: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda engine: engine.generate(PROMPT),
    "stream": lambda engine: engine.stream(PROMPT),
    "many": lambda engine: engine.generate_many([PROMPT, PROMPT]),
    "score": lambda engine: engine.score(PROMPT),
    "answer": lambda engine: engine.answer(PROMPT),
    "session": lambda engine: engine.session().generate("Hello"),
    "warmup": lambda engine: engine.warmup(),
    "refresh": lambda engine: engine.refresh(),
    "holds": lambda engine: engine.holds(PROMPT),
    "policy": lambda engine: engine.policy,
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_engine_says_so(use: str) -> None:
    with engine_of(tokenizer=tokenizer()) as engine:
        assert engine.generate(PROMPT, max_new_tokens=2).token_ids
    engine.close()
    with pytest.raises(EngineClosedError, match="is closed; load another with Engine"):
        USES[use](engine)
    assert repr(engine) == "Engine(closed)"


def test_open_answers_end_and_memory_is_freed() -> None:
    engine = engine_of()
    target = weakref.ref(engine.target)
    with engine, engine.stream(PROMPT, max_new_tokens=40) as stream:
        next(stream)
        engine.close()
        assert list(stream) == []
        assert stream.result is None
    scores = engine_of().score(PROMPT)
    assert next(scores).logprob < 0
    del engine, stream
    gc.collect()
    assert target() is None


def test_asynchronous_answers_end() -> None:
    engine = lanes.engine_of()

    async def answers() -> list[Any]:
        streams = [engine.astream(PROMPT, parallel=2, max_new_tokens=200) for _ in range(4)]
        await anext(streams[0])
        engine.close()
        return await asyncio.gather(*map(rest, streams), return_exceptions=True)

    async def rest(stream: Any) -> list[Any]:
        return [piece async for piece in stream]

    ends = asyncio.run(answers())
    assert any(isinstance(end, EngineClosedError) for end in ends)  # of those that waited
    assert all(isinstance(end, list | EngineClosedError) for end in ends)


def test_a_cycle_of_another_thread_is_not_cut() -> None:
    engine = engine_of()
    reached, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> bool:
        reached.set()
        return not go_on.wait(60)

    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(
            engine.generate(PROMPT, max_new_tokens=4, stopping_criteria=[wait])
        )
    )
    thread.start()
    assert reached.wait(60)
    with pytest.raises(EngineBusyError, match="generating in another thread; close it after"):
        engine.close()
    go_on.set()
    thread.join()
    assert len(results[0].token_ids) == 4
    engine.close()


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_not_copied(duplicate: Callable[[Any], Any]) -> None:
    engine = engine_of()
    with pytest.raises(TypeError, match=r"neither copied nor pickled.* in each process"):
        duplicate(engine)
    with pytest.raises(TypeError, match="in each process"):
        pickle.dumps(engine.generate)  # as a pool of processes does
    assert engine.generate(PROMPT, max_new_tokens=2).token_ids


def test_an_engine_without_a_target_names_from_pretrained() -> None:
    with pytest.raises(InputError, match=r"target: got none, .*Engine\.from_pretrained\(\) loads"):
        Engine()

"""Ctrl-C, streams that are left, and callers at the same time: the engine is free or busy, never broken."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from specengine import Engine
from specengine.errors import EngineBusyError
from specengine.models.huggingface import HuggingFaceTarget
from tests.hostile.engines import PROMPT, check_usable, engine_of, model, plainly, stream_into
from tests.toy import byte_tokenizer, hooked

pytestmark = pytest.mark.usefixtures("one_thread")


def interrupting(after: int) -> Callable[[Tensor], Tensor]:
    calls = 0

    def interrupt(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return output

    return interrupt


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("part", ["target", "draft"])
def test_ctrl_c_inside_a_forward(part: str, after: int) -> None:
    engine = engine_of()
    module = (
        (engine.target.model if part == "target" else engine.drafter.lm.model).model.layers[1].mlp
    )
    seen: list[int] = []
    with hooked(module, interrupting(after)), pytest.raises(KeyboardInterrupt):
        stream_into(seen, engine)
    assert seen == plainly(40)[: len(seen)]
    assert (engine.target.tokens, engine.target.cache.length, engine.drafter.cache.length) == (
        [],
        0,
        0,
    )
    check_usable(engine)


def test_ctrl_c_in_the_consumer() -> None:
    engine = engine_of()

    def consume() -> None:
        for _ in engine.stream(PROMPT, max_new_tokens=40):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    check_usable(engine)


class Fails:
    """A streamer or a tokenizer in whose code Ctrl-C arrives."""

    chat_template = None

    def put(self, value: Tensor) -> None:
        if value.numel() < len(PROMPT):
            raise KeyboardInterrupt

    def end(self) -> None: ...

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["streamer", "tokenizer"])
def test_ctrl_c_around_the_loop_frees_the_engine_though_the_traceback_lives(where: str) -> None:
    """As at a prompt, where sys.last_traceback keeps the frames of what was interrupted."""
    engine = engine_of(tokenizer=Fails() if where == "tokenizer" else None)
    options = {"streamer": Fails()} if where == "streamer" else {}
    with pytest.raises(KeyboardInterrupt) as interrupted:
        engine.generate(PROMPT, max_new_tokens=40, **options)
    engine.tokenizer = None
    check_usable(engine)
    assert interrupted.traceback


def test_breaking_out_of_a_stream_frees_the_engine_at_once() -> None:
    engine = engine_of(tokenizer=byte_tokenizer())
    gc.disable()  # what is freed by reference counting needs no collector
    try:
        for _ in engine.stream(PROMPT, max_new_tokens=40):
            break
        check_usable(engine)
        for _ in engine.session().stream("Hello", max_new_tokens=40):
            break
        check_usable(engine)
    finally:
        gc.enable()
    stream = engine.stream(PROMPT, max_new_tokens=40)
    next(stream)
    with pytest.raises(EngineBusyError):
        engine.generate(PROMPT)
    stream.close()
    check_usable(engine)
    assert list(stream) == []


def test_a_stream_that_was_never_started_holds_nothing() -> None:
    engine = engine_of()
    waiting = engine.stream(PROMPT, max_new_tokens=20)
    check_usable(engine)
    assert [token for piece in waiting for token in piece.cycle.tokens] == plainly(20)


def test_two_threads_sharing_an_engine() -> None:
    engine = engine_of()
    inside, leave = threading.Event(), threading.Event()
    answers: list[Any] = []

    def waits(ids: Tensor, scores: Any) -> bool:
        inside.set()
        leave.wait(20)
        return False

    def first() -> None:
        answers.append(engine.generate(PROMPT, max_new_tokens=20, stopping_criteria=[waits]))

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(
            EngineBusyError, match=r"generating for another caller.*they can share the loaded model"
        ):
            engine.generate(PROMPT)
    finally:
        leave.set()
        thread.join(20)
    assert answers[0].token_ids == plainly(20)
    check_usable(engine)


def test_two_engines_sharing_a_model_in_two_threads() -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    plain = Engine(HuggingFaceTarget(model()), None, None)
    expected = [plain.generate(prompt, max_new_tokens=60).token_ids for prompt in prompts]
    engines = [engine_of("eagle"), engine_of("chain")]
    answers: list[list[list[int]]] = [[], []]
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        for _ in range(4):
            barrier.wait(20)
            answers[index].append(
                engines[index].generate(prompts[index], max_new_tokens=60).token_ids
            )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [[expected[0]] * 4, [expected[1]] * 4]

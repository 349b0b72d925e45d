"""Several threads and processes: engines over models of their own, over one shared model, and after a fork."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from specengine import Engine
from specengine.models.extension import thread_count
from specengine.models.native import NativeLM, NativeTarget, one_torch_thread
from tests.models.native_engines import (
    PROMPT,
    engine_of,
    lm_of,
    model_of,
    native_lm,
    needs_extension,
)

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
PROMPTS = [PROMPT, PROMPT[::-1]]
TOKENS = 40


def in_two_threads(work: Callable[[int], object]) -> list[object]:
    """Run `work(0)` and `work(1)` at the same time and return their results; raises their errors here."""
    barrier, found, errors = threading.Barrier(2), [None, None], []

    def run(index: int) -> None:
        try:
            barrier.wait(60)
            found[index] = work(index)  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)

    both = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(120)
    if errors:
        raise errors[0]
    return found


def plain(lm: NativeLM, prompt: list[int]) -> list[int]:
    return Engine(NativeTarget(lm), None, None).generate(prompt, max_new_tokens=TOKENS).token_ids


@pytest.mark.parametrize("shared", [False, True], ids=["own models", "one model"])
def test_two_engines_in_two_threads(shared: bool) -> None:
    """Forwards leave the interpreter's lock, so they meet in the model: its workspace serves one at a time."""
    lms = [lm_of("llama"), lm_of("llama") if shared else native_lm(model_of("llama"))]
    expected = [plain(lm, prompt) for lm, prompt in zip(lms, PROMPTS, strict=True)]
    engines = [Engine(NativeTarget(lm), None, None) for lm in lms]

    def work(index: int) -> list[list[int]]:
        return [
            engines[index].generate(PROMPTS[index], max_new_tokens=TOKENS).token_ids
            for _ in range(12)
        ]

    assert in_two_threads(work) == [[expected[0]] * 12, [expected[1]] * 12]


def test_two_engines_with_heads_on_one_model_in_two_threads() -> None:
    expected = [plain(lm_of("llama"), prompt) for prompt in PROMPTS]
    engines = [engine_of("llama", draft) for draft in ("eagle-3", "eagle-1")]

    def work(index: int) -> list[list[int]]:
        return [
            engines[index].generate(PROMPTS[index], max_new_tokens=TOKENS).token_ids
            for _ in range(2)
        ]

    assert in_two_threads(work) == [[expected[0]] * 2, [expected[1]] * 2]


def test_the_pool_sleeps_once_no_forward_follows() -> None:
    """Its threads stay awake between the forwards of a generation, not for longer."""
    torch.set_num_threads(3)
    try:
        engine_of("llama", "eagle-3").generate(PROMPT, max_new_tokens=TOKENS)
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.3)
        assert (
            time.process_time() - before < 0.1
        )  # two that spin would take 0.6 s, or all that the machine leaves them
    finally:
        torch.set_num_threads(1)


def test_a_thread_begun_during_a_forward_has_as_many_threads_as_the_others() -> None:
    """Torch gives a new thread what was set last, which is one within a cycle; an answer there would stay slow."""
    inside, leave, seen = threading.Event(), threading.Event(), list[int]()

    def begun_meanwhile() -> None:
        with one_torch_thread():
            inside.set()
            leave.wait(60)
            seen.append(thread_count())
        seen.append(torch.get_num_threads())

    other = threading.Thread(target=begun_meanwhile)
    torch.set_num_threads(3)
    with one_torch_thread():
        assert (thread_count(), torch.get_num_threads()) == (3, 1)
        other.start()
        assert inside.wait(60)
    leave.set()
    other.join(60)
    newest = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    newest.start()
    newest.join(60)
    assert seen == [3, 3, 3]
    assert torch.get_num_threads() == 3


MANY, CROWDED = (4, 8), 5.0  # threads; the most that their time may be, over that of two


@pytest.mark.slow
def test_more_threads_than_cores_change_no_bits_and_cost_no_multiple() -> None:
    engine = engine_of("llama", "eagle-3")
    seconds: dict[int, float] = {}
    expected = engine.generate(PROMPT, max_new_tokens=TOKENS).token_ids
    try:
        for _ in range(5):  # the best of each number, so that others on the machine count little
            for threads in (2, *MANY):
                torch.set_num_threads(threads)
                began = time.perf_counter()
                result = engine.generate(PROMPT, max_new_tokens=TOKENS)
                spent = time.perf_counter() - began
                assert result.token_ids == expected, threads
                seconds[threads] = min(spent, seconds.get(threads, spent))
    finally:
        torch.set_num_threads(1)
    assert all(seconds[threads] < CROWDED * seconds[2] for threads in MANY), seconds

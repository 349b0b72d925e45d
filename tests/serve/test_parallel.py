"""A server that answers several requests at once gives each the answer that it gives alone."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from specengine import Engine
from specengine.cycle import Lane
from specengine.drafters.recycling import Recycling
from specengine.engine import Pool, parallel_of, parts
from specengine.engine.parts import slots_of
from specengine.engine.scheduler import Scheduler
from specengine.errors import InputError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.protocol.settings import Settings
from specengine.serve.metrics import Added, Metrics
from tests.models.native_engines import native_lm, needs_extension
from tests.serve.served import CHAT, NAME, TEXT, Gate, Served, served, tiny_engine, until
from tests.toy import byte_tokenizer, policy_for, tiny

pytestmark = needs_extension


TEXTS = "/v1/completions"


def native_engine(context: int = 512) -> Engine:
    target = NativeTarget(native_lm(tiny(max_position_embeddings=context)))
    return Engine(target, Recycling(), policy_for("eagle"), byte_tokenizer())


class Steps:
    """Forward passes of engines at once, which wait until they are allowed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._allowed = 0  # that have not begun
        run = Scheduler._run

        def held(scheduler: Scheduler, *given: Any) -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._allowed > 0, timeout=30)
                self._allowed -= 1
            run(scheduler, *given)

        patch.setattr(Scheduler, "_run", held)

    def allow(self, count: int) -> None:
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def forbid(self) -> None:
        with self._changed:
            self._allowed = 0

    def until(self, holds: Callable[[], bool]) -> None:
        """Allow steps, one after the other, until it does; none that would be run after that."""

        def looked() -> bool:
            if not (found := holds()):
                if self._allowed == 0:
                    self.allow(1)
                time.sleep(0.02)
            return found

        until(looked)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def slot_bytes() -> int:
    return Pool(native_engine(), 1).engines[0].target.cache.slot_bytes  # type: ignore[attr-defined]


def asked(number: int) -> dict[str, Any]:
    words = [{"role": "user", "content": f"Question {number}: " + "and so on " * (number % 5)}]
    return CHAT | {
        "messages": words,
        "max_tokens": 20 + number,
        "seed": number,
        "temperature": float(number % 2),
    }


@pytest.mark.slow
def test_answers_at_once_are_those_given_alone() -> None:
    with served(native_engine, parallel=1) as server:
        alone = [server.post(asked(number)).json()["choices"][0] for number in range(12)]
    with served(native_engine, parallel=4) as server, ThreadPoolExecutor(12) as many:
        found = list(
            many.map(lambda number: server.post(asked(number)).json()["choices"][0], range(12))
        )
        until(lambda: server.worker.jobs.idle)
        assert server.metric("num_requests_running") == 0
    assert found == alone


def test_a_request_starts_while_another_is_answered() -> None:
    with served(native_engine, parallel=2) as server:
        long = TEXT | {"max_tokens": 450, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", TEXTS, json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            until(lambda: server.metric("num_requests_running") == 1)
            short = server.post(TEXT | {"max_tokens": 5}, TEXTS)
            assert short.json()["usage"]["completion_tokens"] <= 5
            until(lambda: server.metric("num_requests_running") == 1)  # the long one goes on
            rest = [line for line in lines if line.startswith("data: {")]
        assert json.loads(rest[-1].removeprefix("data: "))["choices"] is not None


@pytest.mark.slow
def test_the_queue_begins_behind_the_answers_at_once() -> None:
    with served(native_engine, parallel=2, queue=1) as server, ThreadPoolExecutor(4) as many:
        long = TEXT | {"max_tokens": 480, "ignore_eos": True}
        running = [many.submit(server.post, long, TEXTS) for _ in range(2)]
        until(lambda: server.metric("num_requests_running") == 2)
        waiting = many.submit(server.post, long, TEXTS)
        until(lambda: server.metric("num_requests_waiting") == 1 or running[0].done())
        refused = server.post(TEXT, TEXTS)
        if not running[0].done():
            assert refused.status_code == 429
        assert all(job.result().status_code == 200 for job in (*running, waiting))


def test_a_conversation_goes_on_where_its_prefix_is_held() -> None:
    with served(native_engine, parallel=3) as server:
        histories: list[list[dict[str, str]]] = [
            [{"role": "user", "content": f"Topic {n} " * 8}] for n in range(3)
        ]
        for turn in range(2):
            for history in histories:
                body = server.post(CHAT | {"messages": history, "max_tokens": 12}).json()
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 40) == (turn > 0), (turn, cached)
                history += [body["choices"][0]["message"], {"role": "user", "content": "And then?"}]
                history[-2].setdefault("content", "")


def test_clients_that_leave_free_their_places() -> None:
    with served(native_engine, parallel=3) as server:

        def leave() -> None:
            with httpx.Client(base_url=server.address) as client:
                body = TEXT | {"max_tokens": 480, "stream": True, "ignore_eos": True}
                with client.stream("POST", TEXTS, json=body) as stream:
                    next(stream.iter_lines())

        threads = [threading.Thread(target=leave) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        until(lambda: server.worker.jobs.idle)
        assert server.post(CHAT).status_code == 200


def test_stopping_ends_all_answers() -> None:
    with served(native_engine, parallel=3) as server, ThreadPoolExecutor(3) as many:
        body = TEXT | {"max_tokens": 480, "ignore_eos": True}
        jobs = [many.submit(server.post, body, TEXTS) for _ in range(3)]
        until(lambda: server.worker.jobs.answered)
        server.stop()
        assert {job.result().status_code for job in jobs} <= {200, 503}
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert not server.worker.thread.is_alive()


def test_figures_of_answers_at_once(steps: Steps) -> None:
    with served(native_engine, parallel=3) as server:
        assert server.metric("iteration_tokens_count") == server.metric("kv_cache_usage_perc") == 0
        steps.allow(4)
        with server.client.stream("POST", TEXTS, json=TEXT | {"stream": True}) as stream:
            next(stream.iter_lines())
            assert server.metric("num_requests_running") == 1
            assert 0 < server.metric("kv_cache_usage_perc") < 1
            steps.allow(1000)
        until(lambda: server.worker.jobs.idle)
        assert (
            server.metric("kv_cache_usage_perc") == 0
        )  # what is kept for the next turn can be had
        assert server.metric("kv_cache_bytes") > 0
        generated = server.metric("generation_tokens_total")
        assert 0 < server.metric("iteration_tokens_count") <= generated + 3
        assert server.metric("iteration_tokens_sum") >= generated
    with served(native_engine, parallel=1) as server:
        assert "iteration_tokens" not in server.client.get("/metrics").text
        server.post(TEXT, TEXTS)
        until(lambda: server.worker.jobs.idle)
        before = (
            server.metric("prefix_cache_queries_total"),
            server.metric("prefix_cache_hits_total"),
        )
        server.post(TEXT, TEXTS)
        until(lambda: server.worker.jobs.idle)
        assert server.metric("prefix_cache_queries_total") == before[0] + 16
        assert (
            server.metric("prefix_cache_hits_total") == before[1] + 15
        )  # the last token is run again


def test_use_of_the_cache_of_one_engine_is_its_share_of_the_context() -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server, ThreadPoolExecutor(1) as many:
        assert server.metric("kv_cache_usage_perc") == 0
        job = many.submit(server.post, TEXT, TEXTS)
        until(lambda: gate.passed == 1)
        assert server.metric("kv_cache_usage_perc") == pytest.approx(
            15 / gate.engine.target.max_context
        )
        gate.open.set()
        assert job.result().status_code == 200
        until(lambda: server.worker.jobs.idle)
        assert server.metric("kv_cache_usage_perc") == 0


def test_use_of_caches_is_their_share_of_the_memory() -> None:
    pool, metrics = Pool(native_engine(), 2, memory=1 << 20), Metrics()
    metrics.answering = pool
    with pool.engines[0].stream("once upon a time", max_new_tokens=40) as pieces:
        next(pieces)
        target: Any = pool.engines[0].target
        share = target.cache.length * target.cache.slot_bytes / (1 << 20)
        assert share > 0
        assert f"kv_cache_usage_perc {share}" in metrics.text().decode()
    assert "kv_cache_usage_perc 0.0" in metrics.text().decode()


def test_rows_of_forward_passes_are_added_over_replicas() -> None:
    pool = Pool(native_engine(), 2)
    metrics = Metrics()
    metrics.answering = pool
    pool.generate(["one", "two"], max_new_tokens=4)
    added = Added()
    added.take([("a", metrics.text().decode()), ("b", metrics.text().decode())])
    lines = added.text().decode().splitlines()
    assert f"specengine_iteration_tokens_count {2.0 * pool.scheduler.forwards}" in lines
    assert f"specengine_iteration_tokens_sum {2.0 * pool.scheduler.rows}" in lines


def test_an_answer_without_room_counts_as_waiting(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 600 * slot_bytes()  # for one answer
    monkeypatch.setattr(parts, "free_memory", lambda *_: 2 * room)
    long = TEXT | {"max_tokens": 400, "ignore_eos": True}
    with served(native_engine, parallel=2) as server, ThreadPoolExecutor(2) as many:
        jobs = [many.submit(server.post, long, TEXTS) for _ in range(2)]
        until(
            lambda: (
                server.metric("num_requests_running") == server.metric("num_requests_waiting") == 1
            )
        )
        steps.allow(1000)
        assert all(job.result().status_code == 200 for job in jobs)
        assert server.metric("num_requests_waiting") == 0


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_for_room_frees_its_place(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 600 * slot_bytes()  # for one answer
    monkeypatch.setattr(parts, "free_memory", lambda *_: 2 * room)
    long = TEXT | {"max_tokens": 400, "ignore_eos": True}
    with served(native_engine, parallel=2) as server, ThreadPoolExecutor(2) as many:
        first = many.submit(server.post, long, TEXTS)
        until(lambda: server.metric("num_requests_running") == 1)
        client = HTTPConnection(server.address.removeprefix("http://"))
        client.request("POST", TEXTS, json.dumps(long), {"Content-Type": "application/json"})
        steps.until(lambda: len(server.worker.jobs.answered) == 2)
        assert server.metric("num_requests_waiting") == 1
        client.close()
        steps.until(lambda: len(server.worker.jobs.answered) == 1)
        assert server.metric("num_requests_waiting") == 0
        assert server.metric('request_success_total{finished_reason="abort"}') == 1
        steps.allow(1000)
        assert first.result().status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_waits_for_room_beyond_its_time_ends(
    stream: bool, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 600 * slot_bytes()  # for one answer
    monkeypatch.setattr(parts, "free_memory", lambda *_: 2 * room)
    long = TEXT | {"max_tokens": 400, "ignore_eos": True}
    with (
        served(native_engine, parallel=2, max_seconds=0.4) as server,
        ThreadPoolExecutor(2) as many,
    ):
        first = many.submit(server.post, long, TEXTS)
        until(lambda: server.metric("num_requests_running") == 1)
        (job,) = server.worker.jobs.answered
        job.ticket.deadline = math.inf
        late = (
            long | {"stream": True, "stream_options": {"include_usage": True}} if stream else long
        )
        second = many.submit(server.post, late, TEXTS)
        steps.until(second.done)
        said = second.result()
        assert said.status_code == 200
        bodies = [
            json.loads(line[6:]) for line in said.text.splitlines() if line.startswith("data: {")
        ] or [said.json()]
        assert [choice["finish_reason"] for body in bodies for choice in body["choices"]][
            -1
        ] == "length"
        assert "".join(choice["text"] for body in bodies for choice in body["choices"]) == ""
        assert bodies[-1]["usage"]["completion_tokens"] == 0
        assert bodies[-1]["usage"]["prompt_tokens"] == 16
        assert server.metric("num_requests_waiting") == 0
        steps.allow(1000)
        assert first.result().json()["choices"][0]["finish_reason"] == "length"
        until(lambda: server.worker.jobs.idle)
        assert not server.worker._pool._reserved  # type: ignore[union-attr]


# ---- all places taken


MANY = 16
LONG = TEXT | {"max_tokens": 60, "ignore_eos": True}


@pytest.mark.slow
def test_an_answer_waits_for_no_more_than_one_piece_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While 7,000 tokens come in, all answers have a cycle in every step, and the prompt one piece."""
    # answers with a cycle, those without one, and rows of prompts
    steps: list[tuple[int, int, int]] = []
    run = Scheduler._run

    def watched(scheduler: Scheduler, lanes: Any, pieces: Any, began: float) -> None:
        going = [answer for reference in scheduler._answers if (answer := reference()) is not None]
        left = sum(isinstance(answer.need, Lane) and answer not in lanes for answer in going)
        steps.append((len(lanes), left, sum(len(answer.need.tokens) for answer in pieces)))
        run(scheduler, lanes, pieces, began)

    monkeypatch.setattr(Scheduler, "_run", watched)
    with served(lambda: native_engine(8192), parallel=3) as server, ThreadPoolExecutor(3) as many:
        answers = [
            many.submit(server.post, LONG | {"max_tokens": 600, "seed": seed}, TEXTS)
            for seed in range(2)
        ]
        until(lambda: any(lanes == 2 for lanes, *_ in steps))
        prompt = many.submit(
            server.post, TEXT | {"prompt": 1000 * "long   ", "max_tokens": 1}, TEXTS
        )
        assert prompt.result().json()["usage"]["prompt_tokens"] == 7000
        assert all(answer.result().status_code == 200 for answer in answers)
    assert not any(left for _, left, _ in steps)
    pieces = [rows for lanes, _, rows in steps if lanes and rows]
    assert pieces.count(64) > 20, "the prompt came in beside the answers"
    assert max(pieces[2:]) == 64  # the first two answers' own prompts come before


def asked_of(server: Served) -> float:
    """Return how many requests a server answers or lets wait."""
    return server.metric("num_requests_running") + server.metric("num_requests_waiting")


@pytest.mark.slow
def test_clients_that_leave_full_places_let_those_that_wait_in(steps: Steps) -> None:
    with (
        served(native_engine, parallel=MANY, queue=4) as server,
        ThreadPoolExecutor(MANY + 2) as many,
    ):
        gone = threading.Event()
        begun: list[str] = []

        def leave() -> None:
            asked = LONG | {"stream": True, "max_tokens": 400}
            with (
                httpx.Client(base_url=server.address, timeout=60) as own,
                own.stream("POST", TEXTS, json=asked) as stream,
            ):
                begun.append(next(stream.iter_lines()))
                gone.wait(60)

        leaving = [many.submit(leave) for _ in range(MANY)]
        until(lambda: asked_of(server) == MANY)
        steps.until(lambda: server.metric("num_requests_running") == MANY)
        waiting = [many.submit(server.post, LONG, TEXTS) for _ in range(2)]
        until(lambda: server.metric("num_requests_waiting") == 2)
        steps.until(lambda: len(begun) == MANY)
        assert server.metric("kv_cache_usage_perc") > 0
        answered = list(server.worker.jobs.answered)
        gone.set()
        until(lambda: any(job.ticket.cancelled for job in answered))
        steps.allow(10_000)
        texts = [job.result().json()["choices"][0]["text"] for job in waiting]
        assert [job.result() for job in leaving] == [None] * MANY
        until(lambda: server.worker.jobs.idle)
        assert server.metric('request_success_total{finished_reason="abort"}') > 0
    with served(native_engine, parallel=1) as server:
        assert texts == [server.post(LONG, TEXTS).json()["choices"][0]["text"]] * 2


def test_full_places_of_one_client_do_not_hold_up_another(steps: Steps) -> None:
    with served(native_engine, parallel=2, queue=4) as server, ThreadPoolExecutor(5) as many:
        answers = [many.submit(server.post, LONG, TEXTS) for _ in range(2)]
        steps.until(lambda: server.metric("num_requests_running") == 2)
        answers.append(many.submit(server.post, LONG, TEXTS))
        until(lambda: server.metric("num_requests_waiting") == 1)
        steps.allow(1)
        assert server.metric("num_requests_running") == 2, (
            "one client has no more places than there are"
        )
        answers += [many.submit(server.post, LONG | {"user": "another"}, TEXTS) for _ in range(2)]
        until(lambda: asked_of(server) == 5)
        steps.until(lambda: server.metric("num_requests_running") == 3)
        assert server.metric("num_requests_waiting") == 2, "a spare place for one answer"
        steps.allow(10_000)
        assert len({answer.result().json()["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("in_time", [True, False])
def test_draining_ends_full_places_in_time_or_says_that_it_stops(
    steps: Steps, in_time: bool
) -> None:
    drain = 20.0 if in_time else 0.3
    with (
        served(native_engine, parallel=MANY, drain_seconds=drain) as server,
        ThreadPoolExecutor(MANY + 2) as many,
    ):
        jobs = [
            many.submit(httpx.post, server.address + TEXTS, json=LONG, timeout=60)
            for _ in range(MANY + 2)
        ]
        until(lambda: asked_of(server) == MANY + 2)
        steps.until(
            lambda: (
                server.metric("num_requests_running") == MANY
                and server.metric("num_requests_waiting") == 2
            )
        )
        server.stop()
        if in_time:
            until(lambda: server.worker.state == "stopping")
            steps.allow(10_000)
        answers = [job.result() for job in jobs]
        steps.allow(10_000)
    if in_time:
        assert [answer.status_code for answer in answers] == [200] * (MANY + 2)
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    else:
        assert [answer.json()["error"]["code"] for answer in answers] == ["stopping"] * (MANY + 2)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="parallel: got 0, accepted 1 or more"):
        Settings(name=NAME, parallel=0)


@pytest.mark.slow
def test_without_a_number_as_many_are_answered_at_once_as_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = native_engine()
    cache: Any = engine.target.cache  # type: ignore[attr-defined]
    each = cache.bytes_of(slots_of(engine.drivers.own.eager, 512)[0])  # the draft has no cache
    for free, expected in ((2.1 * each, 1), (6.5 * each, 3), (100 * each, 8), (0, 1)):
        monkeypatch.setattr(parts, "free_memory", lambda *_, free=free: int(free))
        assert parallel_of(engine) == expected
        with served(native_engine) as server:
            assert server.worker.jobs.parallel == expected
            assert (server.worker._pool is None) == (expected == 1)
            assert server.client.get("/health").json() == {"status": "ok", "parallel": expected}
            assert server.post(CHAT).status_code == 200
    with served(native_engine, parallel=2) as server:  # a number that is given holds
        assert server.worker.jobs.parallel == 2
    assert parallel_of(engine, memory=5 * each) == 5


def test_engines_whose_answers_share_no_forward_answer_one_at_a_time() -> None:
    class OneText(Recycling):
        def __copy__(self) -> Any:
            raise InputError("draft: one text alone")

    hybrid = Engine(NativeTarget(native_lm(tiny("lfm2"))), Recycling(), policy_for("eagle"))
    assert (
        parallel_of(hybrid, memory=1 << 40) > 1
    )  # states of recurrent layers stand beside each other
    alone = Engine(NativeTarget(native_lm(tiny())), OneText(), policy_for("eagle"))
    for engine in (tiny_engine(), alone):
        assert parallel_of(engine, memory=1 << 40) == 1
    with served() as server:
        assert server.client.get("/health").json()["parallel"] == 1


def test_an_engine_that_answers_one_at_a_time_says_so() -> None:
    def load() -> Engine:
        return Engine(HuggingFaceTarget(tiny("gpt_oss")), None, None, byte_tokenizer())

    with served(load, parallel=2) as server:  # its attention has a dense mask
        assert isinstance(server.worker.failure, InputError)
        assert "parallel: got 2, accepted 1 on" in str(server.worker.failure)


def test_modules_answer_several_requests_at_once() -> None:
    texts = ["one", "two", "three"]
    with served() as server:
        alone = [server.post({"prompt": text, "max_tokens": 9}, TEXTS).json() for text in texts]
    with served(parallel=3) as server, ThreadPoolExecutor(3) as threads:
        answers = [
            *threads.map(lambda t: server.post({"prompt": t, "max_tokens": 9}, TEXTS).json(), texts)
        ]
        assert server.worker.jobs.parallel == 3
    assert [a["choices"][0]["text"] for a in answers] == [a["choices"][0]["text"] for a in alone]


def test_prompts_are_taken_into_the_caches_at_once() -> None:
    prompts = [f"{name} rivers run to the sea, and back again" for name in ("two", "four", "six")]
    with served(native_engine, parallel=3) as server, ThreadPoolExecutor(3) as threads:

        def post(prompt: str, most: int) -> dict[str, Any]:
            answer: dict[str, Any] = server.post(
                {"prompt": prompt, "max_tokens": most}, TEXTS
            ).json()
            return answer

        for answer in threads.map(lambda prompt: post(prompt, 0), prompts):
            assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
        for prompt in prompts:
            details = post(prompt, 3)["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == len(prompt) - 1

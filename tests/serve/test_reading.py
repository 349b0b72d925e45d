"""Text that cannot fit, or takes long to read: nobody else waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from specengine import Engine
from specengine.errors import InputError
from specengine.protocol import preparing
from specengine.protocol.preparing import CheckedRequest
from specengine.protocol.requests import ChatRequest, CompletionRequest
from specengine.protocol.settings import Settings
from specengine.request.prompts import LETTERS, Room, longest_token
from tests.serve.served import CHAT, NAME, TEXT, Gate, Served, served, tiny_engine, until
from tests.serve.test_requests import TEMPLATE, TOOL, USER, called
from tests.toy import byte_tokenizer

FEW = CHAT | {"max_tokens": 1}


class Merging:
    """A tokenizer of which the longest token is so many letters, and any letters beside each other are one."""

    chat_template = None

    def __init__(self, longest: int, of: int | None = None) -> None:
        self.longest, self.of, self.read = longest, of or longest, 0

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "a" * self.longest: 1}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.read += len(text)
        return {"input_ids": [1] * -(-len(text) // self.of)}


# ---- room


def test_what_fits_in_any_case_is_not_read() -> None:
    tokenizer = Merging(longest=1)
    Room(100).require("x", ["a" * LETTERS * 100], tokenizer)
    assert tokenizer.read == 0


@pytest.mark.parametrize(
    "texts", [["a" * 1_000_001], ["a"] * 1_000_001, ["a" * 999, " " * 999_002]]
)
def test_what_no_tokens_can_hold_is_refused_unread(texts: list[str]) -> None:
    tokenizer = Merging(longest=10_000)
    with pytest.raises(
        InputError, match="x: it has 1000001 characters, accepted at most 100 tokens"
    ):
        Room(100).require("x", texts, tokenizer)
    assert tokenizer.read == 0


@pytest.mark.parametrize(
    "texts", [["a" * 1_000_000], ["a" * 10] * 100_000, ["a", "", "a" * 999_999]]
)
def test_what_may_fit_is_read_up_to_where_it_does_not(texts: list[str]) -> None:
    tokenizer = Merging(longest=10_000, of=4)
    with pytest.raises(InputError, match=r"characters have \d+ tokens, accepted at most 100"):
        Room(100).require("x", texts, tokenizer)
    assert tokenizer.read <= 2 * LETTERS * 100


def test_what_merges_into_few_tokens_passes() -> None:
    tokenizer = Merging(longest=10_000)
    Room(100).require("x", ["a" * 90_000], tokenizer)
    assert tokenizer.read == 90_000
    unknown: Any = type("Silent", (Merging,), {"get_vocab": lambda self: {}})(longest=16)
    assert longest_token(unknown) > 10**12
    Room(100).require("x", ["a" * 1500], unknown)


def test_reading_ends_where_nobody_wants_it() -> None:
    class Gone(Exception):
        pass

    def gone() -> None:
        if tokenizer.read:
            raise Gone

    tokenizer = Merging(longest=10_000)
    with pytest.raises(Gone):
        Room(1000, still_wanted=gone).require("x", ["a" * 100_000], tokenizer)
    assert tokenizer.read < 100_000


# ---- every way that text comes


LONG = "word and " * 200_000
BLANKS = " " * 1_000_000
WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "content": lambda text: {"messages": [{"role": "user", "content": text}]},
    "parts": lambda text: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]
    },
    "many parts": lambda text: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text[:900]}] * (len(text) // 900)}
        ]
    },
    "many messages": lambda text: {
        "messages": [{"role": "user", "content": text[:900]}] * (len(text) // 900)
    },
    "a name": lambda text: {"messages": [USER | {"name": text}]},
    "thoughts": lambda text: {
        "messages": [{"role": "assistant", "content": "a", "reasoning_content": text}]
    },
    "arguments": lambda text: {"messages": [USER, called({"a": text})]},
    "a key of arguments": lambda text: {"messages": [USER, called({text: "a"})]},
    "a result": lambda text: {
        "messages": [USER, called("{}"), {"role": "tool", "tool_call_id": text, "content": "a"}]
    },
    "a description": lambda text: {
        "tools": [{"type": "function", "function": {"name": "f", "description": text}}]
    },
    "a tool's name": lambda text: {
        "tools": [{"type": "function", "function": {"name": f"f{text}"}}]
    },
    "a schema": lambda text: {
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {text: {}}}},
            }
        ]
    },
    "a variable": lambda text: {"chat_template_kwargs": {"thinking": text}},
    "a prediction": lambda text: {"prediction": {"type": "content", "content": text}},
    "a predicted part": lambda text: {
        "prediction": {"type": "content", "content": [{"type": "text", "text": text}]}
    },
}


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    def load() -> Engine:
        engine = tiny_engine(draft="ngram", policy="chain")
        engine.tokenizer = byte_tokenizer(TEMPLATE)
        return engine

    with served(load) as running:
        yield running


@pytest.mark.parametrize("text", [LONG, BLANKS], ids=["words", "blanks"])
@pytest.mark.parametrize("way", WAYS)
def test_text_that_cannot_fit_is_refused_before_it_waits(
    caller: Served, way: str, text: str
) -> None:
    """Whatever way it comes, by the thread that speaks to clients: the one that answers is never asked."""
    jobs = caller.metric("request_queue_time_seconds_count")
    answer = caller.post(FEW | WAYS[way](text))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == ("prediction" if "predict" in way else "messages")
    assert "256 tokens" in answer.json()["error"]["message"]
    assert caller.metric("request_queue_time_seconds_count") == jobs


@pytest.mark.parametrize("prompt", [LONG, BLANKS])
def test_a_text_to_go_on_with_is_bounded_too(caller: Served, prompt: str) -> None:
    answer = caller.post(TEXT | {"prompt": prompt}, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_servers_own_limit_bounds_as_the_context_does() -> None:
    with served(lambda: tiny_engine(draft="none"), max_prompt_tokens=50) as server:
        answer = server.post(CHAT | {"messages": [{"role": "user", "content": "a" * 5000}]})
        assert "maximum context length is 50 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "quick"),
    [
        ({"messages": [USER]}, True),
        ({"messages": [USER] * 199}, True),
        ({"messages": [USER] * 201}, False),
        ({"messages": [USER | {"content": "a" * 40_000}]}, False),
        ({"messages": [USER], "prediction": {"type": "content", "content": "a" * 40_000}}, False),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, False),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, False),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, True),
        ({"prompt": "a" * 40_000}, False),
        ({"prompt": list(range(100_000))}, True),
    ],
)
def test_what_takes_long_to_read_is_known(body: dict[str, Any], quick: bool) -> None:
    model = ChatRequest if "messages" in body else CompletionRequest
    assert CheckedRequest(model.model_validate(body), Settings(NAME)).quick == quick


# ---- the thread beside


class Slow:
    """A reader of requests that is held up at slow ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reads, self.ended = threading.Event(), threading.Event(), threading.Event()
        encode = preparing.token_ids

        def held(prompt: Any, tokenizer: Any, **options: Any) -> list[int]:
            if len(str(prompt)) > 250:
                self.reads.set()
                try:
                    while not self.open.wait(0.01):
                        options["room"].still_wanted()
                finally:
                    self.ended.set()
            return encode(prompt, tokenizer, **options)

        monkeypatch.setattr(preparing, "token_ids", held)
        monkeypatch.setattr(preparing, "QUICK_LETTERS", 200)


LATER = CHAT | {"messages": [{"role": "user", "content": "a" * 220}], "max_tokens": 2}


def test_who_comes_behind_a_long_text_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    with served(lambda: tiny_engine(draft="none")) as server:
        answers: list[httpx.Response] = []
        long = LATER | {
            "messages": [
                {"role": "user", "content": "a" * 110},
                {"role": "user", "content": "b" * 110},
            ]
        }
        asking_long = threading.Thread(target=lambda: answers.append(server.post(long)))
        asking_long.start()
        assert slow.reads.wait(10)
        for _ in range(3):
            assert server.post(FEW).status_code == 200
        assert not answers
        slow.open.set()
        asking_long.join(20)
        assert [answer.status_code for answer in answers] == [200]


@pytest.mark.slow
def test_who_leaves_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    with served(lambda: tiny_engine(draft="none")) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.post(LATER | {"messages": [{"role": "user", "content": "a" * 400}]}, timeout=0.5)
        assert slow.ended.wait(10)
        assert server.post(FEW).status_code == 200
        assert server.metric("num_requests_waiting") == 0


def test_reading_has_its_time() -> None:
    with (
        served(lambda: tiny_engine(draft="none"), max_seconds=0.2) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        slow = Slow(patch)
        began = time.monotonic()
        answer = server.post(LATER | {"messages": [{"role": "user", "content": "a" * 400}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        assert slow.ended.is_set()
        assert time.monotonic() - began < 10


def test_what_is_wrong_with_a_long_request_is_told_and_frees_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparing, "QUICK_LETTERS", 10)
    with served(lambda: tiny_engine(draft="none"), queue=0) as server:
        for _ in range(3):
            answer = server.post(CHAT | {"messages": [{"role": "user", "content": "a" * 400}]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert (
            server.post(CHAT | {"messages": [{"role": "user", "content": "a" * 40}]}).status_code
            == 200
        )


def test_the_thread_beside_reads_what_the_one_that_answers_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = CHAT | {"max_tokens": 6, "messages": [{"role": "user", "content": "<|end|>Hello there"}]}
    asked = [ours, TEXT, ours | {"response_format": {"type": "json_object"}}]
    with served(lambda: tiny_engine(draft="none")) as server:

        def answers() -> list[Any]:
            paths = [
                "/v1/completions" if "prompt" in body else "/v1/chat/completions" for body in asked
            ]
            found = [
                server.post(body | {"return_token_ids": True}, path)
                for body, path in zip(asked, paths, strict=True)
            ]
            return [
                (answer.json()["choices"], answer.json()["prompt_token_ids"]) for answer in found
            ]

        quickly = answers()
        monkeypatch.setattr(preparing, "QUICK_LETTERS", -1)
        assert answers() == quickly


def test_a_prediction_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = preparing.predicted_ids

    def counted(text: Any, *more: Any) -> list[int]:
        reads.append(text)
        return read(text, *more)

    monkeypatch.setattr(preparing, "predicted_ids", counted)
    with served(lambda: tiny_engine(draft="ngram", policy="chain")) as server:
        answer = server.post(FEW | {"prediction": {"type": "content", "content": "expected"}})
        assert sum(answer.json()["usage"]["completion_tokens_details"].values()) == len("expected")
    assert reads == ["expected"]


# ---- what clients are told of the queue


def test_a_full_queue_says_how_long_all_of_it_takes() -> None:
    gate = Gate()
    with served(lambda: gate.engine, queue=3) as server:
        waiting = [threading.Thread(target=server.post, args=(FEW,)) for _ in range(4)]
        for thread in waiting:
            thread.start()
        until(lambda: server.worker.jobs.answered and server.metric("num_requests_waiting") == 3)
        server.worker.jobs._mean_seconds = 2.0
        refused = server.post(FEW)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "8")
        gate.open.set()
        for thread in waiting:
            thread.join(20)

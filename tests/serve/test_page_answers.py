"""Answers on the page: stopped, cut, taken up again after a reload or a lost connection, asked for anew."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specengine.engine import parts
from specengine.protocol import preparing
from specengine.serve import answering
from specengine.serve.answering import KeptStream
from specengine.serve.models import ServedModel
from tests.engine.engines import forced
from tests.models.native_engines import needs_extension
from tests.serve.browsing import LAST_ANSWER, Browsed, browsed, in_a_browser, streamed, writing
from tests.serve.served import Gate, Served, served, tiny_engine, until
from tests.serve.test_parallel import Steps, native_engine


@pytest.mark.slow
@in_a_browser
def test_stopping_and_what_is_refused(chromium: Any) -> None:
    with served(max_prompt_tokens=200) as server, browsed(chromium, server) as seen:
        seen.limit(4000)
        seen.ask("go on", wait=False)
        seen.page.wait_for_selector(".piece", state="attached")
        seen.page.keyboard.press("Escape")
        seen.done()
        assert seen.page.text_content("#status") == "Stopped."
        assert seen.page.text_content(".turn .note") == "Stopped."
        assert seen.page.locator(".turn").count() == 2
        seen.page.click("#new")
        seen.ask("long " * 45)
        assert "maximum context length is 200 tokens" in seen.page.text_content("#status")
        assert seen.page.input_value("#message").startswith("long long")
        assert seen.page.locator(".turn").count() == 0


@in_a_browser
def test_an_answer_cut_by_its_limit_goes_on(chromium: Any, server: Served) -> None:
    with browsed(chromium, server) as seen:
        seen.limit(20, temperature=0)
        seen.ask("go on")
        assert seen.page.text_content(".turn .note") == "Cut at 20 tokens."
        before = seen.page.evaluate(LAST_ANSWER)
        seen.page.click("button:has-text('Continue')")
        seen.done()
        assert seen.bodies[1]["continue_final_message"] is True
        assert seen.bodies[1]["messages"][-1] == {
            "role": "assistant",
            "content": before["text"].rstrip(),
        }
        after = seen.page.evaluate(LAST_ANSWER)
        assert after["text"].startswith(before["text"].rstrip())
        assert len(after["text"]) > len(before["text"])
        assert after["figures"]["tokens"] == 40
        assert seen.slider["max"] == after["figures"]["cycles"]
        assert seen.page.text_content(".turn .note") == "Cut at 40 tokens."
        assert seen.page.locator(".turn").count() == 2
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_an_answer_cut_by_a_reload_is_kept_and_goes_on(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has no place for a stream that outlasts its client."""
    monkeypatch.setattr(answering, "KEPT_STREAMS", 0)
    gate = Gate(seconds=0.05)
    gate.open.set()
    with served(lambda: gate.engine) as server, browsed(chromium, server) as seen:
        seen.page.click("#open-settings")
        seen.page.uncheck("#markdown")
        seen.page.keyboard.press("Escape")
        seen.limit(4000)
        seen.ask("go on", wait=False)
        seen.page.wait_for_selector(".piece:nth-of-type(9)", state="attached")
        shown = seen.page.text_content(".turn.assistant .text")
        seen.page.reload()
        seen.page.wait_for_selector(".turn .note:has-text('Interrupted')")
        answer = seen.page.evaluate(LAST_ANSWER)
        assert answer["text"].startswith(shown)
        assert seen.page.text_content(".turn.assistant .text") == answer["text"]
        assert seen.slider["max"] == answer["figures"]["cycles"], "its trees are kept too"
        seen.page.click("button:has-text('Continue')")
        seen.page.wait_for_selector("#stop", state="visible")
        until(lambda: seen.slider["max"] > answer["figures"]["cycles"])
        with seen.page.context.new_page() as other:
            other.goto(server.address)
            other.wait_for_selector(".turn .note:has-text('Another tab is writing this.')")
        seen.page.keyboard.press("Escape")
        seen.done()
        assert seen.page.text_content(".turn .note") == "Stopped."
        assert seen.page.is_visible("button:has-text('Continue')")
        assert not seen.complaints


def require_one_answer(seen: Browsed, server: Served, gate: Gate, tokens: int) -> None:
    """AssertionError unless the answer on the page, and in the browser's store, is that of one plain request."""
    seen.page.wait_for_selector(".turn .note:has-text('Cut at ')", timeout=60_000)
    gate.seconds = 0.0  # what follows need not be slow
    assert seen.page.text_content(".turn .note") == f"Cut at {tokens} tokens."
    cycles = streamed(server, seen.bodies[0])
    events = server.post(seen.bodies[0]).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event[6:7] == "{"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    answer = seen.page.evaluate(LAST_ANSWER)
    assert answer["text"] == "".join(delta.get("content", "") for delta in deltas)
    assert seen.page.text_content(".turn.assistant .text") == answer["text"]
    assert (answer["figures"]["cycles"], answer["figures"]["tokens"]) == (len(cycles), tokens)
    assert len(answer["ends"]) <= len(cycles)
    assert seen.slider["max"] == len(cycles)
    assert not {"stream", "event"} & answer.keys()
    assert not answer["live"]
    assert seen.page.locator(".turn").count() == 2
    assert len(seen.bodies) == 1, "nothing is asked twice"


@pytest.mark.slow
@in_a_browser
def test_a_reload_takes_the_answer_up_again(chromium: Any) -> None:
    with writing(chromium, 150) as (seen, server, gate):
        for _ in range(3):
            passed = gate.passed
            seen.page.reload()
            seen.page.wait_for_selector("#stop", state="visible")
            until(lambda before=passed: gate.passed > before + 15)  # type: ignore[misc]
        with seen.page.context.new_page() as other:
            other.goto(server.address)
            other.wait_for_selector(".turn .note:has-text('Another tab is writing this.')")
        require_one_answer(seen, server, gate, 150)
        until(lambda: server.models.streams == {})
        assert not seen.complaints
        assert not seen.elsewhere


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_lost_connection_is_taken_up_again(
    chromium: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    read, counts = KeptStream.read, [7, 20, 1000]

    async def cut(self: KeptStream, number: int) -> AsyncIterator[bytes]:
        left = counts.pop(0)
        async for event in read(self, number):
            if (left := left - 1) < 0:
                break
            yield event
        else:
            return
        if how == "fails":
            raise ConnectionError

    monkeypatch.setattr(KeptStream, "read", cut)
    with writing(chromium, 60) as (seen, server, gate):
        require_one_answer(seen, server, gate, 60)
        assert counts == []


@pytest.mark.slow
@in_a_browser
def test_an_event_that_is_sent_twice_would_be_seen(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of what the tests before look at."""
    read = KeptStream.read
    monkeypatch.setattr(KeptStream, "read", lambda self, number: read(self, max(number - 2, 0)))
    with writing(chromium, 60) as (seen, server, gate):
        seen.page.reload()
        with pytest.raises(AssertionError, match=r"Cut at 6[1-9] tokens"):
            require_one_answer(seen, server, gate, 60)


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize("how", ["Stop", "Escape", "Delete"])
@pytest.mark.parametrize("reloaded", [False, True])
def test_stopping_frees_the_engine_of_a_kept_answer(
    chromium: Any, how: str, reloaded: bool
) -> None:
    with writing(chromium, 4000) as (seen, server, _):
        if reloaded:
            seen.page.reload()
            seen.page.wait_for_selector("#stop", state="visible")
        if how == "Stop":
            seen.page.click("#stop")
        elif how == "Escape":
            seen.page.keyboard.press("Escape")
        else:
            seen.page.click("#open-chats")
            seen.page.click("#list button:has-text('Delete')")
        until(lambda: server.worker.jobs.idle, 3)
        until(lambda: server.models.streams == {}, 3)
        if how != "Delete":
            seen.page.wait_for_selector(".turn .note:has-text('Stopped.')")
            seen.page.reload()
            seen.page.wait_for_selector(".turn .note:has-text('Stopped.')")
            assert seen.page.is_visible("button:has-text('Continue')")
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_an_answer_that_the_server_keeps_no_longer_is_interrupted(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "KEPT_SECONDS", 0.5)
    with writing(chromium, 4000) as (seen, server, _):
        seen.page.goto("about:blank")
        until(lambda: server.worker.jobs.idle, 5)
        seen.page.goto(server.address)
        seen.page.wait_for_selector(".turn .note:has-text('Interrupted')")
        answer = seen.page.evaluate(LAST_ANSWER)
        assert seen.slider["max"] == answer["figures"]["cycles"]
        assert seen.page.is_visible("button:has-text('Continue')")
        seen.page.reload()
        seen.page.wait_for_selector(".turn .note:has-text('Interrupted')")
        assert len(seen.complaints) == 1, "that the stream is not there, once"


@pytest.mark.slow
@in_a_browser
def test_two_chats_are_taken_up_at_once(chromium: Any) -> None:
    with writing(chromium, 100) as (seen, _, gate):
        seen.page.click("#new")
        seen.ask("the second", wait=False)
        seen.page.wait_for_selector("#status:has-text('In the queue')")
        seen.page.reload()
        seen.page.click("#open-chats")
        for title in ("go on", "the second"):
            seen.page.click(f"#list .title:has-text('{title}')")
            seen.page.wait_for_selector(
                ".turn .note:has-text('Cut at 100 tokens.')", timeout=60_000
            )
            assert seen.page.locator(".turn").count() == 2
            assert seen.slider["max"] == 100, "cycles, none of which drafts"
            gate.seconds = 0.0  # the second had to wait, and need not take its time
        assert len(seen.bodies) == 2
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_another_answer_and_an_edited_message_are_versions(chromium: Any, server: Served) -> None:
    with browsed(chromium, server) as seen:
        page = seen.page
        seen.limit(12, temperature=0.9, top_k=20, stop_at="never said", schema="")
        seen.ask("Hello")
        page.click("button:has-text('Regenerate')")
        seen.done()
        assert seen.bodies[1]["messages"] == seen.bodies[0]["messages"]
        assert seen.bodies[1]["seed"] != seen.bodies[0]["seed"]
        assert (seen.bodies[1]["top_k"], seen.bodies[1]["stop"]) == (20, ["never said"])
        assert page.text_content(".turn.assistant .versions") == "‹2/2›"
        page.click("button[aria-label='Version before']")
        assert page.text_content(".turn.assistant .versions") == "‹1/2›"
        page.press("#message", "ArrowUp")
        page.keyboard.type(" again")
        page.keyboard.press("Enter")
        seen.done()
        assert seen.bodies[2]["messages"] == [{"role": "user", "content": "Hello again"}]
        assert page.text_content(".turn.user .versions") == "‹2/2›"
        page.locator("button:has-text('Delete')").last.click()
        assert page.locator(".turn").count() == 1
        page.click("#undo")
        assert page.locator(".turn").count() == 2
        seen.limit(12, schema="{")
        page.fill("#message", "More")
        page.press("#message", "Enter")
        assert "the JSON schema cannot be read" in page.text_content("#status")
        assert len(seen.bodies) == 3
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_thoughts_are_shown_apart_and_fold(chromium: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said, options = "<think>It is <b>hot</b>.</think>Water boils.", preparing._options
    monkeypatch.setattr(
        preparing,
        "_options",
        lambda request: options(request) | {"logits_processor": [forced(said)]},
    )
    with served(lambda: tiny_engine(draft="ngram")) as server, browsed(chromium, server) as seen:
        seen.limit(len(said.encode()))
        seen.ask("What of water?")
        assert seen.page.text_content(".turn.assistant .text") == "Water boils."
        assert seen.page.text_content(".thoughts summary") == "Thoughts"
        assert seen.page.text_content(".thoughts div") == "It is <b>hot</b>."
        assert not seen.page.is_visible(".thoughts div")
        seen.page.click(".thoughts summary")
        assert seen.page.is_visible(".thoughts div")
        seen.page.click("#compare")
        assert "the same text" in seen.page.text_content("#compared:has(strong)", timeout=30_000)
        seen.ask("And more?")
        assert seen.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Water boils."}
        seen.page.reload()
        seen.page.wait_for_selector(".turn")
        assert seen.page.locator(".thoughts div").first.text_content() == "It is <b>hot</b>."
        assert seen.page.locator("main b").count() == 0
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_two_answers_at_once_each_have_their_tree(chromium: Any) -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server, browsed(chromium, server) as seen:
        seen.limit(40)
        seen.ask("the first", wait=False)
        until(lambda: gate.passed > 0)
        seen.page.click("#new")
        seen.ask("the second", wait=False)
        seen.page.wait_for_selector("#status:has-text('In the queue: 1 before you')")
        gate.open.set()
        seen.page.wait_for_selector("#others button:has-text('the first')")
        assert seen.page.locator("#others .miniature .dot").count() > 0
        seen.page.click("#others button")
        assert seen.page.text_content(".turn.user .text") == "the first"
        seen.done()
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
@needs_extension
def test_it_tells_how_much_of_a_prompt_is_read(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PREFILL_ROWS", 32)
    steps = Steps(monkeypatch)
    with served(native_engine, parallel=2) as server, browsed(chromium, server) as seen:
        seen.limit(4)
        seen.ask("a" * 200, wait=False)
        seen.page.wait_for_selector("#status:text-matches('^Reading the prompt, [2-9] s$')")
        steps.allow(3)
        seen.page.wait_for_selector(
            "#status:text-matches('^Reading the prompt, 4[0-9] %, [2-9] s$')"
        )
        assert seen.page.text_content("#status [aria-hidden=true]").startswith(", 4")
        steps.allow(1000)
        seen.done()
        assert "Reading" not in seen.page.text_content("#status")
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_it_says_that_a_model_loads(chromium: Any) -> None:
    gate = threading.Event()

    def load() -> Any:
        assert gate.wait(30)
        return tiny_engine()

    other = ServedModel("other", load)
    with served(tiny_engine, other) as server, browsed(chromium, server) as seen:
        seen.limit(4)
        seen.page.locator("#models").select_option("other")
        seen.ask("Hello", wait=False)
        seen.page.wait_for_selector("#status:text-is('Loading the model')")
        gate.set()
        seen.done()
        assert seen.page.locator(".turn.assistant .piece").count() > 0
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_it_tells_how_long_a_prompt_is_read_but_not_how_long_it_waits(chromium: Any) -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server, browsed(chromium, server) as seen:
        seen.limit(4)
        seen.ask("the first", wait=False)
        seen.page.wait_for_selector(
            "#status:text-matches('^Reading the prompt, [2-9] s$')", timeout=20_000
        )
        assert seen.page.text_content("#status [aria-hidden=true]").endswith(" s")
        seen.page.click("#new")
        seen.ask("the second", wait=False)
        seen.page.wait_for_selector("#status:has-text('In the queue: 1 before you')")
        seen.page.wait_for_timeout(2500)
        assert seen.page.text_content("#status") == "In the queue: 1 before you"
        gate.open.set()
        seen.done()
        assert "Reading" not in seen.page.text_content("#status")
        assert not seen.complaints

"""Chats on the page: kept, renamed, deleted in all tabs, and what each of them remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specengine.serve.models import ServedModel
from tests.serve.browsing import LAST_ANSWER, browsed, in_a_browser
from tests.serve.served import NAME, Gate, Served, served, tiny_engine, until


@pytest.mark.slow
@in_a_browser
def test_chats_are_kept_and_can_be_renamed_exported_and_deleted(
    chromium: Any, server: Served
) -> None:
    with browsed(chromium, server, accept_downloads=True) as seen:
        page = seen.page
        seen.limit(12)
        seen.ask("First question")
        page.click("#new")
        seen.ask("Second question")
        page.reload()
        page.wait_for_selector(".turn")
        assert page.locator(".turn .text").first.text_content() == "Second question"
        page.wait_for_selector("#tree .node")
        page.click("#open-chats")
        titles = page.locator("#list .title")
        assert titles.all_text_contents() == ["Second question", "First question"]
        page.click("#list button:has-text('Rename')")
        page.keyboard.type("Renamed")
        page.keyboard.press("Enter")
        assert titles.all_text_contents() == ["Renamed", "First question"]
        with page.expect_download() as coming:
            page.click("#list button:has-text('JSON')")
        (told,) = json.loads(Path(coming.value.path()).read_text())["conversations"]
        assert [turn["role"] for turn in told["turns"].values()] == ["user", "assistant"]
        with page.expect_download() as coming:
            page.click("#list button:has-text('Markdown')")
        assert (
            Path(coming.value.path())
            .read_text()
            .startswith("# Renamed\n\n## You\n\nSecond question\n\n## Answer\n")
        )
        with page.context.new_page() as other:
            other.goto(server.address)
            other.fill("#message", "From another tab")
            other.press("#message", "Enter")
            other.wait_for_selector(".turn:nth-of-type(4)")
            other.wait_for_selector("#stop", state="hidden")
        assert page.wait_for_selector(".turn.user .text:has-text('From another tab')")
        page.click("#list button:has-text('Delete')")
        assert titles.all_text_contents() == ["First question"]
        page.click("#undo")
        assert titles.all_text_contents() == ["Renamed", "First question"]
        assert page.locator(".turn").count() == 4
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize("answering", [False, True])
def test_a_chat_deleted_in_one_tab_is_gone_in_all(chromium: Any, answering: bool) -> None:
    gate = Gate()
    with served(lambda: gate.engine) as server, browsed(chromium, server) as seen:
        seen.limit(12)
        seen.ask("Hello", wait=False)
        if answering:
            until(lambda: gate.passed > 0)
        else:
            gate.open.set()
            seen.done()
        with seen.page.context.new_page() as other:
            other.goto(server.address)
            other.wait_for_selector(".turn")
            other.click("#open-chats")
            other.click("#list button:has-text('Rename')")
            other.keyboard.type("Renamed")
            other.keyboard.press("Enter")
            seen.page.click("#open-chats")
            seen.page.wait_for_selector("#list .title:has-text('Renamed')")
            other.click("#list button:has-text('Delete')")
            seen.page.wait_for_selector("#status:has-text('“Renamed” was deleted in another tab.')")
            gate.open.set()
            assert seen.page.locator(".turn").count() == 0
            seen.page.wait_for_timeout(1200)  # longer than an answer takes to be kept again
            assert seen.page.evaluate(LAST_ANSWER) is None
            assert seen.page.locator("#list li").count() == 0
        assert not seen.complaints


@in_a_browser
def test_each_chat_keeps_the_model_that_was_chosen_for_it(chromium: Any, server: Served) -> None:
    with browsed(chromium, server) as seen:
        assert seen.page.locator("#models").is_hidden()
        assert seen.page.text_content("#model") == NAME
    two = served(tiny_engine, ServedModel("other", tiny_engine))
    with two as server, browsed(chromium, server) as seen:
        page, choice = seen.page, seen.page.locator("#models")
        seen.limit(8)
        assert choice.locator("option").all_text_contents() == [NAME, "other"]
        assert choice.input_value() == NAME
        seen.ask("To the first")
        page.click("#new")
        choice.select_option("other")
        seen.ask("To the other")
        page.reload()
        page.wait_for_selector(".turn")
        page.wait_for_function("document.getElementById('models').value === 'other'")
        seen.ask("Once more")
        page.click("#new")
        assert choice.input_value() == "other"
        page.click("#open-chats")
        page.click("#list .title:has-text('To the first')")
        assert choice.input_value() == NAME
        seen.ask("Again")
        assert [body["model"] for body in seen.bodies] == [NAME, "other", "other", NAME]
        assert seen.complaints == []


@in_a_browser
def test_the_text_of_a_dropped_file_is_in_the_message(chromium: Any, server: Served) -> None:
    drop = """([name, bytes]) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([new Uint8Array(bytes)], name));
        const over = new DragEvent('dragover', {dataTransfer, bubbles: true, cancelable: true});
        document.body.dispatchEvent(over);
        document.body.dispatchEvent(new DragEvent('drop', {dataTransfer, bubbles: true, cancelable: true}));
        return over.defaultPrevented;
    }"""
    with browsed(chromium, server) as seen:
        seen.page.fill("#message", "Sum this up:")
        assert seen.page.evaluate(drop, ["notes.txt", list("Ein Brief, größer.\n".encode())])
        seen.page.wait_for_selector("#status:has-text('notes.txt')")
        assert seen.page.input_value("#message") == "Sum this up:\n\nEin Brief, größer.\n"
        seen.page.evaluate(drop, ["picture.png", [137, 80, 78, 71]])
        seen.page.wait_for_selector(
            "#status:has-text('picture.png cannot be taken: it is no text in UTF-8.')"
        )
        assert seen.page.input_value("#message").endswith("größer.\n")
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
def test_trees_of_what_is_deleted_are_kept_no_longer(chromium: Any, server: Served) -> None:
    count = """want => new Promise(done => {
        const opened = indexedDB.open('specengine');
        opened.onsuccess = () => {
            const kept = opened.result.transaction('cycles', 'readwrite').objectStore('cycles');
            if (want) kept.put([], want);
            kept.getAllKeys().onsuccess = event => (opened.result.close(), done(event.target.result.length));
        };
    })"""
    with browsed(chromium, server) as seen:
        seen.limit(12)
        seen.ask("one")
        seen.ask("two")
        assert seen.page.evaluate(count, None) == 2
        seen.page.locator(".turn.user button:has-text('Delete')").last.click()
        assert seen.page.evaluate(count, None) == 1
        seen.page.click("#undo")
        assert seen.page.evaluate(count, None) == 2
        seen.page.locator(".turn.user button:has-text('Delete')").first.click()
        assert seen.page.evaluate(count, "of nobody") == 1
        seen.page.reload()
        seen.page.wait_for_selector("#model:not(:empty)")
        until(lambda: seen.page.evaluate(count, None) == 0)
        assert not seen.complaints

"""A browser that talks through the page of a server."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specengine.trace.records import TracedCycle
from tests.serve.served import Gate, Served, served

CHROMIUM = Path("/usr/bin/chromium")


in_a_browser = pytest.mark.skipif(
    importlib.util.find_spec("playwright") is None or not CHROMIUM.exists(),
    reason=f"needs the extra browser and {CHROMIUM}",
)


class Browsed:
    """A page of a server; what it complained of, what it asked for, and the streams that it was answered with."""

    def __init__(self, page: Any, server: Served) -> None:
        self.page, self.complaints, self.bodies = page, [], []
        self.elsewhere: list[str] = []
        page.on("console", lambda message: self._heard(message))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._asked(request, server.address))
        page.goto(server.address)
        page.wait_for_selector("#model:not(:empty), #models:not([hidden]), #settings[open]")

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        if wait:
            self.done()

    def done(self) -> None:
        self.page.wait_for_selector("#stop", state="hidden", timeout=60_000)

    def limit(self, tokens: int, **fields: Any) -> None:
        self.page.click("#open-settings")
        for name, value in {"max_tokens": tokens, **fields}.items():
            self.page.fill(f"#{name.replace('stop_at', 'stop-at')}", str(value))
        self.page.keyboard.press("Escape")
        self.page.wait_for_selector("#settings", state="hidden")

    def nodes(self) -> dict[str, tuple[str, str, str]]:
        """Return fate, origin and label by node of the tree that is shown."""
        script = """all => all.map(one => [one.dataset.node, one.classList[1], one.dataset.origin,
                                           one.querySelector('text').textContent])"""
        return {
            node: tuple(rest)
            for node, *rest in self.page.locator("#tree .node").evaluate_all(script)
        }

    @property
    def slider(self) -> dict[str, int]:
        named = {
            name: self.page.get_attribute("#cycle", f"aria-value{name}")
            for name in ("min", "max", "now")
        }
        return {name: int(value) for name, value in named.items()}

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, request: Any, address: str) -> None:
        if not request.url.startswith((address, "data:")):
            self.elsewhere.append(request.url)
        if request.method == "POST":
            self.bodies.append(request.post_data_json)


@contextmanager
def browsed(chromium: Any, server: Served, **context: Any) -> Iterator[Browsed]:
    with chromium.new_context(**context) as opened:
        yield Browsed(opened.new_page(), server)


def streamed(server: Served, body: dict[str, Any]) -> list[TracedCycle]:
    """The cycles of the same request, asked again."""
    events = [line.removeprefix("data: ") for line in server.post(body).text.split("\n\n") if line]
    found = [cycle for event in events[:-1] for cycle in json.loads(event).get("cycles", [])]
    return [
        TracedCycle(**{name: value for name, value in cycle.items() if name != "record"})
        for cycle in found
    ]


LAST_ANSWER = """() => new Promise(done => {
    const opened = indexedDB.open('specengine');
    opened.onsuccess = () => {
        const conversations = opened.result.transaction("conversations").objectStore("conversations");
        conversations.getAll().onsuccess = event => {
            opened.result.close();
            const turns = event.target.result.flatMap(one => Object.values(one.turns));
            done(turns.findLast(turn => turn.role === 'assistant') ?? null);
        };
    };
})"""


@contextmanager
def writing(chromium: Any, tokens: int, **settings: Any) -> Iterator[tuple[Browsed, Served, Gate]]:
    """A page, its server, and the gate of an answer that the page has begun to show."""
    gate = Gate(seconds=0.03)
    gate.open.set()
    with served(lambda: gate.engine, **settings) as server, browsed(chromium, server) as seen:
        seen.page.click("#open-settings")
        seen.page.uncheck("#markdown")
        seen.page.keyboard.press("Escape")
        seen.limit(tokens, temperature=0, seed=1)
        seen.ask("go on", wait=False)
        seen.page.wait_for_selector(".piece:nth-of-type(5)", state="attached")
        yield seen, server, gate

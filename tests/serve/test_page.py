"""The page at `/`: its headers, and a browser that talks through it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.protocol import preparing
from specengine.serve import answering
from specengine.serve import app as served_app
from specengine.serve.answering import KeptStream
from specengine.serve.app import FILES
from specengine.serve.models import ServedModel
from specengine.trace.records import TracedCycle
from tests.engine.engines import forced
from tests.serve.served import CHAT, NAME, Gate, Served, served, tiny_engine, until

PATHS = sorted(FILES)
CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202e&lt;b&gt;\u0007"
SMALL = {"width": 360, "height": 740}

in_a_browser = pytest.mark.skipif(
    importlib.util.find_spec("playwright") is None or not CHROMIUM.exists(),
    reason=f"needs the extra browser and {CHROMIUM}",
)


# ---- as it is served


def test_it_is_served_with_strict_headers(server: Served) -> None:
    links = {
        "/",
        *(
            f"/{link}"
            for link in re.findall(r'(?:src|href)="(page/[^"]+)"', server.client.get("/").text)
        ),
    }
    assert links == {"/", "/page/style.css", "/page/main.js"}
    imported = {
        name
        for path in PATHS
        for name in re.findall(r' from "\./([^"]+)"', server.client.get(path).text)
    }
    loaded = re.findall(r'src: "(page/[^"]+)"', server.client.get("/page/formulas.js").text)
    assert loaded == ["page/katex.min.js"]
    assert links | {f"/page/{name}" for name in imported} | {f"/{loaded[0]}"} == set(PATHS)
    for path in PATHS:
        answer = server.client.get(path)
        assert answer.status_code == 200
        parts = dict(
            part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
        )
        assert parts.pop("default-src") == parts.pop("frame-ancestors") == "'none'"
        assert parts.pop("base-uri") == parts.pop("form-action") == "'none'"
        assert parts.pop("img-src") == "'self' data:"
        assert set(parts) == {"script-src", "style-src", "connect-src"}
        assert set(parts.values()) == {"'self'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not re.search(
            r"https?://(?!www\.w3\.org/(?:2000/svg|1998/Math/MathML)\b)", answer.text
        )
    assert server.client.get("/page/else.js").status_code == 404


def test_nothing_in_it_is_inline_or_made_of_markup(server: Served) -> None:
    html, scripts = (
        server.client.get("/").text,
        "".join(server.client.get(path).text for path in PATHS),
    )
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=", html)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc",
        scripts,
    )


def test_it_needs_no_key_but_the_api_does() -> None:
    with served(api_keys=("right",)) as server:
        assert {server.client.get(path).status_code for path in PATHS} == {200}
        assert server.client.get("/v1/models").status_code == 401
        assert server.client.get("/page/").status_code == 401
        assert server.post(CHAT).status_code == 401


def test_fields_follow_the_direction_of_their_text(server: Served) -> None:
    html = server.client.get("/").text
    sides = dict(re.findall(r'<textarea id="([^"]+)"[^>]*? dir="([^"]+)"', html))
    assert sides == {"message": "auto", "system": "auto", "stop-at": "auto", "schema": "ltr"}
    scripts = {name: server.client.get(f"/page/{name}").text for name in FILES.values()}
    for name, made in (("log.js", "textarea"), ("log.js", "details"), ("chats.js", "input")):
        line = next(line for line in scripts[name].splitlines() if f'element("{made}' in line)
        assert 'dir: "auto"' in line
    style = server.client.get("/page/style.css").text
    sided = re.findall(
        r"^\.(?:text|thoughts)[^{]*\{[^}]*(?:padding|margin|border)-(?:left|right)", style, re.M
    )
    assert not sided, "what stands around a text has its side"
    assert not re.search(r"^\.text (?:th|td|p|li|ul)[^{]*\{[^}]*text-align: left", style, re.M)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_its_functions(tmp_path: Path) -> None:
    """Node runs page.mjs beside copies of the modules, which say that they are modules."""
    for name in FILES.values():
        if name.endswith(".js"):
            (tmp_path / name).write_bytes(
                (Path(served_app.__file__).with_name("page") / name).read_bytes()
            )
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page.mjs").write_text(Path(__file__).with_name("page.mjs").read_text())
    done = subprocess.run(
        ["node", "--test", "page.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- in a browser


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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


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


@in_a_browser
def test_the_nodes_on_the_page_are_those_of_the_chunks(chromium: Any, server: Served) -> None:
    with browsed(chromium, server) as seen:
        seen.limit(24, temperature=0.9, seed=3)
        seen.ask("Hello there")
        cycles = streamed(server, seen.bodies[0])
        assert seen.slider == {"min": 1, "max": len(cycles), "now": len(cycles)}
        assert len(seen.nodes()) == len(cycles[-1].kept) + 1, "pruned nodes wait for their switch"
        seen.page.check("#pruned")
        seen.page.focus("#cycle")
        seen.page.keyboard.press("Home")
        for cycle in cycles:
            shown = seen.nodes()
            assert shown.pop("own")[0] == "own"
            fates = {
                str(node): (state, str(origin or "null").lower())
                for node, (state, origin) in enumerate(
                    zip(cycle.states, cycle.origins or [], strict=True)
                )
            }
            assert {node: (fate, origin) for node, (fate, origin, _) in shown.items()} == fates
            seen.page.keyboard.press("ArrowRight")
        assert seen.slider["now"] == len(cycles)
        seen.page.uncheck("#pruned")
        assert len(seen.nodes()) == len(cycles[-1].kept) + 1
        seen.page.click("#compare")
        assert "the same text" in seen.page.text_content("#compared:has(strong)", timeout=30_000)
        assert seen.bodies[1] == {**seen.bodies[0], "policy": "plain"}
        assert not seen.complaints
        assert not seen.elsewhere


@in_a_browser
def test_a_tree_that_ends_with_a_drafted_end_token_is_drawn(chromium: Any, server: Served) -> None:
    """Such a cycle commits no token of the model's own."""
    record = {
        "tokens": [5, 6, 7, 8],
        "texts": ["a", "b", "</s>", "c"],
        "probabilities": [1, 0.5, 0.4, 0.1],
        "path_probabilities": [1, 0.5, 0.2, 0.1],
        "parents": [-1, 0, 1, 0],
        "kept": [0, 1, 2, 3],
        "accepted": [0, 1, 2],
        "committed": [6, 7],
        "committed_texts": ["b", "</s>"],
    }
    with browsed(chromium, server) as seen:
        seen.page.evaluate(
            "async (record) => (await import('/page/tree.js')).draw(record, false)", record
        )
        assert set(seen.nodes()) == {"0", "1", "2", "3"}
        assert seen.page.get_attribute("#tree .node.chosen", "data-node") == "2"
        assert not seen.complaints


def force(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server answer every request with this text."""
    options = preparing._options
    monkeypatch.setattr(
        preparing,
        "_options",
        lambda request: {**options(request), "logits_processor": [forced(text)]},
    )


@in_a_browser
def test_text_that_would_be_markup_is_text(chromium: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    force(HOSTILE, monkeypatch)
    with served(lambda: tiny_engine(draft="ngram")) as server, browsed(chromium, server) as seen:
        seen.limit(len(HOSTILE.encode()))
        seen.ask(HOSTILE)
        said, answered = (turn.text_content() for turn in seen.page.locator(".turn .text").all())
        assert said == HOSTILE
        assert answered == HOSTILE
        assert seen.page.locator("main img, main script, main b").count() == 0
        seen.page.focus("#cycle")
        seen.page.keyboard.press("Home")
        labels = set()
        for _ in range(seen.slider["max"]):
            labels.update(label for _, _, label in seen.nodes().values())
            seen.page.keyboard.press("ArrowRight")
        assert {"<", "\\u{7}"} <= labels
        assert seen.page.title() == "specengine"
        assert not seen.complaints


FORMULAS = r"""$5 and $10, costs $5. But $E = mc^2$ and \(a < b\).

$$
x
- \frac{1}{2}
$$

\[\sum_i y_i\] and `$code$` and $unfinished{$ and \[open

```tex
$z$
```

$\href{javascript:f()}{u}$ $\htmlData{a=b}{v}$ $\includegraphics{http://e.t/w}$ $\def\a{\a\a}\a$
"""


@in_a_browser
def test_formulas_are_set_and_money_is_not(chromium: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    force(FORMULAS, monkeypatch)
    with served(lambda: tiny_engine(draft="ngram")) as server, browsed(chromium, server) as seen:
        seen.limit(len(FORMULAS.encode()))
        seen.ask("Hello")
        seen.page.wait_for_selector(".text math")
        text = seen.page.locator(".turn.assistant .text")
        sources = text.locator("annotation").all_text_contents()
        assert [source.strip() for source in sources[:4]] == [
            "E = mc^2",
            "a < b",
            "x\n- \\frac{1}{2}",
            "\\sum_i y_i",
        ]
        assert text.locator("math[display=block]").count() == 2
        assert text.locator(".piece math").count() == text.locator("math").count() > 4
        said = text.text_content()
        for source in (
            "$5 and $10, costs $5. But ",
            "$code$",
            "$unfinished{$ and [open",
            "$z$",
            r"$\def\a{\a\a}\a$",
        ):
            assert source in said
        assert text.locator("a, img, [href], [src], [data-a]").count() == 0
        assert seen.page.locator("script[src$='katex.min.js']").count() == 1
        assert not seen.elsewhere
        assert not seen.complaints


ARABIC = """مرحبا بالعالم

Hello

- واحد
- two

> سلام

| اسم | b |
|---|---|
| `x` | ب |

```py
# مرحبا
```
"""


@in_a_browser
def test_texts_follow_their_own_direction(chromium: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    force(ARABIC, monkeypatch)
    with served(lambda: tiny_engine(draft="ngram")) as server, browsed(chromium, server) as seen:
        seen.limit(len(ARABIC.encode()))
        seen.page.fill("#message", "كيف")
        side = "one => getComputedStyle(one).direction"
        assert seen.page.locator("#message").evaluate(side) == "rtl"
        seen.page.press("#message", "Enter")
        seen.done()
        text = ".turn.assistant .text"

        def sides(selector: str) -> list[str]:
            found: list[str] = seen.page.locator(f"{text} {selector}").evaluate_all(
                f"all => all.map({side})"
            )
            return found

        assert sides("> p") == ["rtl", "ltr"]
        assert (sides("ul"), sides("li"), sides("li p")) == (
            ["rtl"],
            ["rtl", "ltr"],
            ["rtl", "ltr"],
        )
        assert (sides("blockquote"), sides("table"), sides("th")) == (
            ["rtl"],
            ["rtl"],
            ["rtl", "ltr"],
        )
        assert set(sides("code") + sides("pre")) == {"ltr"}
        assert seen.page.locator(".turn.user .raw").evaluate(side) == "rtl"
        first, box = (
            seen.page.locator(selector).first.bounding_box()
            for selector in (f"{text} > p .piece", f"{text} > p")
        )
        assert first["x"] + first["width"] > box["x"] + box["width"] - 2, "it begins at the right"


@in_a_browser
def test_a_conversation_by_keyboard(chromium: Any, server: Served) -> None:
    with browsed(chromium, server, reduced_motion="reduce") as seen:
        focused = "document.activeElement.id"
        assert seen.page.evaluate(focused) == "message"
        seen.limit(20)
        seen.page.focus("#message")
        seen.page.keyboard.type("one")
        seen.page.keyboard.press("Shift+Enter")
        seen.page.keyboard.type("two")
        seen.page.keyboard.press("Enter")
        seen.done()
        assert seen.bodies[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
        seen.page.keyboard.type("more")
        seen.page.keyboard.press("Enter")
        seen.done()
        assert [message["role"] for message in seen.bodies[1]["messages"]] == [
            "user",
            "assistant",
            "user",
        ]
        seen.page.check("#pruned")
        seen.page.focus("#message")
        for wanted in ("send", "previous", "cycle"):
            for _ in range(4):
                if seen.page.evaluate(focused) == wanted:
                    break
                seen.page.keyboard.press("Tab")
            assert seen.page.evaluate(focused) == wanted
            if wanted == "previous":
                before = seen.slider["now"]
                seen.page.keyboard.press("Enter")
                assert seen.slider["now"] == before - 1
        seen.page.keyboard.press("Home")
        assert seen.slider["now"] == 1
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement.textContent") == "What am I seeing?"
        seen.page.keyboard.press("Tab")
        chosen = "document.activeElement.dataset.node"
        assert seen.page.evaluate(chosen) == "own"
        seen.page.keyboard.press("Home")
        assert seen.page.evaluate(chosen) == "0"
        seen.page.keyboard.press("ArrowRight")
        seen.page.keyboard.press("ArrowDown")
        label = seen.page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert re.search(r": (accepted|rejected|pruned).*; probability .* %; the draft", label)
        told = seen.page.text_content("#node")
        assert "Probability" in told
        assert "the draft: a head or a small model" in told
        seen.page.click("#new")
        assert (seen.page.locator(".turn").count(), seen.page.locator("#tree .node").count()) == (
            0,
            0,
        )
        assert not seen.complaints


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


def require_one_answer(seen: Browsed, server: Served, tokens: int) -> None:
    """AssertionError unless the answer on the page, and in the browser's store, is that of one plain request."""
    seen.page.wait_for_selector(".turn .note:has-text('Cut at ')", timeout=60_000)
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
        require_one_answer(seen, server, 150)
        until(lambda: server.models.streams == {})
        assert not seen.complaints
        assert not seen.elsewhere


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
    with writing(chromium, 60) as (seen, server, _):
        require_one_answer(seen, server, 60)
        assert counts == []


@in_a_browser
def test_an_event_that_is_sent_twice_would_be_seen(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of what the tests before look at."""
    read = KeptStream.read
    monkeypatch.setattr(KeptStream, "read", lambda self, number: read(self, max(number - 2, 0)))
    with writing(chromium, 60) as (seen, server, _):
        seen.page.reload()
        with pytest.raises(AssertionError, match=r"Cut at 6[1-9] tokens"):
            require_one_answer(seen, server, 60)


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


@in_a_browser
def test_two_chats_are_taken_up_at_once(chromium: Any) -> None:
    with writing(chromium, 100) as (seen, _, _):
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
        assert len(seen.bodies) == 2
        assert not seen.complaints


@in_a_browser
def test_a_key_is_asked_for_and_kept_for_the_tab(chromium: Any) -> None:
    with served(api_keys=("right",)) as server, browsed(chromium, server) as seen:
        assert seen.page.is_visible("#asks-for-key")
        assert seen.page.evaluate("document.activeElement.id") == "key"
        seen.page.keyboard.type("right")
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_selector("#model:not(:empty)")
        seen.page.reload()
        seen.page.wait_for_selector("#model:not(:empty)")
        seen.limit(8)
        seen.ask("Hello")
        assert seen.slider["max"] > 0


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


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_screen(chromium: Any, server: Served, scheme: str) -> None:
    with browsed(chromium, server, viewport=SMALL, color_scheme=scheme) as seen:
        wide = "document.documentElement.scrollWidth"
        assert seen.page.evaluate(wide) == SMALL["width"]
        seen.limit(24)
        seen.ask("w" * 300)
        assert seen.page.evaluate(wide) == SMALL["width"]
        assert seen.page.is_hidden("#trees")
        seen.page.click("#open-trees")
        assert seen.page.evaluate(wide) == SMALL["width"]
        assert (
            seen.page.locator("#trees").bounding_box()["y"]
            > seen.page.locator("#composer").bounding_box()["y"]
        )
        seen.page.click("#new")
        seen.ask("Hello")
        probability = seen.page.locator("#node div:nth-of-type(2)").bounding_box()
        origin = seen.page.locator("#node div:nth-of-type(3)").bounding_box()
        within = seen.page.locator("#node div:nth-of-type(2) dd").evaluate(
            "one => one.scrollWidth <= one.clientWidth"
        )
        assert within
        assert origin["y"] >= probability["y"] + probability["height"], "they stand in two rows"
        stage = seen.page.locator("#stage").bounding_box()
        node = seen.page.locator("#node").bounding_box()
        assert node["y"] >= stage["y"] + stage["height"], "the node's words are below the tree"
        assert seen.page.is_hidden("#what p")
        seen.page.click("#what summary")
        assert seen.page.text_content("#what p").count(". ") + 1 == 4
        assert seen.page.evaluate(wide) == SMALL["width"]
        seen.page.click("#open-settings")
        assert seen.page.evaluate(wide) == SMALL["width"]


@in_a_browser
@pytest.mark.model
@pytest.mark.slow
def test_the_default_model(chromium: Any, default_model_path: Path) -> None:
    with (
        served(lambda: Engine.from_pretrained(offline=True)) as server,
        browsed(chromium, server) as seen,
    ):
        seen.limit(48, temperature=0)
        seen.ask('Repeat this: <img src=x onerror="document.title=1">')
        seen.ask("Name three rivers of France.")
        cycles = streamed(server, seen.bodies[1])
        committed = "".join(
            text for cycle in cycles for text in cycle.committed_texts
        ).removesuffix("<|im_end|>")
        shown = seen.page.locator(".turn .text").last.text_content()
        assert "".join(shown.split()) == "".join(committed.split()), (
            "paragraphs are elements of their own"
        )
        assert seen.page.locator("main img").count() == 0
        # the one after it may have committed the end token alone
        seen.page.locator(".turn .piece").last.click()
        last = "".join(seen.page.locator(".piece.at").all_text_contents())
        assert last, "the cycle that is shown"
        assert committed.endswith(last), "cycles of `auto` are others each time"
        assert "×" in seen.page.text_content("#figures")
        assert not seen.complaints
        assert not seen.elsewhere

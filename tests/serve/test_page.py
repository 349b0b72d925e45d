"""The page at `/`: its headers, what it draws, and how it fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specengine import Engine
from specengine.protocol import preparing
from specengine.protocol.requests import ChatRequest
from specengine.serve import app as served_app
from specengine.serve.app import FILES
from tests.engine.engines import forced
from tests.serve.browsing import browsed, in_a_browser, streamed
from tests.serve.served import CHAT, Served, served, tiny_engine

PATHS = sorted(FILES)
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202e&lt;b&gt;\u0007"
SMALL = {"width": 360, "height": 740}


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


NUMBER = re.compile(r'<input id="([a-z_]+)" type="number"([^>]*)>')


def test_numbers_have_the_servers_bounds(server: Served) -> None:
    fields = dict(NUMBER.findall(server.client.get("/").text))
    assert len(fields) == 9

    def takes(name: str, value: float) -> bool:
        try:
            ChatRequest.model_validate(CHAT | {"max_tokens": None, name: value})
        except ValidationError:
            return False
        return True

    for name, attributes in fields.items():
        bounds = {
            key: json.loads(value) for key, value in re.findall(r'(min|max)="([^"]*)"', attributes)
        }
        step = 1 if 'step="1"' in attributes else 0.01
        assert takes(name, bounds["min"])
        assert takes(name, bounds.get("max", 10**9))
        if name != "seed":  # as far as this page's numbers are exact
            assert not takes(name, bounds["min"] - step)
            assert "max" not in bounds or not takes(name, bounds["max"] + step)


@in_a_browser
def test_a_number_out_of_bounds_is_told_at_its_field_and_not_sent(
    chromium: Any, server: Served
) -> None:
    with browsed(chromium, server) as seen:
        page = seen.page
        page.click("#open-settings")
        page.fill("#temperature", "-1")
        page.fill("#top_k", "2.5")
        for name in ("temperature", "top_k"):
            field, told = (page.locator(f"#{name}{more}").bounding_box() for more in ("", " + *"))
            assert told["height"] > 0
            assert 0 <= told["y"] - field["y"] - field["height"] < 10
        assert page.text_content("#temperature + *") == "Value must be greater than or equal to 0."
        assert page.text_content("#min_p + *") == ""
        page.keyboard.press("Escape")
        seen.ask("Hello")
        assert page.text_content("#status").startswith("Settings: Temperature: Value must be")
        assert page.input_value("#message") == "Hello"
        page.reload()
        page.click("#open-settings")
        assert page.text_content("#temperature + *") != "", "it is kept as it was typed"
        page.click("#reset-settings")
        assert page.text_content("#temperature + *") == ""
        page.click("#close-settings")
        assert not seen.bodies
        seen.limit(4)
        seen.ask("Hello")
        assert len(seen.bodies) == 1
        assert not seen.complaints


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844), (360, 640)])
def test_settings_begin_with_what_is_changed_most_and_can_be_left_at_once(
    chromium: Any, server: Served, width: int, height: int
) -> None:
    viewport = {"width": width, "height": height}
    order = """() => [...document.querySelectorAll('#settings input, #settings textarea, #settings select')]
                     .map(one => one.id)"""

    def is_reached(page: Any, selector: str) -> bool:
        """Whether it is what a pointer in its middle meets."""
        script = """one => { const box = one.getBoundingClientRect();
            return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === one; }"""
        return bool(page.locator(selector).evaluate(script))

    with browsed(chromium, server, viewport=viewport) as seen:
        page = seen.page
        page.click("#open-settings")
        assert page.evaluate("document.activeElement.id") == "system"
        fields = page.evaluate(order)
        assert fields[:3] == ["system", "temperature", "max_tokens"]
        assert fields[-1] == "key"
        for name in fields[:3]:
            assert is_reached(page, f"#{name}")
        for name in fields:
            page.focus(f"#{name}")
            assert is_reached(page, f"#{name}"), "what has the focus is not covered"
            assert is_reached(page, "#close-settings")
        page.click("#close-settings")
        assert page.is_hidden("#settings")
    with (
        served(api_keys=("right",)) as server,
        browsed(chromium, server, viewport=viewport) as seen,
    ):
        assert seen.page.evaluate(order)[0] == "key"
        assert is_reached(seen.page, "#key")


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

"""The page of a trace: it holds the tree, needs nothing else, and hostile tokens do no harm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specengine import policies
from specengine.cli import main
from specengine.trace import Trace, views
from specengine.trace.views import page
from tests.toy import LetterTokenizer
from tests.trace.runs import toy_engine, write

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "\x1b[31m\x1b]0;title\x07",
    "\N{RIGHT-TO-LEFT OVERRIDE}evil",
    "\r\n\u2028{{data}}",
    "'\"`&amp;$\\",
    "\ud800",  # half a character, as a broken tokenizer might give
)


class HostileTokenizer(LetterTokenizer):
    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(HOSTILE[token] for token in tokens)


def hostile(file: Path) -> Trace:
    engine = toy_engine(policies.make("eagle", width=3, expansions=2, budget=5), HostileTokenizer())
    return write(file, engine, list(range(8)), temperature=1.0, seed=1)[0]


def test_hostile_tokens_do_no_harm(tmp_path: Path, capsys: Any) -> None:
    trace = hostile(tmp_path / "run.jsonl")
    text = page([trace])
    assert text.count("<script") == text.count("</script>") == 2  # the data and page.js
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert not re.search("[<>&\u2028]", data)
    assert json.loads(data)["runs"][0]["texts"] == {
        str(token): text for token, text in enumerate(HOSTILE)
    }
    assert main(["trace", str(trace.file), "--pruned"]) == 0
    shown = capsys.readouterr().out
    assert not [letter for letter in shown if letter != "\n" and not letter.isprintable()]


def test_the_page_needs_nothing_else(written: Trace) -> None:
    text = page([written])
    assert not re.search(
        r"""(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)|\bon\w+=|innerHTML""", text
    )
    assert "default-src 'none'" in text
    assert "{{" not in text.split('<script id="data"')[0]


def test_the_page_holds_the_tree(written: Trace) -> None:
    data = json.loads(page([written]).split('application/json">')[1].split("</script>")[0])
    assert len(data["queries"]) == 2
    for query, shown in zip(written.queries, data["queries"], strict=True):
        assert shown["end"] == "length"
        for cycle, small in zip(query.cycles, shown["cycles"], strict=True):
            assert [small[key] for key in "tpkac"] == [
                cycle.tokens, cycle.parents, cycle.kept, cycle.accepted, cycle.committed,
            ]  # fmt: skip
            assert small["e"] == pytest.approx(cycle.probabilities, rel=1e-3)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_is_a_script() -> None:
    script = Path(views.__file__).with_name("page.js")
    done = subprocess.run(["node", "--check", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_is_part_of_the_package() -> None:
    setup = (Path(__file__).parents[2] / "setup.py").read_text()
    assert "trace/page.*" in setup

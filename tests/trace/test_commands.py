"""The commands that write and show traces."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine.cli import main
from specengine.trace import Trace, read_trace
from specengine.trace.views import cycle_lines, page, summary
from tests.toy import byte_tokenizer, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny(seed=1, initializer_range=0.1, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


SAID = "the cat and the dog and the cat"


@pytest.mark.parametrize("extra", [[], ["--json"], ["--stream"]])
def test_generate_with_a_trace_answers_the_same(
    folder: str, tmp_path: Path, capsys: Any, extra: list[str]
) -> None:
    command = ["generate", SAID, "--model", folder, "--max-new-tokens", "20", *extra]
    assert main(command) == 0
    expected = capsys.readouterr().out
    file = tmp_path / "run.jsonl"
    assert main([*command, "--trace", str(file)]) == 0
    out = capsys.readouterr().out
    (query,) = read_trace(file).queries
    if extra == ["--json"]:
        expected, out = json.loads(expected)["text"], json.loads(out)["text"]
    assert out == expected
    assert "".join(cycle.text for cycle in query.cycles) == out.removesuffix("\n")
    assert (query.title, query.finish_reason) == (SAID, "length")
    assert SAID in query.prompt


def test_chat_writes_every_turn(folder: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello you\nagain please\n"))
    file = tmp_path / "run.jsonl"
    assert main(["chat", "--model", folder, "--max-new-tokens", "12", "--trace", str(file)]) == 0
    assert [query.title for query in read_trace(file).queries] == ["hello you", "again please"]
    assert main(["trace", str(file), "--query", "2"]) == 0
    assert "query 2 of 2, cycle 1 of" in capsys.readouterr().out


def test_trace_shows_the_summary_and_a_tree(written: Trace, capsys: Any) -> None:
    assert main(["trace", str(written.file)]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in summary([written]))
    assert "query 1 of 2, cycle 1 of" in out
    assert all(line in out for line in cycle_lines(written.queries[0].cycles[0]))
    assert main(["trace", str(written.file), "--query", "2", "--cycle", "3"]) == 0
    out = capsys.readouterr().out
    assert "tau" not in out
    assert all(line in out for line in cycle_lines(written.queries[1].cycles[2]))


def test_colours_stand_beside_the_marks(written: Trace, capsys: Any, monkeypatch: Any) -> None:
    assert main(["trace", str(written.file)]) == 0
    plain = capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["trace", str(written.file)]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[2m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_an_output_without_those_letters_gets_others(written: Trace, monkeypatch: Any) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["trace", str(written.file)]) == 0
    assert b"v accepted   x verified" in out.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--query", "3"], "query: got 3, accepted 1 to 2"),
        (["--query", "0"], "query: got 0, accepted 1 to 2"),
        (["--cycle", "999"], "cycle: got 999, accepted 1 to"),
        (["--cycle", "0"], "cycle: got 0, accepted 1 to"),
        (["--cycle", "-1"], "cycle: got -1, accepted 1 to"),
        (["--html", "/proc/nowhere/page.html"], "html: /proc/nowhere/page.html cannot be written"),
        (["--tree", "/proc/nowhere/tree.svg"], "tree: /proc/nowhere"),
    ],
)
def test_options_out_of_range(
    written: Trace, capsys: Any, options: list[str], message: str
) -> None:
    assert main(["trace", str(written.file), *options]) == 2
    assert message in capsys.readouterr().err


def test_html_from_several_files(written: Trace, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "page.html"
    assert main(["trace", str(written.file), str(written.file), "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text(encoding="utf-8") == page([written, written])

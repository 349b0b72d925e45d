"""`specengine check`: verdicts, prompt files and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine import cycle
from specengine.cli import main
from tests.cli.streams import PROMPT
from tests.test_checking import accept_blindly

CHECK = ["check", "--max-new-tokens", "20", "--model"]


def test_check_is_exact_for_every_policy(folder: str, capsys: Any) -> None:
    policies = ["--policy", "eagle", "--policy", "chain", "--policy", "fixed", "--policy", "plain"]
    assert main([*CHECK, folder, *policies, PROMPT, "another one"]) == 0
    out, err = capsys.readouterr()
    assert out == "8 exact, 0 near-tie, 0 mismatch\n"
    assert err.count("exact") == 8


def test_check_without_a_draft(folder: str, capsys: Any) -> None:
    assert main([*CHECK, folder, PROMPT, "--draft", "none", "--policy", "plain"]) == 0
    assert capsys.readouterr().out.startswith("1 exact")
    assert main([*CHECK, folder, PROMPT, "--draft", "none", "--policy", "eagle"]) == 2
    assert "draft 'none' is plain decoding, which has no policy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*CHECK, folder, PROMPT, "--policy", "eagle", "--policy", "nonsense"])
    assert "unknown name 'nonsense'" in capsys.readouterr().err


def test_check_has_prompts_of_its_own(folder: str, capsys: Any) -> None:
    assert main([*CHECK, folder, "--limit", "2"]) == 0
    assert capsys.readouterr().out == "2 exact, 0 near-tie, 0 mismatch\n"


@pytest.mark.parametrize(
    "extra", [["--temperature", "0.9", "--seed", "4"], ["--temperature", "1.2"]]
)
def test_check_sampled(folder: str, capsys: Any, extra: list[str]) -> None:
    assert main([*CHECK, folder, PROMPT, *extra]) == 0
    assert capsys.readouterr().out.startswith("1 exact")


def test_check_against_huggingface(folder: str, capsys: Any) -> None:
    assert main([*CHECK, folder, PROMPT, "--against", "huggingface"]) == 0
    assert capsys.readouterr().out.startswith("1 exact")
    assert main([*CHECK, folder, PROMPT, "--against", "huggingface", "--temperature", "1"]) == 2


def test_check_reports_a_mismatch(
    folder: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(cycle, "walk", accept_blindly)
    # auto drafts where measured costs are such that it pays
    drafting = [*CHECK, folder, PROMPT, "--policy", "eagle"]
    out_file = tmp_path / "report.json"
    assert main([*drafting, "--json", "--out", str(out_file)]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == json.loads(out_file.read_text())
    assert (found["mismatch"], found["comparisons"][0]["verdict"]) == (1, "mismatch")
    assert found["comparisons"][0]["gap"] > 1e-3
    assert "mismatch" in err
    assert main([*drafting, "--tolerance", "60"]) == 0
    assert capsys.readouterr().out == "0 exact, 1 near-tie, 0 mismatch\n"


def test_who_waits_at_a_terminal_sees_each_step(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*CHECK, folder, PROMPT, "another", "--policy", "chain"]) == 0
    err = capsys.readouterr().err
    for step in (
        f"[1/4] plain decoding of {PROMPT!r}",
        f"[2/4] policy chain on {PROMPT!r}",
        "[4/4] policy chain on",
    ):
        assert f"{step}" in err
    assert err.count("\r\x1b[K") == 4


def test_check_reads_jsonl_with_turns(folder: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['"a string"', '{"prompt": "an object"}', "", '{"turns": ["one", "two"]}', '"too many"']
    file.write_text("\n".join(lines))
    assert main([*CHECK, folder, "--prompts", str(file), "--limit", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in found["comparisons"]] == [
        "a string",
        "an object",
        "one",
        "two",
    ]
    assert found["exact"] == 4


def test_check_reads_text(folder: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n\nanother\n")
    assert main([*CHECK, folder, "--prompts", str(file), "--raw"]) == 0
    assert capsys.readouterr().out.startswith("2 exact")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "a .txt or a .jsonl"),
        ("a.jsonl", "{", "a.jsonl, line 1 is not JSON"),
        ("a.jsonl", '{"text": 1}', "line 1 is neither"),
        ("a.txt", "\n", "has no prompts"),
        ("missing/a.txt", None, "cannot be read"),
    ],
)
def test_check_refuses_bad_files(
    capsys: Any, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    assert main(["check", "--prompts", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_check_refuses_what_it_cannot_do(folder: str, capsys: Any, tmp_path: Path) -> None:
    for given, message in (
        ([PROMPT, "--prompts", "x.txt"], "not both"),
        (["--limit", "0"], "limit"),
        ([PROMPT, "--policy", "eagle", "--policy", "chain", "-o", "width=2"], "one --policy"),
        ([PROMPT, "--out", str(tmp_path / "missing" / "out.json")], "cannot be written"),
    ):
        assert main([*CHECK, folder, *given]) == 2
        assert message in capsys.readouterr().err


def test_the_table_is_as_wide_as_the_longest_policy(folder: str, capsys: Any) -> None:
    names = ["--policy", "chain", "--policy", "eagle/talon-table1"]
    assert main(["check", PROMPT, "--model", folder, "--max-new-tokens", "4", *names]) == 0
    lines = capsys.readouterr().err.splitlines()
    (header,) = (line for line in lines if line.startswith("policy  "))
    rows = [line for line in lines if line.startswith(("chain", "eagle/talon-table1"))]
    assert len(rows) == 2
    assert {row.index("exact") for row in rows} == {header.index("verdict")}

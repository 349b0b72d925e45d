"""Every committed result file is printed as tables, or told in a sentence."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.plain_tables import MAX_ROWS, plain_tables
from bench.report import main
from docs.build.results import RESULTS

FILES = sorted(RESULTS.glob("*.jsonl"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_file_is_printed(file: Path, capsys: Any) -> None:
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"`{file.name}`")
    assert "\n| " in out


def test_the_command_of_a_committed_file_is_there_or_has_another_name() -> None:
    table = re.findall(r"^\| `([\w.]+)`.*? \| `([\w.]+)", (RESULTS / "README.md").read_text(), re.MULTILINE)
    today = dict(table)
    commands = [json.loads(file.read_text().splitlines()[0]).get("command", "") for file in FILES]
    named = set(re.findall(r"python -m (\S+)", "\n".join(commands)))
    assert named > set(today) > {"bench.ltd", "bench.replay"}
    for module in {today.get(name, name) for name in named}:
        assert importlib.util.find_spec(module), module
    assert not [name for name in today if importlib.util.find_spec(name)]


def test_there_are_such_files() -> None:
    assert len(FILES) > 50


@pytest.mark.parametrize("text", ["no json\n", '{"record": "row"\n'])
def test_a_file_of_something_else_is_told(text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert main([str(tmp_path / "a.jsonl")]) == 1
    assert "a.jsonl: it holds no records (" in capsys.readouterr().err


def test_a_table_that_a_file_does_not_have_is_told(tmp_path: Path, capsys: Any) -> None:
    assert main([str(RESULTS / "replicas.jsonl"), "--only", "losses"]) == 1
    assert "replicas.jsonl: no table of it is among losses" in capsys.readouterr().err


def test_records_without_a_table_of_their_own_are_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"record": "row", "way": "a|b", "ms": {"draft": 0.12345}, "list": [1]}] * 50
    (table,) = plain_tables([{"record": "provenance", "command": "x"}, *rows, {"record": "settings"}])
    assert table.header == ("way", "ms.draft")
    assert table.rows[0] == ["a/b", "0.1235"]
    assert len(table.rows) == MAX_ROWS
    assert "of 50" in table.title
    assert json.dumps(table.rows)

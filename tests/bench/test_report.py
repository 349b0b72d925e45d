"""Every committed result file is printed as tables, or told in a sentence."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.plain_tables import APART, MAX_ROWS, plain_tables
from bench.report import OF_TABLES, main
from docs.build.results import RESULTS

FILES = sorted(RESULTS.glob("*.jsonl"))


@pytest.mark.sliced(31)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_file_is_printed(file: Path, capsys: Any) -> None:
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"`{file.name}`")
    assert "\n| " in out


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_kind_of_record_is_left_out(file: Path, capsys: Any) -> None:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = {record["record"] for record in records} - set(APART)
    assert main([str(file), "--rows", "0"]) == 0
    out = capsys.readouterr().out
    plain = set(re.findall(r"\*\*Records '(.+?)'\*\*", out))
    assert plain <= kinds
    assert kinds - plain <= set(OF_TABLES)
    if kinds - plain:
        assert out.count("**") / 2 > len(plain), (
            "a kind has neither a table of its own nor a plain one"
        )
    for kind in plain:
        table = out.split(f"**Records '{kind}'**")[1].split("**")[0]
        assert sum(line.startswith("| ") for line in table.splitlines()) - 2 == sum(
            record["record"] == kind for record in records
        )


def test_what_is_cut_is_told() -> None:
    rows = [{"record": "x", **{f"field {n}": n for n in range(20)}}] * 50
    (few,), (whole,) = plain_tables(rows, 7), plain_tables(rows, 0)
    assert few.title == "Records 'x', the first 7 of 50, the first 14 of 20 fields"
    assert (len(few.rows), len(few.header)) == (7, 14)
    assert (whole.title, len(whole.rows), len(whole.header)) == ("Records 'x'", 50, 20)
    assert plain_tables(rows, apart=("x",)) == []


def test_the_command_of_a_committed_file_is_there_or_has_another_name() -> None:
    table = re.findall(
        r"^\| `([\w.]+)`.*? \| `([\w.]+)", (RESULTS / "README.md").read_text(), re.MULTILINE
    )
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
    cells = {
        "way": "a|b" + 50 * "c",
        "ms": {"draft": 0.12345},
        "few": [0.12345, 2],
        "text": 50 * "d",
        "many": [1] * 9,
    }
    rows: list[dict[str, Any]] = [{"record": "row", **cells}] * 50
    (table,) = plain_tables(
        [{"record": "provenance", "command": "x"}, *rows, {"record": "settings"}]
    )
    assert table.header == ("way", "ms.draft", "few", "text")
    assert table.rows[0] == ["a/b" + 50 * "c", "0.1235", "0.1235, 2", 40 * "d" + "..."]
    assert len(table.rows) == MAX_ROWS
    assert "of 50" in table.title
    assert json.dumps(table.rows)

"""Tables and plots of what bench.kernels and bench.graphs measure on a device, from records as they write them."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from bench import plots, report
from bench.kernels import WAYS
from bench.kernels.tables import GOALS
from specengine.benchmark.records import Table
from specengine.errors import InputError

Record = dict[str, Any]
CASE = {"nodes": 64, "heads": 32, "kv_heads": 8, "size": 128, "bytes_us": 4.0, "operations_us": 5.0}


def timed(way: str, median: float, prefix: int = 4096, **case: Any) -> Record:
    times = {"error": 1e-3, "median": median, "p20": median, "p80": median}
    return {
        "record": "attention",
        "way": way,
        "cache": "cold",
        **CASE,
        "prefix": prefix,
        **case,
        **times,
    }


def refused(way: str, **why: Any) -> Record:
    return {"record": "attention", "way": way, "cache": "cold", **CASE, "prefix": 4096, **why}


KERNELS: list[Record] = [
    {
        "record": "provenance",
        "command": "python -m bench.kernels",
        "commit": "c",
        "date": "d",
        "device": "a GPU",
    },
    {"record": "versions", "triton": "3.6.0"},
    {"record": "launch floor", "median": 1.5, "p20": 1.5, "p80": 1.5},
    timed("specengine", 12.0),
    timed("specengine, 16 rows, no splits", 11.0),
    timed("torch sdpa efficient", 60.0),
    timed("torch flex", 30.0),
    refused("torch sdpa math", wrong=0.25),
    refused("flashinfer xqa", skipped="Unavailable: xqa, tried: 64 nodes | too many"),
]


def only(records: list[Record], kind: str) -> list[Table]:
    return [table for table in report.tables(records) if table.kind == kind]


def cells(table: Table, row: int = 0) -> dict[str, str]:
    return dict(zip(table.header, table.rows[row], strict=True))


def test_kernels_beside_their_floor_and_the_best_baseline() -> None:
    attention, missing = only(KERNELS, "kernels")
    found = cells(attention)
    assert attention.title == "Attention: microseconds per call; a launch is 1.50"
    assert found["case"] == "64 x 4,096 slots, 32/8 heads of 128"
    assert (found["floor"], found["specengine"], found["torch flex"]) == ("5.0", "12.0", "30.0")
    assert (found["torch sdpa math"], found["flashinfer xqa"]) == ("wrong", report.NOTHING)
    assert (found["ours over floor"], found["best other over ours"]) == (
        "2.40",
        "2.50 (torch flex)",
    )
    assert found["goal"] == "met, without flashinfer xqa"
    assert missing.rows[0] == ["attention", "torch sdpa math", "1", "error 0.25"]
    assert missing.rows[1][3] == "Unavailable: xqa, tried: 64 nodes / too many"


@pytest.mark.parametrize(
    ("median", "flashinfer", "verdict"),
    [
        (14.0, 24.0, "met"),
        (14.1, 24.0, "missed: 14.1 > 14.0"),
        (14.1, 23.0, "missed: 14.1 > 14.0; 1.63 < 1.7 x flashinfer xqa"),
    ],
)
def test_goals_tell_what_is_missed(median: float, flashinfer: float, verdict: str) -> None:
    rows = [
        timed("specengine", median),
        timed("torch sdpa efficient", 60.0),
        timed("torch flex", 30.0),
    ]
    (table,) = only([KERNELS[2], *rows, timed("flashinfer xqa", flashinfer)], "kernels")
    assert cells(table)["goal"] == verdict


def test_cases_without_a_goal_a_floor_or_a_right_result() -> None:
    other = timed("specengine", 9.0, prefix=2048)
    unknown = {
        name: value for name, value in timed("specengine", 9.0).items() if not name.endswith("_us")
    }
    tables = [
        only(records, "kernels")[0]
        for records in ([other], [unknown], [refused("specengine", wrong=1.0)])
    ]
    assert [cells(table)["goal"] for table in tables] == [
        report.NOTHING,
        "met, without torch sdpa efficient, torch flex, flashinfer xqa, floors",
        "missed: wrong",
    ]
    assert cells(tables[1])["floor"] == cells(tables[1])["best other over ours"] == report.NOTHING


def test_goals_name_ways_that_there_are() -> None:
    known = {(way.kind, way.name) for way in WAYS}
    assert {(goal.kind, way) for goal in GOALS for way in goal.over} <= known


WAYS_OF_GRAPHS = {"plain": 1.0, "transformers": 2.0, "plain, graphs": 0.5, "eagle, graphs": 0.25}
GRAPHS: list[Record] = [
    {
        "record": "settings",
        "model": "8b",
        "dtype": "bfloat16",
        "max_new_tokens": 128,
        "rounds": 1,
        "temperature": 0.0,
    },
    *({"record": "way", "way": way, "places": [("policies", "")]} for way in WAYS_OF_GRAPHS),
    {
        "record": "not run",
        "way": "specdecpp",
        "reason": "InputError: states of another size",
        "fault": False,
    },
    *(
        {
            "record": "row",
            "way": way,
            "set": set_,
            "id": "1",
            "new_tokens": 10,
            "seconds": [seconds],
            "diverges_at": None,
        }
        for way, seconds in WAYS_OF_GRAPHS.items()
        for set_ in ("one", "two")
    ),
    {
        "record": "host waits",
        "way": "eagle, graphs",
        "calls": {"cudaStreamSynchronize": 5, "cudaMemcpy": 2},
    },
    {"record": "host waits", "way": "transformers", "failed": "x"},
]
GRAPHS += [
    record | {"over_transformers": 2.0, "over_captured_plain": 0.5}
    if record["way"] == "plain"
    else record
    for record in report.summaries(GRAPHS)
]


def test_graphs_by_way() -> None:
    (table,) = only(GRAPHS, "policies")
    assert (
        table.title
        == "Policies, all sets; 8b, bfloat16; 2 of 2 prompts; 1 round; temperature 0, 128 tokens"
    )
    assert [row[0] for row in table.rows] == list(WAYS_OF_GRAPHS)
    plain, eagle = cells(table, 0), cells(table, 3)
    assert (plain["over transformers"], plain["over captured plain"], plain["host waits"]) == (
        "2.00",
        "0.50",
        "",
    )
    assert (eagle["speed, mean"], eagle["over transformers"], eagle["host waits"]) == (
        "4.00",
        "",
        "7",
    )
    assert cells(table, 1)["host waits"] == ""
    assert (
        "host waits"
        not in only([r for r in GRAPHS if r["record"] != "host waits"], "policies")[0].header
    )
    (dropped,) = only(GRAPHS, "not-run")
    assert dropped.rows == [["specdecpp", "cannot run", "InputError: states of another size"]]


def save(path: Path, records: list[Record]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_tables_and_plots_stand_beside_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    far = [
        timed(way, 40.0, prefix=16384, nodes=nodes)
        for way in ("specengine", "torch flex")
        for nodes in (16, 64)
    ]
    files = [
        save(tmp_path / "kernels.jsonl", KERNELS + far),
        save(tmp_path / "graphs.jsonl", GRAPHS),
    ]
    assert report.main([*files, "--plot"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count(": drawn") == 2
    for name in ("kernels", "graphs"):
        assert (tmp_path / f"{name}.md").read_text() in printed.out
        before = (tmp_path / f"{name}.svg").read_bytes()
        assert before.startswith(b"<?xml")
        assert report.main([str(tmp_path / f"{name}.jsonl"), "--plot"]) == 0
        assert (tmp_path / f"{name}.svg").read_bytes() == before


def test_without_matplotlib_there_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(InputError, match="run pip install matplotlib"):
        plots.draw(KERNELS, tmp_path / "x.svg")
    with pytest.raises(InputError, match="no speed over plain decoding"):
        plots.draw([], tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())
    assert report.main([save(tmp_path / "kernels.jsonl", KERNELS), "--plot"]) == 0
    assert "kernels.jsonl: not drawn (plot: needs matplotlib" in capsys.readouterr().err


def test_a_file_that_is_missing_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = save(tmp_path / "graphs.jsonl", GRAPHS)
    assert report.main([str(tmp_path / "absent.jsonl"), there]) == 1
    printed = capsys.readouterr()
    assert "no such file" in printed.err
    assert "Policies, all sets; 8b" in printed.out

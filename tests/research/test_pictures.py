"""The plots of traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from research.pictures import main
from specengine.cli import main as specengine
from specengine.trace import Trace
from tests.toy import policy_for
from tests.trace.conftest import written as written
from tests.trace.runs import TREE, rewritten, toy_engine, write


def test_acceptance_is_counted_by_depth_and_rank(written: Trace) -> None:
    pytest.importorskip("matplotlib")
    from research.pictures import acceptance_counts

    accepted, verified = acceptance_counts(written.queries)
    cycles = [cycle for query in written.queries for cycle in query.cycles]
    assert verified.sum() == sum(len(cycle.kept) - 1 for cycle in cycles)
    assert accepted.sum() == sum(len(cycle.accepted) - 1 for cycle in cycles)
    assert (accepted <= verified).all()
    assert accepted[0].sum() == sum(len(cycle.accepted) > 1 for cycle in cycles)
    small = acceptance_counts([type(written.queries[0])("", [], None, [TREE])])
    assert [grid.tolist() for grid in small] == [[[1, 0], [0, 0]], [[1, 1], [1, 0]]]


def test_pictures_of_several_policies(written: Trace, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    other, _ = write(tmp_path / "other.jsonl", toy_engine(policy_for("chain")))
    plain, _ = write(tmp_path / "plain.jsonl", toy_engine(None))
    files = [str(trace.file) for trace in (written, other, plain)]
    assert main([*files, "--out", str(tmp_path / "pictures")]) == 0
    drawn = capsys.readouterr().out.split()
    assert [Path(file).name for file in drawn] == [
        "acceptance-by-depth-and-rank.svg", "acceptance-length.svg", "draft-passes-against-length.svg",
    ]  # fmt: skip
    for file in drawn:
        text = Path(file).read_text()
        assert "<svg" in text
        assert "Chain(length=4)" in text  # matplotlib notes each text beside its glyphs


def test_pictures_of_a_run_without_a_draft(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain, _ = write(tmp_path / "plain.jsonl", toy_engine(None))
    assert main([str(plain.file), "--out", str(tmp_path)]) == 0


def test_pictures_say_what_they_need(
    written: Trace, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(written.file), "--out", str(tmp_path)]) == 2
    assert "pictures: needs matplotlib" in capsys.readouterr().err


def test_pictures_need_a_cycle(written: Trace, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    file = rewritten(written, lambda lines: lines.__delitem__(slice(2, None)))
    assert main([str(file), "--out", str(tmp_path)]) == 2
    assert "these traces have no cycles" in capsys.readouterr().err
    assert specengine(["trace", str(file), "--html", str(tmp_path / "page.html")]) == 0
    assert specengine(["trace", str(file)]) == 0


def test_pictures_of_different_prompts_say_so(written: Trace, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    same, _ = write(
        tmp_path / "same.jsonl",
        toy_engine(None),
        *(query.prompt_tokens for query in written.queries),
    )
    other, _ = write(tmp_path / "other.jsonl", toy_engine(None), [4])
    for second, noted in ((same, False), (other, True)):
        assert main([str(written.file), str(second.file), "--out", str(tmp_path / "plots")]) == 0
        assert ("note: these traces are of different prompts" in capsys.readouterr().err) is noted

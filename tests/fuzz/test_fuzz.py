"""A hundred spoiled configs, prompts and option sets, models and folders: each is answered or refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from specengine.errors import shown
from tests.fuzz import __main__, cases, running
from tests.fuzz.cases import Outcome, Workplace
from tests.fuzz.workers import worker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_spoiled_input_is_answered_or_refused(tmp_path: Path) -> None:
    report = running.fuzz(running.here(tmp_path), 102, seed=0, kinds=tuple(cases.SPOILED))
    assert not report.findings, "\n".join(report.findings)
    for kind in cases.SPOILED:
        assert sum(report.counts[kind].values()) == 17
    assert sum(counted["answered"] for counted in report.counts.values()) > 10


@pytest.mark.slow
def test_models_and_folders_that_change_are_answered_as_they_are_or_refused() -> None:
    """In a process of its own: what ends it is found, too."""
    with worker() as run:
        report = running.fuzz(run, 48, seed=0, kinds=tuple(cases.GIVEN))
    assert not report.findings, "\n".join(report.findings)
    for kind in cases.GIVEN:
        assert report.counts[kind]["answered"] >= 4


@pytest.mark.slow
def test_lives_of_engines_answer_as_plain_decoding(tmp_path: Path) -> None:
    report = running.fuzz(running.here(tmp_path), 5, seed=1, kinds=tuple(cases.LIVES))
    assert not report.findings, "\n".join(report.findings)
    assert report.counts["lives"]["answered"] > 3


@pytest.mark.slow
def test_many_lives_of_engines_answer_as_plain_decoding() -> None:
    with worker() as run:
        report = running.fuzz(run, 80, seed=2, kinds=tuple(cases.LIVES))
    assert not report.findings, "\n".join(report.findings)


@pytest.mark.slow
def test_a_result_file_of_lives_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, rows = tmp_path / "lives.jsonl", []
    for count in ("2", "5"):
        monkeypatch.setattr(
            "sys.argv", ["fuzz", "--kind", "lives", "--cases", count, "--out", str(file)]
        )
        assert __main__.main() == 0
        rows.append([json.loads(line) for line in file.read_text().splitlines()])
    assert [row["cases"] for row in (rows[0][-1], rows[1][-1])] == [2, 5]
    assert [row["first"] for row in rows[1][:-1]] == [0, 2]
    assert sum(rows[1][-1]["family"].values()) == sum(rows[1][-1]["outcomes"].values()) == 5


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_case_is_of_its_name(kind: str, tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    first, again, others = (
        [shown(cases.KINDS[kind](place, random.Random(name))[0], 10_000) for name in names]
        for names in ("abcdef", "abcdef", "ghijkl")
    )
    assert [text for text in first if " at 0x" not in text] == [
        text for text in again if " at 0x" not in text
    ]
    assert first != others


def test_what_escapes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def escapes() -> Outcome:
        raise TypeError("not of ours")

    monkeypatch.setitem(cases.KINDS, "head", lambda place, pick: ("given", escapes))
    report = running.fuzz(running.here(tmp_path), 1, seed=0, kinds=("head",))
    assert report.findings == ["0/head/0: 'given'\n    TypeError: not of ours"]
    assert report.counts["head"]["found"] == 1

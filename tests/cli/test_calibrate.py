"""`specengine doctor --calibrate`: the table, the JSON object, and the file that policies read."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.cli import main
from specengine.costs import PassCosts
from specengine.costs.measuring import SyntheticCycles, stored


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))


def test_the_table_of_a_model_and_its_draft(
    folder: str, head: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["doctor", "--calibrate", "--model", folder, "--draft", head]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "EAGLE-3" in lines[lines.index("verified nodes") - 1]
    first = lines[lines.index("verified nodes") + 1]
    assert re.fullmatch(r"  1 +at 64 tokens: \d+\.\d\d ms(; at \d+ tokens: \d+\.\d\d ms)*", first)
    assert "drafted from" in lines
    assert re.fullmatch(r"  \d+\.\d\d ms", lines[lines.index("rest of a cycle") + 1])
    (file,) = (tmp_path / "cache" / "costs").iterdir()
    assert err.endswith(f"kept in {file}\n")


@pytest.mark.parametrize("others", [0.0, 0.4])
def test_a_busy_machine_is_told(folder: str, capsys: Any, monkeypatch: Any, others: float) -> None:
    monkeypatch.setattr("specengine.costs.measuring.share_of_others", lambda _: others)
    monkeypatch.setattr("specengine.costs.MAX_SPREAD", math.inf)
    assert main(["doctor", "--calibrate", "--model", folder, "--draft", "ngram"]) == 0
    told = "note: these costs are provisional, other programs took 40% of the processors; they are measured again"
    assert (told in capsys.readouterr().err) == bool(others)


def test_json_is_what_an_engine_finds(folder: str, capsys: Any) -> None:
    assert main(["doctor", "--calibrate", "--model", folder, "--draft", "ngram", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    engine = Engine.from_pretrained(folder, "ngram")
    assert printed["key"] == stored.identity(engine.target, engine.drafter)
    assert stored.find(engine.target, engine.drafter) == PassCosts.from_dict(printed["costs"])


def test_a_second_call_measures_anew(folder: str, capsys: Any) -> None:
    given = ["doctor", "--calibrate", "--model", folder, "--draft", "none", "--json"]
    assert main(given) == main(given) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["key"] == second["key"]
    assert first["costs"] != second["costs"]


def test_without_a_draft_there_is_no_table_of_it(folder: str, capsys: Any) -> None:
    assert main(["doctor", "--calibrate", "--model", folder, "--draft", "none"]) == 0
    assert "drafted from" not in capsys.readouterr().out


def test_captured_costs_say_so(folder: str, capsys: Any) -> None:
    given = [
        "doctor",
        "--calibrate",
        "--model",
        folder,
        "--backend",
        "huggingface",
        "--graphs",
        "--draft",
        "ngram",
    ]
    assert main(given) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "captured"


def test_a_folder_that_cannot_be_written_is_a_note(
    folder: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "file"))
    assert main(["doctor", "--calibrate", "--model", folder, "--draft", "none"]) == 0
    assert "specengine: note: measured, not stored" in capsys.readouterr().err


@pytest.mark.parametrize(("act", "call"), [("begin", 1), ("cycle", 1), ("cycle", 5), ("end", 1)])
def test_ctrl_c_ends_it_and_keeps_no_half(
    act: str, call: int, folder: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting, calls = getattr(SyntheticCycles, act), []

    def interrupted(*given: Any) -> Any:
        calls.append(act)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return acting(*given)

    command = ["doctor", "--calibrate", "--model", folder, "--draft", "ngram"]
    monkeypatch.setattr(SyntheticCycles, act, interrupted)
    assert main(command) == 130
    assert capsys.readouterr() == ("", "")
    assert len(calls) == call
    assert not list(tmp_path.rglob("costs/*"))
    monkeypatch.undo()
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    assert main(command) == 0
    assert len(list(tmp_path.rglob("costs/*"))) == 1

"""research.curve: the log of a training as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.curve import main
from specengine.train.draft.training import LOG


def test_the_log_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    held_back = {"hits": [0.4, 0.3], "overlap": [0.4, 0.3], "tokens_per_cycle": 1.7}
    entries = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "held_back": held_back},
        {"step": 3, "loss": 2.0},
        {"step": 3, "temperatures": [1.0]},
    ]
    (tmp_path / LOG).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert main([str(tmp_path), "--out", str(tmp_path / "curve.svg")]) == 0
    drawn = (tmp_path / "curve.svg").read_text()
    assert drawn.startswith("<?xml")


def test_folders_without_a_log_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "curve.svg")])
    assert "has no log.jsonl" in capsys.readouterr().err

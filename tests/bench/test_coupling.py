"""bench.coupling: the same answers with and without, and what it counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import coupling
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_ways_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tiny(num_hidden_layers=2).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(coupling, "SAMPLINGS", dict(list(coupling.SAMPLINGS.items())[1:4:2]))
    given = [
        "--model",
        folder,
        "--policy",
        "eagle",
        "--per-set",
        2,
        "--max-new-tokens",
        8,
        "--out",
        tmp_path / "out",
    ]
    monkeypatch.setattr(sys, "argv", ["coupling", *map(str, given)])
    coupling.main()
    _, *rows = (json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    ways = [("plain", False), ("eagle", True), ("eagle", False)]
    assert [(row["policy"], row["coupled"]) for row in rows] == ways * 2
    assert {row["sampling"] for row in rows} == set(coupling.SAMPLINGS)
    assert [row["answers_other_than_plain"] for row in rows] == [0] * 6
    assert all(row["tau"] >= 1 and row["prompts"] == 2 and row["tokens_per_s"] > 0 for row in rows)
    assert [row["over_plain"] for row in rows[::3]] == [1, 1]

"""research.learning_curve: stages add up, heads are measured, and the line through them is the right one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from research import learning_curve
from research.learning_curve import Point
from specengine.checkpoints.eagle import save_head
from tests.toy import byte_tokenizer, head_config, random_state, tiny
from tests.train.test_draft import corpus_of, random_texts

pytestmark = pytest.mark.usefixtures("one_thread")


def stage(folder: Path, times: list[tuple[int, float]], heads: list[int]) -> Path:
    folder.mkdir()
    for step in heads:
        (folder / str(step)).mkdir()
    entries = [{"step": step, "cpu_seconds": seconds, "loss": 1.0} for step, seconds in times]
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def test_stages_add_up(tmp_path: Path) -> None:
    first = stage(tmp_path / "a", [(1, 10.0), (10, 370.0), (20, 730.0)], [10, 20])
    second = stage(tmp_path / "b", [(1, 5.0), (10, 1805.0), (11, 60.0), (40, 1860.0)], [10, 30])
    found = learning_curve.points([first, second], 8, tmp_path / "start", 1000)
    assert [
        (point.stage, point.step, point.tokens, point.hours, point.is_end) for point in found
    ] == [
        (0, 0, 1000, None, True),
        (1, 10, 1080, 0.1, False),
        (1, 20, 1160, 0.2, True),
        (2, 10, 1240, 0.7, False),
        (
            2,
            30,
            1400,
            round(0.7 + 60 / 3600, 3),
            False,
        ),  # the log ends at 40: what came later has no head
    ]
    with pytest.raises(SystemExit, match="no folder of a head that is named by its step"):
        learning_curve.points([stage(tmp_path / "c", [(1, 1.0), (2, 2.0)], [])], 8, None, 0)


def test_twice_the_tokens_are_worth_the_slope_of_the_line() -> None:
    found = [Point(Path(), 1, n, 1000 * 2**n, 1.0, is_end=n != 2) for n in range(5)]
    even = [[(1000 + 100 * n, 1000)] * 6 for n in range(5)]
    even[2] = [(9000, 1000)] * 6  # not an end: left out
    row = learning_curve.doubling(found, even)
    assert row == {
        "heads": 4,
        "tokens": 32000,
        "more_acceptance_length": 0.1,
        "more_acceptance_length_interval": [0.1, 0.1],
    }
    uneven = [[(1000 + 200 * n * (i % 2), 1000) for i in range(6)] for n in range(5)]
    low, high = learning_curve.doubling(found, uneven)["more_acceptance_length_interval"]
    assert 0 <= low < 0.1 < high <= 0.2


@pytest.mark.slow
def test_heads_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tiny(num_hidden_layers=6).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    trained = stage(tmp_path / "a", [(1, 10.0), (10, 370.0)], [5, 10])
    config = head_config()
    for place in (tmp_path / "start", trained / "5", trained / "10"):
        torch.manual_seed(int(place.name == "10"))
        save_head(config, random_state(config), place)
    corpus_of(tmp_path / "data", random_texts(60))
    out = tmp_path / "out.jsonl"
    given = [
        "--model",
        folder,
        "--start",
        tmp_path / "start",
        "--start-tokens",
        5000,
        "--stage",
        trained,
        "--out",
        out,
    ]
    few = ["--data", tmp_path / "data", "--per-set", 2, "--max-new-tokens", 8]
    monkeypatch.setattr(sys, "argv", ["learning_curve", *map(str, given + few)])
    learning_curve.main()
    provenance, *heads, doubling = (json.loads(line) for line in out.read_text().splitlines())
    assert provenance["record"] == "provenance"
    assert [(head["stage"], head["tokens"]) for head in heads] == [
        (0, 5000),
        (1, 10120),
        (1, 15240),
    ]
    for head in heads:
        low, high = head["acceptance_length_interval"]
        assert 1 <= low <= head["acceptance_length"] <= high
        assert [row["rank"] for row in head["by_rank"]] == [1, 2, 3, 4, 5]
    assert (doubling["heads"], doubling["tokens"]) == (3, 30480)

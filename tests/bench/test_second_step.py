"""Count guesses, as bench.second_step does, and run it."""

import json
from pathlib import Path

import pytest

from bench import second_step


def test_groups_of_guesses() -> None:
    tokens = [1, 2, 3, 9, 2, 4, 1, 2]
    likeliest = [[2, 8], [3, 7], [9, 5], [2, 6], [4, 3], [1, 2], [2, 4]]
    groups = second_step.guesses(tokens, likeliest, 2)
    # [1, 2] stood before 3, and 2 alone before 4 last; the likeliest after its last place; those of before it, but 2
    assert groups == {"copies": [3, 4], "recycled": [4, 3], "second": [4], "pairs": [4]}
    new = second_step.guesses([1, 2, 5], [[2, 8], [5, 3]], 2)
    assert new == {"copies": [], "recycled": [], "second": [3], "pairs": []}


def test_what_the_others_hold_is_not_added() -> None:
    counts = second_step.Counts()
    groups = {"copies": [3], "recycled": [4], "second": [4, 6], "pairs": [4]}
    counts.count(groups, 4)
    counts.count(groups, 6)
    record = counts.record("set", 2)
    assert record["held"] == {"copies": 0.0, "recycled": 0.5, "second": 1.0, "pairs": 0.5}
    assert record["added"] == {"second": 0.5, "pairs": 0.0}
    assert record["guesses_added"] == {"second": 1.0, "pairs": 0.0}


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps("Write the word one, four times.") + "\n")
    assert second_step.main(["--prompts", str(file), "--max-new-tokens", "12"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["record"] for record in records[:1]] == ["prompts"]
    assert {record["guesses"] for record in records[1:]} == set(second_step.GUESSES)
    assert all(record["tokens"] > 0 for record in records[1:])

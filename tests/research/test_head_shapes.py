"""research.head_shapes: heads are widened and trained, and worth what their counters and costs say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from research import head_shapes
from specengine.checkpoints.eagle import load_head, save_head
from specengine.costs import PassCosts, find_costs
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.toy import byte_tokenizer, head_config, random_state, tiny
from tests.train.test_draft import corpus_of, random_texts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_heads_are_trained_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tiny(num_hidden_layers=6).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = head_config()
    save_head(config, random_state(config), tmp_path / "start")
    corpus_of(tmp_path / "data", random_texts(60))
    heads = ["--model", str(folder), "--heads", str(tmp_path / "heads")]
    given = ["--data", str(tmp_path / "data"), "--start", str(tmp_path / "start"), "--steps", "1"]
    shapes = ["--shape", "40x200", "--shape", "48x220"]
    monkeypatch.setattr(sys, "argv", ["head_shapes", "train", *heads, *given, *shapes])
    head_shapes.main()
    assert load_head(tmp_path / "heads" / "48x220").config.intermediate_size == 48
    capsys.readouterr()
    few = [
        "--per-set",
        "1",
        "--max-new-tokens",
        "8",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    monkeypatch.setattr(sys, "argv", ["head_shapes", "measure", *heads, *few])
    head_shapes.main()
    provenance, *rows = (
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    )
    assert provenance["record"] == "provenance"
    assert rows == [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    costs, rows = (
        [row for row in rows if row["record"] == "costs"],
        [row for row in rows if row["record"] == "head"],
    )
    assert [found["name"] for found in costs] == ["40x200", "48x220"]
    assert costs[0]["verify_ms_by_nodes"] == costs[1]["verify_ms_by_nodes"]
    assert find_costs(str(tmp_path / "out.jsonl")).verify[1] == pytest.approx(
        costs[0]["verify_ms_by_nodes"]["1"] / 1e3
    )
    assert [row["shape"] for row in rows] == ["40x200", "40x200", "48x220", "48x220"]
    assert [(row["units"], row["tokens"]) for row in rows[::2]] == [(40, 200), (48, 220)]
    assert rows[2]["parameters"] - rows[0]["parameters"] == 8 * 3 * 32 + 20 * 32
    assert all(row["acceptance_length"] >= 1 and row["predicted_tokens_per_s"] > 0 for row in rows)


def test_medians_are_of_what_was_mostly_measured() -> None:
    found = head_shapes._medians(
        [{1: 2.0, 4: 5.0}, {1: 3.0, 2: 9.0, 4: 6.0}, {1: 4.0, 4: 10.0, 8: 1.0}, {1: 3.0, 8: 3.0}]
    )
    assert found == {1: 3.0, 4: 6.0}


def test_a_vocabulary_that_would_shrink_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    tiny(num_hidden_layers=6).save_pretrained(folder)
    config = head_config()
    save_head(config, random_state(config), tmp_path / "start")
    corpus_of(tmp_path / "data", random_texts(4))
    given = [
        "--data",
        str(tmp_path / "data"),
        "--start",
        str(tmp_path / "start"),
        "--shape",
        "40x20",
    ]
    heads = ["--model", str(folder), "--heads", str(tmp_path / "heads")]
    monkeypatch.setattr(sys, "argv", ["head_shapes", "train", *heads, *given])
    with pytest.raises(SystemExit, match=r"--shape: accepted: .* tokens or more"):
        head_shapes.main()
    assert not (tmp_path / "heads").exists()


def test_a_cycle_costs_its_nodes_and_its_passes() -> None:
    costs = PassCosts("made up", {1: 10.0, 9: 18.0}, {1: 1.0, 3: 2.0}, overhead=0.5)
    tree = TokenTree.root(0, 9)
    level = tree.graft([0, 0, 0], [1, 2, 3], [-1.0, -1.5, -2.0])
    tree.graft([1, 2, 3, 1], [4, 5, 6, 7], [-2.0, -3.0, -4.0, -5.0])
    tree.passes += 2
    assert len(level.alive()) == 3
    cycle = Cycle(tree, [0], [9], Seconds(), grown=tree, kept=torch.arange(8))
    assert head_shapes._seconds(cycle, costs) == pytest.approx(0.5 + 17.0 + 1.0 + 2.0)
    alone = Cycle(TokenTree.root(0), [0], [9], Seconds())
    assert head_shapes._seconds(alone, costs) == pytest.approx(0.5 + 10.0)

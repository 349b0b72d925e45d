"""research.calibration: outcomes of a cycle, errors beside what chance alone makes, and a whole run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from research import calibration
from research.calibration import Outcome
from specengine.checkpoints.eagle import save_head
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.toy import byte_tokenizer, head_config, random_state, tiny
from tests.train.test_draft import corpus_of, random_texts

pytestmark = pytest.mark.usefixtures("one_thread")


def test_only_best_children_of_accepted_nodes_count() -> None:
    #        0
    #      1   2          accepted: 0, 2, 4
    #      3   4 5
    #          6
    parents = torch.tensor([-1, 0, 0, 1, 2, 2, 4])
    stated = torch.tensor([1.0, 0.5, 0.25, 0.75, 0.625, 0.125, 0.375])
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 3])
    tree = TokenTree.of(torch.arange(7), parents, depths, stated.log(), stated.log())
    found = calibration.outcomes(
        Cycle(tree=tree, path=[0, 2, 4], tokens=[2, 4, 9], seconds=Seconds())
    )
    assert [(o.behind, round(o.stated, 6), o.hit) for o in found] == [
        (0, 0.5, False),
        (2, 0.625, True),
        (1, 0.375, False),
    ]


def test_right_probabilities_err_as_chance_does_and_wrong_ones_more() -> None:
    generator = torch.Generator().manual_seed(1)
    stated = torch.rand(3000, generator=generator)
    right = torch.bernoulli(stated, generator=generator)
    too_sure = torch.bernoulli(stated**2, generator=generator)
    found = [Outcome(1, *pair) for pair in zip(stated.tolist(), right.bool().tolist(), strict=True)]
    found += [
        Outcome(9, *pair) for pair in zip(stated.tolist(), too_sure.bool().tolist(), strict=True)
    ]
    one, five = calibration.served(found)
    assert (one["behind"], one["outcomes"], five["behind"], five["outcomes"]) == (1, 3000, 5, 3000)
    assert one["error"] < 1.5 * one["chance"]
    assert math.isclose(five["stated"] - five["accuracy"], 1 / 2 - 1 / 3, abs_tol=0.03)
    assert five["error"] > 4 * five["chance"]


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "model", tmp_path / "out.jsonl"
    tiny(num_hidden_layers=6).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = head_config()
    save_head(config, random_state(config), tmp_path / "head")
    corpus_of(tmp_path / "data", random_texts(60))
    given = [
        "--model",
        folder,
        "--head",
        tmp_path / "head",
        "--data",
        tmp_path / "data",
        "--out",
        out,
    ]
    monkeypatch.setattr(
        sys, "argv", ["calibration", *map(str, [*given, "--per-set", 1, "--max-new-tokens", 8])]
    )
    calibration.main()
    _, *rows = (json.loads(line) for line in out.read_text().splitlines())
    along = [row for row in rows if row["record"] == "text"]
    assert [row["temperatures_scale"] for row in along] == [1.0, 0.5, 0.25]
    accuracies = [[rank["accuracy"] for rank in row["by_rank"]] for row in along]
    assert (
        accuracies[0] == accuracies[1] == accuracies[2]
    )  # a temperature changes how sure a head is, not its choice
    assert along[0]["by_rank"] != along[1]["by_rank"]
    served = [row for row in rows if row["record"] == "served"]
    assert {row["sampling"] for row in served if row["behind"] == 0} == {"greedy", "temperature 1"}

"""`python -m research.ltd`: from a model alone to a policy that serves, and the comparison of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.costs_record import costs_record
from research.ltd import compare, train
from research.ltd.__main__ import main
from research.ltd.candidates import CandidateTrees
from specengine.cli import main as specengine
from specengine.costs import PassCosts
from specengine.policies import _ltd
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    *(
        "-o",
        "width=2",
        "-o",
        "expansions=3",
        "-o",
        "sizes=1,2,4,6",
        "-o",
        "least=0",
        "-o",
        "fixed_depth=1",
    ),
    *(
        "-o",
        "size_steps=64",
        "-o",
        "depth_steps=64",
        "-o",
        "rollout=32",
        "-o",
        "minibatch=16",
        "-o",
        "epochs=2",
    ),
    *(
        "-o",
        "hidden_size=8",
        "-o",
        "hidden_depth=8",
        "-o",
        "hidden_critic=8",
        "-o",
        "environments=4",
        "-o",
        "length=16",
    ),
    *("-o", "held_back=0.3", "-o", "again=size", "-o", "fixed_size=4"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny("qwen3", max_position_embeddings=512).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("what is it\nand then\nwho knows\nabc\n")
    return str(file)


@pytest.mark.slow
def test_from_a_model_alone_to_answers(
    model: str, prompts: str, tmp_path: Path, capsys: Any
) -> None:
    """On logged trees, then again without the model; the same seed and table give the same networks."""
    out, again = tmp_path / "out", tmp_path / "again"
    given = ["train", str(out), "--target", model, "--draft", model, "--prompts", prompts]
    assert main([*given, "--costs", "8b-l40", *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out / 'ltd.safetensors'}\n"
    assert "per second" in printed.err
    assert "pair after stage 2 (size): " in printed.err
    assert (out / "curve.svg").is_file()
    trees = CandidateTrees.open(out / "candidates")
    assert trees.manifest["target"] == Path(model).name, "no folder of this machine"
    facts = _ltd.load(str(out / "ltd.safetensors")).facts
    assert facts["ground"]["costs"]["name"] == "8b-l40"
    logged = ["train", str(again), "--candidates", str(trees.folder), "--costs", "8b-l40", *SMALL]
    assert main(logged) == 0
    assert (again / "ltd.safetensors").read_bytes() == (out / "ltd.safetensors").read_bytes()
    curves = tmp_path / "curves.jsonl"
    assert main(["curves", str(again), "--out", str(curves)]) == 0
    rows = [json.loads(line) for line in curves.read_text().splitlines()]
    assert [row["record"] for row in rows[:3]] == ["provenance", "training", "log"]
    assert (tmp_path / "curves-again.svg").is_file()
    capsys.readouterr()
    asked = [
        "generate",
        "abc",
        "--model",
        model,
        "--draft",
        model,
        "--max-new-tokens",
        "8",
        "--policy",
        "ltd",
    ]
    assert specengine([*asked, "-o", f"networks={out / 'ltd.safetensors'}"]) == 0
    assert "ltd" in capsys.readouterr().err.lower()


@pytest.mark.sliced(1)
@pytest.mark.parametrize("how", [["--live", "--costs", "8b-l40"], ["-o", "reward=wallclock"], []])
def test_live_by_the_wall_clock_and_by_measured_costs(
    model: str,
    prompts: str,
    tmp_path: Path,
    how: list[str],
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = PassCosts(
        "here",
        {1: 0.03, 16: 0.04, 64: 0.06},
        {1: 0.002, 4: 0.003},
        source="measured",
        measured=True,
    )
    monkeypatch.setattr(train.measuring, "measure", lambda target, drafter: table)
    out = tmp_path / "out"
    given = ["train", str(out), "--target", model, "--draft", model, "--prompts", prompts, *SMALL]
    given += ["-o", "again=", "-o", "size_steps=32", "-o", "depth_steps=32"]
    assert main([*given, *(["-o", "environments=1"] if how else []), *how]) == 0
    costs = _ltd.load(str(out / "ltd.safetensors")).facts["ground"]["costs"]
    if how:
        assert not (out / "candidates").exists()
        assert (costs == "wall clock") == ("reward=wallclock" in how)
    else:
        assert costs == json.loads(json.dumps(costs_record(table)))
    capsys.readouterr()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--data", "x", "--recipe", "tpu"],
            "recipe: got 'tpu', accepted paper, released, short, cpu",
        ),
        (["--data", "x", "-o", "step=5"], "option: unknown option 'step'"),
        (["--data", "x", "-o", "epochs=0"], "epochs: got 0"),
        (["--data", "nowhere"], "data: nowhere is not a folder of training text"),
        (["--data", "nowhere", "--costs", "tpu"], "costs: tpu is neither one of vicuna-13b-h200"),
        (
            [],
            "data, prompts, candidates: accepted --data, --prompts or both, or --candidates alone",
        ),
        (["--candidates", "x", "--data", "x", "--costs", "8b-l40"], "or --candidates alone"),
        (
            ["--candidates", "nowhere"],
            "candidates: they are for a cost table that is given by --costs",
        ),
        (["--candidates", "x", "--live", "--costs", "8b-l40"], "not for live training"),
        (
            ["--candidates", "nowhere", "--costs", "8b-l40"],
            "candidates: nowhere is not a folder of logged candidates",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    given: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "load_engine", lambda _: pytest.fail("a model was loaded"))
    assert main(["train", "x", *given]) == 2
    assert message in capsys.readouterr().err


def test_the_comparison(model: str, tmp_path: Path, capsys: Any) -> None:
    """It logs, compares on logged trees, and correlates live rewards with the table's."""
    trees, out = tmp_path / "trees", tmp_path / "rows.jsonl"
    own = [
        "--model",
        model,
        "--draft",
        model,
        "--dtype",
        "float32",
        "--per-set",
        "3",
        "--max-new-tokens",
        "24",
    ]
    assert main(["log", str(trees), *own, "--width", "4", "--expansions", "6"]) == 0
    given = [
        "compare",
        str(trees),
        "--grid",
        str(trees),
        "--networks",
        "cpu",
        "--costs",
        "2-cores-amx",
    ]
    assert main([*given, "--default", "2", "11", "--out", str(out)]) == 0
    rows = {
        row["way"]: row
        for row in map(json.loads, out.read_text().splitlines())
        if row["record"] == "replay"
    }
    assert rows["eagle"]["over_eagle"] == [1, 1, 1]
    best, foreseen = (
        rows["eagle, best on these trees"],
        rows["the best depth and size of each tree, foreseen"],
    )
    assert (
        best["speed"]
        == rows["eagle, best on the training's trees"]["speed"]
        >= rows["eagle"]["speed"]
    )
    every = "speed_at_every_position"
    assert foreseen[every] >= max(best[every], rows["ltd: cpu"][every])
    assert sum(rows["ltd: cpu"]["depths"].values()) > 10
    assert main([*given[:-4], "--networks", "cpu", "--networks", "a100", "--costs", "8b-l40"]) == 2
    assert "different shapes" in capsys.readouterr().err
    agree = [
        "agree",
        *own,
        "--networks",
        "cpu",
        "--costs",
        "2-cores-amx",
        "--cycles",
        "150",
        "--candidates",
        str(trees),
    ]
    assert main([*agree, "--out", str(out)]) == 0
    decisions, found, by_setting = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert set(decisions["microseconds"]) == {"depth", "size"}
    assert -1 <= found["spearman_of_rewards"] <= 1
    assert len(by_setting["live_and_replayed"]) == 6 + 12


def test_questions_of_a_text_and_of_ones_own(
    model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--data and --prompts together, -o prompts of the text's; a draft that is not to copy does not."""
    texts = [[5, 6, 7 + number] for number in range(10)]
    monkeypatch.setattr(train.Corpus, "open", lambda _: object())
    monkeypatch.setattr(train, "questions", lambda _: texts)
    monkeypatch.setattr(train, "read_prompts", lambda _: [["what is it"]])
    out = tmp_path / "out"
    given = [
        "train",
        str(out),
        "--target",
        model,
        "--draft",
        model,
        "--data",
        "x",
        "--prompts",
        prompts,
    ]
    given += [
        "--costs",
        "8b-l40",
        *SMALL,
        "-o",
        "again=",
        "-o",
        "size_steps=32",
        "-o",
        "depth_steps=32",
    ]
    assert main([*given, "-o", "prompts=2", "--no-lookup"]) == 0
    trees = CandidateTrees.open(out / "candidates")
    assert len(list(trees.answers())) == 3
    assert "lookup" not in trees.manifest["draft"]


def test_ranks_share_ties() -> None:
    assert compare.spearman([1, 2, 3, 4], [10, 20, 30, 45]) == pytest.approx(1)
    assert compare.spearman([1, 2, 2, 3], [4, 3, 3, 1]) == pytest.approx(-1)
    assert compare._ranks([5, 1, 5]).tolist() == [2.5, 1, 2.5]

"""`specengine train`, through main(): from a model alone to a head that serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine.cli import main, train as command
from specengine.train.draft.options import RECIPES
from specengine.train.text.corpus import Corpus
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = ["-o", "tokens=600", "-o", "rows=8", "-o", "length=40"]
TRAINING = [
    *("-o", "steps=4", "-o", "batch_tokens=80", "-o", "lengths=40", "-o", "draft_vocab_size=64"),
    *("-o", "validate_every=4", "-o", "held_back=0.1", "-l", "steps=2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny("qwen3", num_hidden_layers=6, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_text_then_a_draft_then_an_answer(
    folder: str, tmp_path: Path, capsys: Any, kept: float
) -> None:
    data, head = str(tmp_path / "data"), str(tmp_path / "head")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["abc", "def"]}\n"xyz"\n')
    given = ["--prompts", str(prompts), "-o", f"gib={kept}"]
    assert main(["train", "data", data, "--target", folder, *TEXT, *given]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{data}\n"
    assert "(100%)" in printed.err
    manifest = Corpus.open(Path(data)).manifest
    assert manifest["target"] == Path(folder).name, "no folder of this machine"
    assert manifest["features"] == ([2, 3, 3] if kept else [])
    for loss, kind in (("talf", "eagle3"), ("hass", "eagle1"), ("ttt", "eagle3")):
        out = f"{head}-{loss}"
        given = [
            "train",
            "draft",
            out,
            "--target",
            folder,
            "--data",
            data,
            "--loss",
            loss,
            *TRAINING,
        ]
        assert main([*given, "-l", "anchors=0.5"]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{out}\n"
        assert f"EAGLE-{kind[-1]} head" in printed.err
        assert ("runs the target again" in printed.err) == (loss != "ttt" or not kept)
        assert (
            main(["generate", "abc", "--model", folder, "--draft", out, "--max-new-tokens", "5"])
            == 0
        )
        assert "EAGLE" in capsys.readouterr().err


def test_without_text_the_recipes_is_written_first(
    folder: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = RECIPES["cpu-small"]
    small = replace(usual, text=replace(usual.text, tokens=300, rows=8, length=40))
    monkeypatch.setitem(RECIPES, "cpu-small", small)
    head = tmp_path / "head"
    assert main(["train", "draft", str(head), "--target", folder, *TRAINING]) == 0
    assert Corpus.open(head / "data").shards()
    assert (head / "model.safetensors").is_file()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data", "x", "--recipe", "tpu"], "recipe: got 'tpu', accepted cpu-small, gpu"),
        (["data", "x", "-o", "token=5"], "option: unknown option 'token'"),
        (["data", "x", "-o", "tokens=many"], "option.tokens: got 'many'"),
        (
            ["draft", "x", "--loss", "l2"],
            "loss: got 'l2', accepted eagle, hass, ttt, talf, dflash, eagle-paper, hass-paper",
        ),
        (["draft", "x", "-l", "beam=4"], "loss_option: unknown option 'beam'"),
        (["draft", "x", "-o", "steps=0"], "steps: got 0"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    given: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_load", lambda _: pytest.fail("a model was loaded"))
    assert main(["train", *given]) == 2
    assert message in capsys.readouterr().err


def test_hours_are_above_zero(capsys: Any) -> None:
    for wrong in ("0", "-1", "nan", "inf"):
        assert main(["train", "draft", "x", f"--hours={wrong}"]) == 2
        assert "hours: got" in capsys.readouterr().err


def test_hours_choose_text_and_steps(
    folder: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = RECIPES["cpu-small"]
    monkeypatch.setitem(
        RECIPES, "cpu-small", replace(usual, text=replace(usual.text, rows=4, length=40))
    )
    monkeypatch.setattr("specengine.train.draft.training.MIN_STEPS", 3)
    given = [
        "train",
        "draft",
        str(tmp_path / "head"),
        "--target",
        folder,
        "--hours",
        "1e-6",
        *TRAINING,
    ]
    assert main([*given]) == 0
    said = capsys.readouterr().err
    assert "(100%)" in said
    assert "3 steps in 0.0 hours" in said
    assert "runs the target again" not in said
    assert main([*given]) == 0
    assert "resuming at step 3 of 3" in capsys.readouterr().err


def test_the_recipes_are_sound() -> None:
    for recipe in RECIPES.values():
        assert recipe.about
        assert max(recipe.training.lengths) <= recipe.training.batch_tokens

"""A name that nobody knows is answered with the one that was probably meant, beside the list."""

from __future__ import annotations

from typing import Any

import pytest

from specengine import Engine, policies
from specengine.cli import main
from specengine.errors import ELSEWHERE, InputError, PolicyError, did_you_mean
from specengine.options import LoadOptions
from specengine.request.options import GenerationOptions


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stop", "stop_strings"),
        ("max_tokens", "max_new_tokens"),
        ("max_length", "max_new_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("repeat_penalty", "repetition_penalty"),
        ("Seed", "seed"),
        ("grammer", "grammar"),
    ],
)
def test_an_option_of_a_generation(name: str, meant: str) -> None:
    with pytest.raises(
        InputError, match=rf"^unknown option '{name}', known are .*; did you mean {meant}\?$"
    ):
        GenerationOptions.check({name: 1})


@pytest.mark.parametrize(
    ("name", "meant"), [("dtyp", "dtype"), ("torch_dtype", "dtype"), ("quantise", "quantize")]
)
def test_an_option_of_loading(name: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"; did you mean {meant}\?$"):
        LoadOptions.of({name: 1})


@pytest.mark.parametrize(
    ("name", "options", "meant"),
    [
        ("talom", {}, "talon"),
        ("Eagle", {}, "eagle"),
        ("eagle", {"widht": 3}, "width"),
        ("talon/papers", {}, "paper"),
    ],
)
def test_a_policy_its_options_and_its_presets(
    name: str, options: dict[str, Any], meant: str
) -> None:
    with pytest.raises(InputError, match=rf"; did you mean {meant}\?$"):
        policies.make(name, **options)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["run", "llama3"], "chat"),
        (["generat", "x"], "generate"),
        (["train", "datas"], "data"),
        (["generate", "x", "--max-tokens", "3"], "--max-new-tokens"),
        (["generate", "x", "--max-tokens=3"], "--max-new-tokens"),
        (["generate", "x", "--stop-strings", "a"], "--stop"),
        (["chat", "--temprature", "1"], "--temperature"),
        (["generate", "x", "--policy", "talom"], "talon"),
        (["export", "head", "folder", "--format", "sglan"], "sglang"),
        (["generate", "x", "--dtype", "bfloat"], "bfloat16"),
    ],
)
def test_what_is_typed(typed: list[str], meant: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(typed)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert f"; did you mean {meant}?" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("name", ["no_such_option", "x", "", 5, None])
def test_nothing_is_guessed_where_nothing_is_like_it(name: Any) -> None:
    assert did_you_mean(name, ["width", "expansions"]) == ""


def test_names_of_other_programs_mean_what_is_known() -> None:
    options = {*GenerationOptions.__dataclass_fields__, *LoadOptions.names(), "draft", "stop"}
    commands = {"chat", "generate", "bench", "serve", "doctor"}
    assert {own for meant in ELSEWHERE.values() for own in meant} <= options | commands


@pytest.mark.parametrize("name", ["gemma3:270m", "llama3:latest", "hf.co/owner/model:Q4_K_M"])
def test_a_model_by_another_programs_name_is_told_what_to_give(name: str) -> None:
    with pytest.raises(
        InputError, match=r"model: got .*, accepted a path or a Hub id; (names with|there is no)"
    ):
        Engine.from_pretrained(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("ngrm", "ngram"), ("recyling", "recycling"), ("defaul-head", "default-head")],
)
def test_a_draft_by_its_name(name: str, meant: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"draft: got '{name}', accepted mtp, ngram, recycling, none, .*; did you mean {meant}\?$",
    ):
        Engine.from_pretrained(draft=name, offline=True)


def test_a_mistake_in_a_policy_is_one_line_that_says_how_to_see_where(
    capsys: Any, monkeypatch: Any
) -> None:
    from specengine.cli import generate

    def fails(arguments: Any) -> int:
        raise PolicyError("policy Gated: grow returned None")

    monkeypatch.setattr(generate, "run", fails)
    assert main(["generate", "x"]) == 2
    assert (
        capsys.readouterr().err
        == "specengine: error: policy Gated: grow returned None (--debug shows where)\n"
    )

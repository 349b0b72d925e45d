"""The heads that ship: what is in their packages, and that they are used."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import specengine
from specengine import policies
from specengine.checkpoints import embedded, likeness
from specengine.checkpoints.eagle import Verifier, load_head, writer
from specengine.cli import main
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.engine import loading
from specengine.errors import InputError
from specengine.options import LoadOptions

QUESTIONS = (
    "What is a rainbow?",
    "Write a Python function that adds two numbers.",
    "Name three uses of salt.",
)


ROOT = Path(__file__).parents[2]


def shipped_in_the_checkout() -> Path:
    return ROOT / "heads" / "specengine_default_head" / embedded.NAME


def shipped() -> Path:
    folder = embedded.draft_head(embedded.NAME)
    assert folder == shipped_in_the_checkout()
    return folder


@pytest.mark.parametrize("name", embedded.HEADS)
def test_the_package_holds_a_head_with_its_card(name: str) -> None:
    folder = embedded.shipped_head(name)
    assert folder is not None
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "target.json", "README.md"}
    assert sum(files.values()) <= 25_000_000
    card = (folder / "README.md").read_text()
    for needed in ("Data", "Recipe", "Command", "Figures", "Licence"):
        assert f"## {needed}" in card


def test_it_is_for_the_embedded_model_under_any_of_its_names() -> None:
    for name in (
        embedded.NAME,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        f"/somewhere/models/{embedded.NAME}",
    ):
        assert embedded.draft_head(name) == shipped()
    for name in ("", "HuggingFaceTB/SmolLM2-360M-Instruct", "Qwen/Qwen3-0.6B"):
        assert embedded.draft_head(name) is None


@pytest.fixture
def no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a wheel of specengine is installed alone; returns a folder on the path."""
    monkeypatch.setattr(embedded, "CHECKOUT", tmp_path / "site")
    package = "specengine_default_head_of_a_test"
    monkeypatch.setitem(embedded.HEADS, embedded.HEAD, (package, embedded.NAME))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_package_has_it_where_no_checkout_is(no_head: Path) -> None:
    assert embedded.draft_head(embedded.NAME) is None
    installed = no_head / embedded.HEADS[embedded.HEAD][0]
    shutil.copytree(shipped_in_the_checkout(), installed / embedded.NAME)
    (installed / "__init__.py").write_text("raise AssertionError('it is found, not imported')\n")
    assert embedded.draft_head(embedded.NAME) == installed / embedded.NAME
    assert embedded.missing_head(embedded.NAME) is None


def test_without_it_an_error_says_how_to_get_it_and_the_default_is_recycling(no_head: Path) -> None:
    target = cast(
        Any, SimpleNamespace(name=embedded.NAME, lm=SimpleNamespace(config=SimpleNamespace()))
    )
    assert loading._default(target) == "recycling"
    note = loading._note(target, None, cast(Any, Recycling()))
    assert note.startswith(
        "draft: recycled tokens, because the head for smollm2-135m-instruct is not installed"
    )
    assert note.endswith("pip install that file")
    assert loading._note(target, "recycling", cast(Any, Recycling())) == ""
    assert embedded.missing_head("Qwen/Qwen3-0.6B") is None
    with pytest.raises(
        InputError,
        match=r"draft: the head for smollm2-135m-instruct is not installed; .* that file",
    ):
        loading.check_draft("default-head", LoadOptions())
    assert main(["export", "default-head", str(no_head / "out")]) == 2


@pytest.mark.parametrize("head", embedded.HEADS)
def test_its_package_holds_the_four_files(head: str) -> None:
    """As its pyproject.toml lists them, under the name that embedded.py looks for."""
    name, model = embedded.HEADS[head]
    place = {"specengine_default_head": "heads", "specengine_coder_head": "heads/coder"}[name]
    project = tomllib.loads((ROOT / place / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == [name]
    assert project["project"]["name"].replace("-", "_") == name
    patterns = project["tool"]["setuptools"]["package-data"][name]
    package = ROOT / place / name
    found = {file for pattern in patterns for file in package.glob(pattern)}
    assert {file for file in found if file.parent.name == model} == set((package / model).iterdir())
    models = {model for package_name, model in embedded.HEADS.values() if package_name == name}
    assert {file.parent.name for file in found} == models
    assert embedded.shipped_head(head) == package / model
    assert (ROOT / place / project["project"]["readme"]).is_file()


def test_it_loads_and_its_vocabulary_is_sound() -> None:
    config, _, dialect = load_head(shipped())
    assert (config.version, config.vocab_size, config.target_hidden_size) == (3, 49152, 576)
    assert dialect.layout == "official"
    assert json.loads((shipped() / "config.json").read_text()) == writer("official").written(
        config, "bfloat16", Verifier()
    )  # as other engines read it


@pytest.mark.parametrize("name", embedded.HEADS)
def test_its_record_is_of_its_target(name: str) -> None:
    """By which it is chosen for models, their quantisations and fine-tunes."""
    (head,) = (head for head in likeness.known() if head.name == name)
    record = json.loads((head.folder / likeness.FILE).read_text())
    config = load_head(head.folder).config
    assert (record["hidden_size"], record["vocab_size"]) == (
        config.target_hidden_size,
        config.vocab_size,
    )
    assert head.target == record["model"] == embedded.HEADS[name][1]
    assert max(record["tokens"]) < record["vocab_size"]


@pytest.mark.parametrize(("size", "width", "tokens"), [("1.5b", 1536, 8600), ("0.5b", 896, 11_264)])
def test_a_head_in_blocks_is_read_whole(size: str, width: int, tokens: int) -> None:
    config, state, _ = load_head(cast(Any, embedded.shipped_head(f"qwen2.5-coder-{size}-head")))
    assert (config.version, config.vocab_size, config.draft_vocab_size) == (3, 151_936, tokens)
    assert state["lm_head.weight"].shape == (tokens, width)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


@pytest.mark.slow
@pytest.mark.model
def test_it_drafts_for_the_default_model_without_changing_its_answers(
    default_model_path: Path,
) -> None:
    """In float32, and well: more than a token and a half per cycle, without copying too.

    Of given costs: by measured ones `auto` drafts less where other work runs beside it.
    """
    policy = policies.make("auto", costs="2-cores-amx")
    engine = specengine.Engine.from_pretrained(
        str(default_model_path), policy=policy, dtype="float32"
    )
    plain = specengine.Engine(engine.target, None, None, engine.tokenizer)
    assert isinstance(engine.drafter, Lookup)
    assert isinstance(engine.drafter.inner, EagleDraft)
    alone = specengine.Engine(engine.target, engine.drafter.inner, engine.policy, engine.tokenizer)
    tokens = cycles = 0
    for question in QUESTIONS:
        expected = plain.generate(question, max_new_tokens=32, temperature=0.0).token_ids
        assert engine.generate(question, max_new_tokens=32, temperature=0.0).token_ids == expected
        answer = alone.generate(question, max_new_tokens=32, temperature=0.0)
        assert answer.token_ids == expected
        tokens, cycles = (
            tokens + answer.stats.num_generated_tokens,
            cycles + answer.stats.num_spec_steps,
        )
    assert tokens / cycles > 1.5

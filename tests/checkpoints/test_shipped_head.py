"""The head that ships for the embedded model: what is in the package, and that it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specengine
from specengine import policies
from specengine.checkpoints import embedded
from specengine.checkpoints.eagle import Verifier, load_head, writer
from specengine.drafters.eagle import Eagle
from specengine.drafters.lookup import Lookup

QUESTIONS = ("What is a rainbow?", "Write a Python function that adds two numbers.", "Name three uses of salt.")


def shipped() -> Path:
    folder = embedded.draft_head(embedded.NAME)
    assert folder is not None
    return folder


def test_the_package_holds_a_head_with_its_card() -> None:
    files = {file.name: file.stat().st_size for file in shipped().iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "target.json", "README.md"}
    assert sum(files.values()) <= 40_000_000
    card = (shipped() / "README.md").read_text()
    for needed in ("Data", "Recipe", "Command", "Figures", "Licence"):
        assert f"## {needed}" in card


def test_it_is_for_the_embedded_model_under_any_of_its_names() -> None:
    for name in (embedded.NAME, "HuggingFaceTB/SmolLM2-135M-Instruct", f"/somewhere/models/{embedded.NAME}"):
        assert embedded.draft_head(name) == shipped()
    for name in ("", "HuggingFaceTB/SmolLM2-360M-Instruct", "Qwen/Qwen3-0.6B"):
        assert embedded.draft_head(name) is None


def test_it_loads_and_its_vocabulary_is_sound() -> None:
    config, _, dialect = load_head(shipped())
    assert (config.version, config.vocab_size, config.target_hidden_size) == (3, 49152, 576)
    assert dialect.layout == "official"
    assert json.loads((shipped() / "config.json").read_text()) == writer("official").written(
        config, "bfloat16", Verifier()
    )  # as other engines read it


@pytest.mark.model
def test_it_drafts_for_the_default_model_without_changing_its_answers(default_model_path: Path) -> None:
    """In float32, and well: more than a token and a half per cycle, without copying too.

    Of given costs: by measured ones `auto` drafts less where other work runs beside it.
    """
    policy = policies.make("auto", costs="2-cores-amx")
    engine = specengine.Engine.from_pretrained(str(default_model_path), policy=policy, dtype="float32")
    plain = specengine.Engine(engine.target, None, None, engine.tokenizer)
    assert isinstance(engine.drafter, Lookup)
    assert isinstance(engine.drafter.inner, Eagle)
    alone = specengine.Engine(engine.target, engine.drafter.inner, engine.policy, engine.tokenizer)
    tokens = cycles = 0
    for question in QUESTIONS:
        expected = plain.generate(question, max_new_tokens=32, temperature=0.0).token_ids
        assert engine.generate(question, max_new_tokens=32, temperature=0.0).token_ids == expected
        answer = alone.generate(question, max_new_tokens=32, temperature=0.0)
        assert answer.token_ids == expected
        tokens, cycles = tokens + answer.stats.num_generated_tokens, cycles + answer.stats.num_spec_steps
    assert tokens / cycles > 1.5

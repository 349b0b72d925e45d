"""Engines from paths, names, instances and the first layers of a model."""

from pathlib import Path

import pytest
import torch

import specengine
from bench.short_models import first_layers
from specengine import Engine, policies
from specengine.drafters.ngram import NGram
from specengine.errors import InputError
from tests.engine.engines import PROMPT, model_of, near_copy, plainly, tokenizer, untouched
from tests.toy import byte_tokenizer, policy_for

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer on disk."""
    folder = tmp_path_factory.mktemp("tiny")
    untouched("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_models_load_from_paths_by_name_and_in_one_call(saved: Path) -> None:
    options = {"max_new_tokens": 12, "raw": True}
    prompt = "abcabcabc"
    expected = plainly("llama", tokenizer()(prompt)["input_ids"], 12)
    for draft, policy in (
        (None, None),
        ("ngram", "chain"),
        (saved, None),
        ("none", None),
        (None, "plain"),
    ):
        given = saved if draft else str(saved)
        engine = Engine.from_pretrained(
            given, draft, policy, offline=True, dtype="float32", device="cpu"
        )
        assert engine.generate(prompt, **options).token_ids == expected
    answer = specengine.generate(
        prompt, str(saved), "ngram", "fixed", offline=True, dtype=torch.float32, **options
    )
    assert answer.token_ids == expected
    assert answer.stats.policy.startswith("Fixed(")


def test_plain_decoding_has_no_options(saved: Path) -> None:
    with pytest.raises(InputError, match="policy_options: policy 'plain' has no options"):
        Engine.from_pretrained(
            str(saved), policy="plain", policy_options={"width": 2}, offline=True
        )


def test_loaded_models_options_and_instances(saved: Path) -> None:
    engine = Engine.from_pretrained(
        model_of(),
        "ngram",
        "eagle",
        draft_options={"longest": "4", "shortest": 1},
        policy_options={"width": 2, "budget": "6"},
        tokenizer=tokenizer(),
    )
    assert engine.drafter == NGram(longest=4, shortest=1)
    assert engine.policy == policies.make("eagle", width=2, budget=6)
    assert engine.generate("abcabc", raw=True, max_new_tokens=9).text
    policy, drafter = policy_for("chain"), NGram()
    engine = Engine.from_pretrained(model_of(), drafter, policy)
    assert (engine.drafter, engine.policy, engine.tokenizer) == (drafter, policy, None)
    engine = Engine.from_pretrained(model_of(), near_copy())
    assert engine.drafter.name.startswith("small_model")
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == plainly("llama", PROMPT, 12)
    half = Engine.from_pretrained(str(saved), "none", dtype="bfloat16", offline=True)
    assert half.target.cache.slab.dtype == torch.bfloat16
    assert len(half.generate(PROMPT, max_new_tokens=5).token_ids) == 5


def test_a_model_without_a_tokenizer_answers_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untouched("llama").save_pretrained(tmp_path)
    engine = Engine.from_pretrained(str(tmp_path), "ngram", offline=True)
    assert engine.tokenizer is None
    assert f"no tokenizer for {tmp_path}" in capsys.readouterr().err
    result = engine.generate(PROMPT, max_new_tokens=8)
    assert (result.token_ids, result.text) == (plainly("llama", PROMPT, 8), "")


def test_a_draft_of_the_targets_first_layers() -> None:
    for family in ("llama", "gpt2"):
        model = model_of(family)
        engine = Engine.from_pretrained(model, first_layers(model, 1), "fixed")
        assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(family, PROMPT, 20)

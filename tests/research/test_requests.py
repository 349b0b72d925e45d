"""Requests around self-written text: of every kind, the same for the same seed, and readable as prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from research import requests as module
from research.requests import MAX_PASSAGE, MIN_PASSAGE, main, requests
from specengine.cli.given import read_prompts
from specengine.errors import InputError
from specengine.train.text.corpus import Text
from tests.toy import byte_tokenizer, tiny
from tests.train.test_draft import corpus_of

PASSAGE = (
    "The old lighthouse stood on the cliff for two hundred years. "
    "Nobody knew who had built it. Then the sea came."
)


@given(
    st.integers(1, 60),
    st.integers(0, 2**32),
    st.lists(st.text(min_size=MIN_PASSAGE), min_size=1, max_size=4),
)
def test_any_text_makes_as_many_as_are_asked_for(
    count: int, seed: int, passages: list[str]
) -> None:
    if not any(len(passage.strip()) >= MIN_PASSAGE for passage in passages):
        passages = [*passages, PASSAGE * 2]
    found = requests(count, passages, seed)
    assert len(found) == count
    assert all(1 <= len(turns) <= 2 and all(turns) for turns in found)
    assert found == requests(count, passages, seed)


def test_every_kind_is_there_and_no_template_is_left_open() -> None:
    found = [turns[0] for turns in requests(3000, [PASSAGE * 2, PASSAGE * 30])]
    for table in (
        module.SUMMARIES,
        module.EXTRACTIONS,
        module.REWRITES,
        module.CODE_FORMS,
        module.SUMS,
        module.FACTS,
    ):
        for template in table:
            assert any(template.partition("{")[0].strip() in text for text in found)
    assert any(text.startswith("Translate into Dutch") for text in found)
    assert not any("{" in text or "}" in text for text in found)
    assert max(map(len, found)) < 2 * MAX_PASSAGE + 200
    assert len(set(found)) > 1000


def test_a_long_passage_ends_with_a_sentence() -> None:
    cut = module._cut(PASSAGE * 40)
    assert MIN_PASSAGE < len(cut) <= MAX_PASSAGE
    assert cut.endswith(".")


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(InputError, match="count: got 0, accepted 1 or more"):
        requests(0, [PASSAGE])
    with pytest.raises(InputError, match="passages: none of 2 has 120 characters"):
        requests(5, ["short", "too"])


def test_the_command_writes_prompts(tmp_path: Path) -> None:
    tiny(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    tokens = torch.tensor(byte_tokenizer()(PASSAGE * 2)["input_ids"], dtype=torch.int32)
    corpus_of(tmp_path / "data", [Text(tokens, torch.ones(len(tokens), dtype=torch.bool))] * 3)
    out = tmp_path / "asks.jsonl"
    given = ["--data", str(tmp_path / "data"), "--target", str(tmp_path / "model")]
    assert main([str(out), *given, "-n", "6"]) == 0
    found = [list(turns) for turns in read_prompts(out)]
    assert found == requests(6, [PASSAGE * 2] * 3)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "asks.txt"), *given])
    assert not (tmp_path / "asks.txt").exists()

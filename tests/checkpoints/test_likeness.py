"""A head finds the fine-tunes of its target by rows of their embeddings, and nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.checkpoints import embedded, likeness
from specengine.checkpoints.eagle import save_head
from specengine.models.eagle import MAX_APPENDED
from specengine.models.huggingface import CausalLM
from tests.heads import deep
from tests.toy import VOCABULARY, head_config, random_state

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(40, 52))


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head for `deep()`, with its record, in the cache folder."""
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    folder = tmp_path / "heads" / "mine"
    config = head_config()
    save_head(config, random_state(config), folder)
    likeness.write(folder, CausalLM(deep()), "the-base")
    return folder


def tuned(model: Any, noise: float = 0.05, appended: int = 0) -> Any:
    """The model after a little training, as it were: all weights moved, tokens appended."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += (
                noise
                * weight.std()
                * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            )
    if appended:
        model.resize_token_embeddings(VOCABULARY + appended, mean_resizing=False)
    return model


@pytest.mark.sliced(1)
@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("appended", [0, 3])
def test_a_fine_tune_gets_the_head_of_its_base(
    head: Path, appended: int, backend: str | None
) -> None:
    engine = Engine.from_pretrained(tuned(deep(), appended=appended), backend=backend)
    assert engine.drafter.name.startswith("eagle (EAGLE-3, mine)")
    plain = engine.generate(PROMPT, max_new_tokens=12, policy="plain").token_ids
    result = engine.generate(PROMPT, max_new_tokens=12)
    assert result.token_ids == plain
    (note,) = [note for note in result.stats.notes if note.startswith("draft: ")]
    assert f"{head} was chosen, as this model has the embeddings of the-base" in note
    assert ("and 3 appended tokens" in note) == (appended > 0)
    assert "draft='recycling'" in note


@pytest.mark.parametrize(
    "other",
    [
        lambda: deep(seed=5),
        lambda: tuned(deep(), noise=3.0),
        lambda: deep(vocab_size=VOCABULARY - 1),
        lambda: tuned(deep(), appended=MAX_APPENDED + 1),
        lambda: deep(hidden_size=64),
    ],
    ids=["trained apart", "far away", "fewer tokens", "another vocabulary", "another width"],
)
def test_nobody_else_does(head: Path, other: Any) -> None:
    engine = Engine.from_pretrained(other())
    assert engine.drafter.name.startswith("recycling")
    assert not any(note.startswith("draft: ") for note in engine.notes)


def test_a_draft_that_is_asked_for_is_taken(head: Path) -> None:
    engine = Engine.from_pretrained(tuned(deep()), "recycling")
    assert engine.drafter.name.startswith("recycling")
    assert not engine.notes


def test_a_head_that_cannot_be_read_is_passed_over(head: Path) -> None:
    (head / "model.safetensors").write_bytes(b"nothing")
    assert Engine.from_pretrained(deep()).drafter.name.startswith("recycling")


@pytest.mark.parametrize("field", ["embeddings", "tokens", "layers", "model"])
@pytest.mark.parametrize("value", ["?", None, [-1], 10**9])
def test_a_damaged_record_is_no_record(head: Path, field: str, value: Any) -> None:
    record = json.loads((head / likeness.FILE).read_text()) | {field: value}
    (head / likeness.FILE).write_text(json.dumps(record))
    match = likeness.find(CausalLM(deep()))
    assert match is None or field == "model"


def test_the_nearest_target_is_taken(head: Path, tmp_path: Path) -> None:
    likeness.write(head, CausalLM(tuned(deep(), noise=0.3)), "far")
    near = tmp_path / "heads" / "near"
    near.mkdir()
    likeness.write(near, CausalLM(deep()), "near")
    match = likeness.find(CausalLM(deep()))
    assert match is not None
    assert match.head.target == "near"
    assert match.likeness == pytest.approx(1, abs=1e-3)


def test_the_shipped_head_has_its_record() -> None:
    heads = {head.name: head for head in likeness.known()}
    assert heads[embedded.HEAD].target == embedded.NAME
    record = json.loads((heads[embedded.HEAD].folder / likeness.FILE).read_text())
    assert (record["hidden_size"], record["layers"], record["vocab_size"]) == (576, 30, 49152)

"""research.trees: trees that were kept are those that grow in a step, and what is not kept is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import PreTrainedModel

from research import trees
from research.trees import KeptTrees, folder_for, keep_trees, labels_of_likeliest
from specengine.errors import InputError
from specengine.models.eagle import default_layer_ids
from specengine.train.draft.losses import loss_of
from specengine.train.draft.options import TrainOptions, make_loss
from specengine.train.draft.teacher import Teacher
from specengine.train.draft.training import Batch, Epochs
from specengine.train.text.corpus import Corpus
from tests.examples import examples
from tests.toy import VOCABULARY, head_config, tiny, tiny_head
from tests.train.test_draft import corpus_of, random_texts

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
OPTIONS = TrainOptions(batch_tokens=96, lengths=(32, 48), autocast=False, held_back=0.1)
LOSS = make_loss("talf", width=3, anchors=0.4)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen3", num_hidden_layers=LAYERS)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return corpus_of(tmp_path / "data", random_texts(16))


def batches(corpus: Corpus) -> list[Batch]:
    return Epochs(corpus, OPTIONS).batches


def quiet(line: str) -> None:
    pass


@pytest.mark.sliced(1)
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_kept_trees_are_those_that_grow_in_the_step(
    model: PreTrainedModel,
    corpus: Corpus,
    width: int,
    version: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens and parents; with all tokens as labels, the same loss and gradients."""
    monkeypatch.setattr(trees, "TOGETHER", 7)
    loss = replace(LOSS, width=width)
    head = tiny_head(head_config(version), 0).requires_grad_(True)
    ids = head.config.feature_ids(LAYERS)
    grown = Teacher(model, ids)
    folder = folder_for(corpus, loss, VOCABULARY, "tiny")
    all_batches = batches(corpus)
    keep_trees(grown, folder, all_batches, 1.0, quiet)
    kept = KeptTrees(model, ids, folder)
    for batch in all_batches:
        roots = batch.answers[:, 2:].int().argmax(dim=1)[:, None] + 1
        reading = grown.read(batch.tokens, keep_cache=True)
        layers = grown.grow(reading, roots, width=width, depths=2)
        for layer, stored in zip(
            layers, kept.grow(reading, roots, width=width, depths=2), strict=True
        ):
            assert torch.equal(layer.tokens, stored.tokens)
            assert torch.equal(layer.parents, stored.parents)
            rows = layer.states.flatten(0, 2)
            for label, other in zip(
                grown.labels(rows, head.target_ids()),
                kept.labels(stored.states.flatten(0, 2), head.target_ids()),
                strict=True,
            ):
                torch.testing.assert_close(label.float(), other.float(), atol=2e-3, rtol=1e-2)
        gradients = []
        for teacher in (grown, kept):
            head.zero_grad(set_to_none=True)
            draws = torch.Generator().manual_seed(5)
            read = teacher.read_batch(batch.tokens, batch.pieces, keep_cache=True)
            report = loss_of(loss, head, teacher, read, batch.answers, generator=draws)
            report.loss.backward()
            found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
            gradients.append((report.loss.detach(), found))
        (loss_grown, of_grown), (loss_kept, of_kept) = gradients
        torch.testing.assert_close(loss_grown, loss_kept, rtol=2e-3, atol=1e-3)
        for name, gradient in of_grown.items():
            scale = float(gradient.abs().max()) + 1e-6
            assert float((gradient - of_kept[name]).abs().max()) < 0.02 * scale


def test_growing_that_was_cut_goes_on(
    model: PreTrainedModel, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, all_batches = Teacher(model, default_layer_ids(LAYERS)), batches(corpus)
    folder, whole = (folder_for(corpus, LOSS, best, "tiny") for best in (8, 9))
    keep_trees(teacher, folder, all_batches[:1], 1.0, quiet)
    first = folder.file(all_batches[0].tokens)
    before = first.stat().st_mtime_ns
    calls: list[int] = []
    grow = Teacher.grow

    def dies(self: Teacher, *arguments: Any, **named: Any) -> Any:
        calls.append(0)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return grow(self, *arguments, **named)

    monkeypatch.setattr(Teacher, "grow", dies)
    with pytest.raises(KeyboardInterrupt):
        keep_trees(teacher, folder, all_batches, 1.0, quiet)
    monkeypatch.undo()
    assert 1 < len(list(folder.folder.glob("*.safetensors"))) < len(all_batches)
    said: list[str] = []
    keep_trees(teacher, folder, all_batches, 1.0, said.append)
    assert first.stat().st_mtime_ns == before
    assert said[-1].endswith("GiB in all: 0 min left")
    keep_trees(teacher, folder, all_batches, 1.0, quiet)
    keep_trees(teacher, whole, all_batches, 1.0, quiet)
    for batch in all_batches:
        one, other = (each.load(each.file(batch.tokens), dict) for each in (folder, whole))
        assert all(torch.equal(one[name], other[name]) for name in ("roots", "tokens", "parents"))
        assert torch.equal(one["ids"], other["ids"][..., :8])


def test_the_room_that_is_stated_is_taken(model: PreTrainedModel, corpus: Corpus) -> None:
    teacher, all_batches = Teacher(model, default_layer_ids(LAYERS)), batches(corpus)
    folder = folder_for(corpus, LOSS, 30, "tiny")
    gib = keep_trees(teacher, folder, all_batches, 1.0, quiet)
    taken = sum(file.stat().st_size - 600 for file in folder.folder.glob("*.safetensors"))
    assert abs(taken - gib * 2**30) < 0.1 * taken
    with pytest.raises(InputError, match=r"gib: got .*, accepted 0\.00 or more for the trees"):
        keep_trees(teacher, folder, all_batches, gib / 2, quiet)


@pytest.mark.parametrize(
    ("changes", "best", "message"),
    [
        ({"width": 0}, 8, "loss: got talf, accepted one with a tree"),
        ({"width": 256}, 8, "loss: got talf, accepted one with a tree"),
        ({"steps": 1}, 8, "steps: got 1, accepted 2 or more"),
        ({"regression": 1.0}, 8, "regression: got 1.0, accepted 0"),
        ({}, 0, "best: got 0, accepted 1 or more"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    corpus: Corpus, changes: dict[str, Any], best: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        folder_for(corpus, replace(LOSS, **changes), best, "tiny")


def test_trees_of_another_text_or_shape_are_refused(model: PreTrainedModel, corpus: Corpus) -> None:
    ids = default_layer_ids(LAYERS)
    teacher, batch = Teacher(model, ids), batches(corpus)[0]
    folder = folder_for(corpus, LOSS, 8, "tiny")
    keep_trees(teacher, folder, [batch], 1.0, quiet)
    kept = KeptTrees(model, ids, folder)
    root = batch.answers[:, 2:].int().argmax(dim=1)[:, None] + 1
    reading = kept.read(batch.tokens)
    with pytest.raises(InputError, match=r"loss: got \(2, 2\), accepted \(3, 2\), the width"):
        kept.grow(reading, root, width=2, depths=2)
    with pytest.raises(InputError, match="has none after some of these positions"):
        kept.grow(reading, torch.full_like(root, batch.tokens.shape[1] - 1), width=3, depths=2)
    with pytest.raises(InputError, match=r"trees: .* has none of this text"):
        kept.grow(kept.read(batch.tokens + 1), root, width=3, depths=2)
    folder.file(batch.tokens).write_bytes(b"damaged")
    with pytest.raises(InputError, match="is damaged"):
        kept.grow(reading, root, width=3, depths=2)
    with pytest.raises(InputError, match="best: got 16, accepted a number other than half"):
        KeptTrees(model, ids, folder_for(corpus, LOSS, 16, "tiny"))


@given(st.integers(1, 6), st.integers(0, 2**31 - 1), st.booleans())
@examples(50)
def test_labels_are_shares_of_the_likeliest_tokens(rows: int, seed: int, few: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    logs, tokens = torch.randn(rows, 20, generator=random).log_softmax(-1).topk(5)
    ids = torch.randperm(20, generator=random)[:9].sort().values if few else None
    best, found = labels_of_likeliest(torch.cat([tokens.float(), logs], 1), ids, 20)
    for row in range(rows):
        columns = range(20) if ids is None else ids.tolist()
        shares = [
            float(logs[row][tokens[row] == token].exp()) if token in tokens[row] else 0.0
            for token in columns
        ]
        total = sum(shares) or 1.0
        assert found[row].tolist() == pytest.approx([share / total for share in shares], abs=1e-6)
        first = int(tokens[row, 0])
        assert int(best[row]) == (list(columns).index(first) if first in columns else -1)

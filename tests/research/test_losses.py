"""research.losses: trainings of equal processor time that go on after an interruption, and intervals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from research import bootstrap, losses
from research.ranks import Observed, by_rank, observe
from specengine.checkpoints.eagle import load_head
from specengine.models.eagle import head_from
from specengine.train.draft.teacher import Teacher
from specengine.train.draft.training import LOG, Epochs, train_draft
from tests.toy import CPU, tiny
from tests.train.test_draft import corpus_of, random_texts

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
NO_TIME = losses.Protocol(minutes=0)


def test_processor_time_is_summed_over_processes() -> None:
    times = [5.0, 7.0, 9.5, 6.0, 8.0]  # the fourth is of a new process, which was begun at 0
    entries = [{"cpu_seconds": time, "loss": 1.0} for time in times]
    entries.insert(2, {"cpu_seconds": 8.8, "held_back": {}})
    assert losses.cpu_seconds(entries) == pytest.approx(2.0 + 2.5 + 6.0 + 2.0)


@pytest.mark.slow
def test_a_training_goes_on_with_the_steps_that_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(num_hidden_layers=LAYERS)
    corpus = corpus_of(tmp_path / "data", random_texts(30))
    small = replace(
        losses.OPTIONS,
        batch_tokens=64,
        lengths=(32,),
        intermediate_size=40,
        autocast=False,
        held_back=0.1,
    )
    monkeypatch.setattr(losses, "OPTIONS", small)
    heads, names = tmp_path / "heads", ["eagle", "ttt"]
    heads.mkdir()
    (heads / "steps.json").write_text(json.dumps({"eagle": 6, "ttt": 4, "hass": 5}))
    options = replace(small, steps=6, save_every=1)
    monkeypatch.setattr(losses, "SAVE_EVERY", 1)
    loss = replace(losses.LOSSES["eagle"], anchors=NO_TIME.anchors)
    train_draft(model, corpus, heads / "eagle", options, loss, stop_after=3)  # cut short
    losses.train(names, model, corpus, heads, NO_TIME, "tiny")
    for name, steps in (("eagle", 6), ("ttt", 4)):
        record = json.loads((heads / name / "training.json").read_text())
        assert (record["steps"], record["settings"]["name"]) == (steps, name)
        assert json.loads((heads / name / LOG).read_text().splitlines()[-1])["step"] == steps
    before = (heads / "ttt" / "model.safetensors").read_bytes()
    losses.train(names, model, corpus, heads, NO_TIME, "tiny")
    assert (heads / "ttt" / "model.safetensors").read_bytes() == before
    with pytest.raises(SystemExit, match=r"steps\.json was begun for eagle, ttt, hass"):
        losses.train(["talf"], model, corpus, heads, NO_TIME, "tiny")

    monkeypatch.setattr(losses, "cpu_seconds", lambda entries: 60.0)
    record["cpu_seconds"] = 100  # of the 150 that it was to have; four steps took them
    (heads / "ttt" / "training.json").write_text(json.dumps(record))
    more = NO_TIME._replace(minutes=2.5)
    with pytest.raises(SystemExit, match=r"protocol: .* was begun with"):
        losses.train(["ttt"], model, corpus, heads, more, "tiny")
    (heads / "protocol.json").unlink()
    losses.train(["ttt"], model, corpus, heads, more, "tiny")
    assert json.loads((heads / "ttt" / "training.json").read_text()) == record | {
        "steps": 8,
        "cpu_seconds": 160,
    }
    assert (heads / "ttt" / "model.safetensors").read_bytes() != before
    assert not (heads / "ttt" / "more").exists()

    config, state, _ = load_head(heads / "ttt")
    teacher = Teacher(model, config.feature_ids(LAYERS))
    head, texts = head_from(config, state, torch.float32, CPU), Epochs(corpus, small).held_back
    found = [observe(head, teacher, text, 9) for text in texts]
    rows = losses.by_rank(found)
    for row, report in zip(rows, by_rank(head, teacher, texts, anchors=9), strict=True):
        assert row["accuracy"] == report.accuracy
        low, high = row["accuracy_interval"]
        assert low <= row["accuracy"] <= high


@pytest.mark.slow
@pytest.mark.parametrize("name", ["talf", "talf-k1", "hass-paper"])
def test_a_loss_goes_on_from_a_head_for_equal_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With trees that were grown once: each head is another one than that it began with, after the same steps."""
    model = tiny(num_hidden_layers=LAYERS)
    corpus = corpus_of(tmp_path / "data", random_texts(20))
    small = replace(
        losses.OPTIONS,
        batch_tokens=64,
        lengths=(32,),
        intermediate_size=40,
        autocast=False,
        held_back=0.1,
    )
    monkeypatch.setattr(losses, "OPTIONS", small)
    first = losses.Protocol(steps=4, best=5)
    losses.train(["eagle"], model, corpus, tmp_path / "first", first, "tiny")
    began = tmp_path / "first" / "eagle"
    then = first._replace(steps=3, start=str(began))
    losses.train([name], model, corpus, tmp_path / "then", then, "tiny")
    record = json.loads((tmp_path / "then" / name / "training.json").read_text())
    assert (record["steps"], record["settings"]["anchors"]) == (3, 0.25)
    assert record["settings"]["start"] == str(began)
    assert bool(record["trees"]) == ("talf" in name)
    assert bool(list((tmp_path / "data").glob("trees/*/*.safetensors"))) == ("talf" in name)
    config, state, _ = load_head(tmp_path / "then" / name)
    before_config, before, _ = load_head(began)
    assert config == before_config
    moved = {key for key, tensor in state.items() if not torch.equal(tensor, before[key])}
    assert moved
    far = max(float((state[key].float() - before[key].float()).abs().max()) for key in moved)
    assert far < 0.05  # three steps of a small rate, and no new start


def test_intervals_hold_the_ratio_of_sums() -> None:
    counts = [(20, 10), (30, 10), (90, 30), (8, 8)]
    found = bootstrap.interval(
        [losses.acceptance_length(sample) for sample in bootstrap.samples(counts)]
    )
    assert losses.acceptance_length(counts) == pytest.approx(148 / 58)
    assert 1.0 <= found[0] < 148 / 58 < found[1] <= 3.0
    alike = bootstrap.interval(
        [losses.acceptance_length(sample) for sample in bootstrap.samples([(20, 10)] * 5)]
    )
    assert alike == [2.0, 2.0]


def test_shares_ahead_count_tokens_not_texts() -> None:
    first = [[30.0, 0.5, 0.2], [10.0, 0.1, 0.2], [20.0, 0.4, 0.9]]
    better = [[tokens, one + 0.1, two] for tokens, one, two in first]
    row = losses.shares_ahead(better, first)
    assert (row["texts"], row["tokens"]) == (3, 60)
    assert row["hits"] == pytest.approx([0.1 + 24 / 60, 26 / 60])
    assert row["more"] == pytest.approx([0.1, 0.0])
    assert row["more_interval"] == [pytest.approx([0.1, 0.1]), [0, 0]]
    low, high = row["hits_interval"][1]
    assert 0.2 <= low < 26 / 60 < high <= 0.9


@pytest.mark.slow
def test_differences_are_those_on_the_same_texts_and_prompts() -> None:
    """A head that is better everywhere is so in every draw, though texts differ more than heads do."""
    generator = torch.Generator().manual_seed(0)
    first, better = [], []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        drawn = torch.rand(40, 5, generator=generator)
        highest = torch.rand(40, 5, generator=generator)
        first.append(Observed((drawn < share).float(), highest, highest))
        better.append(Observed((drawn < share + 0.1).float(), highest, highest))
    for row in losses.ranks_beside(better, first):
        low, high = row["accuracy_interval"]
        assert 0 < low <= row["accuracy"] <= high < 0.3
    alone = losses.by_rank(better)[0]["accuracy_interval"][0] - losses.by_rank(first)[0]["accuracy"]
    assert alone < 0  # apart, the intervals could not tell them
    for row in losses.ranks_beside(first, first):
        assert all(
            row[field] == 0 and row[f"{field}_interval"] == [0, 0] for field in losses.RANKED
        )

    cells = losses._Cell(), losses._Cell()
    for cycles in (5, 8, 12, 20, 31):
        for cell, tokens in zip(cells, (60, 64), strict=True):
            cell.add((1.0, 60, 60), (0.5, tokens, cycles))
    found = cells[1].beside(cells[0])
    low, high = found["mean_acceptance_length_interval"]
    assert found["mean_acceptance_length"] == pytest.approx(5 * 4 / 76, abs=1e-3)
    assert 0 < low < found["mean_acceptance_length"] < high
    assert cells[0].beside(cells[0])["mean_acceptance_length_interval"] == [0, 0]

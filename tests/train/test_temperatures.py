"""Temperatures fitted by depth: against the definition, and as the training saves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specengine.checkpoints.eagle import load_head
from specengine.models.eagle import EagleHead, causal, head_from
from specengine.train.draft.options import TrainOptions, make_loss
from specengine.train.draft.teacher import Teacher
from specengine.train.draft.training import train_draft
from specengine.train.draft.validation import fit_temperatures
from specengine.train.text.corpus import Text
from tests.toy import CPU, VOCABULARY, tiny
from tests.train.test_draft import corpus_of, log, random_texts

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, LENGTH, DEPTHS = 6, 40, 3


def texts(count: int) -> list[Text]:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=random, dtype=torch.int32)
    return [Text(row, torch.arange(LENGTH) > 5) for row in tokens]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def trained(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    """A head that knows a little, so that its logits are worth something and some temperature is the best."""
    folder = tmp_path_factory.mktemp("trained")
    options = TrainOptions(
        steps=30, batch_tokens=256, lengths=(32,), learning_rate=3e-3, draft_vocab_size=60, autocast=False,
        held_back=0.0, validate_every=100, save_every=100, temperatures=False,
    )  # fmt: skip
    out = train_draft(
        model,
        corpus_of(folder / "data", random_texts(30)),
        folder / "head",
        options,
        make_loss("ttt"),
    )
    config, state, _ = load_head(out)
    return head_from(config, state, torch.float32, CPU)


def sharpened(head: EagleHead, factor: float) -> EagleHead:
    state = {
        name: tensor * (factor if name == "lm_head.weight" else 1)
        for name, tensor in head.state_dict().items()
    }
    return head_from(head.config, state, torch.float32, CPU)


@torch.no_grad()
def losses(head: EagleHead, teacher: Teacher, given: list[Text], temperature: float) -> list[float]:
    """By depth, the sum of -log p of the target's best tokens, place by place."""
    total = [0.0] * DEPTHS
    for text in given:
        tokens = text.tokens.long()
        reading = teacher.read(tokens[None])
        embeddings = teacher.model.get_input_embeddings()(tokens)
        for place in text.answers[2:].nonzero()[:, 0].tolist():
            hidden = head.fuse(reading.features[0, : place + 1])
            for depth in range(DEPTHS):
                last = place + depth
                if last + 1 >= LENGTH:
                    break
                states = head(
                    hidden[None],
                    embeddings[None, 1 : last + 2],
                    torch.arange(last + 1)[None],
                    causal,
                )[0]
                logits = head.logits(states[-1])
                logits = teacher.head(states[-1]) if logits is None else logits
                best, ids = teacher.head(reading.states[0, last + 1]).argmax(), head.target_ids()
                if ids is None or best in ids:
                    column = best if ids is None else (ids == best).nonzero()[0, 0]
                    total[depth] -= float((logits / temperature).log_softmax(0)[column])
                hidden = torch.cat([hidden, states[-1:]])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.35, 0.5])
def test_no_other_temperature_is_better(
    model: PreTrainedModel, trained: EagleHead, factor: float
) -> None:
    head = sharpened(trained, factor)
    teacher = Teacher(model, head.config.feature_ids(LAYERS))
    given = texts(2)
    found = fit_temperatures(head, teacher, given, depths=DEPTHS)
    assert len(found) == DEPTHS
    for depth, temperature in enumerate(found):
        assert 0.51 < temperature < 1.97  # within what is tried
        here, below, above = (
            losses(head, teacher, given, temperature * f)[depth] for f in (1.0, 0.93, 1.07)
        )
        assert here <= min(below, above)


def test_larger_logits_take_a_higher_temperature(
    model: PreTrainedModel, trained: EagleHead
) -> None:
    teacher = Teacher(model, trained.config.feature_ids(LAYERS))
    one, more = (
        fit_temperatures(sharpened(trained, f), teacher, texts(3), depths=DEPTHS)
        for f in (0.35, 0.455)
    )
    assert list(more) == pytest.approx([1.3 * temperature for temperature in one], rel=0.01)


def test_texts_without_answers_say_nothing(model: PreTrainedModel, trained: EagleHead) -> None:
    teacher = Teacher(model, trained.config.feature_ids(LAYERS))
    silent = Text(torch.zeros(LENGTH, dtype=torch.int32), torch.zeros(LENGTH, dtype=torch.bool))
    assert fit_temperatures(trained, teacher, [silent]) == ()
    assert fit_temperatures(trained, teacher, []) == ()


@pytest.mark.slow
def test_a_training_ends_with_them(model: PreTrainedModel, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(24))
    options = TrainOptions(
        steps=3,
        batch_tokens=128,
        lengths=(32,),
        held_back=0.2,
        validate_every=3,
        save_every=1,
        draft_vocab_size=50,
    )
    loss = make_loss("ttt", steps=2)
    out = train_draft(model, corpus, tmp_path / "with", options, loss)
    found = load_head(out).config.temperatures
    assert len(found) == 6
    assert log(out)[-1]["temperatures"] == list(found)
    without = train_draft(
        model, corpus, tmp_path / "without", replace(options, temperatures=False), loss
    )
    assert load_head(without).config.temperatures == ()
    # finished before: only they are missing
    again = train_draft(model, corpus, without, options, loss)
    assert load_head(again).config.temperatures == found
    further = train_draft(
        model, corpus, tmp_path / "further", replace(options, start=str(out), steps=1), loss
    )
    assert load_head(further).config.temperatures != ()

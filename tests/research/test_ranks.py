"""Accuracy and calibration by rank, against the same places run one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from research.ranks import BINS, RANKS, by_rank, calibration_error
from specengine.models.eagle import causal
from specengine.train.draft.teacher import Teacher
from specengine.train.text.corpus import Text
from tests.toy import VOCABULARY, head_config, tiny, tiny_head

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, LENGTH = 6, 18


@pytest.mark.parametrize("version", [1, 3])
@torch.no_grad()
def test_each_rank_is_measured_behind_the_drafts_own_token(version: Any) -> None:
    model = tiny(num_hidden_layers=LAYERS)
    head = tiny_head(head_config(version))
    teacher = Teacher(model, head.config.feature_ids(LAYERS))
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0))
    text = Text(tokens.int(), torch.arange(LENGTH) > 5)
    found = by_rank(head, teacher, [text], anchors=100)
    features = teacher.read(tokens[None]).features[0]
    embeddings = model.get_input_embeddings()
    ids = head.target_ids()
    hits = torch.zeros(RANKS)
    places = range(4, LENGTH - 2)
    for row in places:
        hidden = head.fuse(features[: row + 1])
        states = head(
            hidden[None], embeddings(tokens[None, 1 : row + 2]), torch.arange(row + 1)[None], causal
        )[0]
        logits = head.logits(states[-1])
        best = (teacher.head(states[-1]) if logits is None else logits).topk(RANKS).indices
        for rank, column in enumerate(best):
            token = column if ids is None else ids[column]
            longer = torch.cat([tokens[: row + 2], token[None]])
            inputs = torch.cat([hidden, states[-1:]])
            deeper = head(
                inputs[None], embeddings(longer[None, 1:]), torch.arange(row + 2)[None], causal
            )[0, -1]
            logits = head.logits(deeper)
            guess = (teacher.head(deeper) if logits is None else logits).argmax()
            guess = guess if ids is None else ids[guess]
            hits[rank] += bool(guess == model(longer[None]).logits[0, -1].argmax())
    assert [report.rank for report in found] == list(range(1, RANKS + 1))
    assert all(report.rows == len(places) for report in found)
    assert [report.accuracy for report in found] == pytest.approx((hits / len(places)).tolist())
    assert all(
        0 <= report.calibration <= 1 and 0 <= report.standard_calibration <= 1 for report in found
    )


def test_few_places_are_spread_over_the_answers() -> None:
    model = tiny(num_hidden_layers=LAYERS)
    head = tiny_head(head_config(3))
    teacher = Teacher(model, head.config.feature_ids(LAYERS))
    text = Text(torch.randint(VOCABULARY, (LENGTH,), dtype=torch.int32), torch.arange(LENGTH) > 5)
    assert by_rank(head, teacher, [text, text], anchors=4)[0].rows == 8


def test_calibration_of_known_cases() -> None:
    """Nothing where confidence is right in every bin; the gap where it is wrong throughout; not that of the means."""
    random = torch.Generator().manual_seed(0)
    confidence = torch.rand(60_000, generator=random)
    calibrated = (torch.rand(60_000, generator=random) < confidence).float()
    assert calibration_error(calibrated, confidence) < 0.02
    sure = torch.ones(BINS * 10)
    assert calibration_error(torch.zeros(BINS * 10), sure) == pytest.approx(1.0)
    upside_down = calibration_error((confidence < 0.5).float(), confidence)
    assert upside_down == pytest.approx(0.75, abs=0.05)

"""Accuracy and calibration of a draft after its own less likely tokens, by rank (SALF & TALF, §3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.models.eagle import EagleConfig, EagleHead
from specengine.train.draft.losses import Unrolling
from specengine.train.draft.teacher import Branches, Teacher
from specengine.train.draft.validation import logits_of
from specengine.train.text.corpus import Text

RANKS = 5
BINS = 15  # of equal mass


@dataclass(frozen=True)
class RankReport:
    """Results after the draft's `rank`-th best token, over `rows` places.

    accuracy          share of places where the draft's best token is the target's
    calibration       expected calibration error of the paper: difference of accuracy and mean draft probability of the
                      target's best token, in bins by that probability, weighted by their sizes
    standard_calibration  the same with the probability of the draft's own best token, as in Guo et al. (2017)
    """

    rank: int
    rows: int
    accuracy: float
    calibration: float
    standard_calibration: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Observed(NamedTuple):
    """Observations of one text, float32 [places, ranks].

    hits     whether the draft's best token is the target's
    of_best  the draft's probability of the target's best token
    highest  the draft's probability of its own best token
    """

    hits: Tensor
    of_best: Tensor
    highest: Tensor


@torch.no_grad()
def by_rank(
    head: EagleHead, teacher: Teacher, texts: Sequence[Text], *, anchors: int = 32
) -> list[RankReport]:
    """Return reports for ranks 1 to 5, from up to `anchors` evenly spaced places in the answers of each text.

    At each place the draft predicts a token, gets its own n-th best token instead of the text's, and predicts again.
    The target gets the same token.
    """
    return reports(
        [observe(head, teacher, text, anchors) for text in texts if text.answers[2:].any()]
    )


def reports(observed: Sequence[Observed]) -> list[RankReport]:
    """Return the reports of `by_rank` for observed texts, which may be a bootstrap sample."""
    hits, of_best, highest = (torch.cat(parts) for parts in zip(*observed, strict=True))
    return [
        RankReport(
            rank=rank + 1,
            rows=len(hits),
            accuracy=float(hits[:, rank].mean()),
            calibration=calibration_error(hits[:, rank], of_best[:, rank]),
            standard_calibration=calibration_error(hits[:, rank], highest[:, rank]),
        )
        for rank in range(RANKS)
    ]


@torch.no_grad()
def observe(head: EagleHead, teacher: Teacher, text: Text, count: int) -> Observed:
    """Observe up to `count` places in the answers of a text with answers; see `by_rank`."""
    tokens = text.tokens.long().to(teacher.device)[None]
    places = text.answers[2:].nonzero()[:, 0].to(teacher.device)
    places = places[
        torch.linspace(
            0, len(places) - 1, min(count, len(places)), dtype=torch.float32, device="cpu"
        )
        .long()
        .unique()
        .to(places.device)
    ][None]
    reading = teacher.read(tokens, keep_cache=True)
    unrolling = Unrolling(head, teacher, reading.features.to(head.dtype), tokens, places)
    first = unrolling.first()[0, places[0]]
    columns = logits_of(head, teacher, first).topk(RANKS, dim=-1).indices[None]
    ids = head.target_ids()
    chosen = columns if ids is None else ids[columns]
    parents = torch.zeros_like(chosen)
    target = teacher.head(Branches(teacher, reading, places + 1).extend(chosen, parents)).float()[0]
    after = logits_of(head, teacher, unrolling.next(chosen, parents, detach=True))[0]
    draft = (after / temperature_at(head.config, 2)).softmax(dim=-1)
    best = target.argmax(dim=-1)
    own = draft.max(dim=-1)
    guess = own.indices if ids is None else ids[own.indices]
    if ids is None:
        of_best = draft.gather(-1, best[..., None])[..., 0]
    else:  # a token outside the draft's vocabulary has probability 0
        of_best = (draft * (ids == best[..., None])).sum(dim=-1)
    return Observed((guess == best).float().cpu(), of_best.cpu(), own.values.cpu())


def temperature_at(config: EagleConfig, depth: int) -> float:
    """Return the temperature of the head's logits for nodes of this depth, 1 or more."""
    return (
        config.temperatures[min(depth, len(config.temperatures)) - 1]
        if config.temperatures
        else 1.0
    )


def calibration_error(hits: Tensor, confidence: Tensor) -> float:
    """Return the weighted mean of |accuracy - confidence| over `BINS` bins of equal mass. Both are float [rows]."""
    order = confidence.argsort()
    bins = zip(hits[order].tensor_split(BINS), confidence[order].tensor_split(BINS), strict=True)
    gaps = [len(h) * abs(float(h.mean() - c.mean())) for h, c in bins if len(h)]
    return sum(gaps) / len(hits)

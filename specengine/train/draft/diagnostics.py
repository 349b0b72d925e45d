"""How well a draft goes on behind its own less likely tokens: accuracy and calibration by rank (SALF & TALF, §3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.models.eagle import EagleConfig, EagleHead
from specengine.train.draft.losses import Unrolling
from specengine.train.draft.teacher import Branches, Teacher
from specengine.train.text.corpus import Text

RANKS = 5
BINS = 15  # of equal mass


@dataclass(frozen=True)
class RankReport:
    """Behind the draft's `rank`-th best token, over `rows` places.

    accuracy          share of places where the draft's best token is the target's
    calibration       difference of accuracy and mean probability that the draft gives to the target's best token, in
                      bins by that probability, weighted by their sizes: the paper's expected calibration error
    standard_calibration  the same with the probability of the draft's own best token, as Guo et al. (2017) define it
    """

    rank: int
    rows: int
    accuracy: float
    calibration: float
    standard_calibration: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Observed(NamedTuple):
    """Of one text, float32 [places, ranks]: hit or not, the draft's probability of the target's best token, and that
    of its own best."""

    hits: Tensor
    of_best: Tensor
    highest: Tensor


@torch.no_grad()
def by_rank(head: EagleHead, teacher: Teacher, texts: Sequence[Text], *, anchors: int = 32) -> list[RankReport]:
    """Reports for ranks 1 to 5, from up to `anchors` places in the answers of each text, evenly spread.

    At each place the draft predicts a token, is told its own n-th best instead of the text's, and predicts once more;
    the target is told the same token.
    """
    return reports([observe(head, teacher, text, anchors) for text in texts if text.answers[2:].any()])


def reports(found: Sequence[Observed]) -> list[RankReport]:
    """What `by_rank` says of these texts, which may be a sample of them, some more than once."""
    hits, of_best, highest = (torch.cat(parts) for parts in zip(*found, strict=True))
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
    """At up to `count` places in the answers of a text that has some; see `by_rank`."""
    tokens = text.tokens.long().to(teacher.device)[None]
    places = text.answers[2:].nonzero()[:, 0].to(teacher.device)
    places = places[
        torch.linspace(0, len(places) - 1, min(count, len(places)), dtype=torch.float32, device="cpu")
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
    behind = logits_of(head, teacher, unrolling.next(chosen, parents, detach=True))[0]
    draft = (behind / temperature_at(head.config, 2)).softmax(dim=-1)
    best = target.argmax(dim=-1)
    own = draft.max(dim=-1)
    guess = own.indices if ids is None else ids[own.indices]
    if ids is None:
        of_best = draft.gather(-1, best[..., None])[..., 0]
    else:  # a token that the draft has no column for has probability 0
        of_best = (draft * (ids == best[..., None])).sum(dim=-1)
    return Observed((guess == best).float().cpu(), of_best.cpu(), own.values.cpu())


def temperature_at(config: EagleConfig, depth: int) -> float:
    """What the head divides logits by that propose nodes of this depth, 1 or more."""
    return config.temperatures[min(depth, len(config.temperatures)) - 1] if config.temperatures else 1.0


def logits_of(head: EagleHead, teacher: Teacher, states: Tensor) -> Tensor:
    """float32, [..., draft vocabulary]: of the draft's recurrent states, as the network gives them."""
    logits = head.logits(states)
    return (teacher.head(states.to(teacher.model.dtype)) if logits is None else logits).float()


def calibration_error(hits: Tensor, confidence: Tensor) -> float:
    """Weighted mean of |accuracy - confidence| over `BINS` bins of equal mass; both float [rows]."""
    order = confidence.argsort()
    bins = zip(hits[order].tensor_split(BINS), confidence[order].tensor_split(BINS), strict=True)
    gaps = [len(h) * abs(float(h.mean() - c.mean())) for h, c in bins if len(h)]
    return sum(gaps) / len(hits)

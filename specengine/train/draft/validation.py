"""Judge a draft on held-back text: agreement, tokens per cycle of a chain, and temperatures by depth."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.models.dflash import DflashNet
from specengine.models.eagle import EagleHead
from specengine.train.draft.losses import Unrolling, block_states, loss_of
from specengine.train.draft.options import make_loss
from specengine.train.draft.teacher import HeadTeacher, Reading
from specengine.train.text.corpus import Text

MEASURED_STEPS = 5  # tokens ahead, for the agreement on held-back text
VALIDATED = 12  # texts
CHAIN_TOKENS, PLACES = 5, 64  # tokens of a chain, and places of each text where it begins


class Validation(NamedTuple):
    """Results of a validation.

    hits[j]            share of held-back answer tokens for which the draft's best token j + 1 ahead is the target's
    overlap[j]         acceptance rate of a sampled draft, j + 1 tokens ahead
    tokens_per_cycle   mean of a greedy chain of 5 tokens along the text
    """

    hits: list[float]
    overlap: list[float]
    tokens_per_cycle: float


def validate(
    head: EagleHead, teacher: HeadTeacher, texts: Sequence[Text], *, autocast: bool
) -> Validation:
    """Validate on up to 12 texts."""
    hits, overlap = agreement(head, teacher, texts[:VALIDATED], autocast=autocast)
    with autocasting(teacher.device, enabled=autocast):
        chains = torch.stack(
            [chain_lengths(head, teacher, text) for text in texts[:VALIDATED]]
        ).sum(dim=0)
    return Validation(hits, overlap, float(chains[0] / chains[1]))


@torch.no_grad()
def agreement(
    head: EagleHead, teacher: HeadTeacher, texts: Sequence[Text], *, autocast: bool
) -> tuple[list[float], list[float]]:
    """Return hits and overlap (see Validation) along the answers of the texts, with the text's tokens as input."""
    steps = min(MEASURED_STEPS, head.config.depths)
    measuring = make_loss("dflash" if isinstance(head, DflashNet) else "ttt", steps=steps)
    sums = torch.zeros(2, steps, dtype=torch.float64, device="cpu")
    counted = 0
    for text in texts:
        reading = teacher.read_text(text)
        with autocasting(teacher.device, enabled=autocast):
            report = loss_of(
                measuring,
                head,
                teacher,
                reading,
                text.answers.to(teacher.device)[None],
                measure=True,
            )
        weight = int(text.answers.sum())
        sums += weight * torch.tensor(
            [report.hits, report.overlap], dtype=torch.float64, device="cpu"
        )
        counted += weight
    hits, overlap = (sums / counted).tolist()
    return hits, overlap


@torch.no_grad()
def chain_lengths(head: EagleHead, teacher: HeadTeacher, text: Text) -> Tensor:
    """Return the sum of tokens per cycle of a greedy chain over places of the answers, and their number; float64 [2].

    A cycle brings the draft's tokens as long as the text has the same, and one more.
    """
    places = spread(text.answers[2:].nonzero()[:, 0], PLACES).to(teacher.device)
    reading = teacher.read_text(text)
    tokens = reading.tokens
    ids = head.target_ids()
    right = torch.ones_like(places, dtype=torch.bool)
    total = float(len(places))
    for depth, states in enumerate(along_text(head, teacher, reading, places, CHAIN_TOKENS)):
        best = logits_of(head, teacher, states).argmax(dim=-1)
        best = best if ids is None else ids[best]
        at = places + 2 + depth
        right = (
            right & (at < tokens.shape[1]) & (best == tokens[0, at.clamp(max=tokens.shape[1] - 1)])
        )
        total += float(right.sum())
    return torch.tensor([total, float(len(places))], dtype=torch.float64, device="cpu")


@contextmanager
def autocasting(device: torch.device, *, enabled: bool) -> Iterator[None]:
    # products in bfloat16 take some 20 times as long on a CPU that lacks them
    with (
        torch.autocast(
            device.type,
            dtype=torch.bfloat16,
            enabled=enabled
            and (device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        ),
        warnings.catch_warnings(),
    ):
        # The weights of the norms stay float32 on purpose.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


DEPTHS = 6
ANCHORS = 64  # places per text
# candidates for 1 / temperature
SHARPNESS = torch.linspace(0.5, 2.0, 61, dtype=torch.float32, device="cpu")
CHUNK = 128  # rows of logits at a time


@torch.no_grad()
def fit_temperatures(
    head: EagleHead,
    teacher: HeadTeacher,
    texts: Sequence[Text],
    *,
    depths: int = DEPTHS,
    autocast: bool = False,
) -> tuple[float, ...]:
    """Return a temperature for each depth from 1, which makes the target's best tokens as likely as possible.

    A probability then is the chance that a greedy target takes the token, which is how policies read it. From up to 64
    evenly spaced places in the answers of each text, the draft follows the text, as on an accepted path. Places whose
    best token is not in the draft's vocabulary are skipped. Return () if there are no places. (Guo et al. 2017, §4.2.)
    """
    depths = min(depths, head.config.depths)
    losses = torch.zeros(depths, len(SHARPNESS), dtype=torch.float64, device="cpu")
    rows = torch.zeros(depths, dtype=torch.int64, device="cpu")
    for text in texts:
        places = spread(text.answers[2:].nonzero()[:, 0], ANCHORS).to(teacher.device)
        if not len(places):
            continue
        reading = teacher.read_text(text)
        length = len(text.tokens)
        with autocasting(teacher.device, enabled=autocast):
            for depth, states in enumerate(along_text(head, teacher, reading, places, depths)):
                inside = places + 1 + depth < length
                total, count = _losses(
                    head, teacher, states[inside], reading.states[0, (places + 1 + depth)[inside]]
                )
                losses[depth] += total
                rows[depth] += count
    if not bool(rows.all()):
        return ()
    return tuple(round(1 / _lowest(of_depth), 3) for of_depth in losses)


def spread(places: Tensor, count: int) -> Tensor:
    """Return up to `count` of these places, evenly spaced."""
    chosen = torch.linspace(
        0, len(places) - 1, min(count, len(places)), dtype=torch.float32, device="cpu"
    )
    return places[chosen.long().unique().to(places.device)]


def along_text(
    head: EagleHead, teacher: HeadTeacher, reading: Reading, places: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield the draft's states [places, hidden size] by depth, where its tokens from each place are those of the text.

    reading: of one text.
    """
    tokens, features = reading.tokens, reading.features.to(head.dtype)
    if isinstance(head, DflashNet):
        blocks = block_states(head, teacher, features, tokens, places[None])[0]
        yield from blocks.unbind(1)[:depths]
        return
    unrolling = Unrolling(head, teacher, features, tokens, places[None])
    yield unrolling.first()[0, places]
    for depth in range(1, depths):
        following = tokens[0, (places + 1 + depth).clamp(max=tokens.shape[1] - 1)][None, :, None]
        yield unrolling.next(following, torch.zeros_like(following), detach=True)[0, :, 0]


def logits_of(head: EagleHead, teacher: HeadTeacher, states: Tensor) -> Tensor:
    """Return logits of the draft's recurrent states, float32 [..., draft vocabulary], before temperatures."""
    logits = head.logits(states)
    return (teacher.head(states.to(teacher.model.dtype)) if logits is None else logits).float()


def _losses(
    head: EagleHead, teacher: HeadTeacher, draft: Tensor, target: Tensor
) -> tuple[Tensor, int]:
    """Return sums over rows of -log p of the target's best token, float64 by sharpness, and the number of rows.

    draft, target: states [rows, hidden size] of the same places.
    """
    total, count, ids = (
        torch.zeros(len(SHARPNESS), dtype=torch.float64, device="cpu"),
        0,
        head.target_ids(),
    )
    sharpness = SHARPNESS.to(draft.device)
    for draft_rows, target_rows in zip(draft.split(CHUNK), target.split(CHUNK), strict=True):
        logits = logits_of(head, teacher, draft_rows)
        best, _ = teacher.labels(target_rows, ids)
        logits, best = logits[best >= 0], best[best >= 0]
        of_best = logits.gather(1, best[:, None])[:, 0]
        for number, factor in enumerate(sharpness):
            total[number] += float(((logits * factor).logsumexp(dim=-1) - of_best * factor).sum())
        count += len(best)
    return total, count


def _lowest(losses: Tensor) -> float:
    """Return the sharpness of the lowest loss: the vertex of a parabola through the best candidates."""
    at = int(losses.argmin().clamp(1, len(losses) - 2))
    before, here, after = losses[at - 1 : at + 2].tolist()
    bend = before - 2 * here + after
    shift = 0.5 * (before - after) / bend if bend > 0 else 0.0
    return float(SHARPNESS[at] + (SHARPNESS[1] - SHARPNESS[0]) * max(-1.0, min(1.0, shift)))

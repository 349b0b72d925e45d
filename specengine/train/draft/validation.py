"""Judge a draft on held-back text: agreement, acceptance length when it serves, and temperatures by depth."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specengine.checkpoints import eagle
from specengine.drafters.eagle import Eagle
from specengine.engine import Engine
from specengine.models.eagle import EagleHead
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.policies.baselines.eagle import Eagle as EaglePolicy
from specengine.train.draft.losses import Unrolling, loss_of
from specengine.train.draft.options import make_loss
from specengine.train.draft.teacher import HeadTeacher, Reading
from specengine.train.text.corpus import Text

MEASURED_STEPS = 5  # tokens ahead, for the agreement on held-back text
VALIDATED = 12  # texts
ANSWERS, ANSWER_TOKENS = 4, 48  # number and length of the answers for the acceptance length


class Validation(NamedTuple):
    """Results of a validation.

    hits[j]            share of held-back answer tokens for which the draft's best token j + 1 ahead is the target's
    overlap[j]         acceptance rate of a sampled draft, j + 1 tokens ahead
    acceptance_length  mean tokens per cycle when the draft serves
    """

    hits: list[float]
    overlap: list[float]
    acceptance_length: float


def validate(
    head: EagleHead,
    teacher: HeadTeacher,
    target: HuggingFaceTarget | NativeTarget,
    texts: Sequence[Text],
    *,
    autocast: bool,
) -> Validation:
    """Validate on up to 12 texts, and on answers to the first questions of 4 of them."""
    hits, overlap = agreement(head, teacher, texts[:VALIDATED], autocast=autocast)
    questions = [text.tokens[: int(text.answers.int().argmax())].tolist() for text in texts[:VALIDATED]]
    prompts = list(filter(None, questions))
    return Validation(hits, overlap, acceptance_length(target, head, prompts[:ANSWERS]))


@torch.no_grad()
def agreement(
    head: EagleHead, teacher: HeadTeacher, texts: Sequence[Text], *, autocast: bool
) -> tuple[list[float], list[float]]:
    """Return hits and overlap (see Validation) along the answers of the texts, with the text's tokens as input."""
    measuring = make_loss("ttt", steps=MEASURED_STEPS)
    sums = torch.zeros(2, MEASURED_STEPS, dtype=torch.float64, device="cpu")
    counted = 0
    for text in texts:
        reading = teacher.read_text(text)
        with autocasting(teacher.device, enabled=autocast):
            report = loss_of(measuring, head, teacher, reading, text.answers.to(teacher.device)[None], measure=True)
        weight = int(text.answers.sum())
        sums += weight * torch.tensor([report.hits, report.overlap], dtype=torch.float64, device="cpu")
        counted += weight
    hits, overlap = (sums / counted).tolist()
    return hits, overlap


@torch.no_grad()
def acceptance_length(target: HuggingFaceTarget | NativeTarget, head: EagleHead, prompts: Sequence[list[int]]) -> float:
    """Return mean tokens per cycle, greedy, with EAGLE's tree of 60 nodes; 0 without prompts."""
    found = eagle.Checkpoint(head.config, head.state_dict(), cast(Any, None))  # which is for those who read a folder
    draft = Eagle.of(found, target.lm, "", pack=None if isinstance(target, NativeTarget) else False)
    engine = Engine(target, draft, EaglePolicy(width=10, expansions=6, budget=60))
    tokens = cycles = 0
    for prompt in prompts:
        stats = engine.generate(prompt, max_new_tokens=ANSWER_TOKENS, temperature=0.0).stats
        tokens, cycles = tokens + stats.num_generated_tokens, cycles + stats.num_spec_steps
    return tokens / cycles if cycles else 0.0


@contextmanager
def autocasting(device: torch.device, *, enabled: bool) -> Iterator[None]:
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled), warnings.catch_warnings():
        # The weights of the norms stay float32 on purpose.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


DEPTHS = 6
ANCHORS = 64  # places per text
SHARPNESS = torch.linspace(0.5, 2.0, 61, dtype=torch.float32, device="cpu")  # candidates for 1 / temperature
CHUNK = 128  # rows of logits at a time


@torch.no_grad()
def fit_temperatures(
    head: EagleHead, teacher: HeadTeacher, texts: Sequence[Text], *, depths: int = DEPTHS, autocast: bool = False
) -> tuple[float, ...]:
    """Return a temperature for each depth from 1, which makes the target's best tokens as likely as possible.

    A probability then is the chance that a greedy target takes the token, which is how policies read it. From up to 64
    evenly spaced places in the answers of each text, the draft follows the text, as on an accepted path. Places whose
    best token is not in the draft's vocabulary are skipped. Return () if there are no places. (Guo et al. 2017, §4.2.)
    """
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
                total, count = _losses(head, teacher, states[inside], reading.states[0, (places + 1 + depth)[inside]])
                losses[depth] += total
                rows[depth] += count
    if not bool(rows.all()):
        return ()
    return tuple(round(1 / _lowest(of_depth), 3) for of_depth in losses)


def spread(places: Tensor, count: int) -> Tensor:
    """Return up to `count` of these places, evenly spaced."""
    chosen = torch.linspace(0, len(places) - 1, min(count, len(places)), dtype=torch.float32, device="cpu")
    return places[chosen.long().unique().to(places.device)]


def along_text(
    head: EagleHead, teacher: HeadTeacher, reading: Reading, places: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield the draft's states [places, hidden size] by depth, where its tokens from each place are those of the text.

    reading: of one text.
    """
    tokens = reading.tokens
    unrolling = Unrolling(head, teacher, reading.features.to(head.dtype), tokens, places[None])
    yield unrolling.first()[0, places]
    for depth in range(1, depths):
        following = tokens[0, (places + 1 + depth).clamp(max=tokens.shape[1] - 1)][None, :, None]
        yield unrolling.next(following, torch.zeros_like(following), detach=True)[0, :, 0]


def logits_of(head: EagleHead, teacher: HeadTeacher, states: Tensor) -> Tensor:
    """Return logits of the draft's recurrent states, float32 [..., draft vocabulary], before temperatures."""
    logits = head.logits(states)
    return (teacher.head(states.to(teacher.model.dtype)) if logits is None else logits).float()


def _losses(head: EagleHead, teacher: HeadTeacher, draft: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return sums over rows of -log p of the target's best token, float64 by sharpness, and the number of rows.

    draft, target: states [rows, hidden size] of the same places.
    """
    total, count, ids = torch.zeros(len(SHARPNESS), dtype=torch.float64, device="cpu"), 0, head.target_ids()
    sharpness = SHARPNESS.to(draft.device)
    for draft_rows, target_rows in zip(draft.split(CHUNK), target.split(CHUNK), strict=True):
        logits, best = logits_of(head, teacher, draft_rows), teacher.best(target_rows)
        if ids is not None:
            best = torch.searchsorted(ids, best).clamp(max=len(ids) - 1).masked_fill(~torch.isin(best, ids), -1)
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

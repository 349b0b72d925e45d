"""Validate a draft: agreement on held-back text, and acceptance length when it serves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from specengine.drafters.eagle import Eagle
from specengine.engine import Engine
from specengine.models.eagle import EagleHead, head_from
from specengine.models.huggingface import HuggingFaceTarget
from specengine.policies.eagle import Eagle as EaglePolicy
from specengine.train.draft.losses import loss_of
from specengine.train.draft.options import make_loss
from specengine.train.draft.teacher import Teacher
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
    head: EagleHead, teacher: Teacher, target: HuggingFaceTarget, texts: Sequence[Text], *, autocast: bool
) -> Validation:
    """Validate on up to 12 texts, and on answers to the first questions of 4 of them."""
    hits, overlap = agreement(head, teacher, texts[:VALIDATED], autocast=autocast)
    questions = [text.tokens[: int(text.answers.int().argmax())].tolist() for text in texts[:VALIDATED]]
    prompts = list(filter(None, questions))
    return Validation(hits, overlap, acceptance_length(target, head, prompts[:ANSWERS]))


@torch.no_grad()
def agreement(
    head: EagleHead, teacher: Teacher, texts: Sequence[Text], *, autocast: bool
) -> tuple[list[float], list[float]]:
    """Return hits and overlap (see Validation) along the answers of the texts, with the text's tokens as input."""
    measuring = make_loss("ttt", steps=MEASURED_STEPS)
    sums = torch.zeros(2, MEASURED_STEPS, dtype=torch.float64, device="cpu")
    counted = 0
    for text in texts:
        reading = teacher.read(text.tokens.long().to(teacher.device)[None])
        with autocasting(teacher.device, enabled=autocast):
            report = loss_of(measuring, head, teacher, reading, text.answers.to(teacher.device)[None], measure=True)
        weight = int(text.answers.sum())
        sums += weight * torch.tensor([report.hits, report.overlap], dtype=torch.float64, device="cpu")
        counted += weight
    hits, overlap = (sums / counted).tolist()
    return hits, overlap


@torch.no_grad()
def acceptance_length(target: HuggingFaceTarget, head: EagleHead, prompts: Sequence[list[int]]) -> float:
    """Return mean tokens per cycle, greedy, with EAGLE's tree of 60 nodes; 0 without prompts."""
    serving = head_from(head.config, head.state_dict(), target.model.dtype, target.device)
    engine = Engine(target, Eagle(serving, target.lm, pack=False), EaglePolicy(width=10, expansions=6, budget=60))
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

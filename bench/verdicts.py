"""Verdicts from figures of answers, by their 95 % intervals over prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

from specengine.benchmark.records import Record

CONFIRMED, REFUTED, UNDECIDED, NOT_RUN = "confirmed", "not confirmed", "undecided", "not run"
THEIRS = "qwen3-8b-h200"
SAMPLES = 1000
Answers = Sequence[Record]  # of one way: what each answer adds, as research.replay.by_answer


def resampled(
    records: Sequence[Record], measure: Callable[[Sequence[Answers]], float | None]
) -> list[float]:
    """Return a measure of replayed ways, and its 95 % interval over prompts, drawn with the same prompts for all.

    A draw for which there is no measure counts as infinite, so that the interval shows it.
    """
    answers = [record["by_answer"] for record in records]
    generator, prompts = random.Random(0), range(len(answers[0]))
    values = []
    for _ in range(SAMPLES):
        chosen = generator.choices(prompts, k=len(prompts))
        value = measure([[way[number] for number in chosen] for way in answers])
        values.append(math.inf if value is None else value)
    values.sort()
    whole = measure(answers)
    ends = values[int(0.025 * SAMPLES)], values[int(0.975 * SAMPLES)]
    return [round(value, 4) for value in (math.inf if whole is None else whole, *ends)]


def speed(answers: Answers, costs: str = THEIRS) -> float:
    return total(answers, "committed") / total(answers, costs)


def tau(answers: Answers) -> float:
    return total(answers, "committed") / total(answers, "cycles")


def nodes_per_token(answers: Answers) -> float:
    return total(answers, "verified") / total(answers, "committed")


def total(answers: Answers, name: str) -> float:
    return sum(float(answer[name]) for answer in answers)


def all_of(verdicts: Iterable[str]) -> str:
    found = set(verdicts)
    return CONFIRMED if found == {CONFIRMED} else REFUTED if REFUTED in found else UNDECIDED


def above_one(apart: Sequence[float]) -> str:
    _, low, high = apart
    return CONFIRMED if low > 1 else REFUTED if high < 1 else UNDECIDED


def words(apart: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*apart)

"""The sentence on whether speculation pays: its arithmetic, and what it says in each case."""

from __future__ import annotations

import dataclasses

import pytest

from specengine.cli.verdict import Seen, break_even, verdict
from specengine.costs import PassCosts
from specengine.records import Stats

CHEAP = PassCosts("cheap", {1: 0.010, 12: 0.012}, {1: 0.001}, measured=True, overhead=0.001)
DEAR = PassCosts("dear", {1: 0.010, 12: 0.060}, {1: 0.002}, measured=True)


def test_break_even_is_the_cost_of_a_cycle_over_that_of_a_token() -> None:
    assert break_even(CHEAP, 12) == pytest.approx((0.012 + 0.001) / 0.010)
    assert break_even(CHEAP, 12, 3) == pytest.approx((0.012 + 0.001 + 3 * 0.001) / 0.010)
    assert break_even(CHEAP, 6.5, 0.5) == pytest.approx((0.011 + 0.001 + 0.0005) / 0.010)
    assert break_even(DEAR, 1) == pytest.approx(1)


def test_averages_are_over_all_verifications() -> None:
    answers = [
        Stats(num_spec_steps=1, num_emitted_in_steps=5, num_draft_tokens=9, num_draft_passes=4),
        Stats(num_spec_steps=3, num_emitted_in_steps=3),
    ]
    assert Seen.of(answers) == Seen(2, 1 + 9 / 4, 1)
    assert Seen.of([]) is Seen.of([Stats()]) is None


@pytest.mark.parametrize(
    ("costs", "seen", "words"),
    [
        (
            CHEAP,
            Seen(2.6, 12, 0),
            "pays on this CPU (2.00 times plain decoding): a pass over 12.0 tokens with 0.0",
        ),
        (
            CHEAP,
            Seen(2.6, 12, 0),
            "takes 1.30 times as long as one of plain decoding, and it brought 2.60 tokens.",
        ),
        (
            CHEAP,
            Seen(2.6, 12, 0, 1.4),
            "pays on this CPU (1.40 times plain decoding)",
        ),  # the clock is believed
        (DEAR, Seen(3, 12, 0), "does not pay on this CPU (0.50 times plain decoding)"),
        (DEAR, Seen(3, 12, 0), "brought 3.00 tokens; for such texts decode with policy 'plain'."),
        (DEAR, Seen(6.1, 12, 0), "changes little on this CPU (1.02 times plain decoding)"),
        (
            DEAR,
            Seen(1.1, 1.2, 0.1),
            "drafts rarely promised more than they cost, as a pass over 12 tokens takes 6.0",
        ),
        (
            None,
            Seen(2, 5, 1, 1.3),
            "pays on this CPU (1.30 times plain decoding): a pass over 5.0 tokens, with 1.0",
        ),
        (
            None,
            Seen(2, 5, 1),
            "is not known: a pass brought 2.00 tokens, and what it costs was not measured",
        ),
        (CHEAP, None, "is not known: no answer was drafted."),
    ],
)
def test_the_sentence(costs: PassCosts | None, seen: Seen | None, words: str) -> None:
    said = verdict("cpu", costs, seen)
    assert words in said
    assert said.count(". ") == 0, "one sentence"
    assert "GPU" in verdict("cuda", costs, seen)


@pytest.mark.parametrize(
    ("others", "costs", "words"),
    [
        (0.3, CHEAP, "other programs took 30% of the processors meanwhile."),
        (
            None,
            dataclasses.replace(CHEAP, load=0.5),
            "other programs took 50% of the processors meanwhile.",
        ),
        (
            0.0,
            dataclasses.replace(CHEAP, spread={1: 0.1, 8: 0.9}),
            "times of 8 rows were scattered meanwhile.",
        ),
        (0.3, None, "other programs took 30% of the processors meanwhile."),
    ],
)
def test_a_busy_machine_is_told(others: float | None, costs: PassCosts | None, words: str) -> None:
    said = verdict("cpu", costs, Seen(2.6, 12, 0, 1.4), others)
    assert said.endswith(f" This may be otherwise on a quiet machine: {words}")


@pytest.mark.parametrize("others", [None, 0.0, 0.1])
def test_a_quiet_or_unknown_machine_is_not_told(others: float | None) -> None:
    assert "quiet" not in verdict("cpu", CHEAP, Seen(2.6, 12, 0, 1.4), others)

"""Tests of when auto decodes plainly: by simulated clocks, and with an engine."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import Engine
from specengine.costs import PassCosts
from specengine.costs.measuring import stored
from specengine.cycle import MAX_REPEATED, repeated
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops.tree import TokenTree
from specengine.policies.auto import Auto
from specengine.policies.auto.pacing import (
    FIRST_REST,
    MAX_REST,
    REPEATED,
    TIMED,
    Pace,
    PaceState,
)
from tests import toy
from tests.examples import examples
from tests.graphs.engines import PROMPT, model


def ran(
    pace: Pace, cycles: int, chance: float, dearer: float, draw: random.Random, told: float = 1.0
) -> list[int]:
    """Tokens per cycle; 0 of a plain one. A cycle with trees brings a second token by this chance, and takes more."""
    found = []
    for _ in range(cycles):
        rests = pace.resting > 0
        tokens = 1 if rests else 1 + (draw.random() < chance)
        seconds = (1.0 if rests else 1 + dearer) * draw.uniform(0.97, 1.03)
        pace.observe(tokens, 0.01 * seconds, 0.01 * told)
        found.append(0 if rests else tokens)
    return found


@pytest.mark.parametrize(
    "told", [0.9, 1.0, 1.15], ids=["told too little", "told right", "told too much"]
)
@pytest.mark.parametrize("dearer", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("chance", [0.0, 0.03, 0.1, 0.3, 0.8])
def test_little_is_lost_whatever_trees_bring(chance: float, dearer: float, told: float) -> None:
    """Over twelve texts; told: what plain cycles are thought to take, over what they do."""
    draw, pace = random.Random(0), Pace()
    cycles = list[int]()
    for _ in range(12):
        pace.begin()
        cycles += ran(pace, 128, chance, dearer, draw, told)
    with_trees = sum(tokens > 0 for tokens in cycles)
    rate = sum(max(tokens, 1) for tokens in cycles) / (len(cycles) + dearer * with_trees)
    best = max(1.0, (1 + chance) / (1 + dearer))
    assert rate > (0.97 if dearer <= 0.1 else 0.95) * best


@pytest.mark.parametrize("busy", [1.0, 1.5, 2.0])
def test_a_busy_moment_is_forgotten(busy: float) -> None:
    """Trees lose two tenths; while the machine was busy, plain cycles took longer, which was timed then."""
    draw, pace = random.Random(7), Pace()
    for _ in range(100):
        rests = pace.resting > 0
        pace.observe(1 if rests else 2, busy * (0.01 if rests else 0.013), 0.01)
    found = ran(pace, 800, 0.3, 0.6, draw)
    assert found.count(0) > 0.6 * len(found)


def test_texts_begin_with_a_rest_after_two_that_lost() -> None:
    draw, pace = random.Random(4), Pace()
    begun = list[bool]()
    for _ in range(6):
        pace.begin()
        begun.append(pace.resting > 0)
        ran(pace, 200, 0.0, 0.2, draw)
    assert begun == [False, False, True, True, True, True]
    short = list[int]()
    for _ in range(12):  # whose rests go on from text to text
        pace.begin()
        short += ran(pace, 12, 0.0, 0.2, draw)
    assert any(short)


def test_a_text_that_pays_ends_the_rests_at_the_beginning() -> None:
    draw, pace = random.Random(5), Pace()
    for _ in range(4):
        pace.begin()
        ran(pace, 200, 0.0, 0.2, draw)
    pace.begin()
    paying = ran(pace, 300, 0.9, 0.2, draw)
    assert 0 < paying.count(0) <= MAX_REST
    pace.begin()
    assert not pace.resting
    assert all(ran(pace, 200, 0.9, 0.2, draw))


def test_one_text_that_lost_delays_no_other() -> None:
    draw, pace = random.Random(6), Pace()
    for chance in (0.0, 0.9) * 4:
        pace.begin()
        assert not pace.resting
        ran(pace, 200, chance, 0.2, draw)


def test_what_pays_is_never_interrupted() -> None:
    pace = Pace()
    assert all(ran(pace, 2000, 0.9, 0.2, random.Random(1)))


def test_trees_that_begin_to_pay_are_found_and_kept() -> None:
    draw, pace = random.Random(2), Pace()
    before = ran(pace, 600, 0.0, 0.2, draw)
    assert before.count(0) > 0.75 * len(before)
    after = ran(pace, 600, 0.9, 0.2, draw)
    assert after[2 * MAX_REST :].count(0) == 0


@examples(30)
@given(seed=st.integers(0, 1000), chance=st.floats(0, 0.3), dearer=st.floats(0.01, 0.5))
def test_rests_are_bounded_and_trees_come_between(seed: int, chance: float, dearer: float) -> None:
    found = ran(Pace(), 600, chance, dearer, random.Random(seed))
    rests = [len(run) for run in "".join("r" if tokens == 0 else " " for tokens in found).split()]
    assert all(length in (TIMED, FIRST_REST, 2 * FIRST_REST, MAX_REST) for length in rests[:-1])
    assert all(length <= MAX_REST for length in rests)


def test_while_it_rests_nobody_is_asked_and_the_answer_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = HuggingFaceTarget(model())
    policy = toy.policy_for("auto")
    assert isinstance(policy, Auto)
    policy = dataclasses.replace(policy, costs="measured", budget=16)
    # whatever this machine would say
    cheap = PassCosts("cheap", {1: 1.0, 16: 1.1}, {1: 0.01}, measured=True)
    monkeypatch.setattr(stored, "find", lambda *_: cheap)
    drafter = Lookup(Recycling())
    engine, plain = Engine(target, drafter, policy), Engine(target, None, None)
    asked = list[int]()
    for name in ("root", "free"):
        real = getattr(drafter, name)

        def counted(tree: TokenTree, *rest: object, real=real):  # type: ignore[no-untyped-def]
            asked.append(int(tree.tokens[0]))
            return real(tree, *rest)

        monkeypatch.setattr(drafter, name, counted)
    engine.generate(PROMPT, max_new_tokens=12)
    assert asked
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        monkeypatch.setattr(
            Pace, "begin", lambda self: vars(self).update(resting=8, state=PaceState.RESTING)
        )
        asked.clear()
        found = list[int]()
        for number, piece in enumerate(engine.stream(PROMPT, max_new_tokens=20, **options)):
            found += piece.cycle.tokens
            assert (len(asked) > 0) == (number >= 8)
            assert number >= 8 or len(piece.cycle.tree) == 1
        assert found == plain.generate(PROMPT, max_new_tokens=20, **options).token_ids


@pytest.mark.parametrize("length", [FIRST_REST, 2 * FIRST_REST, MAX_REST])
def test_a_rest_ends_where_the_text_repeats_itself_for_long_enough(length: int) -> None:
    """Beyond that nothing is told by less of a repetition, and a longer rest takes a longer one."""
    least = length // REPEATED
    assert 0 < least <= MAX_REPEATED
    for count, state in ((least - 1, PaceState.RESTING), (least, PaceState.RETURNING)):
        pace = Pace(PaceState.RESTING, length, _length=length)
        pace.observe(1, 0.01, 0.01, repeated=count)
        assert pace.state is state
        assert pace.resting == (length - 1 if state is PaceState.RESTING else 0)


@pytest.mark.parametrize("copies", [True, False])
def test_an_engine_ends_a_rest_where_its_draft_can_copy(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = toy.policy_for("auto")
    assert isinstance(policy, Auto)
    policy = dataclasses.replace(policy, costs="measured", budget=16)
    cheap = PassCosts("cheap", {1: 1.0, 16: 1.1}, {1: 0.01}, measured=True)
    monkeypatch.setattr(stored, "find", lambda *_: cheap)
    monkeypatch.setattr(
        Pace, "begin", lambda self: vars(self).update(resting=32, state=PaceState.RESTING)
    )
    drafter = Lookup(Recycling()) if copies else Recycling()
    engine = Engine(toy.ToyTarget(toy.Tables(6, 3, concentration=0.2)), drafter, policy)
    text, rests = [1, 2, 0], list[int]()
    for piece in engine.stream([*text], max_new_tokens=40):
        text += piece.cycle.tokens
        rests.append(policy._pace.resting)
        if not rests[-1]:
            break
    ended = 32 if not copies else len(rests)
    assert len(rests) == ended
    assert ended == 32 or REPEATED * repeated(torch.tensor(text)) >= FIRST_REST
    assert (ended < 32) is copies

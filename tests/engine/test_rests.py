"""A policy that rests: the drafter is handed several plain cycles at once, and proposes what it would have."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specengine import Engine, cycle, drafters
from specengine.drafters import Drafter, innermost
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.engine import Pool, generation
from specengine.models.native import NativeHead, NativeTarget
from specengine.policies import Plan
from specengine.policies.baselines.fixed import Fixed
from tests.heads import deep
from tests.models.native_engines import native_lm, needs_extension
from tests.toy import head_config, near_copy, random_state, tiny, tiny_head

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


class Sometimes(Fixed):
    """Draft in two of `every` cycles."""

    every = 7
    learns = True
    _asked = 0

    def plan(self) -> Plan:
        self._asked += 1
        return Plan(rests=self._asked % self.every > 2, learns=self.learns)


@cache
def weights() -> tuple[Any, Any]:
    """Return a target and a smaller model, both native."""
    return native_lm(tiny(num_hidden_layers=4).bfloat16()), native_lm(
        near_copy(num_hidden_layers=1).bfloat16()
    )


def drafter_of(kind: str) -> Drafter:
    lm, small = weights()
    made: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NGram(2, 1),
        "recycling": lambda: Recycling(3),
        "small model": lambda: SmallModel(small),
        "head": lambda: EagleDraft(tiny_head(head_config()), lm),
        "head with lookup and recycling": lambda: Lookup(
            EagleDraft(tiny_head(head_config()), lm), Recycling(3)
        ),
    }
    return made[kind]()


def trees(
    kind: str, most: int, every: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Any]:
    """Return tokens, parents, scores and path of all cycles of two answers, the second one from the first one's end."""
    monkeypatch.setattr(cycle, "MOST_PUT_OFF", most)
    policy = Sometimes((3, 2))
    policy.every = every
    engine, found = Engine(NativeTarget(weights()[0]), drafter_of(kind), policy), []
    prompt = [5, 6, 7, 5, 6, 8, 5]
    for _ in range(2):
        stream = engine.stream(prompt, max_new_tokens=50, eos_token_id=[], **options)
        for piece in stream:
            tree = piece.cycle.tree
            found.append(
                (
                    tree.tokens.tolist(),
                    tree.parents.tolist(),
                    tree.log_probs.tolist(),
                    piece.cycle.path,
                )
            )
        prompt = prompt + stream.result.token_ids
    return found


@pytest.mark.sliced(1)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}])
@pytest.mark.parametrize(
    "kind", ["ngram", "recycling", "small model", "head", "head with lookup and recycling"]
)
def test_trees_do_not_depend_on_when_the_drafter_takes_in_plain_cycles(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for every, most in ((7, 3), (7, 16), (25, 16)):
        at_once = trees(kind, 1, every, monkeypatch, **options)
        assert trees(kind, most, every, monkeypatch, **options) == at_once
        if kind != "recycling" or not options:  # a draw gives no successors while its policy rests
            assert any(len(tokens) > 1 for tokens, *_ in at_once)


class Later(Fixed):
    """Draft in no cycle before the number `first`."""

    first = 0
    _asked = 0

    def begin(self, tokens: int, sampled: bool = False, costs: Any = None) -> None:
        self._asked = 0

    def plan(self) -> Plan:
        self._asked += 1
        return Plan(rests=self._asked <= self.first)


def late(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch, tokens: int = 30
) -> tuple[list[int], list[Any]]:
    """Return the cycles' numbers at which the drafter has run rows of a prompt, and the trees."""
    policy = Later((3, 2))
    policy.first = first
    drafter = drafter_of(kind)
    engine = Engine(NativeTarget(weights()[0]), drafter, policy)
    draft: Any = innermost(drafter)
    extend = draft._extend
    ran = list[int]()
    trees = list[Any]()

    def counted(*given: Any) -> None:
        ran.append(len(trees))
        extend(*given)

    monkeypatch.setattr(draft, "_extend", counted)
    for piece in engine.stream([5, 6, 7, 5, 6, 8, 5], max_new_tokens=tokens, eos_token_id=[]):
        trees.append((piece.cycle.tree.tokens.tolist(), piece.cycle.tree.log_probs.tolist()))
        assert 0 <= piece.cycle.seconds.model <= piece.cycle.seconds.total
    return ran, trees


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("kind", ["small model", "head", "head with lookup and recycling"])
def test_a_draft_that_is_asked_late_takes_in_the_prompt_then(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, trees = late(kind, first, monkeypatch)
    assert ran == [max(first - 1, 0)]  # the plan is asked once before the first cycle
    monkeypatch.setattr(generation, "MAX_WAITING", 0)
    at_once, expected = late(kind, first, monkeypatch)
    assert at_once == [0]
    assert trees == expected
    assert any(len(tokens) > 1 for tokens, _ in trees)


def test_a_draft_that_is_never_asked_takes_in_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late("head", 100, monkeypatch)[0] == []
    monkeypatch.setattr(cycle, "MOST_PUT_OFF", 16)
    monkeypatch.setattr(drafters, "MAX_WAITING", 20)
    assert late("head", 100, monkeypatch)[0] == [15], "what waits for it is bounded"


class Long(Sometimes):
    """Draft in two of 40 cycles, from trees with room for fewer nodes than cycles."""

    every = 40


def test_more_tokens_wait_than_trees_have_nodes() -> None:
    lm, sizes = native_lm(deep()), head_config()
    draft = EagleDraft(NativeHead(sizes, random_state(sizes), lm), lm)
    engine = Engine(NativeTarget(lm), draft, Long((3, 2)))
    result = engine.generate([5, 6, 7, 5, 6, 8, 5], max_new_tokens=100, eos_token_id=[])
    assert result.stats.num_draft_passes > 4
    plain = engine.generate(
        [5, 6, 7, 5, 6, 8, 5], max_new_tokens=100, eos_token_id=[], policy="plain"
    )
    assert result.token_ids == plain.token_ids


class Resting(Fixed):
    """Draft in no cycle."""

    def plan(self) -> Plan:
        return Plan(rests=True)


@pytest.mark.parametrize("kind", ["small model", "head"])
def test_texts_at_once_that_rest_run_no_prompt_and_lend_what_waits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text copies another one's prompt with what its draft has yet to run."""
    ran = list[int]()
    for cls in (EagleDraft, SmallModel):
        monkeypatch.setattr(cls, "_extend", lambda draft, tokens, features: ran.append(len(tokens)))
    pool = Pool(Engine(NativeTarget(weights()[0]), drafter_of(kind), Resting((3, 2))), 2)
    known = [(7 * i * i + i) % 250 for i in range(100)]
    results = pool.generate([[*known, 3, 4], [*known, 5, 6]], max_new_tokens=8, eos_token_id=[])
    assert sum(result.stats.num_cached_prompt_tokens for result in results) == 100
    assert not any(ran)


def test_joined_cycles_are_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cycle, "MOST_PUT_OFF", 16)
    monkeypatch.setattr(Recycling, "accept", lambda self, cycle: seen.append(cycle))
    policy = Sometimes((3, 2))
    policy.every = 10**6
    engine = Engine(NativeTarget(weights()[0]), Recycling(3), policy)
    result = engine.generate([1, 2, 3], max_new_tokens=20, eos_token_id=[])
    roots, tokens = [3, *result.token_ids[:-1]], result.token_ids
    assert [token for one in seen for token in one.tokens] == tokens
    assert [token for one in seen for token in one.tree.tokens.tolist()] == roots
    assert [len(one.tree) for one in seen] == [16, 4]
    for one in seen:
        count = len(one.tree)
        assert one.path == list(range(count))
        assert one.tree.parents.tolist() == list(range(-1, count - 1))
        assert one.successors is not None
        assert one.successors.tokens.shape == (count, 3)
        assert torch.equal(one.successors.tokens[:, 0], torch.tensor(one.tokens))


def test_a_text_that_is_left_leaves_nothing_to_the_next_one() -> None:
    policy = Sometimes((3, 2))
    policy.every = 10**6
    engine = Engine(NativeTarget(weights()[0]), NGram(2, 1), policy)
    with engine.stream([1, 2, 3], max_new_tokens=40, eos_token_id=[]) as stream:
        for _ in range(5):
            next(stream)
    assert engine.drivers.own.eager._put_off == []
    assert (
        engine.generate([4, 5], max_new_tokens=5, eos_token_id=[]).stats.num_generated_tokens == 5
    )


@pytest.mark.slow
def test_few_objects_wait_for_the_drafter() -> None:
    """Many that stay make the interpreter look through all objects, which takes longer than what they wait for."""
    policy = Sometimes((3, 2))
    policy.every = 10**6
    engine = Engine(
        NativeTarget(weights()[0]), drafter_of("head with lookup and recycling"), policy
    )
    gc.disable()
    try:
        stream = engine.stream([1, 2, 3], max_new_tokens=150, eos_token_id=[])
        counts = [len(gc.get_objects()) for _ in stream]
    finally:
        gc.enable()
    assert max(counts) - counts[0] < 700


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_the_last_tokens_that_stand_before_are_counted(text: list[int]) -> None:
    def stands(count: int) -> bool:
        return any(
            text[start : start + count] == text[-count:] for start in range(len(text) - count)
        )

    counts = [count for count in range(1, len(text)) if stands(count)]
    expected = min(max(counts, default=0), cycle.MAX_REPEATED)
    assert cycle.repeated(torch.tensor(text)) == expected


def test_a_long_text_is_counted_in_a_small_part_of_a_forward() -> None:
    """Of the worst text too, whose tokens are all the same."""
    for text in (torch.zeros(32768, dtype=torch.int64), torch.arange(32768) % 50):
        took = []
        for _ in range(20):
            began = time.thread_time()
            assert cycle.repeated(text) == cycle.MAX_REPEATED
            took.append(time.thread_time() - began)
        assert min(took) < 0.005


@pytest.mark.parametrize(
    ("kind", "copies"), [("ngram", True), ("recycling", False), ("head", False)]
)
def test_only_rests_beside_a_draft_that_copies_look_for_repetition(
    kind: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[int](), cycle.repeated
    monkeypatch.setattr(
        cycle, "repeated", lambda tokens, memory: (asked.append(len(tokens)), real(tokens))[1]
    )
    engine = Engine(NativeTarget(weights()[0]), drafter_of(kind), Sometimes((3, 2)))
    prompt = [5, 6, 7, 5, 6, 8, 5]
    answer, rests = list(prompt), list[int]()
    for piece in engine.stream(prompt, max_new_tokens=50, eos_token_id=[]):
        answer += piece.cycle.tokens
        rested = piece.cycle.drafted == 0 and asked[-1:] == [len(answer)]
        rests += [len(answer)] if rested else []
        assert piece.cycle.repeated == (real(torch.tensor(answer)) if rested else 0)
    assert asked == rests
    assert bool(rests) is copies


def test_rests_from_which_nobody_learns_look_for_no_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when several texts rest together: each look takes as long as a tenth of a plain cycle's Python."""
    monkeypatch.setattr(cycle, "repeated", lambda *_: pytest.fail("looked"))
    policy = Sometimes((3, 2))
    policy.learns = False
    engine = Engine(NativeTarget(weights()[0]), drafter_of("ngram"), policy)
    result = engine.generate([5, 6, 7, 5, 6, 8, 5], max_new_tokens=50, eos_token_id=[])
    assert len(result.token_ids) == 50

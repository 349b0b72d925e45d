"""A policy for one call: the answers and trees of an engine loaded with it, and caches right between calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from specengine import Engine, policies
from specengine.checking import certify
from specengine.errors import InputError
from specengine.policies import TreePolicy
from specengine.policies.baselines.chain import Chain
from tests import toy
from tests.graphs.engines import PROMPT, engine_of, frozen

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
WALKED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_k": 9}  # under graphs the host walks
DRAFTS = ("small_model", "eagle3", "ngram", "recycling")
# policies by name, with options that keep their trees small
NAMED: dict[str, dict[str, Any]] = {
    "talon": {"budget": 10, "width": 3},
    "salf/cpu": {},
    "eagle": {"width": 3, "expansions": 3, "budget": "10"},
    "gammatune": {"width": 3, "expansions": 4, "budget": 10, "height": 3},
    "auto": {"costs": "8b-l40", "budget": 12, "width": 3, "max_passes": 4},
}


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def captured(request: pytest.FixtureRequest) -> Iterator[bool]:
    with frozen() if request.param else nullcontext():
        yield request.param


def shape(name: str | None) -> dict[str, Any]:
    return {"policy": name, "policy_options": NAMED.get(str(name))}


def trees(stream: Any) -> list[Any]:
    """Return the tree that each cycle verified, and its outcome."""
    cycles = [piece.cycle for piece in stream]
    return [
        (cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.path, cycle.tokens)
        for cycle in cycles
    ]


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_call_answers_as_an_engine_loaded_with_its_policy(draft: str, captured: bool) -> None:
    """The loaded engine runs eagerly, as one with graphs answers too: tests/graphs."""
    engine = engine_of(draft, "chain", captured=captured)
    plainly = engine_of("none", "", captured=False)
    for way in (GREEDY, SAMPLED, WALKED):
        expected = plainly.generate(PROMPT, max_new_tokens=12, **way).token_ids
        for name, options in NAMED.items():
            loaded = engine_of(draft, policies.make(name, **options), captured=False)
            if draft == "recycling":  # it remembers what other answers have shown
                engine.drafter.forget()
            if name in ("auto", "gammatune"):  # so do these
                engine = engine_of(draft, "chain", captured=captured)
            stream = engine.stream(PROMPT, max_new_tokens=12, **way, **shape(name))
            assert trees(stream) == trees(loaded.stream(PROMPT, max_new_tokens=12, **way))
            assert stream.result.token_ids == expected
            assert stream.stats.policy == repr(policies.make(name, **options))
            assert stream.stats.draft == engine.drafter.name
        plain = engine.generate(PROMPT, max_new_tokens=12, policy="plain", **way)
        assert plain.token_ids == expected
        assert (plain.stats.policy, plain.stats.draft, plain.stats.num_draft_passes) == ("", "", 0)
        assert (plain.stats.num_plain_steps, plain.stats.plain_reason) == (0, "")
        own = engine.generate(PROMPT, max_new_tokens=12, **way)
        assert (own.token_ids, own.stats.policy) == (expected, repr(engine.policy))


TURNS = ("talon", None, "plain", "eagle", "plain", "plain", None, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_session_may_change_its_policy_with_every_turn(
    draft: str, way: dict[str, Any], captured: bool
) -> None:
    """After turns without the draft its trees are those of a draft that has seen everything."""
    engine = engine_of(draft, "chain", captured=captured)
    plainly = engine_of("none", "chain", captured=False)
    engine.tokenizer = plainly.tokenizer = toy.byte_tokenizer()
    ours, theirs, known = engine.session(), plainly.session(), 0
    for turn, name in enumerate(TURNS):
        messages = [*ours.messages, {"role": "user", "content": chr(97 + turn)}]
        stream = ours.stream(chr(97 + turn), max_new_tokens=5, **way, **shape(name))
        found = trees(stream)
        expected = theirs.generate(chr(97 + turn), max_new_tokens=5, **way)
        assert stream.result.token_ids == expected.token_ids
        if draft != "recycling":
            fresh = engine_of(draft, "chain", captured=False)
            fresh.tokenizer = engine.tokenizer
            assert found == trees(fresh.stream(messages, max_new_tokens=5, **way, **shape(name)))
        assert (stream.stats.num_cached_prompt_tokens > 0) == (turn > 0)
        if name == "plain":  # nothing is run again for a draft that is not asked
            assert stream.stats.num_cached_prompt_tokens >= known
        known = stream.stats.num_prompt_tokens


@dataclass
class Counted(Chain):
    """A chain that counts the cycles it has seen, in all generations."""

    seen: int = 0

    def learn(self, outcome: Any) -> None:
        self.seen += 1


def test_drivers_are_kept() -> None:
    engine = engine_of("small_model", policies.make("talon", budget=10), captured=False)
    drivers, own = engine.drivers, engine.drivers.own
    assert drivers.asked(None) is own
    assert drivers.asked("talon", {"budget": "10"}) is drivers.asked("talon", {"budget": 10}) is own
    named = drivers.asked("dynatree")
    assert drivers.asked("dynatree", {}) is named is not drivers.asked("dynatree/paper")
    assert drivers.asked("plain") is drivers.asked("plain")
    brought = Counted(length=2)
    for _ in range(2):
        before = brought.seen
        steps = engine.generate(PROMPT, max_new_tokens=6, policy=brought).stats.num_spec_steps
        assert brought.seen == before + steps
    assert drivers.asked(brought) is drivers.asked(brought)
    engine.policy = brought
    assert drivers.asked(None) is drivers.asked(brought) is drivers.own is not own
    assert drivers.asked("talon", {"budget": 10}) is own  # with what it has learnt
    assert drivers.asked("dynatree") is named


@pytest.mark.slow
def test_graphs_of_each_policy_are_captured_once() -> None:
    with frozen():
        engine = engine_of("eagle3", "eagle", captured=True)
        for name in (None, "talon", "plain"):
            assert engine.warmup(100, **shape(name)).captured
        for name in (None, "talon", "plain", "talon", None, "plain"):
            for way in (GREEDY, SAMPLED, WALKED):
                engine.generate(PROMPT, max_new_tokens=12, **way, **shape(name))
    drivers = engine.drivers.asked("talon", NAMED["talon"]), engine.drivers.asked("plain")
    captures = [part.captured.graphs.captures for part in drivers]
    assert [set(counts.values()) for counts in captures] == [{1}, {1}]
    grows = {"root", "level", "root coupled", "level coupled"}
    assert set(captures[0]) == {
        *grows,
        "finish greedy",
        "finish sampled",
        "finish truncated",
        "verify",
    }
    assert set(captures[1]) == {"finish greedy", "finish sampled", "finish truncated", "verify"}


def test_an_answer_without_text_and_a_certificate_take_one_too() -> None:
    engine, plainly = (
        engine_of("small_model", "chain", captured=False),
        engine_of("none", "", captured=False),
    )
    cycles = list(engine.answer(PROMPT, max_new_tokens=12, **shape("eagle")))
    assert max(int(cycle.tree.passes) for cycle in cycles) == 4
    found = certify(plainly, engine, PROMPT, max_new_tokens=12, **shape("eagle"))
    assert found.verdict == "exact"
    assert found.answer.stats.policy.startswith("Eagle(")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "talons"}, "policy: unknown name 'talons', known are auto, .*talon"),
        ({"policy": ""}, "policy: unknown name ''"),
        ({"policy": "none"}, "policy: unknown name 'none'"),
        ({"policy": "eagle/none"}, "policy eagle: unknown preset 'none', known are "),
        ({"policy": 3}, "policy: got 3, accepted .*plain or a TreePolicy"),
        (
            {"policy": "eagle", "policy_options": {"wide": 3}},
            "policy eagle: unknown option 'wide', known are width",
        ),
        (
            {"policy": "eagle", "policy_options": {"width": "x"}},
            r"policy eagle\.width: got 'x', expected int",
        ),
        (
            {"policy": "eagle", "policy_options": {"name": "x"}},
            "policy eagle: unknown option 'name'",
        ),
        (
            {"policy": "eagle", "policy_options": ["width"]},
            r"policy_options: got \['width'\], accepted a dict",
        ),
        (
            {"policy": "eagle", "policy_options": {3: 4}},
            "policy_options: got {3: 4}, accepted a dict",
        ),
        ({"policy_options": {"width": 3}}, "policy_options: they need a policy given by name"),
        (
            {"policy": "plain", "policy_options": {"width": 3}},
            "policy_options: they need a policy given by name",
        ),
        (
            {"policy": Chain(), "policy_options": {"length": 3}},
            "policy_options: they need a policy given by name",
        ),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_before_anything_is_done(
    options: dict[str, Any], message: str
) -> None:
    engine = engine_of("ngram", "chain", captured=False)
    with pytest.raises(InputError, match=message):
        engine.stream(PROMPT, **options)
    with pytest.raises(InputError, match=message):
        engine.answer(PROMPT, **options)
    assert engine.generate(PROMPT, max_new_tokens=3).stats.num_generated_tokens == 3


@pytest.mark.parametrize("policy", ["talon", Chain()], ids=str)
def test_an_engine_without_a_draft_decodes_plainly_only(policy: str | TreePolicy) -> None:
    engine = engine_of("none", "", captured=False)
    with pytest.raises(
        InputError, match=r"policy: got .*(talon|Chain).*, accepted plain: .* without a draft"
    ):
        engine.stream(PROMPT, policy=policy)
    assert engine.generate(PROMPT, max_new_tokens=4, policy="plain").stats.policy == ""
    with pytest.raises(InputError, match="policy: this engine was loaded without a draft"):
        engine.policy = Chain()


def test_plain_decoding_takes_no_prediction() -> None:
    engine: Engine = engine_of("ngram", "chain", captured=False)
    with pytest.raises(InputError, match="prediction: plain decoding has no draft that copies"):
        engine.generate(PROMPT, prediction=PROMPT, policy="plain")

"""The same tokens as plain decoding, greedy and sampled, whatever tree was drafted."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from specengine import policies
from specengine.engine import Engine
from tests.examples import examples
from tests.lossless.engines import by_hand, engines, prompt_of
from tests.toy import POLICIES, Tables, ToyDrafter, ToyTarget

worlds = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([2, 6, 17]),
        "concentration": st.sampled_from([0.05, 0.5, 2.0]),
        "exact": st.sampled_from([0.0, 0.5]),
        "share": st.sampled_from([0.0, 0.6, 0.95, 1.0]),
        "seed": st.integers(0, 10_000),
    }
)
sampling = st.sampled_from(
    [
        {"do_sample": True},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 3},
        {"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.3},
        {"do_sample": True, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.2, "typical_p": 0.9},
    ]
)


@pytest.mark.sliced
@pytest.mark.parametrize("draft", ["toy", "normalized", "columns"])
@pytest.mark.parametrize("policy", POLICIES)
@examples(8)
@given(world=worlds, options=sampling, noise=st.integers(0, 2**64 - 1))
def test_sampled_output_equals_plain_sampling(
    policy: str, draft: str, world: dict[str, Any], options: dict[str, Any], noise: int
) -> None:
    """The main regression test: the same seed gives the same tokens, whatever tree was drafted."""
    speculative, plain = engines(world, policy, draft)
    prompt, options = prompt_of(world), {**options, "seed": noise}
    expected = by_hand(plain.target, prompt, options, 14)
    for engine in (speculative, plain):
        result = engine.generate(prompt, max_new_tokens=14, **options)
        assert result.token_ids == expected
        assert engine.target.tokens == [*prompt, *expected[:-1]]
    assert speculative.drafter.tokens == [*prompt, *expected[:-1]]


@pytest.mark.parametrize("policy", POLICIES)
@examples(12)
@given(world=worlds, penalty=st.sampled_from([None, 1.5]))
def test_greedy_output_equals_plain_greedy(
    policy: str, world: dict[str, Any], penalty: float | None
) -> None:
    speculative, plain = engines(world, policy)
    prompt, options = prompt_of(world), {"repetition_penalty": penalty}
    expected = by_hand(plain.target, prompt, options, 24)
    for engine in (speculative, plain):
        assert engine.generate(prompt, max_new_tokens=24, **options).token_ids == expected


def test_a_perfect_draft_is_accepted_whole_and_a_hopeless_one_not_at_all() -> None:
    tables = Tables(6, 0)
    for wrong, steps in ((False, 4), (True, 20)):
        source = Tables(6, 0)
        if wrong:
            source.logits = lambda context: -tables.logits(context)  # type: ignore[method-assign]
        engine = Engine(ToyTarget(tables), ToyDrafter(source), policies.make("chain", length=4))
        result = engine.generate([1], max_new_tokens=20)
        assert result.stats.num_spec_steps == steps
        assert result.stats.mean_acceptance_length == 20 / steps


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "sampled"])
def test_a_budget_of_one_is_plain_decoding(options: dict[str, Any]) -> None:
    world = {"vocabulary": 6, "concentration": 0.5, "exact": 0.0, "share": 0.6, "seed": 1}
    speculative, plain = engines(world, "eagle")
    speculative.policy = policies.make("eagle", budget=1)
    result = speculative.generate([0, 1], max_new_tokens=12, **options)
    assert result.token_ids == plain.generate([0, 1], max_new_tokens=12, **options).token_ids
    assert speculative.target.sizes == plain.target.sizes == [1] * 12
    assert result.stats.num_draft_tokens == 0

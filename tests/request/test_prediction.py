"""A predicted text: it changes the speed of an answer, never the answer; who takes one, and who refuses."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

import specengine
from specengine import Engine
from specengine.checking import certify
from specengine.drafters import NO_HINTS, Hints
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.errors import InputError
from tests.engine.engines import PROMPT, engine_of, plainly, tokenizer
from tests.examples import examples
from tests.toy import VOCABULARY, LetterTokenizer, Tables, ToyDrafter, ToyTarget, policy_for, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = st.lists(st.integers(0, 5), max_size=30)


def copying(kind: str) -> NGram | Lookup:
    if kind == "ngram":
        return NGram()
    return Lookup(ToyDrafter(Tables(6, 9), columns=[0, 2, 4], normalized=kind == "sparse"))


@examples(60)
@given(TOKENS, st.sampled_from(["ngram", "lookup", "sparse"]), st.integers(0, 50), st.booleans())
def test_answers_stay_those_of_plain_decoding(
    prediction: list[int], kind: str, seed: int, sampled: bool
) -> None:
    tables = Tables(6, seed=seed, concentration=0.2)
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": sampled,
        **({"seed": seed} if sampled else {}),
    }
    expected = Engine(ToyTarget(tables), None, None).generate([1, 2, 3, 1], **options).token_ids
    engine = Engine(ToyTarget(tables), copying(kind), policy_for("eagle"))
    for predicted in (prediction, expected, [*expected[:9], 0, *expected[10:]], [], None):
        assert engine.generate([1, 2, 3, 1], prediction=predicted, **options).token_ids == expected


@pytest.mark.parametrize("kind", ["ngram", "lookup", "sparse"])
def test_what_was_predicted_is_drafted_from_the_first_token_on(kind: str) -> None:
    tables = Tables(6, seed=4, order=8)
    engine = Engine(ToyTarget(tables), copying(kind), policy_for("chain"))
    answer = engine.generate([1, 2, 3], max_new_tokens=40)
    again = engine.generate([1, 2, 3], max_new_tokens=40, prediction=answer.token_ids)
    assert again.token_ids == answer.token_ids
    assert (
        again.stats.mean_acceptance_length == 5.0
    )  # four drafted tokens and the bonus token in every cycle
    assert answer.stats.mean_acceptance_length < 3.5
    after = engine.generate([1, 2, 3], max_new_tokens=40)  # it is forgotten
    assert after.stats.mean_acceptance_length == answer.stats.mean_acceptance_length


def test_over_a_model_and_by_the_one_call() -> None:
    model, expected = tiny(), plainly("llama", PROMPT, 32)
    options: Any = {"policy": "eagle", "max_new_tokens": 32}  # `auto` may rest
    result = specengine.generate(PROMPT, model, "ngram", prediction=expected, **options)
    without = specengine.generate(PROMPT, model, "ngram", **options)
    assert result.token_ids == without.token_ids == expected
    assert result.stats.mean_acceptance_length > without.stats.mean_acceptance_length


def test_text_is_encoded_without_special_tokens_or_a_template() -> None:
    told = []

    class Told(NGram):
        def begin(self, prompt: list[int], features: Any = None, hints: Hints = NO_HINTS) -> None:
            told.append(list(hints.expected))
            super().begin(prompt, features, hints)

    engine = engine_of("llama", "ngram", tokenizer=tokenizer())
    engine = Engine(engine.target, Told(), engine.policy, engine.tokenizer)
    ids = tokenizer()("One, two", add_special_tokens=False)["input_ids"]
    for given_text in ("One, two", ids, tuple(ids)):
        result = engine.generate(PROMPT, max_new_tokens=2, prediction=given_text)
        assert result.stats.num_generated_tokens == 2
    assert list(engine.answer(PROMPT, max_new_tokens=2, prediction="One, two"))
    engine.generate(PROMPT, max_new_tokens=2, prediction="")
    engine.generate(PROMPT, max_new_tokens=2)
    assert told == [[PROMPT[-1], *ids]] * 4 + [[], []]


@pytest.mark.parametrize("draft", ["small_model", "none"])
def test_drafts_that_copy_nothing_refuse(draft: str) -> None:
    engine = engine_of("llama", draft)
    message = "prediction: .*accepted with ngram and with lookup"
    with pytest.raises(InputError, match=message):
        engine.generate(PROMPT, max_new_tokens=4, prediction=[1, 2])
    assert engine.generate(PROMPT, max_new_tokens=4, prediction=[]).token_ids == plainly(
        "llama", PROMPT, 4
    )


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        (
            [1, VOCABULARY],
            f"prediction: token id {VOCABULARY} is out of range, accepted 0 to {VOCABULARY - 1}",
        ),
        ([-1], "prediction: token id -1 is out of range"),
        ([True], r"prediction: got \[True\], accepted a string or a list of token ids"),
        (["a"], r"prediction: got \['a'\], accepted a string"),
        (5, "prediction: got 5, accepted a string or a list of token ids"),
        ({"type": "content"}, "prediction: got {'type'.*accepted a string"),
        ("caf\udce9", "prediction: character 3 is not Unicode text"),
    ],
    ids=str,
)
def test_wrong_predictions_are_refused_before_anything_is_done(
    prediction: Any, message: str
) -> None:
    engine = engine_of("llama", "ngram", tokenizer=tokenizer())
    with pytest.raises(InputError, match=message):
        engine.stream(PROMPT, prediction=prediction)


def test_text_needs_a_tokenizer() -> None:
    engine = Engine(ToyTarget(Tables(6)), NGram(), policy_for("chain"))
    with pytest.raises(InputError, match="prediction: a string needs a tokenizer"):
        engine.generate([1, 2], prediction="ab")
    engine.tokenizer = LetterTokenizer()
    assert (
        engine.generate([1, 2], prediction="ab", max_new_tokens=3).stats.num_generated_tokens == 3
    )


def test_a_session_predicts_turn_by_turn() -> None:
    engine = engine_of("llama", "ngram", tokenizer=tokenizer())
    session, plain = engine.session(), engine_of("llama", "none", tokenizer=tokenizer()).session()
    for text, prediction in (("one", "two three"), ("two", None), ("three", "\N{EM DASH}four")):
        expected = plain.generate(text, max_new_tokens=12).token_ids
        assert (
            session.generate(text, max_new_tokens=12, prediction=prediction).token_ids == expected
        )


def test_it_can_be_certified() -> None:
    plain, engine = engine_of("llama", "none"), engine_of("llama", "ngram")
    found = certify(plain, engine, PROMPT, prediction=PROMPT, max_new_tokens=12)
    assert found.verdict == "exact"

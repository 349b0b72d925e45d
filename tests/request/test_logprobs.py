"""Log-probabilities of answers and of texts: those of one plain forward of transformers over the whole text."""

import math
from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.engine import TextGeneration
from specengine.errors import EngineBusyError, InputError, NumericalError, UnsupportedModelError
from specengine.models.native import NativeLM
from specengine.records import TokenLogprob
from specengine.request.sampling import of_rows
from tests import toy
from tests.engine.engines import PROMPT, engine_of, tokenizer, untouched
from tests.graphs import engines as padded
from tests.models import native_engines as native
from tests.toy import POLICIES

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "seed": 5}


@torch.inference_mode()
def plain_forward(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens - 1, vocabulary]: log-probabilities after each token but the last."""
    if isinstance(model, NativeLM):
        logits = model.extend(model.new_cache(len(tokens)), tokens, logits="all")[0]
    else:
        logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0]
    return logits[:-1].float().log_softmax(-1).cpu()


def check(
    model: Any,
    prompt: list[int],
    tokens: list[int],
    logprobs: Any,
    count: int,
    tolerance: float = 1e-5,
) -> None:
    rated = plain_forward(model, [*prompt, *tokens])[len(prompt) - 1 :]
    assert [given.token for given in logprobs] == tokens
    for row, token, given in zip(rated, tokens, logprobs, strict=True):
        assert given.logprob == pytest.approx(float(row[token]), abs=tolerance)
        assert [value for _, value in given.top] == pytest.approx(
            row.topk(count).values.tolist(), abs=tolerance
        )
        assert [value for _, value in given.top] == pytest.approx(
            [float(row[i]) for i, _ in given.top], abs=tolerance
        )
        assert len({likely for likely, _ in given.top}) == count


@pytest.mark.sliced(8)
@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [*POLICIES, "plain"])
def test_of_an_answer_under_every_policy(policy: str, way: dict[str, Any]) -> None:
    engine = engine_of("llama", draft="none" if policy == "plain" else "small_model", policy=policy)
    result = engine.generate(PROMPT, max_new_tokens=24, logprobs=3, **way)
    check(untouched("llama"), PROMPT, result.token_ids, result.logprobs, 3)
    without = engine_of("llama", draft="none").generate(PROMPT, max_new_tokens=24, **way)
    assert (result.token_ids, without.logprobs) == (without.token_ids, None)


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_of_an_answer_of_every_family(family: str) -> None:
    result = engine_of(family).generate(PROMPT, max_new_tokens=16, logprobs=2)
    check(untouched(family), PROMPT, result.token_ids, result.logprobs, 2)


@pytest.mark.parametrize(
    "way", [GREEDY, {"temperature": 1.0, "seed": 5}, SAMPLED], ids=["greedy", "drawn", "walked"]
)
@pytest.mark.parametrize("draft", ["small_model", "eagle3", "ngram", "none"])
def test_of_captured_cycles(draft: str, way: dict[str, Any]) -> None:
    engine = padded.engine_of(draft, "talon", captured=True)
    result = engine.generate(PROMPT, max_new_tokens=16, logprobs=3, **way)
    again = engine.generate(PROMPT, max_new_tokens=16, **way)  # the cycles stay on the device
    # padded sums are others
    check(padded.model(), PROMPT, result.token_ids, result.logprobs, 3, tolerance=1e-4)
    assert (again.token_ids, again.logprobs) == (result.token_ids, None)
    assert result.stats.num_accepted_draft_tokens > 0 or draft != "small_model"


@native.needs_extension
@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["none", "small_model"])
def test_of_the_native_forward(draft: str, way: dict[str, Any]) -> None:
    lm = native.lm_of("llama", None, torch.float32)
    drafter = None if draft == "none" else native.drafter_of(draft, lm, "llama", None)
    policy = None if draft == "none" else toy.policy_for("eagle", 3)
    engine = Engine(native.NativeTarget(lm), drafter, policy)
    result = engine.generate(PROMPT, max_new_tokens=16, logprobs=3, **way)
    assert result.token_ids == engine.generate(PROMPT, max_new_tokens=16, **way).token_ids
    text = [*PROMPT, *result.token_ids] * 5
    for model, tolerance in (
        (lm, 1e-5),
        (lm.model, 1e-3),
    ):  # which sums otherwise, and the model is deep
        check(model, PROMPT, result.token_ids, result.logprobs, 3, tolerance)
        check(model, text[:1], text[1:], list(engine.score(text, top=3)), 3, tolerance)


def test_they_end_where_the_answer_ends() -> None:
    engine = engine_of("llama", tokenizer=tokenizer())
    whole = engine.generate(PROMPT, max_new_tokens=24)
    ends = [whole.token_ids[7]]
    for options in (
        {"eos_token_id": ends},
        {"stop_strings": [whole.text[9:11]]},
        {"max_new_tokens": 5},
    ):
        given = {"max_new_tokens": 24, **options}
        stream = engine.stream(PROMPT, logprobs=1, **given)
        streamed = [given for piece in stream for given in piece.cycle.logprobs or ()]
        assert streamed == stream.result.logprobs
        assert len(stream.result.token_ids) < 24
        check(untouched("llama"), PROMPT, stream.result.token_ids, streamed, 1)


def test_in_transformers_output_and_of_none_of_the_likeliest() -> None:
    out = engine_of("llama").generate(
        PROMPT, max_new_tokens=8, logprobs=0, return_dict_in_generate=True
    )
    check(
        untouched("llama"),
        PROMPT,
        out.token_ids,
        [given._replace(top=[]) for given in out.logprobs],
        0,
    )
    assert all(given.top == [] for given in out.logprobs)


@pytest.mark.parametrize("value", [-1, True, 1.5, "3"])
def test_other_numbers_are_refused(value: Any) -> None:
    engine = engine_of("llama")
    with pytest.raises(InputError, match="logprobs"):
        engine.generate(PROMPT, max_new_tokens=8, logprobs=value)
    with pytest.raises(InputError, match="top"):
        engine.score(PROMPT, top=value)


@pytest.mark.parametrize("length", [2, 3, 130, 240])
def test_of_a_text(length: int) -> None:
    engine, text = engine_of("llama"), (PROMPT * 20)[:length]
    engine.generate(PROMPT, max_new_tokens=4)  # whose cache is no part of the text's
    check(untouched("llama"), text[:1], text[1:], list(engine.score(text, top=3)), 3)
    expected = engine_of("llama").generate(text, max_new_tokens=12).token_ids
    assert engine.generate(text, max_new_tokens=12).token_ids == expected
    assert list(engine_of("llama").score([5])) == []


def test_a_text_is_answered_from_what_scoring_has_read() -> None:
    engine, text = engine_of("llama", draft="ngram"), PROMPT * 8
    list(engine.score(text))
    stream = TextGeneration(engine, text, {"max_new_tokens": 12}, reuse_cache=True)
    tokens = [token for piece in stream for token in piece.cycle.tokens]
    assert stream.stats.num_cached_prompt_tokens == len(text) - 1
    assert tokens == engine_of("llama", draft="none").generate(text, max_new_tokens=12).token_ids


def test_scoring_holds_no_logits_of_the_whole_text_and_can_be_left() -> None:
    engine = engine_of("llama")
    rows = []
    rate = engine.target.rate
    engine.target.rate = lambda tokens: rows.append(len(tokens)) or rate(tokens)  # type: ignore[method-assign, func-returns-value]
    scores = engine.score(PROMPT * 9)
    next(scores)
    assert sum(rows) <= 128
    with pytest.raises(EngineBusyError):
        engine.generate(PROMPT, max_new_tokens=4)
    scores.close()  # type: ignore[attr-defined]
    assert len(engine.generate(PROMPT, max_new_tokens=4).token_ids) == 4
    assert max(rows) <= 128


def test_what_is_not_finite_counts_as_impossible() -> None:
    inf = math.inf
    logits = torch.tensor([[1.0, math.nan, inf, 1.0, -inf]])
    found = of_rows(logits, [3], 4)
    half = found[0].logprob
    assert half == pytest.approx(math.log(0.5))
    assert found == [TokenLogprob(3, half, [(0, half), (3, half), (1, -inf), (2, -inf)])]
    engine = engine_of("llama")
    engine.target.rate = lambda tokens: torch.full((len(tokens), 8), math.nan)  # type: ignore[method-assign]
    with pytest.raises(NumericalError, match="position 1 "):
        list(engine.score(PROMPT))
    engine_of("llama").generate(PROMPT, max_new_tokens=2)


def test_a_target_without_a_way_says_so() -> None:
    engine = Engine(toy.ToyTarget(toy.Tables()), None, None)
    with pytest.raises(UnsupportedModelError, match="ToyTarget"):
        list(engine.score([1, 2, 3]))
    assert len(engine.generate([1, 2, 3], max_new_tokens=4, logprobs=2).logprobs) == 4


def test_half_precision_is_rated_in_float32() -> None:
    rows = torch.randn(4, 50).to(torch.bfloat16)
    expected = rows.float().log_softmax(-1)
    for row, found in zip(expected, of_rows(rows, [1, 2, 3, 4], 2), strict=True):
        assert found.logprob == float(row[found.token])

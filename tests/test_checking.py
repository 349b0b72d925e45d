"""Certificates: what is exact, what is rounding, and that real faults are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine, checking, cycle
from specengine.checking import (
    certify,
    huggingface_tokens,
    judge,
    near_tie_logits,
    swap_gap,
    teacher_forced,
)
from specengine.cycle import walk
from specengine.engine import TextGeneration
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.records import GenerationResult
from specengine.request.sampling import History, Sampler, TopP
from tests.toy import byte_tokenizer, hooked, tiny

PROMPT = "the cat and the dog and the cat"
GREEDY = {"max_new_tokens": 24, "temperature": 0.0}
SAMPLED = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Return a model that repeats itself, so that n-gram drafts are accepted."""
    return tiny(initializer_range=0.1)


def engine_for(model: PreTrainedModel, policy: str | None = "plain", **options: Any) -> Engine:
    """Return an engine that keeps no texts: those of one test would be copied in the next."""
    return Engine.from_pretrained(
        model, policy=policy, tokenizer=byte_tokenizer(), memory="off", **options
    )


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Engine:
    return engine_for(model)


@pytest.fixture(scope="module")
def speculative(model: PreTrainedModel) -> Engine:
    """Return an engine that drafts from the first token on: `auto` may rest, and then a fault shows nothing."""
    return engine_for(model, "eagle")


# ---- verdicts


@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLED, {**SAMPLED, "seed": 5}], ids=["greedy", "sampled", "seed"]
)
def test_speculative_decoding_is_certified_exact(
    plain: Engine, speculative: Engine, options: dict[str, Any]
) -> None:
    found = certify(plain, speculative, PROMPT, **options)
    assert found.verdict == "exact"
    assert found.answer.token_ids == found.reference
    assert (found.flips, found.position, found.gap, found.tokens) == ((), None, None, None)


@pytest.fixture
def biased(model: PreTrainedModel) -> Callable[[float], Engine]:
    """Engines on a copy of the model in which every second token's logit is too large by some amount."""

    def make(bias: float) -> Engine:
        copy = tiny(initializer_range=0.1)
        copy.load_state_dict(model.state_dict())
        wrong = torch.zeros(copy.config.vocab_size)
        wrong[::2] = bias
        hooked(copy.lm_head, lambda logits: logits + wrong)
        return engine_for(copy)

    return make


@pytest.mark.parametrize("options", [GREEDY, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
def test_a_bias_is_a_near_tie_within_the_tolerance_and_a_mismatch_beyond(
    plain: Engine, biased: Callable[[float], Engine], options: dict[str, Any]
) -> None:
    # The penalty divides positive logits and so may widen a gap; without it the bias bounds every gap.
    options = {**options, "repetition_penalty": 1.0}
    other = biased(2.0)
    wide = certify(plain, other, PROMPT, tolerance=2.001, **options)
    assert wide.verdict == "near-tie"
    assert wide.flips
    assert all(0 < flip.gap <= 2.001 for flip in wide.flips)
    first = wide.flips[0]
    assert (wide.position, wide.gap, wide.tokens) == (
        first.position,
        first.gap,
        (first.wanted, first.token),
    )
    assert wide.reference[first.position] == first.wanted
    assert wide.reference[: first.position] == wide.answer.token_ids[: first.position]

    of_tokens = judge(plain, PROMPT, wide.answer.token_ids, [], **options)
    assert of_tokens.flips == wide.flips, "the same, of tokens alone"
    assert judge(plain, PROMPT, wide.reference, [], **options).flips == ()
    narrow = certify(plain, other, PROMPT, tolerance=first.gap / 2, **options)
    assert narrow.verdict == "mismatch"
    assert narrow.flip is not None
    assert narrow.flip.gap > narrow.tolerance


def test_a_fault_behind_a_near_tie_is_found(
    plain: Engine, speculative: Engine, monkeypatch: Any
) -> None:
    answer = plain.generate(PROMPT, **GREEDY).token_ids
    best, second = _row(plain, answer, 2).topk(2).values.tolist()
    reference = list(answer)
    # the answer leaves the reference by a near-tie
    reference[2] = int(_row(plain, answer, 2).topk(2).indices[1])
    options = {**GREEDY, "reference": reference, "tolerance": best - second + 1e-3}
    assert certify(plain, speculative, PROMPT, **options).verdict == "near-tie"

    worst, run = int(_row(plain, answer, 20).argmin()), TextGeneration.run

    def faulty(self: TextGeneration) -> GenerationResult:
        result: GenerationResult = run(self)
        result.token_ids[20] = worst
        return result

    monkeypatch.setattr(TextGeneration, "run", faulty)
    found = certify(plain, speculative, PROMPT, **options)
    assert (found.verdict, found.position) == ("mismatch", 20)
    assert found.flips[0].position == 2


def _row(plain: Engine, tokens: list[int], position: int) -> Tensor:
    prompt = plain.stream(PROMPT).prompt
    return list(teacher_forced(plain.target, prompt, tokens))[position]


def test_accepting_drafts_blindly_is_a_mismatch(
    plain: Engine, speculative: Engine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cycle, "walk", accept_blindly)
    found = certify(plain, speculative, PROMPT, **GREEDY)
    assert found.verdict == "mismatch"
    assert found.gap is not None
    assert found.gap > found.tolerance


def accept_blindly(tree: TokenTree, choose: Callable[[int], Any], *how: Any) -> Any:
    """A wrong rule: the first child is taken, whatever the target says."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    first_child = {parent: tokens[node] for node, parent in reversed(list(enumerate(parents)))}
    return walk(tree, lambda node: first_child.get(node, choose(node)), *how)


def test_an_answer_that_ends_too_early_is_a_mismatch(
    plain: Engine, speculative: Engine, monkeypatch: Any
) -> None:
    run = TextGeneration.run

    def short(self: TextGeneration) -> GenerationResult:
        result: GenerationResult = run(self)
        del result.token_ids[-3:]
        return result

    reference = plain.generate(PROMPT, **GREEDY).token_ids
    monkeypatch.setattr(TextGeneration, "run", short)
    found = certify(plain, speculative, PROMPT, reference=reference, **GREEDY)
    assert (found.verdict, found.flips, found.position) == ("mismatch", (), len(reference) - 3)


def test_a_wrong_finish_reason_is_a_mismatch(
    plain: Engine, speculative: Engine, monkeypatch: Any
) -> None:
    reference = plain.generate(PROMPT, **GREEDY).token_ids
    monkeypatch.setattr(
        TextGeneration,
        "run",
        lambda self: GenerationResult("", list(reference), "stop", self.stats, None),
    )
    assert certify(plain, speculative, PROMPT, reference=reference, **GREEDY).verdict == "mismatch"


def test_a_stop_string_ends_as_asked(plain: Engine, speculative: Engine) -> None:
    text = plain.generate(PROMPT, **GREEDY).text
    stop = next(
        character
        for character in text[3:]
        if character.isprintable() and character != "\N{REPLACEMENT CHARACTER}"
    )
    found = certify(plain, speculative, PROMPT, stop_strings=[stop], **GREEDY)
    assert (found.verdict, found.answer.finish_reason) == ("exact", "stop")


def test_a_certificate_becomes_json(plain: Engine, biased: Callable[[float], Engine]) -> None:
    found = certify(plain, biased(50.0), PROMPT, bad_words_ids=[[7]], **GREEDY).to_dict()
    assert found["verdict"] == "mismatch"
    assert found["flips"][0].keys() == {"position", "token", "wanted", "gap"}
    assert all(flip["gap"] is None or math.isfinite(flip["gap"]) for flip in found["flips"])


@pytest.mark.parametrize(
    "name", ["max_time", "stopping_criteria", "streamer", "return_dict_in_generate"]
)
def test_options_that_make_answers_incomparable_are_refused(plain: Engine, name: str) -> None:
    with pytest.raises(InputError, match=name):
        certify(plain, plain, PROMPT, **{name: 1.0})


# ---- gaps


LOGITS = torch.tensor([1.0, 4.0, 3.5, -2.0, 3.0])


def history() -> History:
    return History([0, 1, 2], 4)


@pytest.mark.parametrize(("token", "gap"), [(1, 0.0), (2, 0.5), (4, 1.0), (0, 3.0), (3, 6.0)])
def test_a_greedy_gap_is_a_difference_of_logits(token: int, gap: float) -> None:
    assert swap_gap(Sampler(), LOGITS, history(), token) == pytest.approx(gap, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_sampled_gap_is_one_of_raw_logits(temperature: float) -> None:
    from transformers import TemperatureLogitsWarper

    sampler = Sampler([TemperatureLogitsWarper(temperature)], seed=11)
    chosen = sampler.choose(LOGITS, history())
    for token in range(5):
        gap = swap_gap(sampler, LOGITS, history(), token)
        assert (gap == 0) == (token == chosen)
        raised = LOGITS.clone()
        raised[token] += gap + 1e-3
        assert sampler.choose(raised, history()) == token


def test_a_token_at_the_edge_of_a_nucleus_has_a_small_gap() -> None:
    # Probabilities 0.5, 0.3, 0.2: at top_p just above 0.8 the third is in by a hair, just below it is out.
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    noisy = next(
        seed for seed in range(1000) if Sampler([TopP(0.801)], seed).choose(logits, history()) == 2
    )
    inside, outside = Sampler([TopP(0.801)], noisy), Sampler([TopP(0.799)], noisy)
    other = outside.choose(logits, history())
    assert other is not None
    assert other != 2
    assert 0 < swap_gap(inside, logits, history(), other) < 0.05
    assert 0 < swap_gap(outside, logits, history(), 2) < 0.05


def test_a_banned_token_has_an_infinite_gap() -> None:
    def ban(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([2]), -math.inf)

    assert swap_gap(Sampler([ban]), LOGITS, history(), 2) == math.inf


def test_the_tolerance_follows_the_dtype(plain: Engine) -> None:
    assert near_tie_logits(plain.target) == 1e-3
    assert near_tie_logits(engine_for(tiny().bfloat16()).target) == 0.5
    with pytest.raises(InputError, match="float64"):
        near_tie_logits(engine_for(tiny().double()).target)


def test_teacher_forced_logits_are_those_of_plain_decoding(plain: Engine) -> None:
    tokens = plain.generate(PROMPT, **GREEDY).token_ids
    prompt = plain.stream(PROMPT).prompt
    assert [int(row.argmax()) for row in teacher_forced(plain.target, prompt, tokens)] == tokens


# ---- transformers' generate as the reference


def test_huggingface_tokens_are_those_of_generate(
    model: PreTrainedModel, plain: Engine, speculative: Engine
) -> None:
    options = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    tokens = huggingface_tokens(plain, PROMPT, **options)
    ids = torch.tensor([plain.stream(PROMPT).prompt])
    out = model.generate(
        ids, do_sample=False, max_new_tokens=24, repetition_penalty=1.3, no_repeat_ngram_size=3
    )
    assert tokens == out[0, ids.shape[1] :].tolist()
    assert certify(plain, speculative, PROMPT, reference=tokens, **options).verdict == "exact"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": 1.0}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"max_time": 1.0}, "max_time"),
    ],
)
def test_huggingface_tokens_refuse_what_generate_lacks(
    plain: Engine, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InputError, match=name):
        huggingface_tokens(plain, PROMPT, **options)


def test_only_a_hugging_face_target_has_a_dtype() -> None:
    from tests.toy import Tables, ToyTarget

    with pytest.raises(InputError, match="ToyTarget"):
        checking.near_tie_logits(ToyTarget(Tables()))

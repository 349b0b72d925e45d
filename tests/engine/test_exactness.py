"""Greedy and sampled answers under every policy and eight families: equal to plain decoding."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation import TopPLogitsWarper

from specengine import Engine
from specengine.request.sampling import PresenceFrequencyPenalty, TopP
from tests.engine.engines import (
    PROMPT,
    DependsOnThePath,
    InPlace,
    engine_of,
    model_of,
    plainly,
    untouched,
)
from tests.toy import FAMILIES, POLICIES, VOCABULARY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sliced(10)
@pytest.mark.parametrize("draft", ["ngram", "small_model"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str, policy: str, draft: str) -> None:
    engine = engine_of(family, draft, policy)
    result = engine.generate(PROMPT, max_new_tokens=32)
    assert result.token_ids == plainly(family, PROMPT, 32)
    assert engine.target.cache.length == len(engine.target.tokens) == len(PROMPT) + 31
    if draft == "small_model":
        assert result.stats.num_accepted_draft_tokens >= 5


def test_the_model_stays_usable_by_itself() -> None:
    assert engine_of("qwen2").target.lm.attention in ("tree", "native")
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for options in ({}, {"num_beams": 2}):
        given = [
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
            for model in (model_of("qwen2"), untouched("qwen2"))
        ]
        assert torch.equal(*given)


GREEDY_OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [*([token] for token in range(0, VOCABULARY, 5)), [1, 2], [1, 2, 3]]},
    {"min_new_tokens": 20, "eos_token_id": list(range(0, VOCABULARY, 2))},
    {"suppress_tokens": list(range(0, VOCABULARY, 3))},
    {"sequence_bias": [[[9], 8.0], [[9, 10], -20.0]]},
    {"logits_processor": [DependsOnThePath()]},
    {"logits_processor": [InPlace()], "repetition_penalty": 1.2},
]


@pytest.mark.sliced(10)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", GREEDY_OPTIONS, ids=lambda options: "-".join(options))
def test_greedy_with_processors_equals_transformers_generate(
    policy: str, options: dict[str, Any]
) -> None:
    result = engine_of("gpt2", "small_model", policy).generate(PROMPT, max_new_tokens=24, **options)
    assert (
        result.token_ids
        == greedy_answer(GREEDY_OPTIONS.index(options))
        != plainly("gpt2", PROMPT, 24)
    )
    assert result.stats.num_draft_tokens > 0


@cache  # every policy is compared with the same answers
def greedy_answer(number: int) -> list[int]:
    return plainly("gpt2", PROMPT, 24, **GREEDY_OPTIONS[number])


SAMPLING_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"do_sample": True, "top_k": 5, "min_p": 0.05},
    {"do_sample": True, "repetition_penalty": 1.2, "typical_p": 0.8},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.9, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    {"temperature": 0.8, "logits_processor": [DependsOnThePath(), InPlace()]},
]


@pytest.mark.sliced(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", SAMPLING_OPTIONS, ids=lambda options: "-".join(options))
def test_sampling_equals_plain_sampling_with_the_same_seed(
    policy: str, options: dict[str, Any]
) -> None:
    family = "gpt2" if policy == "random" else "qwen3"
    speculative = engine_of(family, "small_model", policy)
    answers = []
    for seed in (0, 12345678901234567890):
        result = speculative.generate(PROMPT, max_new_tokens=24, seed=seed, **options)
        assert result.token_ids == sampled_answer(family, SAMPLING_OPTIONS.index(options), seed)
        assert result.seed == seed
        answers.append(result.token_ids)
    assert answers[0] != answers[1]


@cache
def sampled_answer(family: str, number: int, seed: int) -> list[int]:
    plain = engine_of(family, "none")
    return plain.generate(
        PROMPT, max_new_tokens=24, seed=seed, **SAMPLING_OPTIONS[number]
    ).token_ids


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"typical_p": 0.5},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
        {
            "no_repeat_ngram_size": 1,
            "bad_words_ids": [[token] for token in range(0, VOCABULARY, 3)],
        },
    ],
    ids=lambda options: "-".join(options),
)
def test_sampling_options_mean_what_they_mean_in_transformers(options: dict[str, Any]) -> None:
    """The same noise on the scores of transformers' own processors, in its own order, gives the same tokens."""
    engine = engine_of("llama", "small_model", "eagle")
    ids, ours, answers, pure = torch.tensor([PROMPT]), [], [], []
    for seed in range(3):
        theirs = engine.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=engine.as_custom_generate(seed=seed),
            max_new_tokens=16,
            pad_token_id=0,
            do_sample=True,
            **options,
        )
        answers += theirs[0, len(PROMPT) :].tolist()
        ours += engine.generate(
            PROMPT, max_new_tokens=16, seed=seed, **{"do_sample": True, **options}
        ).token_ids
        pure += engine.generate(PROMPT, max_new_tokens=16, seed=seed, do_sample=True).token_ids
    assert ours == answers != pure


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    """The OpenAI definition: logit - frequency * count - presence * (count > 0), over what was generated."""
    penalty = PresenceFrequencyPenalty(presence=1.0, frequency=0.25, prompt_length=3)
    scores = torch.zeros(1, 6)
    penalised = penalty(torch.tensor([[5, 5, 1, 2, 2, 0, 2]]), scores)
    assert penalised.tolist() == [[-1.25, 0.0, -1.75, 0.0, 0.0, 0.0]]
    assert not scores.any()
    assert torch.equal(penalty(torch.tensor([[5, 5, 1]]), scores), scores)


def test_penalties_of_an_answer_do_not_count_the_prompt() -> None:
    """The model's choice is the prompt's last token by less than the penalties take, once it counts."""
    presence, frequency, token = 1.0, 0.25, PROMPT[-1]
    model = untouched("llama")
    with torch.inference_mode():
        row = model(torch.tensor([PROMPT])).logits[0, -1]
        bias = float(row.max() - row[token]) + 0.5
        expected: list[int] = []
        for _ in range(12):
            scores = model(torch.tensor([PROMPT + expected])).logits[0, -1].clone()
            scores[token] += bias
            for said in set(expected):
                scores[said] -= presence + frequency * expected.count(said)
            expected.append(int(scores.argmax()))
    assert expected[0] == token
    engine = engine_of("llama", "ngram")
    penalties = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "sequence_bias": {(token,): bias},
    }
    assert engine.generate(PROMPT, max_new_tokens=12, **penalties).token_ids == expected


def test_top_p_leaves_out_what_begins_at_its_edge() -> None:
    """Of equal tokens, whose probabilities are exact, a mass of exactly top_p is enough."""
    for count, top_p, kept in ((2, 0.5, 1), (4, 0.25, 1), (4, 0.5, 2), (4, 0.75, 3), (8, 0.5, 4)):
        scores = torch.zeros(1, count)
        ours, theirs = TopP(top_p)(None, scores), TopPLogitsWarper(top_p)(None, scores)
        assert int(ours.isfinite().sum()) == int(theirs.isfinite().sum()) == kept


def test_top_p_keeps_what_transformers_keeps() -> None:
    torch.manual_seed(0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for spread, top_p in itertools.product((0.1, 1.0, 4.0), (0.01, 0.3, 0.9, 0.999)):
        scores = spread * torch.randn(1, 3000)
        ours, theirs = TopP(top_p, first=16)(ids, scores), TopPLogitsWarper(top_p)(ids, scores)
        differing = (ours > -float("inf")) != (theirs > -float("inf"))
        assert int(differing.sum()) <= 1  # the last one in, where both sums round differently
        kept = (ours > -float("inf")) & ~differing
        assert torch.equal(ours[kept], scores[kept])


@pytest.mark.sliced(1)
@pytest.mark.model
@pytest.mark.parametrize("policy", ["chain", "eagle", "fixed"])
def test_the_default_model_answers_as_transformers_does(
    policy: str, default_model_path: Path
) -> None:
    model, token = _default_model(default_model_path)
    engine = Engine.from_pretrained(model, "ngram", policy, tokenizer=token)
    for prompt in (
        "Count from one to twelve in words.",
        "Repeat three times: the quick brown fox jumps.",
    ):
        assert engine.generate(prompt, max_new_tokens=32).token_ids == _its_own_answer(
            default_model_path, prompt
        )


@cache
def _default_model(path: Path) -> tuple[PreTrainedModel, Any]:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32
    ), AutoTokenizer.from_pretrained(path)


@cache
def _its_own_answer(path: Path, prompt: str) -> list[int]:
    model, token = _default_model(path)
    messages = [{"role": "user", "content": prompt}]
    ids = token.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return model.generate(**ids, max_new_tokens=32, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ].tolist()

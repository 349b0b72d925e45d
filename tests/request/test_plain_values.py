"""Options and prompts as numbers and arrays of numpy and torch, and numbers at the edge of what float32 holds."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from specengine import Engine
from specengine.errors import InputError
from specengine.registry import plain
from tests.engine.engines import PROMPT, engine_of, tokenizer
from tests.toy import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

VALUES: dict[str, Any] = {
    "max_new_tokens": 5,
    "do_sample": True,
    "temperature": 0.75,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.5,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[40], [41, 42]],
    "sequence_bias": [[[40], 2.5], [[41, 42], -1.5]],
    "suppress_tokens": [40, 41],
    "min_new_tokens": 2,
    "seed": 3,
    "coupled": False,
    "eos_token_id": [40, 41],
    "stop_strings": ["a", "b"],
    "max_time": 60.5,
    "raw": True,
    "allow_special_text": True,
    "json_object": False,
    "prediction": [40, 41],
    "logprobs": 2,
    "return_dict_in_generate": True,
}


def as_numpy(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, list) for item in value):
        return [as_numpy(item) for item in value]
    return [as_numpy(item) for item in value] if _ragged(value) else np.array(value)[()]


def as_array(value: Any) -> Any:
    return as_numpy(value) if _ragged(value) else np.asarray(value)


def as_tensor(value: Any) -> Any:
    texts = isinstance(value, list) and isinstance(value[0], str)
    return as_numpy(value) if texts or _ragged(value) else torch.tensor(value)


def _ragged(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], list)


@pytest.mark.parametrize("form", [as_numpy, as_array, as_tensor])
@pytest.mark.parametrize("name", VALUES)
def test_every_option_may_be_numpys_or_torchs(name: str, form: Any) -> None:
    engine = engine_of(draft="ngram", tokenizer=tokenizer())
    options: dict[str, Any] = {"max_new_tokens": 4, "seed": 3} | (
        {"temperature": 1.0} if name != "do_sample" else {}
    )
    expected = engine.generate(PROMPT, **options | {name: VALUES[name]})
    found = engine.generate(PROMPT, **options | {name: form(VALUES[name])})
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_prompts_of_any_whole_dtype(dtype: Any) -> None:
    engine = engine_of("llama", "none")
    expected = engine.generate(PROMPT, max_new_tokens=3).token_ids
    given = np.array(PROMPT, dtype=dtype)
    for prompt in (
        given,
        given[None],
        list(given),
        tuple(given),
        torch.from_numpy(given),
        torch.from_numpy(given)[None],
    ):
        assert engine.generate(prompt, max_new_tokens=3).token_ids == expected
    assert (
        engine.generate([torch.tensor(token) for token in PROMPT], max_new_tokens=3).token_ids
        == expected
    )


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array(["a"]),
        np.array([[1, 2], [3, 4]]),
        np.array(7),
        np.array([], dtype=np.int64),
        np.zeros((1, 2, 3), dtype=np.int64),
        [np.float32(1), np.float32(2)],
        [np.True_],
        [np.array([1, 2])],
        torch.ones(3, dtype=torch.bool),
        torch.empty(4, dtype=torch.int64, device="meta"),
    ],
    ids=str,
)
def test_arrays_that_are_no_prompt_are_refused(prompt: Any) -> None:
    with pytest.raises(InputError, match=r"prompt: "):
        engine_of("llama", "none").generate(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": np.True_},
        {"max_new_tokens": np.float64(5)},
        {"max_new_tokens": torch.tensor([5])},
        {"max_new_tokens": torch.tensor(5, device="meta")},
        {"seed": torch.tensor(True)},
        {"temperature": np.bool_(False)},
        {"temperature": np.array([0.5])},
        {"top_k": np.int64(-1)},
        {"eos_token_id": np.array([[3]])},
        {"eos_token_id": torch.tensor([True])},
        {"eos_token_id": np.float64(3.0)},
        {"logprobs": np.float32(2)},
        {"raw": np.int64(1)},
        {"stop_strings": np.array([1])},
        {"prediction": np.array([1.5])},
    ],
    ids=str,
)
def test_another_kind_is_still_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        engine_of(draft="ngram", tokenizer=tokenizer()).generate(PROMPT, **options)


def test_configs_policies_drafts_and_scores_take_them_too() -> None:
    engine = engine_of(draft="ngram")
    config = GenerationConfig(
        max_new_tokens=np.int64(5), eos_token_id=torch.tensor([40]), repetition_penalty=1.5
    )
    expected = engine.generate(
        PROMPT, max_new_tokens=5, eos_token_id=40, repetition_penalty=1.5
    ).token_ids
    assert engine.generate(PROMPT, generation_config=config).token_ids == expected
    assert list(engine.score(np.array(PROMPT), top=np.int64(2))) == list(
        engine.score(PROMPT, top=2)
    )  # type: ignore[arg-type]
    with pytest.raises(InputError, match="top: got True, accepted 0 or more"):
        engine.score(PROMPT, top=True)
    for width in (np.int64(3), torch.tensor(3), np.array(3)):
        shape = {"width": width}
        assert engine.generate(
            PROMPT, max_new_tokens=4, policy="eagle", policy_options=shape
        ).token_ids
        options = {
            "draft_options": {"longest": width},
            "policy_options": shape,
            "strict": np.False_,
        }
        loaded = Engine.from_pretrained(tiny(), "ngram", "eagle", **options)
        assert loaded.policy is not None
        assert (loaded.policy.width, type(loaded.policy.width)) == (3, int)  # type: ignore[attr-defined]


def test_what_plain_makes_of_values() -> None:
    assert plain({np.int64(1): [np.float32(0.5), (torch.tensor(2),)]}) == {1: [0.5, (2,)]}
    assert plain(Fraction(1, 2)) == 0.5
    assert plain(np.array([["a"]])) == [["a"]]
    itself: list[Any] = []
    itself.append(itself)
    assert isinstance(plain(itself), list)


# ---- the edges of float32


@pytest.mark.parametrize("temperature", [9.9e-6, 1e-7, 1e-20, 1e-38, 1e-40, 5e-324])
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"top_p": 0.5, "top_k": 3}, {"do_sample": False}], ids=str
)
def test_hardly_any_temperature_is_none(temperature: float, options: dict[str, Any]) -> None:
    engine = engine_of(draft="ngram")
    found = engine.generate(PROMPT, max_new_tokens=8, temperature=temperature, **options)
    assert found.token_ids == engine.generate(PROMPT, max_new_tokens=8).token_ids
    assert found.seed is None


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-5},
        {"temperature": 1e30},
        {"top_p": 5e-324},
        {"top_p": 1e-45},
        {"min_p": 1.0},
        {"min_p": 5e-324},
        {"typical_p": 5e-324},
        {"top_k": 10**400},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": 1e-30},
        {"presence_penalty": 1e30, "frequency_penalty": 1e30},
        {"presence_penalty": -1e30, "frequency_penalty": -1e30},
        {"no_repeat_ngram_size": 10**20},
        {"max_time": 1e30},
        {"max_new_tokens": 10**5000},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_extreme_options_give_an_answer(options: dict[str, Any], scale: float) -> None:
    engine = engine_of(draft="ngram")
    given: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 6} | options
    found = engine.generate(PROMPT, logits_processor=[lambda ids, rows: rows * scale], **given)
    assert found.token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 5e-324},
        {"min_new_tokens": 10**5000},
        {"seed": 10**5000},
        {"eos_token_id": -(10**5000)},
        {"temperature": 10**5000},
        {"sequence_bias": {(3,): float("inf")}},
        {"sequence_bias": {(3,): float("nan")}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_extreme_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        engine_of("llama", "none").generate(PROMPT, **{"max_new_tokens": 4} | options)

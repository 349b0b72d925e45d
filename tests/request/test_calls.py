"""Calls written as for transformers' `generate`: what passes, and what is said of the rest."""

from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import specengine
from specengine.errors import InputError
from specengine.request.configs import read_call
from tests.engine.engines import engine_of, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [5, 6, 7]


def encoded(rows: int = 1, last: int = 1) -> BatchEncoding:
    """Return what a tokenizer returns for so many texts; last: of the attention mask."""
    return BatchEncoding(
        {
            "input_ids": torch.tensor([IDS] * rows),
            "token_type_ids": torch.zeros(rows, len(IDS), dtype=torch.int64),
            "attention_mask": torch.tensor([[1, 1, last]] * rows),
        }
    )


def test_a_call_for_transformers_gives_the_same_answer() -> None:
    engine = engine_of(tokenizer=tokenizer())
    answer = engine.generate(IDS, max_new_tokens=6).token_ids
    flat: dict[str, Any] = {"input_ids": IDS, "attention_mask": [1, 1, 1]}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (None, dict(encoded())),
        (encoded(), {}),
        (flat, {}),
        (None, flat),
        (None, {"inputs": torch.tensor([IDS]), "attention_mask": None}),
        (IDS, {"pad_token_id": 0, "use_cache": True, "num_beams": 1, "num_return_sequences": 1}),
        (IDS, {"use_cache": False, "output_scores": False, "early_stopping": True}),
    ]
    for prompt, options in calls:
        assert engine.generate(prompt, max_new_tokens=6, **options).token_ids == answer, options
    assert engine.stream(**encoded()).prompt == IDS
    results = engine.generate_many(torch.tensor([IDS, IDS]), max_new_tokens=6, use_cache=True)
    assert [result.token_ids for result in results] == [answer, answer]


def test_messages_may_be_named() -> None:
    engine = engine_of(tokenizer=tokenizer())
    messages = [{"role": "user", "content": "Hello"}]
    assert engine.stream(messages=messages).prompt == engine.stream("Hello").prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_beams": 4},
            r"num_beams: got 4, accepted 1: one answer .* generate_many\(\[prompt\] \* 4",
        ),
        ({"num_return_sequences": 2}, "num_return_sequences: got 2, accepted 1: .*generate_many"),
        ({"attention_mask": [[0, 1]]}, "attention_mask: got .* without padding.* generate_many"),
        ({"attention_mask": torch.tensor([0, 1])}, r"attention_mask: got \[0, 1\], accepted 1:"),
        ({"token_type_ids": [0, 1]}, "token_type_ids: got"),
        ({"output_scores": True}, "output_scores: got True, accepted False: leave it out"),
        ({"assistant_model": "M"}, "assistant_model: got 'M', .* as draft="),
        ({"tokenizer": object()}, "tokenizer: got .* as tokenizer="),
        ({"cache_implementation": "quantized"}, "unknown option 'cache_implementation'"),
        ({"max_length": 9}, "unknown option 'max_length'.* did you mean max_new_tokens"),
        ({"no_such": None}, "unknown option 'no_such'"),
        ({"input_ids": IDS}, "prompt: got prompt and input_ids, accepted one of prompt, input_ids"),
    ],
)
def test_other_arguments_are_refused_with_what_to_write(options: Any, message: str) -> None:
    engine = engine_of(tokenizer=tokenizer())
    with pytest.raises(InputError, match=message):
        engine.generate(IDS, **options)
    assert not engine.is_busy


def test_several_rows_are_for_generate_many() -> None:
    engine = engine_of(tokenizer=tokenizer())
    with pytest.raises(InputError, match=r"batch of 2, accepted one sequence.* generate_many"):
        engine.generate(**encoded(rows=2))
    with pytest.raises(InputError, match=r"attention_mask: got .* generate_many"):
        engine.generate(**encoded(rows=2, last=0))


@pytest.mark.parametrize("prompts", ["hello", b"hello", {"input_ids": [IDS]}])
def test_generate_many_refuses_one_prompt(prompts: Any) -> None:
    with pytest.raises(
        InputError, match=r"prompts: got .* a list of prompts; generate answers one"
    ):
        engine_of().generate_many(prompts)


@pytest.mark.parametrize("prompts", [True, 1, float("nan"), None])
def test_generate_many_refuses_what_is_no_list(prompts: Any) -> None:
    with pytest.raises(InputError, match=r"prompts: got (True|1|nan|None), accepted a list of"):
        engine_of().generate_many(prompts)


def test_habits_of_other_libraries_work_or_are_told_what_to_write() -> None:
    engine = engine_of(tokenizer=tokenizer())
    result = engine.generate("Hello", max_new_tokens=4)
    assert engine("Hello", max_new_tokens=4).token_ids == result.token_ids
    with pytest.raises(TypeError, match=r"one answer, no list: write result\.text, or .*token_ids"):
        result[0]
    texts = ["Hello", "there"]
    with pytest.raises(InputError, match=r"for several texts pass input_ids without padding"):
        engine.generate_many(tokenizer()(texts))
    answers = engine.generate_many(tokenizer()(texts)["input_ids"], max_new_tokens=4)
    assert len(answers) == 2
    with pytest.raises(InputError, match=r"messages: got 'Be brief', accepted a list of messages"):
        engine.session("Be brief")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="text: got True, accepted a string"):
        engine.session().generate(True)  # type: ignore[call-overload]


def test_a_call_without_a_prompt_names_what_can_be_one() -> None:
    with pytest.raises(InputError, match="prompt: got none, accepted one of prompt, input_ids"):
        engine_of().stream(max_new_tokens=2)
    with pytest.raises(InputError, match="prompt: got none, accepted one of prompt, input_ids"):
        read_call(None, {"inputs": None})


def test_the_one_call_takes_messages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tokenizer=tokenizer())
    monkeypatch.setattr(specengine.Engine, "from_pretrained", lambda *_, **options: engine)
    answer = specengine.generate(messages=[{"role": "user", "content": "Hello"}], max_new_tokens=4)
    assert answer.token_ids == engine.generate("Hello", max_new_tokens=4).token_ids

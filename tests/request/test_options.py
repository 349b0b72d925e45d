"""Forms of prompts and of results, generation configs, limits and seeds."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from specengine import Engine
from specengine.errors import InputError
from specengine.records import GenerationResult, SpeculativeOutput
from tests.engine.engines import PROMPT, engine_of, forced, plainly, tokenizer
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_prompts_may_be_text_messages_ids_or_tensors() -> None:
    engine = engine_of(tokenizer=tokenizer())
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    forms = [
        "Hello",
        messages,
        ids,
        tuple(ids),
        torch.tensor(ids),
        torch.tensor([ids], dtype=torch.int32),
    ]
    answers = [engine.generate(form, max_new_tokens=6).token_ids for form in forms]
    assert answers == [answers[0]] * len(forms)
    raw = tokenizer()("Hello")["input_ids"]
    assert engine.generate("Hello", raw=True, max_new_tokens=6).stats.num_prompt_tokens == len(raw)
    engine.tokenizer = byte_tokenizer(template=None)
    assert engine.generate("Hello", max_new_tokens=6).stats.num_prompt_tokens == len(raw)


def test_return_dict_in_generate_says_what_comes_back() -> None:
    engine = engine_of(tokenizer=tokenizer())
    result = engine.generate("Hello", max_new_tokens=6)
    assert isinstance(result, GenerationResult)
    output = engine.generate("Hello", max_new_tokens=6, return_dict_in_generate=True)
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences.shape == (1, result.stats.num_prompt_tokens + 6)
    assert (output.token_ids, output.text, output.finish_reason) == (
        result.token_ids,
        result.text,
        "length",
    )
    assert output.stats.num_generated_tokens == 6
    sequences = engine.generate("Hello", max_new_tokens=6, return_dict_in_generate=False)
    assert torch.equal(sequences, output.sequences)
    assert sequences[0, -6:].tolist() == result.token_ids


def test_a_transformers_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of("llama", "none", tokenizer=tokenizer())
    streamer = TextStreamer(tokenizer(), skip_prompt=True, skip_special_tokens=True)
    engine.generate(
        "Hello", max_new_tokens=20, streamer=streamer, logits_processor=[forced("one two three ")]
    )
    assert capsys.readouterr().out == "one two three one tw\n"


def test_generation_config_is_honoured_and_options_go_before_it() -> None:
    engine = engine_of()
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3, eos_token_id=None)
    result = engine.generate(PROMPT, generation_config=config)
    assert result.token_ids == plainly("llama", PROMPT, 9, repetition_penalty=1.3)
    assert (
        engine.generate(PROMPT, generation_config=config, max_new_tokens=4).token_ids
        == result.token_ids[:4]
    )
    eos = result.token_ids[2]
    stopped = engine.generate(
        PROMPT, generation_config=GenerationConfig(eos_token_id=eos, repetition_penalty=1.3)
    )
    assert (stopped.token_ids, stopped.finish_reason) == (result.token_ids[:3], "stop")
    endless = engine.generate(
        PROMPT, generation_config=GenerationConfig(eos_token_id=[eos, 259]), eos_token_id=[]
    )
    assert len(endless.token_ids) == 256 - len(
        PROMPT
    )  # the context is full before the default of 256 new tokens


def test_the_models_own_generation_config_is_the_default() -> None:
    model = tiny("llama")
    first = plainly("llama", PROMPT, 3)[2]
    model.generation_config = GenerationConfig(eos_token_id=first, pad_token_id=0)
    engine = Engine.from_pretrained(model, "ngram")
    assert (
        engine.generate(PROMPT).token_ids
        == plainly("llama", PROMPT, 3)[: plainly("llama", PROMPT, 3).index(first) + 1]
    )
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=12)
    sampled = engine.generate(PROMPT, seed=4)
    assert (
        sampled.token_ids
        == engine_of("llama", "none")
        .generate(PROMPT, temperature=0.7, seed=4, max_new_tokens=12)
        .token_ids
    )
    assert engine.generate(PROMPT, do_sample=False).token_ids == plainly("llama", PROMPT, 12)
    assert engine.generate(PROMPT, temperature=0).seed is None


def test_a_temperature_in_a_config_that_does_not_sample_means_nothing() -> None:
    """As in transformers: only a temperature given to `generate` itself implies sampling."""
    engine = engine_of()
    config = GenerationConfig(temperature=0.5, max_new_tokens=8)
    assert engine.generate(PROMPT, generation_config=config).token_ids == plainly(
        "llama", PROMPT, 8
    )


def test_max_length_counts_the_prompt_as_in_transformers() -> None:
    engine = engine_of()
    config = GenerationConfig(max_length=len(PROMPT) + 5)
    assert engine.generate(PROMPT, generation_config=config).token_ids == plainly(
        "llama", PROMPT, 5
    )
    assert len(engine.generate(PROMPT, generation_config=config, max_new_tokens=7).token_ids) == 7
    with pytest.raises(
        InputError,
        match=r"generation_config\.max_length: got 5, accepted a whole number, 27 or more",
    ):
        engine.generate(PROMPT, generation_config=GenerationConfig(max_length=5))


@pytest.mark.parametrize(
    "field",
    [
        {"num_beams": 2},
        {"num_return_sequences": 3, "do_sample": True},
        {"output_scores": True},
        {"output_logits": True},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True},
        {"guidance_scale": 2.0},
        {"num_beams": 0},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
        {"token_healing": True},
        {"penalty_alpha": 0.6},
        {"force_words_ids": [[3]]},
        {"constraints": [3]},
    ],
    ids=lambda field: next(iter(field)),
)
def test_unsupported_generation_config_names_itself(field: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=rf"generation_config\.{next(iter(field))}: .* not supported"
    ):
        engine_of("llama", "none").generate(PROMPT, generation_config=GenerationConfig(**field))


def test_max_time_ends_with_the_criteria_reason() -> None:
    result = engine_of().generate(PROMPT, max_time=1e-9, max_new_tokens=50)
    assert (result.finish_reason, len(result.token_ids)) == ("criteria", 1)


def test_the_seed_comes_from_torchs_generator() -> None:
    engine = engine_of()
    answers = []
    for torch_seed in (3, 3, 4):
        torch.manual_seed(torch_seed)
        answers.append(engine.generate(PROMPT, max_new_tokens=16, temperature=1.0))
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids
    assert answers[0].seed == answers[1].seed != answers[2].seed
    repeated = engine.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=answers[2].seed)
    assert repeated.token_ids == answers[2].token_ids
    state = torch.get_rng_state()
    engine.generate(PROMPT, max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), state)  # greedy decoding draws nothing


def test_what_shapes_a_draw_is_refused_where_none_is_asked_for() -> None:
    engine = engine_of("llama", "none")
    for given in (
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"typical_p": 0.9},
    ):
        with pytest.raises(InputError, match=f"{next(iter(given))}: got .* do_sample=False"):
            engine.generate(PROMPT, do_sample=False, **given)
    neutral = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    assert len(engine.generate(PROMPT, do_sample=False, max_new_tokens=2, **neutral).token_ids) == 2

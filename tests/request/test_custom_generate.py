"""The engine inside transformers' own generate."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StopStringCriteria

from specengine.errors import InputError
from specengine.records import SpeculativeOutput
from tests.engine.engines import PROMPT, DependsOnThePath, engine_of, plainly, tokenizer, untouched
from tests.toy import POLICIES, RecordingStreamer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sliced(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_custom_generate_equals_generate(policy: str) -> None:
    engine = engine_of("llama", "small_model", policy, tokenizer())
    ids = torch.tensor([PROMPT])
    common = {
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 24,
    }
    eos = plainly("llama", PROMPT, 12)[11]
    for options in (
        {},
        {"repetition_penalty": 1.3},
        {"eos_token_id": eos},
        {"logits_processor": [DependsOnThePath()]},
    ):
        custom = engine.as_custom_generate()
        ours = engine.target.model.generate(ids, custom_generate=custom, **common, **options)
        theirs = untouched("llama").generate(ids, **common, **options)
        assert torch.equal(ours, theirs)
        assert custom.stats.num_generated_tokens == ours.shape[1] - len(PROMPT)


def test_custom_generate_with_stop_strings_streamer_dict_and_seed() -> None:
    engine = engine_of("llama", "small_model", "eagle", tokenizer())
    model, ids = engine.target.model, torch.tensor([PROMPT])
    common = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 24}

    text = tokenizer().decode(plainly("llama", PROMPT, 24))
    # as a criterion: transformers hands stop_strings= no tokenizer where custom_generate is a function
    stop = {
        "stopping_criteria": [StopStringCriteria(tokenizer(), [text[8:10]])],
        "do_sample": False,
    }
    streamer = RecordingStreamer()
    ours = model.generate(
        ids, custom_generate=engine.as_custom_generate(streamer), **common, **stop
    )
    assert torch.equal(ours, untouched("llama").generate(ids, **common, **stop))
    assert ours.shape[1] < len(PROMPT) + 24
    assert streamer.puts[0] == PROMPT
    assert [token for tokens in streamer.puts[1:] for token in tokens] == ours[
        0, len(PROMPT) :
    ].tolist()
    assert streamer.ended == 1

    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 0}
    once = model.generate(
        ids, custom_generate=engine.as_custom_generate(seed=5), **common, **sampled
    )
    again = engine.generate(PROMPT, max_new_tokens=24, temperature=0.9, seed=5)
    assert once[0, len(PROMPT) :].tolist() == again.token_ids
    torch.manual_seed(8)
    first = model.generate(ids, custom_generate=engine.as_custom_generate(), **common, **sampled)
    torch.manual_seed(8)
    assert torch.equal(
        first, model.generate(ids, custom_generate=engine.as_custom_generate(), **common, **sampled)
    )

    output = model.generate(
        ids,
        custom_generate=engine.as_custom_generate(),
        return_dict_in_generate=True,
        do_sample=False,
        **common,
    )
    assert isinstance(output, SpeculativeOutput)
    assert output.token_ids == plainly("llama", PROMPT, 24)
    assert output.stats.num_generated_tokens == 24


def test_custom_generate_refuses_what_it_cannot_do() -> None:
    engine = engine_of("llama", "none")
    custom, model, ids = engine.as_custom_generate(), engine.target.model, torch.tensor([PROMPT])
    one = torch.ones_like(ids)
    common = {"custom_generate": custom, "pad_token_id": 0, "max_new_tokens": 4}
    with pytest.raises(InputError, match="got a batch of 2"):
        model.generate(ids.repeat(2, 1), attention_mask=one.repeat(2, 1), **common)
    padded = one.clone()
    padded[0, 0] = 0
    with pytest.raises(InputError, match="attention_mask: padded prompts"):
        model.generate(ids, attention_mask=padded, **common)
    with pytest.raises(InputError, match="output_scores: True is not supported"):
        model.generate(ids, attention_mask=one, output_scores=True, **common)
    with pytest.raises(InputError, match="another model than the engine's target"):
        untouched("llama").generate(ids, attention_mask=one, **common)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams: 2 is not supported"),
        (
            {"num_return_sequences": 2, "do_sample": True},
            "num_return_sequences: 2 is not supported",
        ),
        ({"position_ids": torch.arange(len(PROMPT))[None] + 3}, "position_ids: accepted 0, 1, 2"),
        ({"past_key_values": DynamicCache()}, "past_key_values: not supported"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: the engine drafts"),
    ],
)
def test_custom_generate_names_what_it_cannot_do(options: dict[str, Any], message: str) -> None:
    engine = engine_of("llama", "none")
    model, ids = engine.target.model, torch.tensor([PROMPT])
    common = {
        "custom_generate": engine.as_custom_generate(),
        "pad_token_id": 0,
        "max_new_tokens": 4,
    }
    with pytest.raises(InputError, match=message):
        model.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)


def test_custom_generate_takes_positions_that_are_the_usual_ones() -> None:
    engine = engine_of("llama", "none")
    model, ids = engine.target.model, torch.tensor([PROMPT])
    options = {"pad_token_id": 0, "max_new_tokens": 4, "do_sample": False, "use_cache": False}
    given = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(len(PROMPT))[None],
    }
    ours = model.generate(ids, custom_generate=engine.as_custom_generate(), **given, **options)
    assert ours[0, len(PROMPT) :].tolist() == plainly("llama", PROMPT, 4)


def test_custom_generate_takes_tokens_and_no_other_inputs() -> None:
    engine = engine_of("llama", "none")
    model, ids = engine.target.model, torch.tensor([PROMPT])
    common = {
        "custom_generate": engine.as_custom_generate(),
        "pad_token_id": 0,
        "max_new_tokens": 4,
    }
    with pytest.raises(InputError, match="inputs_embeds: not supported"):
        model.generate(
            inputs_embeds=model.get_input_embeddings()(ids),
            attention_mask=torch.ones_like(ids),
            **common,
        )
    with pytest.raises(InputError, match="token_type_ids: not supported"):
        engine.as_custom_generate()(model, ids, token_type_ids=torch.ones_like(ids))


@pytest.mark.parametrize(("seed", "streamer"), [(-1, None), ("x", None), (True, None), (None, 5)])
def test_what_is_bound_to_custom_generate_is_checked(seed: Any, streamer: Any) -> None:
    with pytest.raises(InputError, match="seed: got" if streamer is None else "streamer: got"):
        engine_of("llama", "none").as_custom_generate(streamer, seed)

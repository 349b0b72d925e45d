"""Every field of transformers' GenerationConfig changes the answer as it does there, is refused, or has no effect."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from specengine import Engine
from specengine.errors import InputError
from specengine.request.configs import PROCESSED, WITHOUT_EFFECT
from tests.engine.engines import PROMPT, engine_of, tokenizer, untouched

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 8
GREEDY = {"do_sample": False}
ONE = {"do_sample": True, "top_k": 1}
# By field: what makes an answer another one, the field among it; said are the tokens of the plain answer.
CHANGES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "max_new_tokens": lambda said: {"max_new_tokens": 5},
    "max_length": lambda said: {"max_new_tokens": None, "max_length": len(PROMPT) + 3},
    "max_time": lambda said: {"max_time": 1e-9},
    "eos_token_id": lambda said: {"eos_token_id": said[2]},
    "min_length": lambda said: {"eos_token_id": said[2], "min_length": len(PROMPT) + 6},
    "min_new_tokens": lambda said: {"eos_token_id": said[2], "min_new_tokens": 5},
    "repetition_penalty": lambda said: {"repetition_penalty": 0.2},
    "no_repeat_ngram_size": lambda said: {"repetition_penalty": 0.2, "no_repeat_ngram_size": 1},
    "bad_words_ids": lambda said: {"bad_words_ids": [[said[0]]]},
    "sequence_bias": lambda said: {"sequence_bias": [[[said[0]], -9.0]]},
    "suppress_tokens": lambda said: {"suppress_tokens": [said[1]]},
    "begin_suppress_tokens": lambda said: {"begin_suppress_tokens": [said[0]]},
    "forced_eos_token_id": lambda said: {"forced_eos_token_id": 3},
    "exponential_decay_length_penalty": lambda said: {
        "eos_token_id": said[6], "exponential_decay_length_penalty": (1, 50.0)
    },
    "typical_p": lambda said: {"do_sample": True, "top_k": 0, "typical_p": 1e-9},
}  # fmt: skip
# By field: values with which a draw is the likeliest token, or a prompt of several tokens is not changed.
SAME: dict[str, dict[str, Any]] = {
    "do_sample": ONE,
    "top_k": ONE,
    "temperature": {"do_sample": True, "top_k": 0, "temperature": 1e-4},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 1e-6},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 1.0},
    "top_h": {"do_sample": True, "top_k": 0, "top_h": 1e-6},
    "epsilon_cutoff": {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.999},
    "eta_cutoff": {"do_sample": True, "top_k": 0, "eta_cutoff": 0.999, "temperature": 1e-3},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "use_cache": {"use_cache": True},
    "low_memory": {"low_memory": True},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "pad_token_id": {"pad_token_id": 4},
    "bos_token_id": {"bos_token_id": 4},
    "decoder_start_token_id": {"decoder_start_token_id": 4},
    "early_stopping": {"early_stopping": True},
    "length_penalty": {"length_penalty": 0.3},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
}
REFUSED: dict[str, Any] = {
    "num_beams": 3,
    "num_return_sequences": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [1],
    "force_words_ids": [[3]],
    "dola_layers": "low",
    "penalty_alpha": 0.6,
    "token_healing": True,
    "is_assistant": True,
    "guidance_scale": 1.5,
    "encoder_repetition_penalty": 1.3,
    "encoder_no_repeat_ngram_size": 2,
    "watermarking_config": WatermarkingConfig(),
    "cache_implementation": "quantized",
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}
ELSEWHERE = {
    "return_dict_in_generate": "says what comes back",
    "stop_strings": "needs a tokenizer, which transformers does not hand to a function",
}


def theirs(fields: dict[str, Any]) -> list[int]:
    ids = torch.tensor([PROMPT])
    config = GenerationConfig(**{"max_new_tokens": COUNT} | fields)
    return (
        untouched()
        .generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
            0, len(PROMPT) :
        ]
        .tolist()
    )


def own(engine: Engine, fields: dict[str, Any]) -> list[int]:
    return engine.generate(
        PROMPT, generation_config=GenerationConfig(**{"max_new_tokens": COUNT} | fields)
    ).token_ids


def inside(engine: Engine, fields: dict[str, Any]) -> list[int]:
    """Return the answer of transformers' generate through `custom_generate`."""
    ids, config = torch.tensor([PROMPT]), GenerationConfig(**{"max_new_tokens": COUNT} | fields)
    custom = engine.as_custom_generate()
    out = engine.target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=custom
    )
    return out[0, len(PROMPT) :].tolist()


def test_every_field_has_its_place() -> None:
    """A field of a newer transformers is none of these, and refused."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    places = [
        set(CHANGES),
        set(SAME) | set(WITHOUT_EFFECT) - set(REFUSED),
        set(REFUSED),
        set(ELSEWHERE),
    ]
    assert fields <= set().union(*places)
    twice = [name for name in fields if sum(name in place for place in places) > 1]
    assert twice == ["max_length"]
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_the_answer_as_in_transformers(name: str) -> None:
    engine, said = engine_of("llama", "ngram"), theirs(GREEDY)
    fields = GREEDY | CHANGES[name](said)
    expected = theirs(fields)
    torch.manual_seed(0)
    assert expected != theirs({other: value for other, value in fields.items() if other != name})
    assert own(engine, fields) == expected
    assert inside(engine, fields) == expected


@pytest.mark.parametrize("name", [name for name in SAME if hasattr(GenerationConfig(), name)])
def test_a_field_leaves_the_answer_as_in_transformers(name: str) -> None:
    engine, said = engine_of("llama", "ngram"), theirs(GREEDY)
    fields = GREEDY | SAME[name]
    assert theirs(fields) == said
    assert own(engine, fields) == said
    assert inside(engine, fields) == said


@pytest.mark.parametrize("name", [name for name in REFUSED if hasattr(GenerationConfig(), name)])
def test_a_field_is_refused_by_name(name: str) -> None:
    engine, fields = engine_of("llama", "ngram"), {name: REFUSED[name]}
    more = {"penalty_alpha": {"top_k": 4}, "num_return_sequences": {"do_sample": True}}
    with pytest.raises(InputError, match=rf"generation_config\.{name}: .* not supported"):
        own(engine, fields | more.get(name, {}))
    if name in PROCESSED:
        assert inside(engine, fields) == theirs(fields)
        return
    with pytest.raises(
        (InputError, ValueError, ImportError)
    ):  # by transformers itself, or by name as above
        inside(engine, fields)


def test_an_unknown_field_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GenerationConfig.__init__

    def newer(self: GenerationConfig, **fields: Any) -> None:
        self.thinks_first = fields.pop("thinks_first", None)
        before(self, **fields)

    monkeypatch.setattr(GenerationConfig, "__init__", newer)
    engine = engine_of("llama", "ngram")
    for answer in (own, inside):
        with pytest.raises(
            InputError, match=r"generation_config\.thinks_first: True is not supported"
        ):
            answer(engine, {"thinks_first": True})


def test_stop_strings_are_those_of_the_config() -> None:
    engine = engine_of("llama", "ngram", "chain", tokenizer())
    text = engine.generate(PROMPT, max_new_tokens=COUNT).text
    config = GenerationConfig(max_new_tokens=COUNT, stop_strings=[text[2:4]])
    assert engine.generate(PROMPT, generation_config=config).text != text

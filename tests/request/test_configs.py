"""Generation configs as models bring them: what transformers makes of each key, or an error of ours."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import GenerationConfig

from specengine import Engine
from specengine.errors import InputError, SpecEngineError
from specengine.records import GenerationResult
from tests.engine.engines import PROMPT, engine_of, tokenizer, untouched
from tests.examples import examples
from tests.toy import tiny

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:Unfeasible length constraints"
    ),  # of transformers, which goes on as we do
]

COUNT = 8


def theirs(
    config: GenerationConfig, prompt: list[int] = PROMPT, **options: Any
) -> list[int] | None:
    """Return the answer of transformers with this config as the model's own; None if it raises."""
    model, ids = untouched(), torch.tensor([prompt])
    before, model.generation_config = model.generation_config, config
    options = {
        "max_new_tokens": COUNT,
        "return_dict_in_generate": False,
        "output_scores": False,
    } | options
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    except (ValueError, TypeError, RuntimeError, IndexError):
        return None
    finally:
        model.generation_config = before
    return out[0, len(prompt) :].tolist()


def ours(config: GenerationConfig, prompt: list[int] = PROMPT, **options: Any) -> list[int] | None:
    engine = engine_of("llama", "ngram")
    model = engine.target.model
    before, model.generation_config = model.generation_config, config
    try:
        return engine.generate(prompt, **{"max_new_tokens": COUNT} | options).token_ids
    except InputError:
        return None
    finally:
        model.generation_config = before


FIRST = 3  # tokens that the model says early
NO_EFFECT: list[dict[str, Any]] = [
    {
        "chat_format": "chatml",
        "max_window_size": 6144,
        "user_token_id": 195,
        "seed": 3,
        "presence_penalty": 2.0,
    },
    {
        "trust_remote_code": True,
        "attn_implementation": "sdpa",
        "prediction": 3,
        "policy": "none",
        "raw": 1,
    },
    {"renormalize_logits": True, "remove_invalid_values": True},
    {
        "output_scores": True,
        "output_attentions": True,
        "output_hidden_states": True,
        "output_logits": True,
    },
    {
        "bad_words_ids": None,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "forced_bos_token_id": 5,
    },
    {
        "num_beams": 1,
        "num_return_sequences": 1,
        "guidance_scale": 1.0,
        "diversity_penalty": 0.0,
        "num_beam_groups": 1,
    },
    {"eos_token_id": -1, "pad_token_id": -1},
    {"eos_token_id": [-1, -2]},
    {
        "top_k": -1,
        "top_p": 0.0,
        "min_p": -3,
        "typical_p": 0,
        "temperature": 0.0,
        "epsilon_cutoff": 0.3,
        "top_h": 0.5,
    },
    {
        "max_length": 3,
        "cache_implementation": "static",
        "max_cache_len": 1 << 30,
        "use_cache": True,
    },
    {
        "length_penalty": 0.5,
        "early_stopping": True,
        "assistant_ensemble_weight": 0.5,
        "token_healing": False,
    },
]


@pytest.mark.parametrize("fields", NO_EFFECT, ids=lambda fields: next(iter(fields)))
def test_what_changes_no_token_is_no_hindrance(fields: dict[str, Any]) -> None:
    assert ours(GenerationConfig(**fields)) == theirs(GenerationConfig(), eos_token_id=None)
    assert ours(
        GenerationConfig(), generation_config=GenerationConfig(**_without_outputs(fields))
    ) == ours(GenerationConfig())


def _without_outputs(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith("output_")}


def answer() -> list[int]:
    found = theirs(GenerationConfig())
    assert found is not None
    return found


@pytest.mark.parametrize(
    "fields",
    [
        lambda said: {"eos_token_id": float(said[2])},
        lambda said: {"eos_token_id": [said[2], -1]},
        lambda said: {"eos_token_id": [-1, float(said[4])], "min_length": len(PROMPT) + 6},
        lambda said: {"eos_token_id": said[2], "exponential_decay_length_penalty": (1, 1.5)},
        lambda said: {"forced_eos_token_id": 3},
        lambda said: {"forced_eos_token_id": [3, 5]},
        lambda said: {"begin_suppress_tokens": [said[0]], "suppress_tokens": [said[1]]},
        lambda said: {"eos_token_id": said[2], "min_new_tokens": 5, "repetition_penalty": 1.2},
        lambda said: {"eos_token_id": said[2], "min_new_tokens": 50},
        lambda said: {
            "bad_words_ids": [[said[0]]],
            "sequence_bias": {(said[1],): -5.0},
            "no_repeat_ngram_size": 2,
        },
    ],
)
def test_what_changes_tokens_changes_them_as_in_transformers(fields: Any) -> None:
    said = answer()
    config = GenerationConfig(pad_token_id=0, **fields(said))
    expected = theirs(config)
    assert expected is not None
    assert expected != said
    assert ours(config) == expected
    assert ours(GenerationConfig(), generation_config=config) == expected


def test_a_forced_beginning_is_that_of_a_prompt_of_one_token() -> None:
    config = GenerationConfig(forced_bos_token_id=9, begin_suppress_tokens=[4])
    assert ours(config, [7]) == theirs(config, [7])
    assert ours(config, [7])[:1] == [9]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"epsilon_cutoff": 0.05}, {"eta_cutoff": 0.1}, {"top_h": 0.3}, {}]
)
def test_cutoffs_of_a_config_leave_the_tokens_that_transformers_leaves(
    fields: dict[str, Any],
) -> None:
    config = GenerationConfig(do_sample=True, temperature=2.0, **fields)
    torch.manual_seed(0)
    drawn = {token for _ in range(60) for token in theirs(config, max_new_tokens=1) or ()}
    found = {
        token for seed in range(60) for token in ours(config, max_new_tokens=1, seed=seed) or ()
    }
    likely = set(
        untouched()(input_ids=torch.tensor([PROMPT])).logits[0, -1].topk(50).indices.tolist()
    )
    assert found <= likely
    if fields:
        assert found & drawn
        assert max(len(found), len(drawn)) < 45  # of 50, which the default alone leaves


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"num_beams": 4, "length_penalty": 0.8}, {"num_beams": 1}),
        ({"num_return_sequences": 3, "do_sample": True, "top_k": 1}, {"num_return_sequences": 1}),
        ({"guidance_scale": 1.5}, {"guidance_scale": 1.0}),
        ({"encoder_repetition_penalty": 1.2}, {"encoder_repetition_penalty": 1.0}),
        ({"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": False}),
        ({"token_healing": True}, {"token_healing": False}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_call_has_a_way_round_what_is_refused(
    fields: dict[str, Any], remedy: dict[str, Any]
) -> None:
    model = tiny("llama")
    model.generation_config = GenerationConfig(**fields)
    engine = Engine.from_pretrained(model, "none")
    name = next(iter(fields))
    with pytest.raises(
        InputError,
        match=rf"generation_config\.{name}: .* not supported .*GenerationConfig\({name}=",
    ):
        engine.generate(PROMPT, max_new_tokens=2)
    assert engine.generate(
        PROMPT, max_new_tokens=2, generation_config=GenerationConfig(**remedy)
    ).token_ids


def test_every_way_round_is_one_that_transformers_takes() -> None:
    model = tiny("llama")
    engine, named = Engine.from_pretrained(model, "none"), []
    for name in vars(GenerationConfig()):
        model.generation_config = GenerationConfig()
        setattr(model.generation_config, name, 3)
        try:
            engine.generate(PROMPT, max_new_tokens=2)
        except InputError as error:
            if (
                found := re.search(r"generation_config=GenerationConfig\((\w+)=(\w+)\)", str(error))
            ) is not None:
                config = GenerationConfig(**{found[1]: ast.literal_eval(found[2])})
                assert engine.generate(PROMPT, max_new_tokens=2, generation_config=config).token_ids
                named.append(found[1])
    assert len(named) > 5
    model.generation_config = GenerationConfig(watermarking_config={"bias": 1.0})
    with pytest.raises(InputError, match="leave it out, in the model's generation config too"):
        engine.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("fields", [{"top_p": 0.0}, {"top_p": 0}, {"top_p": 1e-30}])
def test_no_share_of_the_tokens_is_the_likeliest_one(fields: dict[str, Any], by_call: bool) -> None:
    config = GenerationConfig(do_sample=True, temperature=3.0, top_k=0, **fields)
    found = ours(GenerationConfig(), generation_config=config) if by_call else ours(config)
    assert found == theirs(GenerationConfig()) is not None


@pytest.mark.parametrize("fields", [{"top_p": 1.5}, {"top_p": 100}, {"typical_p": 2.0}])
def test_more_than_all_tokens_are_all_of_them(fields: dict[str, Any]) -> None:
    config = {"do_sample": True, "temperature": 3.0}
    assert (
        ours(GenerationConfig(**config, **fields), seed=3)
        == ours(GenerationConfig(**config), seed=3)
        is not None
    )


@pytest.mark.parametrize(
    "fields", [{"top_p": -0.5}, {"top_k": -3}, {"min_p": 1.5}, {"typical_p": 0.0}]
)
def test_a_value_of_the_models_own_is_named_so(fields: dict[str, Any]) -> None:
    (name,) = fields
    model = tiny("llama")
    for field, value in {"do_sample": True, **fields}.items():
        setattr(model.generation_config, field, value)
    engine = Engine.from_pretrained(model, "none")
    with pytest.raises(InputError, match=rf"^generation_config\.{name}: got {fields[name]}"):
        engine.generate(PROMPT, max_new_tokens=2)
    with pytest.raises(InputError, match=rf"^{name}: got {fields[name]}"):
        engine.generate(PROMPT, max_new_tokens=2, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": -1.0},
        {"suppress_tokens": "x"},
        {"forced_eos_token_id": -1},
        {"exponential_decay_length_penalty": 3},
        {"eos_token_id": "end"},
        {"eos_token_id": 7.5},
        {"stop_strings": 3},
        {"begin_suppress_tokens": ["a"]},
        {"min_length": "x", "eos_token_id": 3},
        {"temperature": "warm", "do_sample": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(fields))):
        engine_of("llama", "none").generate(PROMPT, generation_config=GenerationConfig(**fields))
    with pytest.raises(InputError, match=r"generation_config\.max_length: got"):
        engine_of("llama", "none").generate(
            PROMPT, generation_config=GenerationConfig(max_length="long")
        )


def test_the_model_does_not_say_what_comes_back() -> None:
    model = tiny("llama")
    for wanted in (True, False):
        model.generation_config = GenerationConfig(return_dict_in_generate=wanted)
        engine = Engine.from_pretrained(model, "none", tokenizer=tokenizer())
        assert isinstance(engine.generate(PROMPT, max_new_tokens=2), GenerationResult)
    sequences = engine.generate(
        PROMPT, max_new_tokens=2, generation_config=GenerationConfig(return_dict_in_generate=False)
    )
    assert sequences.shape == (1, len(PROMPT) + 2)


@pytest.mark.slow
def test_sampling_asked_for_draws_from_the_likeliest_as_in_transformers() -> None:
    likely = set(
        untouched()(input_ids=torch.tensor([PROMPT])).logits[0, -1].topk(50).indices.tolist()
    )
    hot: dict[str, Any] = {"temperature": 30.0, "max_new_tokens": 1}

    def drawn(config: GenerationConfig, **options: Any) -> set[int]:
        return {token for seed in range(16) for token in ours(config, seed=seed, **options) or ()}

    asked, hidden = (
        GenerationConfig(do_sample=True),
        GenerationConfig(do_sample=True, temperature=30.0),
    )
    assert drawn(GenerationConfig(), do_sample=True, **hot) <= likely
    assert drawn(asked, **hot) <= likely
    assert drawn(hidden, max_new_tokens=1) <= likely
    assert drawn(GenerationConfig(), generation_config=hidden, max_new_tokens=1) <= likely
    assert (
        not drawn(GenerationConfig(), **hot) <= likely
    )  # implied: nobody asked for transformers' own
    assert not drawn(asked, top_k=0, **hot) <= likely
    assert not drawn(GenerationConfig(do_sample=True, top_k=0), **hot) <= likely


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "eos_token_id": st.sampled_from([-1, 7, 7.0, [3, -1], 999, [40.0, 41]]),
    "pad_token_id": st.sampled_from([-1, 0, 999]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
    "no_repeat_ngram_size": st.sampled_from([0, 2]),
    "suppress_tokens": st.lists(st.integers(0, 259), max_size=3),
    "begin_suppress_tokens": st.lists(st.integers(0, 259), max_size=3),
    "forced_eos_token_id": st.sampled_from([3, [4, 5]]),
    "min_length": st.integers(0, 60),
    "min_new_tokens": st.integers(0, 12),
    "temperature": st.sampled_from([0.0, 0.7, 1.0, -1]),
    "top_k": st.sampled_from([-1, 0, 50]),
    "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(),
    "output_scores": st.booleans(),
    "num_beams": st.sampled_from([1, 1, 3]),
    "max_length": st.sampled_from([1, 30, 500]),
    "watermarking_config": st.sampled_from([None, None, {"bias": 1.0}]),
    "chat_format": st.text(max_size=3),
}


@examples(25)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_any_config_is_read_as_transformers_reads_it(fields: dict[str, Any]) -> None:
    found = ours(GenerationConfig(**fields))
    assert found is None or found == theirs(GenerationConfig(**fields))


def test_the_file_of_a_folder_may_begin_with_a_mark_and_may_be_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file, end = tmp_path / "generation_config.json", answer()[3]
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + json.dumps({"eos_token_id": end, "chat_format": "raw"}).encode())
        found = Engine.from_pretrained(tmp_path, "none", backend="native").generate(
            PROMPT, max_new_tokens=COUNT
        )
        assert (found.token_ids, found.finish_reason) == (
            answer()[: answer().index(end) + 1],
            "stop",
        )
    for fields in ({"max_new_tokens": -3}, {"early_stopping": "soon"}, {"max_new_tokens": "many"}):
        file.write_text(json.dumps(fields))
        with pytest.raises(SpecEngineError, match=r"generation.config"):
            Engine.from_pretrained(tmp_path, "none", backend="native").generate(
                PROMPT, max_new_tokens=COUNT
            )
    for text in ("", "{"):
        file.write_text(text)
        found = Engine.from_pretrained(tmp_path, "none", backend="native").generate(
            PROMPT, max_new_tokens=COUNT
        )
        assert found.token_ids == answer()

"""Draft heads as others write them: every dialect read, and configs that are ambiguous or senseless refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.checkpoints.eagle import is_head, load_head
from specengine.errors import CheckpointError
from specengine.models.eagle import EagleConfig
from tests.checkpoints.layouts import (
    FLAT,
    LAYER_IDS,
    NESTED,
    READ,
    THIRD,
    official,
    same,
    speculators,
    write,
)
from tests.heads import LLAMA3, YARN
from tests.toy import VOCABULARY, head_config, random_state, tiny

# name, what the config says, how the head must be read, its dialect
DIALECTS: list[tuple[str, dict[str, Any], EagleConfig, str]] = [
    (
        "EAGLE-1",
        FLAT,
        head_config(1, fc_bias=True, own_embeddings=True, **READ),
        "EAGLE-1, official layout, fields as eagle",
    ),
    (
        "EAGLE-1 no bias",
        {**FLAT, "bias": False},
        head_config(1, **READ),
        "EAGLE-1, official layout, fields as eagle",
    ),
    (
        "EAGLE-1 for Qwen2",
        {**FLAT, "bias": True, "qkv_bias": True, "rope_theta": 1e6},
        head_config(
            1, fc_bias=True, qkv_bias=True, rope={"rope_type": "default", "rope_theta": 1e6}, **READ
        ),
        "EAGLE-1, official layout, fields as eagle",
    ),
    (
        "EAGLE-3",
        {**FLAT, **THIRD, "architectures": ["LlamaForCausalLM"]},
        head_config(**READ),
        "EAGLE-3, official layout, fields as eagle",
    ),
    (
        "EAGLE-3 whole vocabulary",
        {**FLAT, "draft_vocab_size": VOCABULARY, "attention_bias": True},
        head_config(draft_vocab_size=VOCABULARY, **READ),
        "EAGLE-3, official layout, fields as eagle",
    ),
    (
        "SpecForge",
        {
            **FLAT,
            **THIRD,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {LAYER_IDS: [1, 11, 21]},
            "head_dim": 16,
            "rope_theta": 1000000,
            "rope_scaling": None,
        },
        head_config(
            head_dim=16,
            layer_ids=(2, 12, 22),
            rope={"rope_type": "default", "rope_theta": 1e6},
            **READ,
        ),
        "EAGLE-3, official layout, fields as specforge",
    ),
    (
        "SpecForge 3.1",
        {
            **FLAT,
            **THIRD,
            "architectures": ["LlamaForCausalLMEagle3"],
            "fc_norm": True,
            "norm_output": False,
        },
        head_config(fusion_norm="each", norm_logits=False, **READ),
        "EAGLE-3, official layout, fields as specforge",
    ),
    (
        "SpecForge other width",
        {**FLAT, **THIRD, "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": 48},
        head_config(target_hidden_size=48, own_embeddings=True, **READ),
        "EAGLE-3, official layout, fields as specforge",
    ),
    (
        "vLLM's ids in the official layout",
        {**FLAT, **THIRD, LAYER_IDS: [1, 2, 3], "rope_scaling": {"type": "linear", "factor": 2.0}},
        head_config(
            layer_ids=(1, 2, 3),
            rope={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            **READ,
        ),
        "EAGLE-3, official layout, fields as eagle",
    ),
    (
        "speculators",
        NESTED,
        head_config(
            norm_before_residual=True, rope={"rope_type": "default", "rope_theta": 500000.0}, **READ
        ),
        "EAGLE-3, speculators layout, fields as speculators",
    ),
    (
        "speculators 3.1",
        {
            **NESTED,
            "norm_before_residual": False,
            "fc_norm": True,
            "norm_output": True,
            LAYER_IDS: [2, 16],
        },
        head_config(
            fusion_norm="each",
            norm_recurrent=True,
            layer_ids=(2, 16),
            own_embeddings=True,
            rope={"rope_type": "default", "rope_theta": 500000.0},
            **READ,
        ),
        "EAGLE-3, speculators layout, fields as speculators",
    ),
    (
        "speculators with a Qwen3 layer",
        {
            **NESTED,
            "norm_before_fc": True,
            "transformer_layer_config": {
                **FLAT,
                "model_type": "qwen3",
                "attention_bias": True,
                "rope_theta": 5e5,
            },
        },
        head_config(
            fusion_norm="whole",
            norm_before_residual=True,
            qk_norm=True,
            qkv_bias=True,
            o_bias=True,
            rope={"rope_type": "default", "rope_theta": 500000.0},
            **READ,
        ),
        "EAGLE-3, speculators layout, fields as speculators",
    ),
    (
        "speculators EAGLE-1",
        {"speculators_model_type": "eagle", "fusion_bias": True, "transformer_layer_config": FLAT},
        head_config(1, fc_bias=True, **READ),
        "EAGLE-1, speculators layout, fields as speculators",
    ),
]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("raw", "config", "dialect"), [row[1:] for row in DIALECTS], ids=[row[0] for row in DIALECTS]
)
def test_every_dialect_is_read(
    tmp_path: Path, raw: dict[str, Any], config: EagleConfig, dialect: str, pickled: bool
) -> None:
    state = random_state(config)
    names = speculators if "speculators_model_type" in raw else official
    folder = write(tmp_path, raw, names(config, state), pickled=pickled)
    assert is_head(folder)
    found = load_head(folder)
    assert found.config == config
    assert same(found.state, state)
    assert str(found.dialect).startswith(dialect)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_the_official_layer_has_two_names(tmp_path: Path, prefix: str) -> None:
    config = head_config(**READ)
    tensors = {
        name.replace("midlayer.", prefix): t
        for name, t in official(config, random_state(config)).items()
    }
    assert same(load_head(write(tmp_path, {**FLAT, **THIRD}, tensors)).state, random_state(config))


def test_what_was_not_stated_is_said(tmp_path: Path) -> None:
    config = head_config(draft_vocab_size=VOCABULARY, **READ)
    tensors = official(config, random_state(config)) | {
        "d2t": torch.zeros(VOCABULARY, dtype=torch.int64)
    }
    folder = write(
        tmp_path, {**FLAT, "draft_vocab_size": VOCABULARY, "attention_bias": True}, tensors
    )
    assert load_head(folder).dialect.notes == (
        "no rope_theta: 10000.0, with which the EAGLE repository trains",
        "attention_bias is set, but there are no biases: read as if it were not",
        "no layer ids: hidden states 2, L/2 and L - 3 of the target's L layers",
        "d2t is the identity",
    )


def test_whole_models_are_no_heads(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    assert not is_head(tmp_path / "model")
    assert not is_head(tmp_path)
    assert not is_head(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    assert not is_head(tmp_path)


# ---------------------------------------------------------------------------------------------------- ambiguity


def test_norm_output_has_the_meaning_of_its_producer(tmp_path: Path) -> None:
    config = head_config(**READ)
    folder = write(
        tmp_path, {**FLAT, **THIRD, "norm_output": False}, official(config, random_state(config))
    )
    with pytest.raises(
        CheckpointError, match="norm_output: SpecForge and speculators mean different things by it"
    ):
        load_head(folder)
    assert not load_head(folder, producer="specforge").config.norm_logits
    ignored = load_head(folder, producer="eagle")
    assert ignored.config.norm_logits
    assert "norm_output is ignored: the EAGLE repository has no such field" in ignored.dialect.notes
    with pytest.raises(
        CheckpointError, match="producer: got 'speculators', but the config has the official layout"
    ):
        load_head(folder, producer="speculators")
    with pytest.raises(
        CheckpointError,
        match="producer: got 'someone', accepted dflash, eagle, specforge, speculators",
    ):
        load_head(folder, producer="someone")  # type: ignore[arg-type]


def test_layer_ids_that_stand_twice_and_agree_are_taken(tmp_path: Path) -> None:
    config = head_config(layer_ids=(2, 3, 4), **READ)
    raw = {**FLAT, **THIRD, LAYER_IDS: [2, 3, 4], "eagle_config": {LAYER_IDS: [1, 2, 3]}}
    assert load_head(write(tmp_path, raw, official(config, random_state(config)))).config == config


def test_layer_ids_that_stand_twice_and_differ_are_refused(tmp_path: Path) -> None:
    config = head_config(**READ)
    raw = {**FLAT, **THIRD, LAYER_IDS: [1, 2, 3], "eagle_config": {LAYER_IDS: [1, 2, 3]}}
    folder = write(tmp_path, raw, official(config, random_state(config)))
    with pytest.raises(CheckpointError, match="which count layers differently; pass layer_ids"):
        load_head(folder)
    assert load_head(folder, layer_ids=(2, 3, 4)).config.layer_ids == (2, 3, 4)


@pytest.mark.parametrize(
    "rope", [LLAMA3, YARN, {**YARN, "truncate": False, "attention_factor": None}]
)
def test_rotary_sets_are_read_with_all_that_they_say(tmp_path: Path, rope: dict[str, Any]) -> None:
    stated = {name: value for name, value in rope.items() if value is not None}
    config = head_config(rope=stated, **READ)
    raw = {**FLAT, **THIRD, "rope_scaling": rope}
    assert load_head(write(tmp_path, raw, official(config, random_state(config)))).config == config


NEAR, FULL = "sliding_attention", "full_attention"
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size: got None, accepted a whole number, 1 to 16777216"),
    ({"vocab_size": "many"}, "vocab_size: got 'many'"),
    ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
    ({"num_attention_heads": True}, "num_attention_heads: got True"),
    (
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        "head_dim: is missing, and hidden_size 32 is not a multiple of 5",
    ),
    ({"num_key_value_heads": 3}, "num_attention_heads: got 4, not a multiple of 3 key-value heads"),
    ({"draft_vocab_size": 300}, "draft_vocab_size: got 300, more than the target's 260"),
    ({"hidden_act": "loud"}, "hidden_act: unknown name 'loud'"),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type: got 'dynamic', accepted default, linear",
    ),
    ({"rope_scaling": {"type": "mrope"}}, "rope_type: got 'mrope'"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_parameters: one set is needed",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only whole heads are rotated"),
    (
        {"fc_norm": True, "norm_before_fc": True},
        "fc_norm, norm_before_fc: only one of them can be set",
    ),
    (
        {"target_hidden_size": 48},
        "embed_tokens.weight: is missing, and the target's embeddings have another width",
    ),
    (
        {"hidden_size": 10**12},
        "hidden_size: got 1000000000000, accepted a whole number, 1 to 16777216",
    ),
    ({"hidden_size": 10**300}, "hidden_size: got 10{59}\\.\\.\\., accepted"),
    ({"num_key_value_heads": 0}, "num_key_value_heads: got 0"),
    ({"draft_vocab_size": 0}, "draft_vocab_size: got 0"),
    ({"head_dim": 0}, "head_dim: got 0"),
    ({"head_dim": 7}, "head_dim: got 7, accepted even sizes"),
    ({"head_dim": 1 << 24}, "num_attention_heads, head_dim: got 4 and 16777216"),
    ({"rms_norm_eps": -1}, "rms_norm_eps: got -1, accepted a number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps: got 'x'"),
    ({"rms_norm_eps": [1]}, r"rms_norm_eps: got \[1\]"),
    ({"rope_theta": 0}, "rope_theta: got 0"),
    ({"rope_theta": "x"}, "rope_theta: got 'x'"),
    ({"rope_theta": [1]}, r"rope_theta: got \[1\]"),
    ({"rope_theta": float("inf")}, "rope_theta: got inf"),
    ({"rope_scaling": "x"}, "rope_scaling: got 'x', accepted an object"),
    ({"rope_scaling": True}, "rope_scaling: got True, accepted an object"),
    ({"rope_scaling": {"a": 1}}, "rope_parameters: unknown field 'a' of type default"),
    ({"rope_scaling": {"type": "linear"}}, "rope_parameters: type linear needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: got 0, accepted a number, 1 to"),
    ({"rope_scaling": {"type": [1]}}, r"type: got \[1\], accepted text"),
    (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "low_freq_factor: got 4.0, accepted less than high_freq_factor",
    ),
    ({"max_position_embeddings": -1}, "max_position_embeddings: got -1"),
    ({"max_position_embeddings": "x"}, "max_position_embeddings: got 'x'"),
    ({"hidden_act": [1]}, r"hidden_act: got \[1\], accepted text"),
    ({"eagle_config": "x"}, "eagle_config: got 'x', accepted an object"),
    ({"eagle_config": [1]}, "eagle_config: got .* accepted an object"),
    ({"eagle_config": 1}, "eagle_config: got 1, accepted an object"),
    ({LAYER_IDS: ["a"]}, f"{LAYER_IDS}: got .'a'., accepted a list of at most 64 whole numbers"),
    ({LAYER_IDS: [1] * 65}, f"{LAYER_IDS}: got .* accepted a list of at most 64"),
    ({"architectures": 5}, "architectures: got 5, accepted a list of text"),
    (
        {"norm_before_residual": "false"},
        "norm_before_residual: got 'false', accepted true or false",
    ),
    ({"fc_norm": 0}, "fc_norm: got 0, accepted true or false"),
    (
        {"draft_temperatures": 1.0},
        "draft_temperatures: got 1.0, accepted a list of at most 64 numbers, 0.05 to 20",
    ),
    (
        {"draft_temperatures": [1.0, 0.0]},
        "draft_temperatures: got .* accepted a list of at most 64 numbers",
    ),
    (
        {"draft_temperatures": [True]},
        "draft_temperatures: got .* accepted a list of at most 64 numbers",
    ),
    (
        {"draft_temperatures": [1.0] * 65},
        "draft_temperatures: got .* accepted a list of at most 64 numbers",
    ),
    ({"attention_bias": "no"}, "attention_bias: got 'no', accepted true or false"),
    (
        {"layer_types": [NEAR], "sliding_window": 0},
        "sliding_window: got 0, accepted a whole number",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_fields_that_make_no_sense_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = head_config(**READ)
    folder = write(tmp_path, {**FLAT, **THIRD, **changes}, official(config, random_state(config)))
    with pytest.raises(CheckpointError, match=message):
        load_head(folder)


BAD_NESTED: list[tuple[dict[str, Any], str]] = [
    (
        {"speculators_model_type": "mlp"},
        "speculators_model_type: got 'mlp', known are eagle, eagle3",
    ),
    ({"transformer_layer_config": None}, "transformer_layer_config: is missing"),
    (
        {"transformer_layer_config": {**FLAT, "model_type": None}},
        r"model_type: got None, accepted llama or qwen3",
    ),
    (
        {"transformer_layer_config": {**FLAT, "layer_types": [FULL, NEAR]}},
        "drafts of several layers are not",
    ),
    (
        {"transformer_layer_config": {**FLAT, "layer_types": [NEAR]}},
        "sliding_window: got None, accepted a whole number",
    ),
    (
        {"speculators_model_type": ["eagle3"]},
        r"speculators_model_type: got \['eagle3'\], known are",
    ),
    ({"transformer_layer_config": "x"}, "transformer_layer_config: got 'x', accepted an object"),
    (
        {"transformer_layer_config": {**FLAT, "layer_types": 1}},
        "layer_types: got 1, accepted a list of text",
    ),
    ({"norm_output": "no"}, "norm_output: got 'no', accepted true or false"),
    (
        {"speculators_model_type": "eagle", "layernorms": True},
        "layernorms: this variant of EAGLE-1 is not supported",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_NESTED)
def test_speculators_fields_that_make_no_sense_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = head_config(**READ)
    folder = write(tmp_path, {**NESTED, **changes}, speculators(config, random_state(config)))
    with pytest.raises(CheckpointError, match=message):
        load_head(folder)

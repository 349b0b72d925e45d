"""Draft heads on disk: layouts from synthetic checkpoints, corruptions detected, bit-identical round trips."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import Engine, loading
from specengine.drafters.eagle import CPU_TREE, Eagle
from specengine.errors import CheckpointError, InputError
from specengine.models import checkpoints
from specengine.models.checkpoints import is_head, load_head, save_head
from specengine.models.eagle_head import EagleConfig, causal, head_from
from specengine.policies.eagle import Eagle as EaglePolicy
from tests.toy import CPU, VOCABULARY, head_config, random_state, tiny

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAT = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "model_type": "llama",
}
THIRD = {"draft_vocab_size": 200}
NESTED: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 200,
    "norm_before_residual": True,
    "transformer_layer_config": {**FLAT, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}
READ: dict[str, Any] = {"rms_norm_eps": 1e-5}  # what all of these say


def official(config: EagleConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the EAGLE repository and SpecForge name them."""
    if config.version == 1:
        return dict(state)
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    return with_t2d(config, tensors)


def with_t2d(config: EagleConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if "d2t" in tensors:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[tensors["d2t"] + torch.arange(config.draft_vocab_size)] = True
        tensors["t2d"] = t2d
    return tensors


def speculators(config: EagleConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as speculators names them."""
    if config.version == 3:
        return with_t2d(config, dict(state))
    return {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor for name, tensor in state.items()
    }


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


# name, what the config says, how the head must be read, its dialect
DIALECTS: list[tuple[str, dict[str, Any], EagleConfig, str]] = [
    (
        "EAGLE-1",
        FLAT,
        head_config(1, fc_bias=True, own_embeddings=True, **READ),
        "EAGLE-1, official layout, fields as eagle",
    ),
    ("EAGLE-1 no bias", {**FLAT, "bias": False}, head_config(1, **READ), "EAGLE-1, official layout, fields as eagle"),
    (
        "EAGLE-1 for Qwen2",
        {**FLAT, "bias": True, "qkv_bias": True, "rope_theta": 1e6},
        head_config(1, fc_bias=True, qkv_bias=True, rope={"rope_type": "default", "rope_theta": 1e6}, **READ),
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
        head_config(head_dim=16, layer_ids=(2, 12, 22), rope={"rope_type": "default", "rope_theta": 1e6}, **READ),
        "EAGLE-3, official layout, fields as specforge",
    ),
    (
        "SpecForge 3.1",
        {**FLAT, **THIRD, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": False},
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
        head_config(layer_ids=(1, 2, 3), rope={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, **READ),
        "EAGLE-3, official layout, fields as eagle",
    ),
    (
        "speculators",
        NESTED,
        head_config(norm_before_residual=True, rope={"rope_type": "default", "rope_theta": 500000.0}, **READ),
        "EAGLE-3, speculators layout, fields as speculators",
    ),
    (
        "speculators 3.1",
        {**NESTED, "norm_before_residual": False, "fc_norm": True, "norm_output": True, LAYER_IDS: [2, 16]},
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
            "transformer_layer_config": {**FLAT, "model_type": "qwen3", "attention_bias": True, "rope_theta": 5e5},
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
@pytest.mark.parametrize(("raw", "config", "dialect"), [row[1:] for row in DIALECTS], ids=[row[0] for row in DIALECTS])
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
    tensors = {name.replace("midlayer.", prefix): t for name, t in official(config, random_state(config)).items()}
    assert same(load_head(write(tmp_path, {**FLAT, **THIRD}, tensors)).state, random_state(config))


def test_what_was_not_stated_is_said(tmp_path: Path) -> None:
    config = head_config(draft_vocab_size=VOCABULARY, **READ)
    tensors = official(config, random_state(config)) | {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}
    folder = write(tmp_path, {**FLAT, "draft_vocab_size": VOCABULARY, "attention_bias": True}, tensors)
    assert load_head(folder).dialect.notes == (
        "no rope_theta: 10000.0, with which the EAGLE repository trains",
        "attention_bias is set, but there are no biases: taken as none",
        "no layer ids: hidden states 2, L/2 and L - 3 of the target's L layers",
        "d2t is the identity",
    )


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
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
    folder = write(tmp_path, {**FLAT, **THIRD, "norm_output": False}, official(config, random_state(config)))
    with pytest.raises(CheckpointError, match="norm_output: SpecForge and speculators mean different things by it"):
        load_head(folder)
    assert not load_head(folder, producer="specforge").config.norm_logits
    ignored = load_head(folder, producer="eagle")
    assert ignored.config.norm_logits
    assert "norm_output is ignored: the EAGLE repository has no such field" in ignored.dialect.notes
    with pytest.raises(CheckpointError, match="producer: got 'speculators', but the config has the official layout"):
        load_head(folder, producer="speculators")
    with pytest.raises(CheckpointError, match="producer: got 'someone', accepted eagle, specforge, speculators"):
        load_head(folder, producer="someone")  # type: ignore[arg-type]


def test_layer_ids_that_stand_twice_are_refused(tmp_path: Path) -> None:
    config = head_config(**READ)
    raw = {**FLAT, **THIRD, LAYER_IDS: [1, 2, 3], "eagle_config": {LAYER_IDS: [1, 2, 3]}}
    folder = write(tmp_path, raw, official(config, random_state(config)))
    with pytest.raises(CheckpointError, match="where the ids count otherwise; pass layer_ids"):
        load_head(folder)
    assert load_head(folder, layer_ids=(2, 3, 4)).config.layer_ids == (2, 3, 4)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size: got None, a positive integer is needed"),
    ({"vocab_size": "many"}, "vocab_size: got 'many'"),
    ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
    ({"num_attention_heads": True}, "num_attention_heads: got True"),
    (
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        "head_dim: is missing, and hidden_size 32 is no multiple of 5",
    ),
    ({"num_key_value_heads": 3}, "num_attention_heads: got 4, no multiple of 3 key-value heads"),
    ({"draft_vocab_size": 300}, "draft_vocab_size: got 300, more than the target's 260"),
    ({"hidden_act": "loud"}, "hidden_act: unknown name 'loud'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: got 'dynamic', accepted default, linear"),
    ({"rope_scaling": {"type": "mrope"}}, "rope_type: got 'mrope'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: one set is needed"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only whole heads are rotated"),
    ({"fc_norm": True, "norm_before_fc": True}, "fc_norm, norm_before_fc: only one of them can be set"),
    ({"target_hidden_size": 48}, "embed_tokens.weight: is missing, and the target's embeddings have another width"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_fields_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = head_config(**READ)
    folder = write(tmp_path, {**FLAT, **THIRD, **changes}, official(config, random_state(config)))
    with pytest.raises(CheckpointError, match=message):
        load_head(folder)


BAD_NESTED: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "mlp"}, "speculators_model_type: got 'mlp', known are eagle, eagle3"),
    ({"transformer_layer_config": None}, "transformer_layer_config: is missing"),
    ({"transformer_layer_config": {**FLAT, "model_type": None}}, r"model_type: got None, accepted llama or qwen3"),
    ({"transformer_layer_config": {**FLAT, "layer_types": ["sliding_attention"]}}, "sliding-window drafts are not"),
    ({"speculators_model_type": "eagle", "layernorms": True}, "layernorms: this variant of EAGLE-1 is not supported"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_NESTED)
def test_speculators_fields_that_make_no_sense_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = head_config(**READ)
    folder = write(tmp_path, {**NESTED, **changes}, speculators(config, random_state(config)))
    with pytest.raises(CheckpointError, match=message):
        load_head(folder)


# ---------------------------------------------------------------------------------------------------- corruption


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder to be overwritten, and the tensors of a head that loads."""
    config = head_config(fusion_norm="each", qkv_bias=True, **READ)
    return tmp_path_factory.mktemp("head"), official(config, random_state(config))


RAW = {**FLAT, **THIRD, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True}
WEIGHTS = sorted(
    name
    for name in official(head_config(), random_state(head_config(fusion_norm="each", qkv_bias=True)))
    if "2" not in name
)
quickly = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quickly
@given(
    name=st.sampled_from(WEIGHTS), kind=st.sampled_from(["missing", "renamed", "longer", "flat", "nan", "inf", "int"])
)
def test_each_damaged_tensor_is_named(whole: tuple[Path, dict[str, Tensor]], name: str, kind: str) -> None:
    folder, tensors = whole[0], dict(whole[1])
    tensor = tensors.pop(name)
    if kind == "renamed":
        tensors[name + "_"] = tensor
    elif kind == "longer":
        tensors[name] = torch.cat([tensor, tensor])
    elif kind == "flat":
        tensors[name] = tensor[None]
    elif kind in ("nan", "inf"):
        tensors[name] = tensor.clone()
        tensors[name].view(-1)[-1] = float(kind)
    elif kind == "int":
        tensors[name] = tensor.to(torch.int8)
    with pytest.raises(CheckpointError) as refused:
        load_head(write(folder, RAW, tensors))
    assert name in str(refused.value)
    words = {
        "longer": "mis-shaped",
        "flat": "mis-shaped",
        "nan": "not finite",
        "inf": "not finite",
        "int": "not float32",
    }
    assert words.get(kind, "missing") in str(refused.value)
    assert ("unused" in str(refused.value)) == (kind == "renamed")


def test_all_wrong_tensors_are_listed_at_once(whole: tuple[Path, dict[str, Tensor]]) -> None:
    tensors = dict(whole[1]) | {"extra.weight": torch.zeros(2), "norm.weight": torch.zeros(3)}
    del tensors["fc.weight"]
    with pytest.raises(CheckpointError) as refused:
        load_head(write(whole[0], RAW, tensors))
    assert str(refused.value).endswith(
        "its tensors are not those of an EAGLE-3 head of width 32; unused: extra.weight [2]; "
        "missing: fc.weight [32, 96]; mis-shaped: norm.weight [3] instead of [32]"
    )


def test_tensors_that_the_config_does_not_announce_are_refused(whole: tuple[Path, dict[str, Tensor]]) -> None:
    """And those that it announces are missed."""
    with pytest.raises(CheckpointError, match=r"unused: fc_norm\.0\.weight \[32\], fc_norm\.1"):
        load_head(write(whole[0], {**RAW, "fc_norm": False}, whole[1]))
    without = {name: tensor for name, tensor in whole[1].items() if not name.endswith("bias")}
    with pytest.raises(CheckpointError, match=r"missing: midlayer\.self_attn\.q_proj\.bias \[32\]"):
        load_head(write(whole[0], {**RAW, "qkv_bias": True}, without))


def identity_offsets(ids: Tensor) -> Tensor:
    return ids - torch.arange(len(ids))


@quickly
@given(data=st.data())
def test_each_damaged_vocabulary_map_is_detected(whole: tuple[Path, dict[str, Tensor]], data: st.DataObject) -> None:
    """Any change of an offset, and any flipped mark, contradicts the other map, the order or the range."""
    folder, tensors = whole[0], dict(whole[1])
    if data.draw(st.booleans()):
        changed = tensors["d2t"].clone()
        changed[data.draw(st.integers(0, 199))] += data.draw(st.integers(-300, 300).filter(bool))
        tensors["d2t"] = changed
    else:
        marks = tensors["t2d"].clone()
        marks[data.draw(st.integers(0, VOCABULARY - 1))] ^= True
        tensors["t2d"] = marks
    with pytest.raises(CheckpointError, match=r"d2t|t2d"):
        load_head(write(folder, RAW, tensors))


BAD_MAPS: list[tuple[dict[str, Any], str]] = [
    ({"d2t": torch.zeros(200, dtype=torch.int64)}, "d2t is all zero, but 200 of 260 tokens are drafted"),
    ({"d2t": None}, "d2t is missing, but 200 of 260 tokens are drafted"),
    ({"d2t": torch.arange(60, 260)}, r"got 60 to 458 \(they look like ids, not offsets\)"),
    ({"d2t": torch.full((200,), -1)}, "offsets to ascending tokens below 260 are needed, got -1 to 198"),
    ({"d2t": torch.arange(200, 0, -1)}, "offsets to ascending tokens"),
    ({"d2t": torch.zeros(199, dtype=torch.int64)}, r"d2t: int64 \[200\] is needed, got int64 \[199\]"),
    ({"d2t": torch.zeros(200)}, r"d2t: int64 \[200\] is needed, got float32 \[200\]"),
    ({"t2d": torch.zeros(260)}, r"t2d: bool \[260\] is needed, got float32 \[260\]"),
    ({"t2d": torch.zeros(200, dtype=torch.bool)}, r"t2d: bool \[260\] is needed, got bool \[200\]"),
    ({"t2d": torch.ones(260, dtype=torch.bool)}, "t2d marks other tokens than d2t leads to"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MAPS)
def test_vocabulary_maps_that_lead_nowhere_are_refused(
    whole: tuple[Path, dict[str, Tensor]], changes: dict[str, Any], message: str
) -> None:
    tensors = {name: tensor for name, tensor in (dict(whole[1]) | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        load_head(write(whole[0], RAW, tensors))


def test_a_map_without_marks_is_enough(whole: tuple[Path, dict[str, Tensor]]) -> None:
    tensors = {name: tensor for name, tensor in whole[1].items() if name != "t2d"}
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    found = load_head(write(whole[0], RAW, tensors)).state["d2t"]
    assert found.dtype is torch.int64
    assert torch.equal(found, whole[1]["d2t"])


def test_eagle_1_has_no_vocabulary_of_its_own(tmp_path: Path) -> None:
    config = head_config(1, **READ)
    tensors = random_state(config) | {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match="unused tensors d2t"):
        load_head(write(tmp_path, {**FLAT, "bias": False}, tensors))


@quickly
@given(cut=st.integers(0, 5000))
def test_a_truncated_file_is_refused(whole: tuple[Path, dict[str, Tensor]], cut: int) -> None:
    folder = write(whole[0], RAW, whole[1])
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: cut * len(content) // 5001])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as weights"):
        load_head(folder)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_pickles_do_not_run_code(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, **THIRD}))
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        load_head(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        load_head(tmp_path)
    assert "executed" not in capsys.readouterr().out
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds something else than named tensors"):
        load_head(tmp_path)


def test_files_must_be_there_and_readable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no object"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, **THIRD}))
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor pytorch_model\.bin"):
        load_head(tmp_path)


def test_files_in_parts_are_joined_and_may_not_overlap(tmp_path: Path) -> None:
    config = head_config(**READ)
    tensors = official(config, random_state(config))
    write(tmp_path, {**FLAT, **THIRD}, {})
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "model-00002-of-00002.safetensors")
    assert same(load_head(tmp_path).state, random_state(config))
    save_file({name: tensors[name] for name in names[4:]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"{names[4]} stand in another file as well"):
        load_head(tmp_path)


# ---------------------------------------------------------------------------------------------------- round trips

BOTH = [
    head_config(1, fc_bias=True, own_embeddings=True),
    head_config(1),
    head_config(layer_ids=(0, 4, 9), norm_before_residual=True),
    head_config(fusion_norm="each", own_embeddings=True, target_hidden_size=48, head_dim=16),
    head_config(fusion_norm="whole", layer_ids=(1, 2)),
    head_config(draft_vocab_size=VOCABULARY, rope={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}),
    head_config(qkv_bias=True, o_bias=True),
]
ONE = {
    "official": [head_config(norm_logits=False), head_config(1, qkv_bias=True)],
    "speculators": [head_config(qk_norm=True), head_config(norm_recurrent=True)],
}


def logits(config: EagleConfig, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    head = head_from(config, state, dtype, CPU)
    random = torch.Generator().manual_seed(1)
    features = torch.randn(1, 9, config.num_features * config.target_hidden_size, generator=random).to(dtype)
    embeddings = torch.randn(1, 9, config.hidden_size, generator=random).to(dtype)
    with torch.inference_mode():
        states = head(head.fuse(features), embeddings, torch.arange(9)[None], causal)
        out = head.logits(states)
    return states if out is None else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", ["official", "speculators"])
@pytest.mark.parametrize("config", BOTH)
def test_round_trips_between_the_layouts_are_bit_identical(
    tmp_path: Path, config: EagleConfig, first: Any, dtype: torch.dtype
) -> None:
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in random_state(config).items()}
    other: Any = "speculators" if first == "official" else "official"
    save_head(config, state, tmp_path / "one", first)
    there = load_head(tmp_path / "one")
    save_head(there.config, there.state, tmp_path / "two", other, target="some/model")
    back = load_head(tmp_path / "two")
    for found in (there, back):
        assert found.config == config
        assert same(found.state, state)
    assert there.dialect.layout == first
    assert back.dialect.layout == other
    assert torch.equal(logits(config, state, dtype), logits(back.config, back.state, dtype))
    save_head(back.config, back.state, tmp_path / "three", first)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


@pytest.mark.parametrize(("layout", "config"), [(layout, config) for layout, many in ONE.items() for config in many])
def test_what_one_layout_cannot_say_is_refused_by_it(tmp_path: Path, layout: Any, config: EagleConfig) -> None:
    save_head(config, random_state(config), tmp_path, layout)
    assert load_head(tmp_path).config == config
    other: Any = "speculators" if layout == "official" else "official"
    with pytest.raises(CheckpointError, match=r"layout (has no word for it|knows only both or none)"):
        save_head(config, random_state(config), tmp_path / "other", other)
    assert not (tmp_path / "other").exists()


def test_the_official_file_is_what_upstream_reads(tmp_path: Path) -> None:
    config = head_config(layer_ids=(2, 3, 4))
    save_head(config, random_state(config), tmp_path)
    tensors, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert same(tensors, official(config, random_state(config)))
    assert raw["eagle_config"] == {LAYER_IDS: [1, 2, 3]}
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert int(tensors["t2d"].sum()) == config.draft_vocab_size


def test_a_failed_save_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = head_config()
    save_head(config, random_state(config), tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_head(config, random_state(config, seed=1), tmp_path)
    assert same(load_head(tmp_path).state, random_state(config))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_saved_head_has_the_permissions_of_any_file(tmp_path: Path) -> None:
    config = head_config()
    save_head(config, random_state(config), tmp_path / "head")
    (tmp_path / "any").touch()
    usual = (tmp_path / "any").stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "head").iterdir()} == {usual}


def test_only_a_whole_head_is_saved(tmp_path: Path) -> None:
    config = head_config()
    state = random_state(config)
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: norm\.weight"):
        save_head(config, state, tmp_path / "head")
    with pytest.raises(CheckpointError, match="layout: got 'gguf', accepted official, speculators"):
        save_head(config, random_state(config), tmp_path / "head", "gguf")  # type: ignore[arg-type]
    assert not (tmp_path / "head").exists()


# ---------------------------------------------------------------------------------------------------- in an engine


@pytest.mark.parametrize("layout", ["official", "speculators"])
@pytest.mark.parametrize("version", [1, 3])
def test_engines_load_heads_by_their_path(tmp_path: Path, layout: Any, version: Any) -> None:
    model = tiny(num_hidden_layers=6)
    config = head_config(version)
    save_head(config, random_state(config), tmp_path / "my-head", layout)
    engine = Engine.from_pretrained(model, draft=str(tmp_path / "my-head"))
    plain = Engine.from_pretrained(model, policy="plain")
    result = engine.generate([1, 2, 3, 4], max_new_tokens=12)
    assert result.token_ids == plain.generate([1, 2, 3, 4], max_new_tokens=12).token_ids
    assert result.stats.draft == f"eagle (EAGLE-{version}, my-head)"
    assert engine.policy == EaglePolicy(**CPU_TREE)
    assert Eagle.default_policy == ("eagle", {"width": 10, "expansions": 6, "budget": 60})


def test_draft_options_overrule_the_config(tmp_path: Path) -> None:
    model = tiny(num_hidden_layers=6)
    config = head_config()
    save_head(config, random_state(config), tmp_path)
    engine = Engine.from_pretrained(model, str(tmp_path), draft_options={"layer_ids": "1,2,4"})
    assert engine.drafter is not None
    assert engine.drafter.features == (1, 2, 4)
    with pytest.raises(InputError, match="draft_options: unknown option 'layers', known are producer, layer_ids"):
        Engine.from_pretrained(model, str(tmp_path), draft_options={"layers": "1,2,4"})
    other = replace(config, target_hidden_size=48, own_embeddings=True)
    save_head(other, random_state(other), tmp_path)
    with pytest.raises(InputError, match="made for a target with hidden size 48, this one has 32"):
        Engine.from_pretrained(model, str(tmp_path))


def test_small_models_take_no_draft_options(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has none, it is no EAGLE head"):
        Engine.from_pretrained(tiny(), str(tmp_path), draft_options={"layer_ids": "1,2,4"})


def test_heads_on_the_hub_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = head_config()
    save_head(config, random_state(config), tmp_path)
    asked: list[str] = []

    def cached_file(_repository: str, name: str, **_: Any) -> str | None:
        asked.append(name)
        return str(tmp_path / name) if (tmp_path / name).exists() else None

    def config_dict(name: str, **_: Any) -> Any:
        if name == "org/absent":
            raise OSError("no such repository")
        raw = json.loads((tmp_path / "config.json").read_text())
        return (raw if name == "org/head" else {"model_type": "llama"}), {}

    monkeypatch.setattr(loading, "cached_file", cached_file)
    monkeypatch.setattr(loading.PretrainedConfig, "get_config_dict", config_dict)
    assert loading.head_folder("org/head") == tmp_path
    assert asked == ["config.json", "model.safetensors"]
    assert loading.head_folder("org/model") is None
    assert loading.head_folder("org/absent") is None

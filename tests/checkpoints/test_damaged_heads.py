"""Draft heads damaged on disk: what is wrong is found and named, and no code of theirs runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, strategies as st
from safetensors.torch import save_file
from torch import Tensor

from specengine.checkpoints.eagle import load_head
from specengine.errors import CheckpointError
from tests.checkpoints.layouts import FLAT, READ, THIRD, official, same, write
from tests.examples import examples
from tests.toy import VOCABULARY, head_config, random_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder to be overwritten, and the tensors of a head that loads."""
    config = head_config(fusion_norm="each", qkv_bias=True, **READ)
    return tmp_path_factory.mktemp("head"), official(config, random_state(config))


RAW = {**FLAT, **THIRD, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True}
WEIGHTS = sorted(
    name
    for name in official(
        head_config(), random_state(head_config(fusion_norm="each", qkv_bias=True))
    )
    if "2" not in name
)
quickly = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quickly
@given(
    name=st.sampled_from(WEIGHTS),
    kind=st.sampled_from(["missing", "renamed", "longer", "flat", "nan", "inf", "huge", "int"]),
)
def test_each_damaged_tensor_is_named(
    whole: tuple[Path, dict[str, Tensor]], name: str, kind: str
) -> None:
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
    elif kind == "huge":
        tensors[name] = torch.full_like(tensor, -3e38)
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
        "huge": "beyond 1e+30",
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
        "its tensors are not those of a head of EAGLE-3 of width 32; unused: extra.weight [2]; "
        "missing: fc.weight [32, 96]; mis-shaped: norm.weight [3] instead of [32]"
    )


def test_tensors_that_the_config_does_not_announce_are_refused(
    whole: tuple[Path, dict[str, Tensor]],
) -> None:
    """And those that it announces are missed."""
    with pytest.raises(CheckpointError, match=r"unused: fc_norm\.0\.weight \[32\], fc_norm\.1"):
        load_head(write(whole[0], {**RAW, "fc_norm": False}, whole[1]))
    without = {name: tensor for name, tensor in whole[1].items() if not name.endswith("bias")}
    with pytest.raises(CheckpointError, match=r"missing: midlayer\.self_attn\.q_proj\.bias \[32\]"):
        load_head(write(whole[0], {**RAW, "qkv_bias": True}, without))


@quickly
@given(data=st.data())
def test_each_damaged_vocabulary_map_is_detected(
    whole: tuple[Path, dict[str, Tensor]], data: st.DataObject
) -> None:
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
    (
        {"d2t": torch.zeros(200, dtype=torch.int64)},
        "t2d and d2t disagree on which tokens are drafted",
    ),
    ({"d2t": None}, "d2t is missing, but 200 of 260 tokens are drafted"),
    ({"d2t": torch.arange(60, 260)}, r"got 60 to 458 \(they look like ids, not offsets\)"),
    (
        {"d2t": torch.full((200,), -1)},
        "offsets to ascending tokens below 260 are needed, got -1 to 198",
    ),
    ({"d2t": torch.arange(200, 0, -1)}, "offsets to ascending tokens"),
    (
        {"d2t": torch.zeros(199, dtype=torch.int64)},
        r"d2t: int64 \[200\] is needed, got int64 \[199\]",
    ),
    ({"d2t": torch.zeros(200)}, r"d2t: int64 \[200\] is needed, got float32 \[200\]"),
    ({"t2d": torch.zeros(260)}, r"t2d: bool \[260\] is needed, got float32 \[260\]"),
    (
        {"d2t": None, "t2d": torch.zeros(260, dtype=torch.bool)},
        "d2t is missing, but 200 of 260 tokens are drafted",
    ),
    ({"t2d": torch.zeros(200, dtype=torch.bool)}, r"t2d: bool \[260\] is needed, got bool \[200\]"),
    (
        {"t2d": torch.ones(260, dtype=torch.bool)},
        "t2d and d2t disagree on which tokens are drafted",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MAPS)
def test_vocabulary_maps_that_lead_nowhere_are_refused(
    whole: tuple[Path, dict[str, Tensor]], changes: dict[str, Any], message: str
) -> None:
    tensors = {
        name: tensor for name, tensor in (dict(whole[1]) | changes).items() if tensor is not None
    }
    with pytest.raises(CheckpointError, match=message):
        load_head(write(whole[0], RAW, tensors))


ACCEPTED: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
    (
        {"draft_vocab_size": VOCABULARY},
        {"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)},
        "t2d marks no token: ignored",
    ),
    (
        {},
        {
            "d2t": torch.zeros(200, dtype=torch.int64),
            "t2d": torch.zeros(VOCABULARY, dtype=torch.bool),
        },
        "d2t is all zero: the first 200 of 260 tokens are drafted",
    ),
    (
        {},
        {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        "inv_freq is left out: computed from the config",
    ),
    ({}, {"fc.bias": torch.ones(32)}, "fc.bias is left out: this head's fusion has no bias"),
]


@pytest.mark.parametrize(("changes", "more", "note"), ACCEPTED)
def test_what_published_heads_carry_unused_is_left_out_with_a_note(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Tensor], note: str
) -> None:
    config = head_config(**READ, **changes)
    tensors = official(config, random_state(config)) | more
    found = load_head(write(tmp_path, {**FLAT, **THIRD, **changes}, tensors))
    assert [line for line in found.dialect.notes if line.endswith(note)]
    wanted = random_state(config) | {name: tensor for name, tensor in more.items() if name == "d2t"}
    assert found.config == config
    assert same(found.state, wanted)


def test_eagle_1_may_carry_the_targets_head(tmp_path: Path) -> None:
    config = head_config(1, **READ)
    tensors = random_state(config) | {
        "lm_head.weight": torch.ones(VOCABULARY, 32),
        "fc.bias": torch.ones(32),
    }
    found = load_head(write(tmp_path, {**FLAT, "bias": False}, tensors))
    assert same(found.state, random_state(config))
    assert "lm_head.weight is left out: EAGLE-1 reads the target's head" in found.dialect.notes


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
    with pytest.raises(CheckpointError, match="cannot be read as weights") as refused:
        load_head(tmp_path)
    assert "weights_only" not in str(refused.value)  # torch's advice is to turn that off
    assert "more than tensors" in str(refused.value)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        load_head(tmp_path)
    assert "executed" not in capsys.readouterr().out
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold nothing but named tensors"):
        load_head(tmp_path)


def test_files_must_be_there_and_readable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deep"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, **THIRD}))
    with pytest.raises(
        CheckpointError, match=r"holds neither model\.safetensors nor pytorch_model\.bin"
    ):
        load_head(tmp_path)


def test_files_in_parts_are_joined_and_may_not_overlap(tmp_path: Path) -> None:
    config = head_config(**READ)
    tensors = official(config, random_state(config))
    write(tmp_path, {**FLAT, **THIRD}, {})
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file(
        {name: tensors[name] for name in names[:5]}, tmp_path / "model-00001-of-00002.safetensors"
    )
    save_file(
        {name: tensors[name] for name in names[5:]}, tmp_path / "model-00002-of-00002.safetensors"
    )
    assert same(load_head(tmp_path).state, random_state(config))
    save_file(
        {name: tensors[name] for name in names[4:]}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match=f"{names[4]} are in another file as well"):
        load_head(tmp_path)

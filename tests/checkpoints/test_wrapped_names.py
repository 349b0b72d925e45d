"""Files that other programs have wrapped, packed or mixed up: the refusal says which, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine
from specengine.checkpoints.eagle import load_head, save_head
from specengine.errors import CheckpointError, InputError, SpecEngineError, UnsupportedModelError
from tests.toy import head_config, random_state, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def folder_with(
    place: Path, rename: Callable[[str], str] = str, fields: Any = None, **more: torch.Tensor
) -> Path:
    model = tiny("llama")
    model.save_pretrained(place)
    state = {rename(name): tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state | more, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | (fields or {})))
    return place


def written_head(place: Path) -> Path:
    save_head(head_config(), random_state(head_config()), place / "head")
    return place / "head"


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod.", "other."]
)
def test_a_prefix_of_all_names_is_named(prefix: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", lambda name: prefix + name)
    with pytest.raises(
        CheckpointError, match=rf"missing: .*; names of tensors begin with '{prefix}', .* remove it"
    ):
        Engine.from_pretrained(str(folder), "ngram")


@pytest.mark.parametrize("inside", ["base_layer", "_orig_mod", "module"])
def test_a_wrapper_within_names_is_named(inside: str, tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path / "model", lambda name: name.replace("q_proj.", f"q_proj.{inside}.")
    )
    with pytest.raises(
        CheckpointError, match=rf"names of tensors hold '\.{inside}\.', which a wrapper adds"
    ):
        Engine.from_pretrained(str(folder), "ngram")


def test_states_within_a_state_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"state_dict": tiny("llama").state_dict()}, folder / "pytorch_model.bin")
    with pytest.raises(SpecEngineError, match="state_dict"):
        Engine.from_pretrained(str(folder), "ngram")


@pytest.mark.parametrize(
    "value", [torch.ones(1), torch.ones(0), torch.tensor(3.0), torch.ones(2, 3)]
)
def test_a_value_beside_the_layers_is_left_out(value: torch.Tensor, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", **{"model.step": value})
    expected = (
        Engine.from_pretrained(tiny("llama"), "ngram")
        .generate([5, 6, 7], max_new_tokens=4)
        .token_ids
    )
    assert (
        Engine.from_pretrained(str(folder), "ngram").generate([5, 6, 7], max_new_tokens=4).token_ids
        == expected
    )
    within = folder_with(tmp_path / "within", **{"model.layers.0.mlp.step": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.mlp\.step"):
        Engine.from_pretrained(str(within), "ngram")


@pytest.mark.parametrize(
    "fields", [("quantization",), ("quantization_config",), ("quantization", "quantization_config")]
)
def test_weights_packed_by_mlx_are_named(fields: tuple[str, ...], tmp_path: Path) -> None:
    packing = {"group_size": 64, "bits": 4}
    folder = folder_with(tmp_path / "model", fields=dict.fromkeys(fields, packing))
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = torch.zeros(state["lm_head.weight"].shape[0], 8, dtype=torch.uint32)
    state |= {f"lm_head.{name}": torch.ones(2, 2) for name in ("scales", "biases")}
    save_file(state, folder / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(
        (CheckpointError, UnsupportedModelError), match=r"MLX has packed .* mlx_lm\.convert"
    ):
        Engine.from_pretrained(str(folder), "ngram")


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod."])
def test_a_head_with_a_prefix_says_so(prefix: str, tmp_path: Path) -> None:
    head = written_head(tmp_path)
    state = load_file(head / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in state.items()}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"names of tensors begin with '{prefix}'"):
        load_head(head)


@pytest.mark.parametrize("backend", [None, "huggingface"])
def test_a_head_as_the_model_says_so(backend: str | None, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"is a draft head, accepted a whole model; give it as draft="
    ):
        Engine.from_pretrained(str(written_head(tmp_path)), backend=backend)


def test_a_note_says_why_there_is_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Engine.from_pretrained(str(folder_with(tmp_path / "model")), "ngram")
    note = next(
        line for line in capsys.readouterr().err.splitlines() if line.startswith("no tokenizer for")
    )
    assert not note.endswith(":")
    assert len(note) > 150

"""Tests that a folder's model is the files that transformers reads, whatever else the folder has."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specengine import Engine
from specengine.errors import CheckpointError, SpecEngineError
from specengine.files import safetensors_files
from tests.models.native_engines import needs_extension
from tests.sweep.serving import generated, prompt_of
from tests.sweep.small import model_of
from tests.toy import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(40, 52))
Change = Callable[[Path], Any]


def write(model: Any, file: Path, **tensors: Any) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file({**state, **tensors}, file, metadata={"format": "pt"})


def config_with(**fields: Any) -> Change:
    """Change fields of the config; None removes one."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        found = {**json.loads(file.read_text()), **fields}
        file.write_text(
            json.dumps({key: value for key, value in found.items() if value is not None})
        )

    return change


def named_in_the_config(folder: Path) -> None:
    config_with(transformers_weights="mine.safetensors")(folder)
    write(tiny("llama", 3), folder / "mine.safetensors")


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny("llama").save_pretrained(folder, max_shard_size="60KB")


def sharded_with_more_shards(folder: Path) -> None:
    sharded(folder)
    write(tiny("llama", 3), folder / "model-00099-of-00099.safetensors")


def one_file_beside_shards(folder: Path) -> None:
    sharded(folder)
    write(tiny("llama", 3), folder / "model.safetensors")


def strays(folder: Path) -> None:
    write(tiny("llama", 3), folder / "model.fp16.safetensors")
    save_file({"model.norm.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    (folder / "old.safetensors").write_bytes(b"no weights")


def without_prefixes(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})


def only_the_head_of_a_tied_pair(folder: Path) -> None:
    config_with(tie_word_embeddings=True)(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    state.pop("model.embed_tokens.weight")
    save_file(state, file, metadata={"format": "pt"})


def linked(folder: Path) -> None:
    blobs = folder / "blobs"
    blobs.mkdir()
    for file in [file for file in folder.iterdir() if file.is_file()]:
        shutil.move(file, blobs / file.name)
        file.symlink_to(blobs / file.name)


def defaults_in_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config_with(repetition_penalty=1.7)(folder)


CHANGES: dict[str, Change] = {
    "named in the config": named_in_the_config,
    "shards": sharded,
    "more shards than the list": sharded_with_more_shards,
    "one file beside shards": one_file_beside_shards,
    "stray files": strays,
    "a pickle beside it": lambda folder: torch.save(
        tiny("llama", 3).state_dict(), folder / "pytorch_model.bin"
    ),
    "no prefixes": without_prefixes,
    "only the head of a tied pair": only_the_head_of_a_tied_pair,
    "links": linked,
    "generation defaults in config.json": defaults_in_the_config,
    "a generation config that is no JSON": lambda folder: (
        folder / "generation_config.json"
    ).write_text("{"),
    "no dtype": config_with(dtype=None),
    "code of its own": config_with(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny("llama").save_pretrained(folder)
    return folder


def theirs(folder: Path) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        eos_token_id=None,
        max_new_tokens=9,
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.sliced(6)
@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_is_read_as_transformers_reads_it(
    saved: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    CHANGES[change](tmp_path)
    engine = Engine.from_pretrained(tmp_path)
    assert engine.generate(PROMPT, max_new_tokens=9, eos_token_id=[]).token_ids == theirs(tmp_path)


def test_the_cases_tell_the_files_apart(saved: Path, tmp_path: Path) -> None:
    tiny("llama", 3).save_pretrained(tmp_path)
    assert theirs(saved) != theirs(tmp_path)


DAMAGES: dict[str, tuple[Change, str]] = {
    "a shard is missing": (
        lambda folder: (sharded(folder), next(folder.glob("model-00002*")).unlink()),
        r"index.json: 1 of \d+ files are missing, fetch them: model-00002",
    ),
    "a list of shards that is none": (
        lambda folder: (
            sharded(folder),
            (folder / "model.safetensors.index.json").write_text("[]"),
        ),
        r"index.json: is damaged, fetch it again",
    ),
    "shards without names": (
        lambda folder: (
            sharded(folder),
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
        ),
        r"index.json: is damaged, fetch it again",
    ),
    "a link to nothing": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors").symlink_to("/no/file"),
        ),
        "no file named model.safetensors",
    ),
    "generation defaults of other types": (
        lambda folder: (folder / "generation_config.json").write_text('{"max_new_tokens": "many"}'),
        "generation_config.json: its values are not a valid generation config; correct or remove it",
    ),
    "generation defaults that are a list": (
        lambda folder: (folder / "generation_config.json").write_text("[1]"),
        "generation_config.json: its values are not a valid generation config; correct or remove it",
    ),
    "weights of GPTQ without a word in the config": (
        lambda folder: write(
            tiny("llama"),
            folder / "model.safetensors",
            **{"model.layers.0.mlp.up_proj.qweight": torch.ones(2, 2, dtype=torch.int32)},
        ),
        "unexpected: model.layers.0.mlp.up_proj.qweight",
    ),
}


@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_at_load(
    saved: Path, tmp_path: Path, damage: str, backend: str | None
) -> None:
    change, message = DAMAGES[damage]
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(SpecEngineError, match=message):
        Engine.from_pretrained(tmp_path, backend=backend)


def test_the_files_by_transformers_order(tmp_path: Path) -> None:
    assert safetensors_files(tmp_path) == []
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "two", "b": "one", "c": "two"}}')
    with pytest.raises(CheckpointError, match="2 of 2 files are missing"):
        safetensors_files(tmp_path)
    for name in ("one", "two", "three"):
        (tmp_path / name).touch()
    assert safetensors_files(tmp_path) == [tmp_path / "one", tmp_path / "two"]
    (tmp_path / "model.safetensors").touch()
    assert safetensors_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_sizes_that_differ_by_layer_are_read(tmp_path: Path) -> None:
    model = model_of("gemma4_text")
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, "none", offline=True)
    prompt = prompt_of(20)
    assert engine.generate(prompt, max_new_tokens=24, eos_token_id=[]).token_ids == generated(
        model, prompt
    )


@pytest.mark.parametrize("backend", ["huggingface", pytest.param("native", marks=needs_extension)])
def test_keys_that_no_layer_reads_are_not_read(tmp_path: Path, backend: str) -> None:
    """Gemma 4's files hold some of layers that read the keys of a layer before."""
    model, file, prompt = tiny("gemma4_text"), tmp_path / "model.safetensors", prompt_of(20)
    model.save_pretrained(tmp_path)
    keys = {"model.layers.5.self_attn.k_proj.weight": torch.ones(16, 32)}
    save_file(load_file(file) | keys, file, {"format": "pt"})
    engine = Engine.from_pretrained(tmp_path, "none", offline=True, backend=backend)
    assert engine.generate(prompt, max_new_tokens=24, eos_token_id=[]).token_ids == generated(
        model, prompt
    )


def test_a_folder_without_a_tokenizers_files_or_package_answers_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("ctrl")  # whose tokenizer's class raises a TypeError
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, "none", offline=True)
    assert engine.tokenizer is None
    assert "no tokenizer for " in capsys.readouterr().err
    assert engine.generate(prompt_of(9), max_new_tokens=24, eos_token_id=[]).token_ids == generated(
        model, prompt_of(9)
    )

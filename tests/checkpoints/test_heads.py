"""Draft heads saved and loaded: bit-identical round trips between the layouts, and engines that load them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import hub

from specengine import Engine, policies
from specengine.checkpoints import eagle as checkpoints
from specengine.checkpoints.eagle import Verifier, load_head, save_head
from specengine.drafters.eagle import EagleDraft
from specengine.errors import CheckpointError, InputError
from specengine.models.eagle import EagleConfig, causal, head_from
from tests.checkpoints.layouts import LAYER_IDS, official, same
from tests.toy import CPU, VOCABULARY, head_config, random_state, tiny

MODEL = Verifier("some/model")
BOTH = [
    head_config(1, fc_bias=True, own_embeddings=True),
    head_config(1),
    head_config(layer_ids=(0, 4, 9), norm_before_residual=True),
    head_config(fusion_norm="each", own_embeddings=True, target_hidden_size=48, head_dim=16),
    head_config(fusion_norm="whole", layer_ids=(1, 2)),
    head_config(
        draft_vocab_size=VOCABULARY, rope={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    ),
    head_config(qkv_bias=True, o_bias=True),
    head_config(temperatures=(0.85, 1.0, 1.25)),
    head_config(1, temperatures=(0.9,)),
    head_config(1, sliding_window=9),
    head_config(sliding_window=7),
]
ONE = {
    "official": [head_config(norm_logits=False), head_config(1, qkv_bias=True)],
    "speculators": [head_config(qk_norm=True), head_config(norm_recurrent=True)],
}


def logits(config: EagleConfig, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    head = head_from(config, state, dtype, CPU)
    random = torch.Generator().manual_seed(1)
    features = torch.randn(
        1, 9, config.num_features * config.target_hidden_size, generator=random
    ).to(dtype)
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
    state = {
        name: t.to(dtype) if t.is_floating_point() else t
        for name, t in random_state(config).items()
    }
    other: Any = "speculators" if first == "official" else "official"
    save_head(config, state, tmp_path / "one", first, verifier=MODEL)
    there = load_head(tmp_path / "one")
    save_head(there.config, there.state, tmp_path / "two", other, verifier=MODEL)
    back = load_head(tmp_path / "two")
    for found in (there, back):
        assert found.config == config
        assert same(found.state, state)
    assert there.dialect.layout == first
    assert back.dialect.layout == other
    assert torch.equal(logits(config, state, dtype), logits(back.config, back.state, dtype))
    save_head(back.config, back.state, tmp_path / "three", first, verifier=MODEL)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


@pytest.mark.parametrize(
    ("layout", "config"), [(layout, config) for layout, many in ONE.items() for config in many]
)
def test_what_one_layout_cannot_say_is_refused_by_it(
    tmp_path: Path, layout: Any, config: EagleConfig
) -> None:
    save_head(config, random_state(config), tmp_path, layout, verifier=MODEL)
    assert load_head(tmp_path).config == config
    other: Any = "speculators" if layout == "official" else "official"
    with pytest.raises(CheckpointError, match=r"layout has (no field for it|one field for both)"):
        save_head(config, random_state(config), tmp_path / "other", other, verifier=MODEL)
    assert not (tmp_path / "other").exists()


def test_the_official_file_is_what_upstream_reads(tmp_path: Path) -> None:
    config = head_config(layer_ids=(2, 3, 4))
    save_head(config, random_state(config), tmp_path)
    tensors, raw = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    assert same(tensors, official(config, random_state(config)))
    assert raw["eagle_config"] == {LAYER_IDS: [1, 2, 3]}
    assert raw[LAYER_IDS] == [2, 3, 4]  # as vLLM counts them
    assert "norm_output" not in raw  # which vLLM takes for another thing
    assert "attention_bias" not in raw
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert int(tensors["t2d"].sum()) == config.draft_vocab_size


def test_what_is_not_the_usual_stands_in_the_official_file(tmp_path: Path) -> None:
    config = head_config(norm_logits=False, qkv_bias=True, o_bias=True)
    save_head(config, random_state(config), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["norm_output"] is False
    assert (
        raw["attention_bias"] is raw["qkv_bias"] is True
    )  # vLLM reads the former, the EAGLE repository the latter
    assert load_head(tmp_path).config == config


@pytest.mark.parametrize("target", [None, ""])
def test_the_speculators_layout_needs_the_targets_name(tmp_path: Path, target: str | None) -> None:
    config = head_config()
    with pytest.raises(
        CheckpointError,
        match=r"target: got .*, accepted the name of the model that the head was made",
    ):
        save_head(
            config,
            random_state(config),
            tmp_path / "head",
            "speculators",
            verifier=Verifier(target),
        )
    assert not (tmp_path / "head").exists()
    save_head(config, random_state(config), tmp_path / "head", "speculators", verifier=MODEL)
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/model"


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
    with pytest.raises(
        CheckpointError, match="layout: got 'gguf', accepted dflash, official, speculators"
    ):
        save_head(config, random_state(config), tmp_path / "head", "gguf")  # type: ignore[arg-type]
    assert not (tmp_path / "head").exists()


# ---------------------------------------------------------------------------------------------------- in an engine


@pytest.mark.parametrize("layout", ["official", "speculators"])
@pytest.mark.parametrize("version", [1, 3])
def test_engines_load_heads_by_their_path(tmp_path: Path, layout: Any, version: Any) -> None:
    model = tiny(num_hidden_layers=6)
    config = head_config(version)
    save_head(config, random_state(config), tmp_path / "my-head", layout, verifier=MODEL)
    engine = Engine.from_pretrained(model, draft=str(tmp_path / "my-head"), lookup=False)
    plain = Engine.from_pretrained(model, policy="plain")
    result = engine.generate([1, 2, 3, 4], max_new_tokens=12)
    assert result.token_ids == plain.generate([1, 2, 3, 4], max_new_tokens=12).token_ids
    assert result.stats.draft == f"eagle (EAGLE-{version}, my-head)"
    assert engine.policy == policies.make("auto")
    assert (EagleDraft.about.policy, EagleDraft.about.options) == ("auto", {})


def test_draft_options_overrule_the_config(tmp_path: Path) -> None:
    model = tiny(num_hidden_layers=6)
    config = head_config()
    save_head(config, random_state(config), tmp_path)
    engine = Engine.from_pretrained(model, str(tmp_path), draft_options={"layer_ids": "1,2,4"})
    assert engine.drafter is not None
    assert engine.drafter.traits.features == (1, 2, 4)
    with pytest.raises(
        InputError, match="draft_options: unknown option 'layers', known are producer, layer_ids"
    ):
        Engine.from_pretrained(model, str(tmp_path), draft_options={"layers": "1,2,4"})
    other = replace(config, target_hidden_size=48, own_embeddings=True)
    save_head(other, random_state(other), tmp_path)
    with pytest.raises(InputError, match="made for a target with hidden size 48, this one has 32"):
        Engine.from_pretrained(model, str(tmp_path))


def test_small_models_take_no_draft_options(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="accepted for EAGLE heads alone"):
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

    monkeypatch.setattr(checkpoints, "cached_file", cached_file)
    monkeypatch.setattr(checkpoints, "why_absent", lambda name, offline: None)
    monkeypatch.setattr(checkpoints.PretrainedConfig, "get_config_dict", config_dict)
    assert checkpoints.head_folder("org/head") == tmp_path
    assert asked == ["config.json", "model.safetensors"]
    assert checkpoints.head_folder("org/model") is None
    assert checkpoints.head_folder("org/absent") is None

    whole = tmp_path / "model.safetensors"
    tensors, shards = load_file(whole), dict[str, list[str]]()
    for place, name in enumerate(tensors):
        shards.setdefault(f"model-{place % 2}.safetensors", []).append(name)
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    whole.unlink()
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {name: file for file, names in shards.items() for name in names}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    asked.clear()
    monkeypatch.setattr(hub, "cached_files", lambda _, names, **__: asked.extend(names))
    assert checkpoints.head_folder("org/head") == tmp_path
    assert asked == ["config.json", "model.safetensors", index.name, *sorted(shards)]
    assert load_head(tmp_path).state.keys() == random_state(config).keys()
    index.write_text("{}")
    assert checkpoints.head_folder("org/head") is None

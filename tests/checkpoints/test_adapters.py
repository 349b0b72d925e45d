"""Adapters of PEFT: answers as transformers gives them, from folders and from loaded models, or a refusal by name."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specengine import Engine
from specengine.checkpoints import checks
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(40, 52))
LORA = {
    "r": 4,
    "target_modules": ["q_proj", "down_proj"],
    "init_lora_weights": False,
    "task_type": "CAUSAL_LM",
}


def answer(model: Any, count: int = 10) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = model.eval().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options
    )
    return out[0, len(PROMPT) :].tolist()


def ours(model: Any, count: int = 10, **options: Any) -> list[int]:
    return (
        Engine.from_pretrained(model, **options)
        .generate(PROMPT, max_new_tokens=count, eos_token_id=[])
        .token_ids
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer on disk."""
    folder = tmp_path_factory.mktemp("base")
    tiny("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def adapted(base: Path, kind: str = "LoraConfig", **options: Any) -> Any:
    """The base with random adapters, as a PeftModel."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    model = peft.get_peft_model(loaded(base), getattr(peft, kind)(**options))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) / 2)
    return model.eval()


KINDS = {
    "lora": ("LoraConfig", LORA),
    "rank stabilised": ("LoraConfig", LORA | {"use_rslora": True}),
    "modules to save": ("LoraConfig", LORA | {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "trainable tokens": ("LoraConfig", LORA | {"trainable_token_indices": [41, 42]}),
    "ia3": ("IA3Config", {"task_type": "CAUSAL_LM", "init_ia3_weights": False}),
    "norms": ("LNTuningConfig", {"task_type": "CAUSAL_LM", "target_modules": ["input_layernorm"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_answers_as_in_transformers(base: Path, tmp_path: Path, kind: str) -> None:
    name, options = KINDS[kind]
    model = adapted(base, name, **options)
    model.save_pretrained(tmp_path)
    expected = answer(model)
    assert expected != answer(loaded(base))
    assert answer(loaded(tmp_path)) == expected
    assert ours(tmp_path) == expected
    assert ours(model, draft="ngram") == expected


def test_a_model_and_its_adapter_in_one_folder(base: Path, tmp_path: Path) -> None:
    model = adapted(base, **LORA)
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path)
    assert engine.generate(PROMPT, max_new_tokens=10, eos_token_id=[]).token_ids == answer(model)
    assert "an adapter of kind LORA" in engine.target.backend
    assert "merge_and_unload()" in engine.target.backend
    with pytest.raises(InputError, match="an adapter of kind LORA"):
        Engine.from_pretrained(tmp_path, backend="native")


def test_an_adapter_as_a_draft_and_one_kept_as_a_pickle(base: Path, tmp_path: Path) -> None:
    model = adapted(base, **LORA)
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(base, tmp_path)
    assert engine.drafter.name.startswith("small_model")
    assert engine.generate(PROMPT, max_new_tokens=10, eos_token_id=[]).token_ids == answer(
        loaded(base)
    )
    assert (
        Engine.from_pretrained(tmp_path).tokenizer("abc")["input_ids"]
        == byte_tokenizer()("abc")["input_ids"]
    )
    file = tmp_path / "adapter_model.safetensors"
    torch.save(load_file(file), tmp_path / "adapter_model.bin")
    file.unlink()
    with pytest.raises(
        UnsupportedModelError,
        match=r"an adapter of kind LORA .*adapter_model.safetensors.*merge it",
    ):
        Engine.from_pretrained(tmp_path)


def test_a_merged_model_runs_natively(base: Path) -> None:
    model = adapted(base, **LORA)
    expected, merged = answer(model), model.merge_and_unload()
    engine = Engine.from_pretrained(merged)
    assert engine.generate(PROMPT, max_new_tokens=10, eos_token_id=[]).token_ids == expected


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learnt_prompts_are_refused_by_name(base: Path, tmp_path: Path, kind: str) -> None:
    model = adapted(base, kind, num_virtual_tokens=3, task_type="CAUSAL_LM")
    model.save_pretrained(tmp_path)
    for given in (model, tmp_path):
        with pytest.raises(
            UnsupportedModelError, match=r"adapter of kind PR.*_TUNING.*accepted: LORA"
        ):
            Engine.from_pretrained(given)
        with pytest.raises(
            UnsupportedModelError, match=r"adapter of kind PR.*_TUNING.*accepted: LORA"
        ):
            Engine.from_pretrained(tiny("llama"), given)


def test_weights_that_transformers_leaves_out_are_no_silent_other_answer(
    base: Path, tmp_path: Path
) -> None:
    adapted(base, **LORA).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"target_modules": ["q_proj", "down_proj", "up_proj"]}
        )
    )
    with pytest.raises(
        UnsupportedModelError, match=r"cannot apply \(to .*missing: .*up_proj.*merge_and_unload"
    ):
        Engine.from_pretrained(tmp_path)


def test_a_vocabulary_that_grew_with_the_adapter(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = loaded(base)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    config = peft.LoraConfig(**LORA, modules_to_save=["embed_tokens", "lm_head"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"cannot apply \(.*shape.*AutoPeftModelForCausalLM"
    ):
        Engine.from_pretrained(tmp_path)


# ---- without peft


def written(folder: Path, **fields: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    return folder


def test_without_peft_an_adapter_is_refused_by_name(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "is_peft_available", lambda: False)
    written(tmp_path, base_model_name_or_path=str(base))
    shutil.copytree(base, tmp_path / "both")
    for folder in (tmp_path, written(tmp_path / "both")):
        for place in ({}, {"draft": folder}):
            with pytest.raises(
                UnsupportedModelError,
                match=r"an adapter of kind LORA .*pip install peft, or merge it",
            ):
                Engine.from_pretrained(base if place else folder, **place)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": None}, "peft_type: got None, accepted a name"),
        (
            {"base_model_name_or_path": None},
            "base_model_name_or_path of its adapter_config.json: got None",
        ),
        (
            {"base_model_name_or_path": 3},
            "base_model_name_or_path of its adapter_config.json: got 3",
        ),
    ],
)
def test_an_adapter_config_that_says_too_little(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Engine.from_pretrained(written(tmp_path, **fields))


def test_a_damaged_adapter_config_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config.json is damaged"):
        Engine.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/base", "nobody/no-such-model"])
def test_an_adapter_of_a_model_that_is_not_there(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_require_applicable", lambda *_: None)
    written(tmp_path, base_model_name_or_path=name)
    with pytest.raises(
        UnsupportedModelError,
        match=f"for '{name}' .*there is no such.*correct that field, or merge",
    ):
        Engine.from_pretrained(tmp_path, offline=True)


def test_an_adapter_upon_an_adapter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_require_applicable", lambda *_: None)
    (tmp_path / "first").mkdir()
    first = written(tmp_path / "first", base_model_name_or_path="x/y")
    with pytest.raises(UnsupportedModelError, match="it is an adapter itself"):
        Engine.from_pretrained(written(tmp_path, base_model_name_or_path=str(first)))


class Wrapped(torch.nn.Module):
    """A model as PeftModel holds it."""

    def __init__(self, model: PreTrainedModel, **kind: Any) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model
        config = {"peft_type": "LORA", "is_prompt_learning": False, "is_adaption_prompt": False}
        self.peft_config = {"default": SimpleNamespace(**(config | kind))}


def test_the_model_inside_of_a_wrapper_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("peft")
    package.PeftModel = package.PeftMixedModel = Wrapped  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", package)
    model = tiny("llama")
    assert ours(Wrapped(model)) == answer(model)
    assert ours(model, draft=Wrapped(tiny("llama"))) == answer(model)
    for kind in (
        {"is_prompt_learning": True},
        {"is_adaption_prompt": True},
        {"peft_type": "XLORA"},
    ):
        for field, given in (
            ("model", (Wrapped(model, **kind),)),
            ("draft", (model, Wrapped(model, **kind))),
        ):
            with pytest.raises(
                UnsupportedModelError, match=f"^{field}: its Wrapped has an adapter of kind"
            ):
                Engine.from_pretrained(*given)
    with pytest.raises(InputError, match="model: got Linear"):
        Engine.from_pretrained(torch.nn.Linear(1, 1))

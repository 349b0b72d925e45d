"""Checkpoints of models that read pictures too: by their folder, for text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel, T5Config

from specengine import Engine
from specengine.errors import UnsupportedModelError
from specengine.models.configs import auto_class, empty_model, text_config, with_buffers
from tests.models.native_engines import needs_extension
from tests.sweep.serving import generated, prompt_of
from tests.sweep.small import sizes_for
from tests.toy import policy_for

pytestmark = pytest.mark.usefixtures("one_thread")


def saved(kind: str, folder: Path) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind](**sizes_for(CONFIG_MAPPING[kind], {}))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.sliced(6)
@pytest.mark.parametrize("backend", ["huggingface", pytest.param(None, marks=needs_extension)])
@pytest.mark.parametrize(
    "kind",
    [
        "mistral3",
        "llava",
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "smolvlm",
        "qwen3_5",
        "muse_glimmer",
    ],
)
def test_a_folder_answers_texts(kind: str, backend: str | None, tmp_path: Path) -> None:
    model, prompt = saved(kind, tmp_path), prompt_of(40)
    options = {} if backend is None else {"backend": backend}
    engine = Engine.from_pretrained(tmp_path, "ngram", policy_for("eagle"), offline=True, **options)
    assert engine.target.backend.startswith("native (" if backend is None else "huggingface")
    assert engine.generate(prompt, max_new_tokens=24, eos_token_id=[]).token_ids == generated(
        model, prompt
    )
    if kind != "qwen3_5":  # of which transformers loads the language model alone
        assert type(engine.target.model) is type(model)  # whole, pictures and all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_text_alone_has_the_logits_of_the_model_with_pictures(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    saved("muse_glimmer", tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype)
    ids, state = torch.tensor([prompt_of(40)]), whole.state_dict()
    text = empty_model(text_config(whole.config), dtype)
    names = {name: name.replace("model.", "model.language_model.", 1) for name in text.state_dict()}
    tensors = {name: state.get(stored, state.get(name)) for name, stored in names.items()}
    text.load_state_dict(tensors, assign=True)
    with_buffers(text).eval()
    for rows in ({}, {"logits_to_keep": 1}, {"logits_to_keep": torch.tensor([3, 20])}):
        logits = text(ids, **rows).logits
        assert torch.equal(logits, whole(ids, **rows).logits)
        assert logits.abs().max() <= text.config.final_logit_softcapping


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file(
        {change(name): tensor for name, tensor in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )


@needs_extension
def test_tensors_of_the_language_model_have_one_of_the_known_names(tmp_path: Path) -> None:
    model, prompt = saved("gemma3", tmp_path), prompt_of(20)
    renamed(tmp_path, lambda name: name.replace("language_model.model.", "model.language_model."))
    engine = Engine.from_pretrained(tmp_path, "none", offline=True, backend="native")
    assert engine.generate(prompt, max_new_tokens=24, eos_token_id=[]).token_ids == generated(
        model, prompt
    )
    renamed(tmp_path, lambda name: name.replace("model.language_model.", "model.text."))
    with pytest.raises(
        UnsupportedModelError, match="names the tensors of its language model in no known way"
    ):
        Engine.from_pretrained(tmp_path, "none", offline=True, backend="native")


@needs_extension
def test_a_tensor_that_its_language_model_lacks_is_named(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    renamed(tmp_path, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper"))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight None, not "):
        Engine.from_pretrained(tmp_path, "none", offline=True, backend="native")


def test_a_model_that_goes_on_with_no_text_is_named_by_its_type() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="model type t5 is no language model of transformers that goes on",
    ):
        auto_class(T5Config())
    with pytest.raises(UnsupportedModelError, match=r"^model \S*: model type t5"):
        empty_model(T5Config(), torch.float32)

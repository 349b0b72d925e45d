"""Tests of which backend runs a model: what the native forward takes by default, what it refuses, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations
from transformers import LlamaForCausalLM, PreTrainedModel

from specengine import Engine
from specengine.errors import BackendError, InputError, UnsupportedModelError
from specengine.models import extension
from specengine.models.extension import NOT_BUILT, VARIABLE
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, from_model, lm as native_lm_module
from tests.heads import deep
from tests.models.native_engines import FAMILIES, INSTRUCTION_SETS, needs_extension, plainly
from tests.models.native_variants import PROMPT, write_gguf
from tests.toy import hooked, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]


def loaded(model: Any, draft: Any = "none", **options: Any) -> Engine:
    return Engine.from_pretrained(model, draft, offline=True, **options)


def answer(engine: Engine, count: int = 12, **options: Any) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=count, raw=True, **options).token_ids


def saved(folder: Path, model: PreTrainedModel, **config: Any) -> str:
    """A folder with this model; `config` changes what its config.json says."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


# ---------------------------------------------------------------------------------------------------- by default


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_runs_natively_on_a_cpu(family: str) -> None:
    whole = {"sliding_window": None} if family == "mistral" else {}
    engine = loaded(tiny(family, **whole))
    assert isinstance(engine.target, NativeTarget)
    assert answer(engine) == plainly(tiny(family), PROMPT, 12)
    assert isinstance(loaded(tiny(family), backend="native").target, NativeTarget)
    other = loaded(tiny(family), backend="huggingface")
    assert isinstance(other.target, HuggingFaceTarget)
    assert other.target.backend == "huggingface (backend='huggingface' was asked for)"
    assert answer(other) == answer(engine)


def test_the_backend_names_the_instruction_set_and_the_weights() -> None:
    found = loaded(tiny().to(torch.bfloat16)).target.backend
    assert found.startswith(f"native ({INSTRUCTION_SETS[0]}, ")
    assert found.endswith("MB of weights as bf16)")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pack": True}, "pack= is an option of the Hugging Face backend"),
        ({"pack": False}, "pack= is an option of the Hugging Face backend"),
        ({"graphs": True}, "graphs are made of the model's own modules"),
    ],
)
def test_options_of_the_other_backend_choose_it(options: dict[str, Any], reason: str) -> None:
    engine = loaded(tiny(), **options)
    assert isinstance(engine.target, HuggingFaceTarget)
    assert answer(engine, 6) == plainly(tiny(), PROMPT, 6)
    with pytest.raises(
        InputError, match=f"backend: the native forward was asked for, but {reason}"
    ):
        loaded(tiny(), backend="native", **options)


def test_weights_that_onednn_cannot_multiply_are_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = tiny().to(torch.bfloat16)
    with pytest.raises(InputError, match="pack: got True, accepted False or none: oneDNN has no"):
        loaded(model, pack=True)
    assert not loaded(model, pack=False).target.lm.packed
    assert not loaded(model, backend="huggingface").target.lm.packed
    assert isinstance(loaded(tiny(), pack=True).target, HuggingFaceTarget)  # with nothing to pack


def test_float16_runs_through_transformers(tmp_path: Path) -> None:
    path = saved(tmp_path, tiny())
    assert loaded(path, dtype="float16").target.dtype is torch.float16
    with pytest.raises(
        InputError, match=r"asked for, but dtype torch.float16 is neither bfloat16 nor float32"
    ):
        loaded(path, dtype="float16", backend="native")
    half = tiny().to(torch.float16)
    assert (
        "native: weights of torch.float16, known are bfloat16 and float32"
        in loaded(half).target.backend
    )
    with pytest.raises(UnsupportedModelError, match=r"native: weights of torch.float16"):
        loaded(half, backend="native")


@pytest.mark.parametrize("value", ["natively", "", 1])
def test_unknown_backends_are_refused(value: Any) -> None:
    with pytest.raises(
        InputError, match=f"backend: got {value!r}, accepted native, huggingface or none"
    ):
        loaded(tiny(), backend=value)


def test_strict_costs_nothing_here_and_is_accepted() -> None:
    engine = loaded(tiny().to(torch.bfloat16), "ngram", policy="eagle", strict=True)
    assert isinstance(engine.target, NativeTarget)


@pytest.mark.slow
def test_drafts_run_natively_beside_a_native_target_and_otherwise_beside_others() -> None:
    engine = loaded(tiny(), tiny("qwen3", seed=1), lookup=False)
    assert isinstance(engine.drafter.lm, NativeLM)
    assert answer(engine) == plainly(tiny(), PROMPT, 12)
    for target, draft, options in (
        (tiny(), tiny("gpt2"), {}),
        (tiny(), tiny("qwen3"), {"backend": "huggingface"}),
    ):
        engine = loaded(target, draft, lookup=False, **options)
        assert isinstance(engine.drafter.lm, CausalLM)
        assert answer(engine) == plainly(tiny(), PROMPT, 12)
    engine = loaded(tiny("gpt2"), tiny("qwen3"), lookup=False)
    assert isinstance(engine.target, HuggingFaceTarget)
    assert isinstance(engine.drafter.lm, NativeLM)
    assert answer(engine) == plainly(tiny("gpt2"), PROMPT, 12)


# ---------------------------------------------------------------------------------------------------- refused


class OfItsOwn(LlamaForCausalLM):
    """A model by somebody else, whose forward may do anything."""


def _own_class() -> PreTrainedModel:
    model = OfItsOwn(tiny().config).eval()
    model.load_state_dict(tiny().state_dict())
    return model


def _own_module() -> PreTrainedModel:
    model = tiny()
    model.model.layers[1].mlp.act_fn = torch.nn.Identity()
    return model


def _own_forward() -> PreTrainedModel:
    model = tiny()
    mlp = model.model.layers[0].mlp
    whole = mlp.forward
    mlp.forward = lambda states: 3 * whole(states)
    return model


def _own_head() -> PreTrainedModel:
    model = tiny(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def _hook() -> PreTrainedModel:
    model = tiny()
    hooked(model.model.norm, lambda states: 2 * states)
    return model


def _pre_hook() -> PreTrainedModel:
    model = tiny()
    model.lm_head.register_forward_pre_hook(lambda _module, states: (2 * states[0],))
    return model


def _parametrized() -> PreTrainedModel:
    model = tiny()
    parametrizations.weight_norm(model.lm_head)
    return model


def _mixed() -> PreTrainedModel:
    model = tiny()
    model.model.norm.to(torch.bfloat16)
    return model


LOADED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "another family": (lambda: tiny("gpt2"), "model type gpt2, known are bamba, cohere, "),
    "another activation": (
        lambda: tiny(hidden_act="gelu"),
        "activation gelu, known are silu, gelu_pytorch_tanh",
    ),
    "dynamic positions": (
        lambda: tiny(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        ),
        "dynamic positions, known are default, linear, llama3, yarn, longrope",
    ),
    "part of a head": (
        lambda: tiny(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        ),
        "positions on part of a head's channels",
    ),
    "own class": (_own_class, "module model is a OfItsOwn"),
    "own module": (_own_module, "module model.layers.1.mlp.act_fn is a Identity"),
    "own forward": (
        _own_forward,
        "module model.layers.0.mlp has hooks, parametrizations or a forward of its own",
    ),
    "own head": (
        _own_head,
        "lm_head has weights of its own, and the config ties it to the embeddings",
    ),
    "hook": (_hook, "module model.norm has hooks, parametrizations or a forward"),
    "pre-hook": (_pre_hook, "module lm_head has hooks, parametrizations or a forward"),
    "parametrization": (_parametrized, "module lm_head has hooks, parametrizations or a forward"),
    "mixed dtypes": (_mixed, "the weights have more than one dtype"),
}


@pytest.mark.parametrize("case", LOADED)
def test_a_loaded_model_that_computes_something_else_is_refused_with_the_reason(case: str) -> None:
    make, reason = LOADED[case]
    for options in ({"backend": "native"}, {"quantize": "int8"}):
        with pytest.raises(UnsupportedModelError, match=f"native: {reason}"):
            loaded(make(), **options)


@pytest.mark.parametrize(
    "case", [name for name in LOADED if name not in ("part of a head", "mixed dtypes")]
)
def test_by_default_it_runs_as_transformers_runs_it(case: str) -> None:
    make, reason = LOADED[case]
    engine = loaded(make())
    assert engine.target.backend.startswith(f"huggingface (native: {reason}")
    assert answer(engine, 8) == plainly(make(), PROMPT, 8)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "quantized": ({"quantization_config": {"quant_method": "quark"}}, "quantized weights"),
    "own code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
        "code of its own .auto_map.",
    ),
    "linear attention": (
        {"layer_types": ["full_attention", "linear_attention"]},
        "other layers than full or sliding attention",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_says_something_else_is_refused_before_weights_are_read(
    case: str, tmp_path: Path
) -> None:
    changes, reason = CONFIGS[case]
    path = saved(tmp_path, tiny(), **changes)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=f"native: {reason}"):
        loaded(path, backend="native")


def test_own_code_falls_back_to_transformers(tmp_path: Path) -> None:
    path = saved(tmp_path, tiny(), auto_map={"AutoModelForCausalLM": "modeling.Own"})
    engine = loaded(path)
    assert engine.target.backend == "huggingface (native: code of its own (auto_map))"
    assert answer(engine) == plainly(tiny(), PROMPT, 12)


def test_a_model_whose_results_are_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no rule foresaw: the first layers are compared with the model's own at load."""
    real = native_lm_module.shape_of

    def wrong(config: Any) -> Any:
        shape = real(config)
        return type(shape)(**(vars(shape) | {"eps": 0.5}))

    monkeypatch.setattr(native_lm_module, "shape_of", wrong)
    with pytest.raises(
        UnsupportedModelError, match=r"gives other hidden states than its own modules .distance"
    ):
        loaded(tiny(), backend="native")
    engine = loaded(tiny())
    assert isinstance(engine.target, HuggingFaceTarget)
    assert answer(engine) == plainly(tiny(), PROMPT, 12)


# ---------------------------------------------------------------------------------------------------- the environment


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_the_variable_forces_an_instruction_set(
    instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, instructions)
    assert loaded(tiny().to(torch.bfloat16)).target.backend.startswith(f"native ({instructions}, ")
    engine = loaded(tiny())  # float32 goes to the vectors of a set that multiplies bfloat16 alone
    assert (engine.target.lm.instruction_set == instructions) == (
        instructions not in extension.WITH_PAIRS
    )


def test_an_unknown_instruction_set_is_named_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "nonsense")
    for options in ({}, {"backend": "native"}):
        with pytest.raises(
            BackendError, match=f"{VARIABLE}: got 'nonsense', accepted on this CPU: .*portable"
        ):
            loaded(tiny(), **options)
    assert isinstance(loaded(tiny(), backend="huggingface").target, HuggingFaceTarget)
    monkeypatch.setenv(VARIABLE, "")
    assert loaded(tiny().to(torch.bfloat16)).target.lm.instruction_set == INSTRUCTION_SETS[0]


def test_without_the_extension_all_goes_through_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = str(write_gguf(tmp_path / "model.gguf", "llama", "q8_0"))
    expected = answer(loaded(file, dtype="float32"))
    monkeypatch.setattr(extension, "_extension", None)
    assert extension.instruction_sets() == []
    engine = loaded(tiny(), tiny("qwen3"), lookup=False)
    assert engine.target.backend == f"huggingface ({NOT_BUILT})"
    assert isinstance(engine.drafter.lm, CausalLM)
    assert answer(engine) == plainly(tiny(), PROMPT, 12)
    assert answer(loaded(file, dtype="float32")) == expected
    for options in ({"backend": "native"}, {"quantize": "int8"}):
        with pytest.raises(
            InputError, match=r"the native forward was asked for, but the extension .* is not built"
        ):
            loaded(tiny(), **options)
    with pytest.raises(
        BackendError, match=r"native: the extension specengine._cpu is not built: install a C"
    ):
        from_model(tiny())


# ---------------------------------------------------------------------------------------------------- a living model


def test_weights_changed_in_place_are_taken_in() -> None:
    """By an optimizer, by load_state_dict, and by other tensors in their place; of a draft as well."""
    model, draft = tiny(), tiny("qwen3")
    engine = loaded(model, draft, lookup=False)
    before = answer(engine)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
        draft.lm_head.weight.mul_(-1)
    after = answer(engine)
    assert after == plainly(model, PROMPT, 12) != before
    model.load_state_dict(tiny(seed=5).state_dict())
    assert answer(engine) == plainly(tiny(seed=5), PROMPT, 12)
    model.model.norm.weight = torch.nn.Parameter(torch.full_like(model.model.norm.weight, 0.1))
    assert answer(engine, temperature=1.0, seed=1) == answer(loaded(model), temperature=1.0, seed=1)


def test_what_is_hung_onto_a_model_later_is_run_by_transformers() -> None:
    model = tiny()
    engine = loaded(model)
    expected = answer(engine)
    with hooked(model.model.layers[0], lambda states: 2 * states):
        assert answer(engine) == plainly(model, PROMPT, 12) != expected
        assert "native: module model.layers.0 has hooks" in engine.target.backend
        with pytest.raises(UnsupportedModelError, match=r"native: module model.layers.0 has hooks"):
            answer(loaded(model, backend="native"))
    assert answer(engine) == expected


def test_a_head_untied_later_is_run_by_transformers() -> None:
    model = tiny(tie_word_embeddings=True)
    engine = loaded(model)
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach().flip(0))
    assert answer(engine) == plainly(model, PROMPT, 12)
    assert "native: lm_head has weights of its own" in engine.target.backend


def test_hidden_states_asked_of_a_loaded_model_leave_it_native() -> None:
    """Transformers leaves hooks on a model that it has once been asked for hidden states; they only look."""
    model = tiny()
    engine = loaded(model)
    expected = answer(engine)
    model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    assert answer(engine) == expected
    assert isinstance(loaded(model).target, NativeTarget)


def test_an_engine_and_its_loaded_model_do_not_disturb_each_other() -> None:
    model = deep()
    engine = loaded(model, "ngram")
    assert engine.target.model is model
    assert answer(engine) == plainly(model, PROMPT, 12) == plainly(deep(), PROMPT, 12)
    both = loaded(model, "ngram", backend="huggingface")  # this one changes the model's attention
    assert answer(both) == answer(engine) == answer(loaded(model))

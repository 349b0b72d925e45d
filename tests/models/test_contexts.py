"""The context: what scaled positions reach, what the config says, and what the option `context` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specengine import Engine
from specengine.checkpoints import gguf
from specengine.errors import InputError
from specengine.models.configs import context_limit
from tests.checkpoints.test_gguf_configuration import opened
from tests.models.native_engines import needs_extension
from tests.toy import VOCABULARY, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
BACKENDS = ["huggingface", pytest.param("native", marks=needs_extension)]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, dict[str, Any]] = {
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, new name": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, no original": {"rope_type": "yarn", "factor": 4.0},
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
}


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i) % VOCABULARY for i in range(length)]


def expected(model: PreTrainedModel, length: int, new: int) -> list[int]:
    ids = torch.tensor([prompt_of(length)])
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, length:
        ].tolist()


def saved(
    folder: Path, scaling: dict[str, Any] | None, family: str = "qwen2", **changes: Any
) -> str:
    """Save a model of 32 positions whose config is then given the scaling by hand, as model cards say."""
    tiny(family, max_position_embeddings=32, **changes).save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters", None)
    added = {} if scaling is None else {"rope_scaling": scaling}
    file.write_text(json.dumps({**config, "rope_theta": 10000.0, **added}))
    return str(folder)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_reach_their_factor_times_the_trained_context(
    kind: str, backend: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, SCALED[kind])
    engine = Engine.from_pretrained(folder, "recycling", "eagle", backend=backend)
    assert engine.target.max_context == 128
    model = AutoModelForCausalLM.from_pretrained(folder)
    for length, new in ((60, 20), (20, 40)):
        found = engine.generate(prompt_of(length), max_new_tokens=new, eos_token_id=[])
        assert found.token_ids == expected(model, length, new)
    with pytest.raises(
        InputError, match=r"accepted at most 127: .*max_position_embeddings .*option context"
    ):
        engine.generate(prompt_of(128))


def limit_of(scaling: Any, context: int = 32, **fields: Any) -> int:
    return context_limit(
        SimpleNamespace(
            model_type="llama", max_position_embeddings=context, rope_parameters=scaling, **fields
        )
    )


def test_contexts_that_hold_the_scaled_ones_already_stay() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    assert limit_of(yarn, 163840) == 163840
    assert limit_of({**LLAMA3, "original_max_position_embeddings": 8192}, 131072) == 131072
    assert limit_of({"rope_type": "default", "factor": 4.0}) == 32
    assert limit_of({"rope_type": "dynamic", "factor": 4.0}) == 32
    assert (
        limit_of({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16})
        == 16
    )
    assert limit_of({"rope_type": "yarn", "factor": "4"}) == 32
    assert limit_of({"rope_type": "linear", "factor": 1e300}) == 1 << 30
    assert limit_of(None) == 32


def test_layers_that_are_not_scaled_keep_the_context() -> None:
    gemma3 = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    assert limit_of(gemma3, 131072) == 131072
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"type": "linear", "factor": 2},
    }
    assert limit_of(both, 32) == 64


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 16}, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "linear", "factor": 4.0, "original_context_length": 16}, 64),
        ({"type": "none", "factor": 4.0}, 64),
    ],
)
def test_files_of_llama_cpp_have_the_same_contexts(
    scaling: dict[str, Any], reach: int, tmp_path: Path
) -> None:
    metadata = {f"qwen2.rope.scaling.{key}": value for key, value in scaling.items()}
    config = gguf.config(
        opened(tmp_path, "qwen2", metadata=metadata | {"qwen2.context_length": 64})
    )
    assert context_limit(config) == reach


@needs_extension
def test_queries_that_grow_go_on_growing_beyond_the_config(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.7,
    }
    model = tiny(
        "ministral3", max_position_embeddings=32, rope_parameters={**scaling, "rope_theta": 1e4}
    )
    for backend in ("native", "huggingface"):
        engine = Engine.from_pretrained(model, backend=backend)
        assert engine.target.max_context == 128
        assert engine.generate(
            prompt_of(100), max_new_tokens=12, eos_token_id=[]
        ).token_ids == expected(model, 100, 12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", [20, 100])
def test_the_option_says_otherwise(context: int, backend: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, None)
    engine = Engine.from_pretrained(folder, "recycling", "eagle", backend=backend, context=context)
    found = engine.generate(prompt_of(15), max_new_tokens=60, eos_token_id=[])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert found.token_ids == expected(model, 15, min(60, context - 15))
    assert ("ends with the context, 20 tokens" in " ".join(found.stats.notes)) is (context == 20)
    with pytest.raises(
        InputError, match=f"accepted at most {context - 1}: the context here is {context}"
    ):
        engine.generate(prompt_of(context))
    assert Engine.from_pretrained(folder, backend=backend).target.max_context == 32


def test_the_option_outlasts_a_change_of_the_model() -> None:
    model = tiny("llama", max_position_embeddings=32)
    engine = Engine.from_pretrained(model, backend="huggingface", context=64)
    model.lm_head.register_forward_hook(lambda _layer, _given, out: out.flip(-1))
    found = engine.generate(prompt_of(15), max_new_tokens=40, eos_token_id=[]).token_ids
    assert found == expected(model, 15, 40)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {"max_position_embeddings": 32}, "its table of positions has no more entries"),
        (
            "llama",
            {
                "max_position_embeddings": 32,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "positions of other kinds begin there",
        ),
    ],
)
def test_positions_that_end_are_named(family: str, changes: dict[str, Any], reason: str) -> None:
    model = tiny(family, **changes)
    with pytest.raises(InputError, match=f"context: got 40, accepted 2 to 32: {reason}"):
        Engine.from_pretrained(model, context=40)
    assert Engine.from_pretrained(model, context=24).target.max_context == 24


def test_strict_attention_ends_with_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.models.huggingface.strict_rows", lambda lm, padded: 8)
    model = tiny("mistral", sliding_window=24)
    with pytest.raises(
        InputError,
        match="context: got 40, accepted 2 to 24: strict attention ends with its window of 24",
    ):
        Engine.from_pretrained(model, strict=True, context=40, backend="huggingface")


@pytest.mark.parametrize("value", [0, 1, -5, 1.5, "64", True])
def test_what_is_no_context_is_refused(value: Any) -> None:
    with pytest.raises(
        InputError, match=r"context: got .* accepted a whole number of tokens, 2 or more"
    ):
        Engine.from_pretrained(tiny(), context=value)

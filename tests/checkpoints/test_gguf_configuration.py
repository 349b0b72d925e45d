"""The configuration of a GGUF file is transformers' own; what no configuration describes is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from specengine import Engine
from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.models.configs import layer_template
from tests.checkpoints import gguf_files as files
from tests.checkpoints.gguf_files import ARCHITECTURES, opened, written


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_configuration_is_that_of_transformers(
    models: dict[str, Path], architecture: str
) -> None:
    path = models[architecture]
    theirs = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    ours = gguf.config(gguf.read(path)).to_dict()
    without_meaning = {
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "transformers_version",
    }
    differing = {
        key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
    } - without_meaning
    assert differing <= {
        "head_dim"
    }  # which transformers leaves to Qwen2Config, and does not read for qwen3
    assert ours["head_dim"] == files.HEAD
    assert ours["architectures"] == [
        {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture] + "ForCausalLM"
    ]


def test_what_the_tensors_say_of_the_configuration(tmp_path: Path) -> None:
    plain = gguf.config(opened(tmp_path))
    assert (plain.tie_word_embeddings, plain.attention_bias, plain.mlp_bias) == (
        False,
        False,
        False,
    )
    biases = {
        f"blk.{layer}.attn_{part}.bias": ("f32", (64,))
        for layer in (0, 1)
        for part in ("q", "output")
    }
    biases |= {f"blk.{layer}.attn_{part}.bias": ("f32", (32,)) for layer in (0, 1) for part in "kv"}
    file = opened(tmp_path, tied=True, tensors=biases)
    config = gguf.config(file)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (
        True,
        True,
        False,
    )
    gguf.require_complete(file, config, layer_template(config))


def test_absent_values_have_the_meaning_that_llama_cpp_gives_them(tmp_path: Path) -> None:
    absent = ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv")
    config = gguf.config(
        opened(tmp_path, vocabulary={}, metadata={f"llama.{key}": None for key in absent})
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.num_key_value_heads, config.head_dim) == (files.HEADS, files.HEAD)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


SCALED = {
    "linear": ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "no type": ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "factor 1": ({"type": "linear", "factor": 1.0}, {"rope_type": "default"}),
    "none": ({"type": "none", "factor": 2.0}, {"rope_type": "default"}),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 1.0,
        },
    ),
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_rotary_positions(tmp_path: Path, case: str) -> None:
    stored, expected = SCALED[case]
    metadata = {f"qwen2.rope.scaling.{key}": value for key, value in stored.items()}
    config = gguf.config(opened(tmp_path, "qwen2", metadata=metadata))
    assert config.rope_parameters == {"rope_theta": 50_000.0, **expected}
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    assert Qwen2RotaryEmbedding(config).inv_freq.shape == (files.HEAD // 2,)


def llama3_factors(factor: float, theta: float = 50_000.0) -> np.ndarray:
    """Compute the factors as convert_hf_to_gguf.py does: llama.cpp divides each frequency by its factor."""
    frequencies = 1.0 / theta ** (np.arange(0, files.HEAD, 2, dtype=np.float32) / files.HEAD)
    found = []
    for wavelength in 2 * np.pi / frequencies:
        smooth = (8192 / wavelength - 1) / 3
        known = {wavelength < 2048: 1.0, wavelength > 8192: factor}
        found.append(known.get(True, 1 / ((1 - smooth) / factor + smooth)))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3(tmp_path: Path, factor: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stored = llama3_factors(factor)
    assert {1.0, factor} < set(stored.tolist())
    file = opened(tmp_path, tensors={"rope_freqs.weight": stored})
    config = gguf.config(file)
    gguf.require_complete(file, config, layer_template(config))
    plain = 50_000.0 ** (-np.arange(0, files.HEAD, 2) / files.HEAD)
    np.testing.assert_allclose(
        LlamaRotaryEmbedding(config).inv_freq.numpy(), plain / stored, rtol=1e-5
    )


@pytest.mark.parametrize(
    "stored", [llama3_factors(8.0) * 1.01, np.ones(4, np.float32), np.full(8, np.nan, np.float32)]
)
def test_other_rotary_factors_are_refused(tmp_path: Path, stored: np.ndarray) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight are not those of Llama 3"):
        gguf.config(opened(tmp_path, tensors={"rope_freqs.weight": stored.astype(np.float32)}))


UNSUPPORTED = {
    "expert_group_count": 8,
    "attention.sliding_window": 4096,
    "attention.causal": False,
    "logit_scale": 0.5,
    "rope.dimension_count": 8,
    "attention.value_length": 8,
    "rope.scaling.type": "longrope",
    "rope.scaling.attn_factor": 0.5,
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_model_that_no_configuration_describes_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} = {UNSUPPORTED[key]} "):
        gguf.config(opened(tmp_path, metadata={f"llama.{key}": UNSUPPORTED[key]}))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    message = r"architecture 'gemma2'; accepted in GGUF files: .*llama, .*qwen3, .*; load the model from its folder"
    with pytest.raises(UnsupportedModelError, match=message):
        gguf.config(opened(tmp_path, "gemma2"))
    with pytest.raises(CheckpointError, match=r"general\.architecture is missing, or not text"):
        gguf.config(gguf.read(written(tmp_path, files.encode())))


def test_an_architecture_is_refused_before_the_types_of_its_tensors(tmp_path: Path) -> None:
    architecture = files.entry("general.architecture", 8, files.text("bloom"))
    path = written(
        tmp_path, files.encode([architecture], [files.info("blk.0.attn_k.weight", [256, 1], 15)])
    )
    for load in (
        lambda: gguf.read(path, gguf.architecture_of),
        lambda: Engine.from_pretrained(path),
    ):
        with pytest.raises(
            UnsupportedModelError, match=r"architecture 'bloom'; accepted in GGUF files: .*llama"
        ):
            load()
    known = files.entry("general.architecture", 8, files.text("llama"))
    path = written(
        tmp_path, files.encode([known], [files.info("blk.0.attn_k.weight", [256, 1], 15)])
    )
    with pytest.raises(
        CheckpointError,
        match=r"is of ggml's type 15; accepted: F32, .*make one with llama-quantize",
    ):
        gguf.read(path, gguf.architecture_of)


@pytest.mark.parametrize("value", ["all", ["a"], 7])
def test_suppressed_tokens_must_be_ids(tmp_path: Path, value: Any) -> None:
    file = opened(tmp_path, metadata={"tokenizer.ggml.suppress_tokens": value})
    with pytest.raises(CheckpointError, match="suppress_tokens must be a list of token ids"):
        gguf.suppressed_ids(file, 265)


CONTRADICTING = {
    "llama.block_count": (None, "must be a positive integer; it is missing"),
    "llama.attention.head_count": ("four", "must be a positive integer; it is four"),
    "llama.context_length": (0, "must be a positive integer; it is 0"),
    "llama.attention.head_count_kv": (3, "must be a divisor of the 4 heads"),
    "llama.attention.layer_norm_rms_epsilon": (
        float("nan"),
        "must be a positive number; it is nan",
    ),
    "llama.rope.freq_base": (-1.0, "must be a positive number; it is -1.0"),
    "llama.embedding_length": (
        128,
        r"token_embd.weight must be \[vocabulary, 128\]; it is \[265, 64\]",
    ),
    "tokenizer.ggml.eos_token_id": (2.0, r"must be a token id, not 2\.0"),
}


NUMBERS = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 96,
    "context_length": 128,
    "rope.freq_base": 50_000.0,
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_counts_whatever_its_width(tmp_path: Path, key: str) -> None:
    value, expected = NUMBERS[key], gguf.config(opened(tmp_path)).to_dict()
    for kind in (
        ("FLOAT64",) if isinstance(value, float) else ("UINT8", "INT16", "INT32", "UINT64", "INT64")
    ):
        assert (
            gguf.config(opened(tmp_path, metadata={f"llama.{key}": (kind, value)})).to_dict()
            == expected
        )
    for kind, wrong in (("BOOL", True), ("STRING", str(value)), ("FLOAT32", -1.0)):
        with pytest.raises(CheckpointError, match=f"{key} must be a positive"):
            gguf.config(opened(tmp_path, metadata={f"llama.{key}": (kind, wrong)}))


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"]
)
def test_a_list_of_equal_numbers_is_one_number(tmp_path: Path, key: str) -> None:
    value, expected = NUMBERS[key], gguf.config(opened(tmp_path)).to_dict()
    assert (
        gguf.config(opened(tmp_path, metadata={f"llama.{key}": [value] * 2})).to_dict() == expected
    )
    for wrong in ([value], [value] * 3, [value, -value], ["x", "x"], [value / 1] * 2):
        with pytest.raises(CheckpointError, match=f"{key} must be a positive"):
            gguf.config(opened(tmp_path, metadata={f"llama.{key}": wrong}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=key):
        gguf.config(opened(tmp_path, metadata={f"llama.{key}": [value, 2 * value]}))


@pytest.mark.parametrize("key", CONTRADICTING)
def test_values_that_contradict_the_tensors_are_refused(tmp_path: Path, key: str) -> None:
    value, message = CONTRADICTING[key]
    with pytest.raises(CheckpointError, match=message):
        gguf.config(opened(tmp_path, metadata={key: value}))


def test_more_tokens_than_embeddings_are_refused_and_fewer_accepted(tmp_path: Path) -> None:
    assert (
        gguf.config(opened(tmp_path, tensors={"token_embd.weight": ("q8_0", (288, 64))})).vocab_size
        == 288
    )
    with pytest.raises(CheckpointError, match=r"token_embd.weight has 256 rows for 265 tokens"):
        gguf.config(opened(tmp_path, tensors={"token_embd.weight": ("q8_0", (256, 64))}))

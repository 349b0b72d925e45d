"""Draft heads in GGUF files, written as llama.cpp's converter writes them, draft as the same heads in folders do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as written
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from specengine import Engine
from specengine.checkpoints.eagle import head_folder, is_head, load_head, save_head
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from specengine.models.eagle import EagleConfig
from specengine.models.native import NativeHead
from tests.checkpoints.gguf_files import byte_level_vocabulary, finish, write_model
from tests.heads import LLAMA3, deep
from tests.models.native_engines import needs_extension
from tests.toy import VOCABULARY, head_config, random_state

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [*range(40, 60)]
NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_norm": "enc.output_norm",
    "fc": "fc",
    "layers.0.input_layernorm": "blk.0.attn_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "layers.0.self_attn.q_proj": "blk.0.attn_q",
    "layers.0.self_attn.k_proj": "blk.0.attn_k",
    "layers.0.self_attn.v_proj": "blk.0.attn_v",
    "layers.0.self_attn.o_proj": "blk.0.attn_output",
    "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "layers.0.mlp.up_proj": "blk.0.ffn_up",
    "layers.0.mlp.down_proj": "blk.0.ffn_down",
}
RAW = GGMLQuantizationType


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys as the converter's LlamaModel.permute orders them."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write(
    path: Path,
    config: EagleConfig,
    state: Mapping[str, Tensor],
    *,
    kind: GGMLQuantizationType | None = None,
    old: bool = False,
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a head; old: as before llama.cpp read such heads; changes: of keys, of which None goes; more: tensors."""
    values = {
        "block_count": 1,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "extract_layers" if old else "target_layers": list(config.layer_ids or ()),
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fusion_norm == "whole",
        **(changes or {}),
    }
    writer = written.GGUFWriter(path, "eagle3")
    adders = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"eagle3.{key}", value)
        elif value is not None:
            adders.get(type(value), writer.add_float32)(f"eagle3.{key}", value)
    tensors: dict[str, np.ndarray | None] = {}
    for name, tensor in state.items():
        module, _, ending = name.rpartition(".")
        numbers = tensor.numpy()
        if module.endswith(("q_proj", "k_proj")):
            numbers = permuted(
                numbers, config.num_heads if "q_proj" in module else config.num_kv_heads
            )
        if name == "d2t":
            tensors[name] = numbers if old else numbers + np.arange(len(numbers))
        else:
            stored = NAMES[module].replace("attn_norm_2", "hidden_norm" if old else "attn_norm_2")
            tensors[f"{stored}.{ending}"] = numbers
    if config.rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    for name, numbers in (tensors | dict(more or {})).items():
        if numbers is None:
            continue
        packed = kind is not None and numbers.ndim > 1
        writer.add_tensor(
            name,
            quants.quantize(np.ascontiguousarray(numbers), kind) if packed else numbers,
            raw_dtype=kind if packed else None,
        )
    return finish(writer, path)


def llama3_factors(config: EagleConfig) -> np.ndarray:
    """Return what the converter divides frequencies by."""
    rope, factors = config.rope, []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for place in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (place / config.head_dim)
        smooth = (low / wavelength * rope["low_freq_factor"] - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(
            1.0 if wavelength < high else rope["factor"] if wavelength > low else between
        )
    return np.array(factors, np.float32)


IDS = (1, 3, 5)
HEADS: dict[str, EagleConfig] = {
    "plain": head_config(layer_ids=IDS),
    "whole vocabulary": head_config(layer_ids=IDS, draft_vocab_size=VOCABULARY),
    "norms": head_config(layer_ids=IDS, norm_before_residual=True, fusion_norm="whole"),
    "biases": head_config(layer_ids=IDS, qkv_bias=True, o_bias=True),
    "own width": head_config(layer_ids=IDS, hidden_size=24, own_embeddings=True),
    "target's head": head_config(layer_ids=IDS, draft_vocab_size=VOCABULARY, own_head=False),
    "llama3": head_config(
        layer_ids=IDS, rope=LLAMA3 | {"original_max_position_embeddings": 8192}, head_dim=32
    ),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("case", HEADS)
def test_a_file_is_read_as_the_head_it_was_made_of(case: str, old: bool, tmp_path: Path) -> None:
    config, state = HEADS[case], random_state(HEADS[case])
    path = write(tmp_path / "head.gguf", config, state, old=old)
    assert is_head(path)
    assert head_folder(str(path)) == path
    read = load_head(path)
    theta = {"rope_theta": float(config.rope["rope_theta"])}
    eps = pytest.approx(config.rms_norm_eps)
    assert replace(read.config, rms_norm_eps=1e-6) == replace(
        config, rope=dict(config.rope) | theta
    )
    assert read.config.rms_norm_eps == eps
    assert read.state.keys() == state.keys()
    assert all(torch.equal(read.state[name], tensor) for name, tensor in state.items())
    assert str(read.dialect) == "EAGLE-3, official layout, fields as eagle means them"


@pytest.mark.parametrize("kind", [RAW.F16, RAW.BF16, RAW.Q8_0, RAW.Q4_0])
def test_matrices_are_read_as_they_are_stored(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    config = head_config(layer_ids=IDS, intermediate_size=64)
    state = random_state(config)
    read = load_head(write(tmp_path / "head.gguf", config, state, kind=kind)).state
    for name, tensor in state.items():
        expected = tensor
        if tensor.ndim > 1:
            numbers = quants.dequantize(quants.quantize(tensor.numpy(), kind), kind)
            expected = torch.from_numpy(numbers).to(
                torch.float16 if kind is RAW.F16 else torch.bfloat16
            )
        assert torch.equal(read[name], expected)


SAMPLED = {"do_sample": True, "seed": 5}


def trees(engine: Engine, **options: Any) -> list[Any]:
    """Return the verified trees and the tokens of an answer's cycles."""
    answer = engine.answer(PROMPT, max_new_tokens=16, eos_token_id=[], **options)
    return [
        (cycle.tree.tokens.tolist(), cycle.tree.parents.tolist(), cycle.tokens) for cycle in answer
    ]


@pytest.mark.parametrize("backend", ["huggingface", pytest.param("native", marks=needs_extension)])
def test_a_file_drafts_as_its_folder_does(backend: str, tmp_path: Path) -> None:
    model, config = deep(), HEADS["plain"]
    state = random_state(config)
    save_head(config, state, tmp_path / "folder")
    write(tmp_path / "head.gguf", config, state)
    plain = Engine.from_pretrained(model, "none", backend=backend)
    drafted = []
    for draft in ("folder", "head.gguf"):
        draft = str(tmp_path / draft)
        engine = Engine.from_pretrained(model, draft, "eagle", backend=backend, lookup=False)
        assert engine.drafter.name == f"eagle (EAGLE-3, {Path(draft).name})"
        for options in ({}, SAMPLED):
            expected = plain.generate(PROMPT, max_new_tokens=16, eos_token_id=[], **options)
            answer = engine.generate(PROMPT, max_new_tokens=16, eos_token_id=[], **options)
            assert answer.token_ids == expected.token_ids
            assert answer.stats.num_draft_tokens
        drafted.append([trees(engine), trees(engine, **SAMPLED)])
    assert drafted[0] == drafted[1]


@needs_extension
def test_a_file_drafts_for_a_target_in_a_file(tmp_path: Path) -> None:
    vocabulary = len(byte_level_vocabulary()["tokenizer.ggml.tokens"])
    sizes = {"hidden_size": 64, "target_hidden_size": 64, "vocab_size": vocabulary}
    config = head_config(layer_ids=(0, 1), intermediate_size=96, **sizes)
    path = write(tmp_path / "head.gguf", config, random_state(config), kind=RAW.Q8_0)
    target = str(write_model(tmp_path / "target.gguf"))
    plain = Engine.from_pretrained(target, "none", offline=True)
    engine = Engine.from_pretrained(target, str(path), "eagle", lookup=False, offline=True)
    assert type(engine.drafter.head) is NativeHead
    for options in ({}, SAMPLED):
        expected = plain.generate(PROMPT, max_new_tokens=16, eos_token_id=[], **options)
        answer = engine.generate(PROMPT, max_new_tokens=16, eos_token_id=[], **options)
        assert answer.token_ids == expected.token_ids
        assert answer.stats.num_draft_tokens


DAMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": ({}, {"blk.0.attn_v.weight": None}, r"missing: blk\.0\.attn_v\.weight"),
    "unused": ({}, {"blk.0.ffn_up.bias": np.ones(40, np.float32)}, r"unused: blk\.0\.ffn_up\.bias"),
    "two norms": (
        {},
        {"blk.0.hidden_norm.weight": np.ones(32, np.float32)},
        r"two tensors have the name layers\.0\.hidden_norm\.weight",
    ),
    "another shape": (
        {},
        {"blk.0.attn_k.weight": np.ones((15, 64), np.float32)},
        r"mis-shaped: blk\.0\.attn_k\.weight \[15, 64\] instead of \[16, 64\]",
    ),
    "factors of nothing": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {"rope_freqs.weight": np.ones(4, np.float32)},
        "rope_freqs",
    ),
    "other factors": ({}, {"rope_freqs.weight": np.ones(4, np.float32) / 2}, "rope_freqs"),
    "not finite": ({}, {"output_norm.weight": np.full(32, np.nan, np.float32)}, "not finite"),
    "no map": ({}, {"d2t": None}, r"mis-shaped: output\.weight \[200, 32\]"),
    "a map of numbers": ({}, {"d2t": np.ones(200, np.float32)}, "d2t: int64"),
    "a map beyond": ({}, {"d2t": np.arange(200) + VOCABULARY - 199}, "d2t: offsets"),
    "a map backwards": ({}, {"d2t": np.arange(200)[::-1].copy()}, "d2t: offsets"),
    "a map of matrices": ({}, {"d2t": np.ones((200, 2), np.int64)}, "d2t"),
    "huge ids": ({}, {"d2t": np.arange(200) + (1 << 62)}, "d2t: offsets"),
    "layers": ({"block_count": 2}, {}, r"eagle3\.block_count must be 1; it is 2"),
    "no layers to read": ({"target_layers": None}, {}, r"eagle3\.target_layers must be a list"),
    "layers to read": ({"target_layers": [1.5, 2.0, 3.0]}, {}, "whole numbers"),
    "width": ({"embedding_length": 0}, {}, r"eagle3\.embedding_length must be a positive"),
    "a huge width": ({"feed_forward_length": 1 << 30}, {}, "intermediate_size"),
    "a list": ({"attention.head_count": [4]}, {}, r"eagle3\.attention\.head_count must be a posit"),
    "unequal heads": ({"attention.value_length": 16}, {}, "attention.value_length = 16"),
    "text": ({"norm_before_fc": "yes"}, {}, "norm_before_fc"),
    "a window": (
        {"attention.sliding_window": 64},
        {},
        r"attention\.sliding_window = 64 is not supp",
    ),
    "unknown": ({"norm_output": True}, {}, r"eagle3\.norm_output = True is not known"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    changes, more, message = DAMAGES[case]
    config = HEADS["plain"]
    path = write(tmp_path / "head.gguf", config, random_state(config), changes=changes, more=more)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as refused:
        load_head(path)
    assert str(path) in str(refused.value)


def test_cut_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", HEADS["plain"], random_state(HEADS["plain"]))
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        load_head(path)
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        Engine.from_pretrained(deep(), str(path))


def test_a_file_for_another_target_is_refused(tmp_path: Path) -> None:
    config = replace(HEADS["plain"], target_hidden_size=24, own_embeddings=True)
    path = write(tmp_path / "head.gguf", config, random_state(config))
    with pytest.raises(InputError, match="made for a target with hidden size 24"):
        Engine.from_pretrained(deep(), str(path))


def test_a_head_is_no_model(tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", HEADS["plain"], random_state(HEADS["plain"]))
    with pytest.raises(InputError, match="is a draft head, accepted a whole model"):
        Engine.from_pretrained(str(path), "none")

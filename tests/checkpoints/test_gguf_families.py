"""GGUF files of each architecture, with a random model's numbers: the native forward answers as that model does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf as written
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from specengine import Engine
from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.models.configs import family_of, layer_template, stored_tensors
from specengine.models.families import GGUF, stated
from tests.checkpoints.gguf_files import finish
from tests.models.native_engines import needs_extension, plainly
from tests.models.native_variants import GEMMA4_EXPERTS, LONGROPE, PART, PROMPT
from tests.toy import policy_for, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
Keys = dict[str, Any]
PLAIN_QUERIES = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 256}
SWA, FULL = "sliding_attention", "full_attention"
_LATENT = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 24,
}
GEMMA4: Keys = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "attention.sliding_window": 24,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 8,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
MUSE: Keys = {"sliding_window": 9}
MUSE_KEYS: Keys = {
    "attention.sliding_window": 9,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "logit_scale": 0.4,
    "final_logit_softcapping": 6.0,
}
# Of each: the family, changes of its tiny model, and what the file's metadata says beside the sizes.
FILES: dict[str, tuple[str, Keys, Keys]] = {
    "gemma": ("gemma", {}, {"attention.key_length": 16, "attention.value_length": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "layer_types": [*[SWA] * 5, FULL, SWA],
            "num_hidden_layers": 7,
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
        },
        {"attention.sliding_window": 9, "rope.freq_base": 1e6},
    ),
    "gemma3 linear": (
        "gemma3_text",
        {
            "layer_types": [SWA] * 5 + [FULL],
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SWA: {"rope_type": "default", "rope_theta": 5e4},
            },
        },
        {
            "attention.sliding_window": 24,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 5e4,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": ("phi3", {}, {"attention.sliding_window": 24}),
    "phi3 part": (
        "phi3",
        {"hidden_size": 64, "rope_parameters": PART, "sliding_window": None},
        {"rope.dimension_count": 12},
    ),
    "phi3 longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": LONGROPE,
            "sliding_window": None,
        },
        {
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": (1 + np.log(2) / np.log(128)) ** 0.5,
        },
    ),
    "cohere": ("cohere", {}, {"logit_scale": 0.3}),
    "cohere2": (
        "cohere2",
        {"sliding_window_pattern": 4, "num_hidden_layers": 5, "sliding_window": 9},
        {"attention.sliding_window": 9, "logit_scale": 0.3},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_group": 1, "topk_method": "greedy"},
        _LATENT | {"expert_weights_scale": 1.3},
    ),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {},
        _LATENT
        | {
            "attention.q_lora_rank": 24,
            "expert_weights_scale": 1.3,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {},
        _LATENT
        | {
            "attention.q_lora_rank": 24,
            "expert_weights_scale": 2.5,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "glm4": (
        "glm4",
        {},
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8},
    ),
    "ministral3": (
        "ministral3",
        {},
        {
            "attention.temperature_scale": 0.5,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "ministral3 as it was": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, **PLAIN_QUERIES}},
        {"rope.freq_base": 1e5},
    ),
    "stablelm": (
        "stablelm",
        {"use_qkv_bias": True},
        {"rope.dimension_count": 2, "use_parallel_residual": False},
    ),
    "stablelm parallel": (
        "stablelm",
        {"use_parallel_residual": True, "hidden_size": 64},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
    "smollm3": (
        "smollm3",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
        {"rope.freq_base": 2e6},
    ),
    "muse-glimmer": (
        "muse_glimmer_text",
        {**MUSE, "post_norm_eps": 1e-8},
        {**MUSE_KEYS, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "muse-glimmer period": (
        "muse_glimmer_text",
        {
            **MUSE,
            "post_norm_eps": 1e-8,
            "num_hidden_layers": 5,
            "layer_types": [SWA, SWA, FULL, SWA, SWA],
            "layer_rope_theta": [3e5, 3e5, 0, 3e5, 3e5],
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
        },
        {
            **MUSE_KEYS,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 3e5,
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "granite": (
        "granite",
        {},
        {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.0},
    ),
    "exaone4": (
        "exaone4",
        {"sliding_window_pattern": 4, "num_hidden_layers": 5, "sliding_window": 9},
        {"attention.sliding_window": 9},
    ),
    "exaone4 full": ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 2}, {}),
    "lfm2": (
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
        {"attention.head_count_kv": [0, 0, 2], "shortconv.l_cache": 4, "rope.freq_base": 1e6},
    ),
    "seed_oss": ("seed_oss", {}, {}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}, {}),
    "mixtral": ("mixtral", {"sliding_window": None}, {"expert_count": 5, "expert_used_count": 2}),
    "gpt_oss": (
        "gpt_oss",
        {"sliding_window": 9},
        {
            "attention.sliding_window": 9,
            "attention.key_length": 8,
            "attention.value_length": 8,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {},
        {
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.7,
            "logit_scale": 2.0,
            "expert_count": 5,
            "expert_used_count": 2,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {},
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {},
        GEMMA4
        | {
            "attention.head_count_kv": [2, 1] * 3,
            "attention.shared_kv_layers": 3,
            "attention.sliding_window_pattern": [True, False] * 3,
            "embedding_length_per_layer_input": 12,
            "feed_forward_length": [48] * 3 + [96] * 3,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4 experts": (
        "gemma4_text",
        {
            **GEMMA4_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": [SWA, SWA, FULL],
            "attention_k_eq_v": False,
        },
        GEMMA4
        | {
            "attention.sliding_window_pattern": [True, True, False],
            "final_logit_softcapping": 20.0,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {},
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 40,
        },
    ),
    "olmoe": ("olmoe", {}, {"expert_count": 6, "expert_used_count": 3}),
    "qwen3_moe": (
        "qwen3_moe",
        {"mlp_only_layers": []},
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "attention.key_length": 8,
        },
    ),
}


def stored_of(model: PreTrainedModel, own: GGUF) -> dict[str, np.ndarray]:
    """Return the tensors of a file as llama.cpp's converter makes them."""
    config, found = model.config, {}
    wanted = layer_template(config)
    tensors = {name: tensor.detach() for name, tensor in stored_tensors(model) if name in wanted}
    for name, names in gguf.tensor_names(config, tensors).items():
        numbers = tensors[name].numpy().astype(np.float32)
        if numbers.ndim == 3 and numbers.shape[1] == 1:  # a convolution of single channels
            numbers = numbers[:, 0]
        plain = own.architecture == "muse-glimmer" and names[0] == "output_norm.weight"
        if family_of(config).one_is_zero and numbers.ndim == 1 and not plain:
            numbers = numbers + 1
        if names[0].endswith("attn_k_b.weight"):
            heads = numbers.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            found |= dict(
                zip(names, np.split(heads, [config.qk_nope_head_dim], axis=1), strict=True)
            )
            found[names[0]] = found[names[0]].swapaxes(1, 2).copy()
            continue
        parts = np.split(numbers, len(names), axis=int(len(names) > 1))
        if family_of(config).alternating:
            numbers = numbers.swapaxes(1, 2) if numbers.ndim > 2 else numbers
            parts = (
                [np.ascontiguousarray(numbers[:, i::2]) for i in range(2)]
                if len(names) > 1
                else [numbers.copy()]
            )
        for stored, part in zip(names, parts, strict=True):
            order = gguf.row_order(config, stored)
            found[stored] = part if order is None else part[np.argsort(order)]
    if own.architecture == "muse-glimmer":
        for layer in range(config.num_hidden_layers):
            ones = np.ones(config.head_dim, np.float32)
            found[f"blk.{layer}.attn_q_norm.weight"] = ones * np.float32(config.qk_scale_factor)
            found[f"blk.{layer}.attn_k_norm.weight"] = ones
    if (config.rope_parameters or {}).get("rope_type") == "longrope":
        for kind in ("short", "long"):
            found[f"rope_factors_{kind}.weight"] = np.array(
                config.rope_parameters[f"{kind}_factor"], np.float32
            )
    full = (config.rope_parameters or {}).get(FULL)
    if own.proportional and full is not None:
        half = config.per_layer_config[FULL].head_dim // 2
        turned = int(half * full["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    return found


def made(case: str) -> PreTrainedModel:
    """A random model whose weights are bfloat16 numbers."""
    family, changes, _ = FILES[case]
    model = tiny(family, **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                weight.uniform_(0.5, 1.5)
            weight.copy_(weight.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(buffer.bfloat16())
    return model


def write(
    folder: Path,
    case: str,
    changes: Mapping[str, Any] | None = None,
    model: PreTrainedModel | None = None,
    kind: written.GGMLQuantizationType | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, Path]:
    """more: tensors beside the model's, or in their place; or shapes of such."""
    model, path, metadata = model or made(case), folder / "model.gguf", FILES[case][2]
    config, own = model.config, family_of(model.config).gguf
    assert own is not None
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": stated(config, "num_key_value_heads"),
        f"attention.layer_norm_{'' if family_of(config).layer_norms else 'rms_'}epsilon": getattr(
            config, family_of(config).fields.eps
        ),
        "rope.freq_base": float((config.rope_parameters or {}).get("rope_theta", 1e4)),
        **metadata,
        **(changes or {}),
    }
    writer = written.GGUFWriter(path, own.architecture)
    for key, value in values.items():
        kinds = {
            int: writer.add_uint32,
            bool: writer.add_bool,
            str: writer.add_string,
            list: writer.add_array,
        }
        add = kinds.get(type(value), writer.add_float32)
        add(f"{own.architecture}.{key}", value)
    for name, numbers in (stored_of(model, own) | dict(more or {})).items():
        if isinstance(numbers, tuple):
            numbers = np.ones(numbers, np.float32)
        packed = kind is not None and numbers.ndim > 1 and numbers.shape[-1] % 32 == 0
        writer.add_tensor(
            name, quantize(numbers, kind) if packed else numbers, raw_dtype=kind if packed else None
        )
    return model, finish(writer, path)


@pytest.mark.sliced(5)
@pytest.mark.parametrize("case", FILES)
def test_a_file_answers_as_its_model_does(case: str, tmp_path: Path) -> None:
    model, path = write(tmp_path, case)
    engine = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(model, PROMPT, 20)
    theirs = engine.target.model.state_dict()
    assert all(
        (theirs[name] - tensor).abs().max() < 1e-6 for name, tensor in model.state_dict().items()
    )
    half = Engine.from_pretrained(str(path), "none", offline=True, backend="native")
    assert half.target.dtype is torch.bfloat16
    norm = f"{family_of(model.config).norm.transformers}.weight"
    assert torch.equal(half.target.model.get_parameter(norm).float(), model.get_parameter(norm))


@pytest.mark.parametrize("heads", [[0, 2], [0, 0, 0], [0, 2, 1], [0, 0, 3], [0, -2, 2], 2.0])
def test_lists_of_heads_that_fit_no_layers_are_refused(heads: Any, tmp_path: Path) -> None:
    _, path = write(tmp_path, "lfm2", {"attention.head_count_kv": heads})
    with pytest.raises(
        (CheckpointError, UnsupportedModelError), match=r"lfm2\.attention\.head_count_kv"
    ):
        Engine.from_pretrained(str(path), "none", offline=True, backend="native")


def test_the_largest_gemma_3_divides_scores_by_another_root(tmp_path: Path) -> None:
    _, path = write(tmp_path, "gemma3", {"attention.key_length": 16})
    with gguf.read(path) as file:
        file.metadata["gemma3.attention.key_length"] = 16
        assert gguf.config(file).query_pre_attn_scalar == 16
        file.metadata["gemma3.block_count"] = 62
        file.tensors.update({f"more.{i}": next(iter(file.tensors.values())) for i in range(62)})
        assert gguf.config(file).query_pre_attn_scalar == 8


def test_windows_of_other_architectures_are_refused(tmp_path: Path) -> None:
    """As of OLMo 3, whose files are called OLMo 2."""
    _, path = write(tmp_path, "olmo2", {"attention.sliding_window": 9})
    with pytest.raises(
        UnsupportedModelError, match=r"olmo2\.attention\.sliding_window = 9 is not supported"
    ):
        Engine.from_pretrained(str(path), "none", offline=True)


@pytest.mark.parametrize(
    ("case", "key"), [("phi3 part", "rope.dimension_count"), ("granite", "rope.dimension_count")]
)
def test_rotated_channels_are_of_a_head(case: str, key: str, tmp_path: Path) -> None:
    _, path = write(tmp_path, case, {key: 20 if case == "phi3 part" else 4})
    with pytest.raises(UnsupportedModelError, match="must be the size of a head"):
        Engine.from_pretrained(str(path), "none", offline=True)


def test_factors_of_another_length_are_refused(tmp_path: Path) -> None:
    _, path = write(tmp_path, "phi3 longrope", {"rope.dimension_count": 4})
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight must be \[2\]"):
        Engine.from_pretrained(str(path), "none", offline=True)


def test_keys_that_no_layer_reads_are_not_read(tmp_path: Path) -> None:
    """Gemma 4's converter stores them for layers that read those of a layer before."""
    model, path = write(
        tmp_path, "gemma4", more={"blk.5.attn_k.weight": (16, 32), "blk.4.attn_k_norm.weight": (8,)}
    )
    engine = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(model, PROMPT, 20)
    _, path = write(tmp_path, "gemma4", more={"blk.5.attn_x.weight": (16, 32)})
    with pytest.raises(CheckpointError, match=r"not used by this model: blk\.5\.attn_x\.weight"):
        Engine.from_pretrained(str(path), "none", offline=True)


GEMMA4_DAMAGES: dict[str, tuple[Keys, dict[str, Any], str]] = {
    "a head that turns in part": (
        {"rope.dimension_count_swa": 4},
        {},
        r"rope\.dimension_count_swa = 4",
    ),
    "values of another size": (
        {"attention.value_length_swa": 4},
        {},
        r"attention\.value_length_swa = 4",
    ),
    "widths of other layers": (
        {"feed_forward_length": [48] * 5},
        {},
        r"feed_forward_length must be a positive",
    ),
    "heads of other layers": (
        {"attention.head_count_kv": [2, 1]},
        {},
        r"attention\.head_count_kv must be a positive",
    ),
    "types of other layers": (
        {"attention.sliding_window_pattern": [True, False]},
        {},
        "no Gemma4TextConfig",
    ),
    "no keys at all": ({"attention.shared_kv_layers": 6}, {}, "layer types producing a cache"),
    "other factors": (
        {},
        {"rope_freqs.weight": np.float32([1.0, 2.0] + [1e30] * 6)},
        "proportional positions",
    ),
    "no factors of one": (
        {},
        {"rope_freqs.weight": np.float32([1e30] * 8)},
        "proportional positions",
    ),
}


@pytest.mark.parametrize("case", GEMMA4_DAMAGES)
def test_other_files_of_gemma_4_are_refused(case: str, tmp_path: Path) -> None:
    changes, tensors, message = GEMMA4_DAMAGES[case]
    _, path = write(tmp_path, "gemma4", changes, more=tensors)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Engine.from_pretrained(str(path), "none", offline=True, backend="native")


MUSE_DAMAGES: dict[str, tuple[Keys, dict[str, Any], str]] = {
    "queries normed by weights": (
        {},
        {"blk.1.attn_q_norm.weight": np.arange(1, 9, dtype=np.float32)},
        r"attn_q_norm\.weight must hold one number above 0 in all layers",
    ),
    "another factor in one layer": (
        {},
        {"blk.1.attn_q_norm.weight": (8,)},
        r"attn_q_norm\.weight must hold one number above 0 in all layers",
    ),
    "no factor": (
        {},
        {f"blk.{n}.attn_q_norm.weight": np.zeros(8, np.float32) for n in range(3)},
        r"attn_q_norm\.weight must hold one number above 0 in all layers",
    ),
    "no numbers": (
        {},
        {"blk.2.attn_k_norm.weight": np.full(8, np.nan, np.float32)},
        r"attn_k_norm\.weight must hold 1 in all layers",
    ),
    "keys with a factor": (
        {},
        {f"blk.{n}.attn_k_norm.weight": np.full(8, 2, np.float32) for n in range(3)},
        r"attn_k_norm\.weight must hold 1 in all layers",
    ),
    "norms of another size": (
        {},
        {"blk.1.attn_k_norm.weight": (4,)},
        r"attn_k_norm\.weight must hold 1 in all layers",
    ),
    "types of other layers": (
        {"attention.sliding_window_pattern": [True, False]},
        {},
        "no MuseGlimmerTextConfig",
    ),
    "no layers with windows": (
        {"attention.sliding_window_pattern": 0},
        {},
        r"muse-glimmer\.attention\.sliding_window_pattern must be",
    ),
    "no window": (
        {"attention.sliding_window": 0},
        {},
        r"muse-glimmer\.attention\.sliding_window must be",
    ),
    "a window of text": ({"attention.sliding_window": "long"}, {}, "no MuseGlimmerTextConfig"),
    "no logits": ({"logit_scale": 0.0}, {}, r"muse-glimmer\.logit_scale must be"),
    "no cap": (
        {"final_logit_softcapping": 0.0},
        {},
        r"muse-glimmer\.final_logit_softcapping must be",
    ),
    "a cap of text": ({"final_logit_softcapping": "none"}, {}, "no MuseGlimmerTextConfig"),
    "another scale of scores": (
        {"attention.scale": 0.5},
        {},
        r"muse-glimmer\.attention\.scale = 0\.5 is not supported",
    ),
    "part of a head": ({"rope.dimension_count": 4}, {}, "must be the size of a head"),
}


@pytest.mark.parametrize("case", MUSE_DAMAGES)
def test_other_files_of_muse_glimmer_are_refused(case: str, tmp_path: Path) -> None:
    changes, tensors, message = MUSE_DAMAGES[case]
    _, path = write(tmp_path, "muse-glimmer", changes, more=tensors)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Engine.from_pretrained(str(path), "none", offline=True, backend="native")


def test_muse_glimmer_answers_from_blocks_with_trees_and_beside_other_texts(
    tmp_path: Path,
) -> None:
    _, path = write(tmp_path, "muse-glimmer", kind=written.GGMLQuantizationType.Q8_0)
    load: Keys = {"offline": True, "backend": "native"}
    plain = Engine.from_pretrained(str(path), policy="plain", **load)
    engine = Engine.from_pretrained(str(path), "ngram", policy_for("eagle"), **load)
    assert "q8_0" in engine.target.backend
    prompts = [PROMPT, PROMPT[:3], [9, 8] * 15]  # windows are of 9 tokens
    for options in ({}, {"do_sample": True, "temperature": 0.8, "seed": 4}):
        asked: Keys = {"max_new_tokens": 16, **options}
        answers = engine.generate_many(prompts, parallel=2, **asked)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = plain.generate(prompt, **asked).token_ids
            assert answer.token_ids == expected
            assert engine.generate(prompt, **asked).token_ids == expected


def test_muse_glimmer_runs_on_modules_too(tmp_path: Path) -> None:
    model, path = write(tmp_path, "muse-glimmer period")
    engine = Engine.from_pretrained(
        str(path),
        "ngram",
        policy_for("eagle"),
        offline=True,
        dtype="float32",
        backend="huggingface",
    )
    assert engine.target.lm.attention == "tree"
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(model, PROMPT, 20)


def test_numbers_are_kept_or_their_rounding_is_said(tmp_path: Path) -> None:
    model = made("gemma")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 2**-12)  # no bfloat16 number any more
    _, path = write(tmp_path, "gemma", model=model)
    kept = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    theirs = kept.target.model.state_dict()
    assert all(
        (theirs[name] - tensor).abs().max() < 1e-6 for name, tensor in model.state_dict().items()
    )
    assert kept.generate(PROMPT, max_new_tokens=20).token_ids == plainly(model, PROMPT, 20)
    assert not kept.generate(PROMPT, max_new_tokens=1).stats.notes
    rounded = Engine.from_pretrained(str(path), "none", offline=True, backend="native")
    (note,) = rounded.generate(PROMPT, max_new_tokens=1).stats.notes
    assert (
        "matrices stored in F32 are rounded to bfloat16; dtype='float32' keeps their numbers"
        in note
    )


def test_older_files_have_the_matrices_of_latents_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = made("deepseek_v3"), {}
    for name, numbers in stored_of(model, GGUF("deepseek2")).items():
        if name.endswith("attn_k_b.weight"):
            module = f"model.layers.{name.split('.')[1]}.self_attn.kv_b_proj.weight"
            whole[name.replace("k_b", "kv_b")] = model.get_parameter(module).detach().numpy()
        elif not name.endswith("attn_v_b.weight"):
            whole[name] = numbers
    monkeypatch.setitem(globals(), "stored_of", lambda model, own: whole)
    sizes = {
        "head_count_kv": 4,
        "key_length": 20,
        "value_length": 16,
        "key_length_mla": 0,
        "value_length_mla": 0,
    }
    _, path = write(
        tmp_path, "deepseek_v3", {f"attention.{key}": size for key, size in sizes.items()}, model
    )
    engine = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(model, PROMPT, 20)


def test_matrices_of_latents_are_read_from_blocks(tmp_path: Path) -> None:
    """Loading holds them against transformers' modules with the same numbers."""
    kind, sizes = written.GGMLQuantizationType.Q8_0, {"qk_nope_head_dim": 32, "v_head_dim": 32}
    model, lengths = (
        tiny("deepseek_v3", **sizes),
        {"attention.key_length_mla": 40, "attention.value_length_mla": 32},
    )
    _, path = write(tmp_path, "deepseek_v3", lengths, model, kind)
    engine = Engine.from_pretrained(str(path), "none", offline=True, backend="native")
    read = engine.target.model.get_parameter("model.layers.0.self_attn.kv_b_proj.weight")
    heads = model.model.layers[0].self_attn.kv_b_proj.weight.detach().view(4, 64, 32).numpy()
    keys = dequantize(quantize(heads[:, :32].swapaxes(1, 2).copy(), kind), kind).swapaxes(1, 2)
    values = dequantize(quantize(heads[:, 32:].copy(), kind), kind)
    assert torch.equal(
        read, torch.from_numpy(np.concatenate((keys, values), axis=1)).flatten(0, 1).bfloat16()
    )


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"attention.kv_lora_rank": 64},
            r"blk\.0\.attn_k_b\.weight \[4, 32, 12\], not \[4, 64, 12\]",
        ),
        ({"attention.kv_lora_rank": "many"}, "can be built from its metadata"),
        ({"attention.key_length_mla": "long"}, "can be built from its metadata"),
        ({"attention.value_length_mla": 20}, r"attn_v_b\.weight \[4, 16, 32\], not \[4, 20, 32\]"),
        (
            {"expert_gating_func": 1},
            "expert_weights_norm is true, but experts are chosen by softmax",
        ),
        ({"attention.head_count_kv": 3}, "a divisor of the 4 heads"),
    ],
)
def test_files_of_latents_that_contradict_themselves_are_refused(
    changes: Keys, refusal: str, tmp_path: Path
) -> None:
    _, path = write(tmp_path, "deepseek_v3", changes)
    with pytest.raises(CheckpointError, match=refusal):
        Engine.from_pretrained(str(path), "none", offline=True)

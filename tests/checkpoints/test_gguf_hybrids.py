"""GGUF files of hybrid models, their tensors laid out as llama.cpp's converter does: the native forward answers alike.

llama.cpp itself gives the same greedy tokens for files that its converter makes of these models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as written
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specengine import Engine
from specengine.checkpoints import gguf, mtp
from specengine.checkpoints.pretrained import open_gguf
from specengine.errors import CheckpointError
from specengine.models.configs import family_of, layer_template
from specengine.models.mtp import MtpLayer
from specengine.models.native.lm import NativeMtpHead
from tests.checkpoints.gguf_files import finish
from tests.models.native_engines import needs_extension, plainly
from tests.models.native_variants import PROMPT
from tests.toy import tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
Keys = dict[str, Any]
STATES = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
QWEN: Keys = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "attention.recurrent_layers": [True, True, False],
    "full_attention_interval": 4,
}
EXPERTS: Keys = {
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
}
MAMBA: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.inner_size": 64,
    "ssm.time_step_rank": 4,
    "rope.dimension_count": 8,
    "rope.scaling.finetuned": False,
}
GRANITE: Keys = {
    "attention.head_count_kv": [0, 2, 0],
    "attention.scale": 0.3,
    "embedding_scale": 3.0,
    "residual_scale": 0.7,
    "logit_scale": 2.0,
    "expert_shared_feed_forward_length": 40,
}
BLOCKS = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
HEADS: Keys = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.head_count_kv": [0, 0, 2, 0, 0],
}
FALCON: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.inner_size": 64,
    "ssm.time_step_rank": 4,
    "attention.key_length": 8,
    "attention.value_length": 8,
}
PLAIN: Keys = {
    **{f"{name}_multiplier": 1.0 for name in ("embedding", "lm_head", "key")},
    **{f"{name}_{end}_multiplier": 1.0 for name in ("attention", "ssm") for end in ("in", "out")},
    "ssm_multipliers": [1.0] * 5,
    "mlp_multipliers": [1.0] * 2,
}
# Of each: the architecture, the family, changes of its tiny model, and what the metadata says beside the sizes.
FILES: dict[str, tuple[str, str, Keys, Keys]] = {
    "qwen35": (
        "qwen35",
        "qwen3_5_text",
        {"linear_num_value_heads": 6},
        {**QWEN, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "qwen35moe": (
        "qwen35moe",
        "qwen3_5_moe_text",
        {"linear_num_value_heads": 6},
        {**QWEN, **EXPERTS},
    ),
    "qwen3next": (
        "qwen3next",
        "qwen3_next",
        {"linear_num_value_heads": 6, "mlp_only_layers": []},
        {**QWEN, **EXPERTS, "attention.recurrent_layers": None, "full_attention_interval": 3},
    ),
    "granitehybrid": (
        "granitehybrid",
        "granitemoehybrid",
        {},
        {**MAMBA, **GRANITE, "expert_count": 5, "expert_used_count": 2},
    ),
    "granitehybrid dense": (
        "granitehybrid",
        "granitemoehybrid",
        {"num_local_experts": 0, "intermediate_size": 40},
        {**MAMBA, **GRANITE, "expert_count": 0},
    ),
    "nemotron_h": (
        "nemotron_h_moe",
        "nemotron_h",
        {"layers_block_type": BLOCKS, "n_group": 1, "topk_group": 1},
        {
            **MAMBA,
            **HEADS,
            **EXPERTS,
            "feed_forward_length": [0, 24, 0, 0, 24],
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
        },
    ),
    "nemotron_h dense": (
        "nemotron_h",
        "nemotron_h",
        {"layers_block_type": ["mlp" if kind == "moe" else kind for kind in BLOCKS]},
        {**MAMBA, **HEADS, "feed_forward_length": [0, 48, 0, 0, 48]},
    ),
    "falcon-h1": ("falcon-h1", "falcon_h1", PLAIN, FALCON),
    "falcon-h1 norms": (
        "falcon-h1",
        "falcon_h1",
        {
            **PLAIN,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
        },
        FALCON,
    ),
    "falcon-h1 multiplied": ("falcon-h1", "falcon_h1", {}, FALCON),
}
MULTIPLIED = "falcon-h1 multiplied"  # whose numbers llama.cpp's converter multiplies


def by_key(numbers: np.ndarray, keys: int, sizes: list[int]) -> list[np.ndarray]:
    """Split rows that stand by key head, so many of each part."""
    parts = np.split(numbers.reshape(keys, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
    return [part.reshape(-1, numbers.shape[-1]) for part in parts]


def tiled(numbers: np.ndarray, config: Any, axis: int = 0, begin: int = 0) -> np.ndarray:
    """Turn value heads from those of a key together to those of all keys in turn, behind `begin` rows."""
    numbers = np.moveaxis(numbers, axis, 0)
    head, values = numbers[:begin], numbers[begin:]
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    shape = values.shape
    values = values.reshape(keys, heads // keys, -1, *shape[1:]).swapaxes(0, 1).reshape(shape)
    return np.moveaxis(np.concatenate((head, values)), 0, axis)


def laid_out(name: str, numbers: np.ndarray, config: Any) -> list[np.ndarray]:
    """Return a tensor of transformers as llama.cpp's converter stores it, in the order of the file's names."""
    kind, module = config.model_type, name.removesuffix(".weight").rpartition(".")[2]
    numbers = numbers[:, 0] if module == "conv1d" and numbers.ndim > 2 else numbers
    if module == "A_log":
        numbers = -np.exp(numbers)
    if kind.startswith("qwen"):
        if name.endswith("norm.weight") and "linear_attn" not in name:
            numbers = numbers + 1
        keys, each = (
            config.linear_num_key_heads,
            config.linear_num_value_heads // config.linear_num_key_heads,
        )
        if module == "in_proj_qkvz":
            q, k, v, z = by_key(numbers, keys, [16, 16, each * 16, each * 16])
            return [np.concatenate((q, k, v)), z]
        if kind != "qwen3_next" and "linear_attn" in name:
            if module in ("in_proj_qkv", "conv1d"):
                numbers = tiled(numbers, config, begin=2 * keys * 16)
            elif module in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
                numbers = tiled(numbers, config)
            elif module == "out_proj":
                numbers = tiled(numbers, config, axis=1)
    elif module in ("A_log", "D"):
        numbers = numbers[:, None]
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        numbers = numbers.reshape(2, -1)
    elif module in ("q_proj", "k_proj") and kind != "falcon_h1":
        half = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        ) // 2
        numbers = (
            numbers.reshape(-1, 2, half, numbers.shape[-1]).swapaxes(1, 2).reshape(numbers.shape)
        )
    if module == "gate_up_proj":
        return np.split(numbers, 2, axis=1)
    return (
        np.split(numbers, 2)
        if name.endswith("input_linear.weight") and "shared" in name
        else [numbers]
    )


def made(case: str) -> PreTrainedModel:
    """A random model whose weights are bfloat16 numbers."""
    model = tiny(FILES[case][1], **FILES[case][2])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith((".D", "A_log", "dt_bias")):
                weight.normal_()
            weight.copy_(weight.bfloat16())
    return model


def write(
    folder: Path, case: str, kind: str = "F32", **changes: Any
) -> tuple[PreTrainedModel, Path]:
    """kind: of matrices whose rows fill blocks; changes: of the metadata, and tensors by name."""
    (architecture, _, _, metadata), model, path = FILES[case], made(case), folder / "model.gguf"
    config, writer = model.config, written.GGUFWriter(path, architecture)
    eps = "layer_norm_epsilon" if architecture.startswith("nemotron") else "layer_norm_rms_epsilon"
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 48),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        f"attention.{eps}": getattr(config, family_of(config).fields.eps),
        "rope.freq_base": 1e4,
        **metadata,
        **{key: value for key, value in changes.items() if not isinstance(value, np.ndarray)},
    }
    for key, value in values.items():
        kinds = {int: writer.add_uint32, list: writer.add_array, bool: writer.add_bool}
        if value is not None:
            kinds.get(type(value), writer.add_float32)(f"{architecture}.{key}", value)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {
        name: tensors[name].detach().numpy().astype(np.float32) for name in layer_template(config)
    }
    stored: dict[str, np.ndarray] = {}
    for name, names in gguf.tensor_names(config, tensors).items():
        stored |= dict(zip(names, laid_out(name, tensors[name], config), strict=True))
    stored |= {name: value for name, value in changes.items() if isinstance(value, np.ndarray)}
    wanted = written.GGMLQuantizationType[kind]
    for name, numbers in stored.items():
        blocks = (
            wanted is not written.GGMLQuantizationType.F32
            and numbers.ndim > 1
            and numbers.shape[-1] % 32 == 0
        )
        data = written.quants.quantize(numbers, wanted) if blocks else np.ascontiguousarray(numbers)
        writer.add_tensor(name, data, raw_dtype=wanted if blocks else None)
    return model, finish(writer, path)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("case", [case for case in FILES if case != MULTIPLIED])
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


def test_numbers_that_a_file_was_multiplied_by_are_not_asked_for(tmp_path: Path) -> None:
    model = made(MULTIPLIED)
    config = model.config
    z, x, b, c, dt = config.ssm_multipliers
    rows = torch.tensor([z] * 64 + [x] * 64 + [b] * 16 + [c] * 16 + [dt] * 4)
    own = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "in_proj": config.ssm_in_multiplier * rows[:, None],
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
    }
    names = gguf.tensor_names(config, layer_template(config))
    changed = {
        names[name][0]: (tensor.detach() * own[name.split(".")[-2]]).numpy()
        for name, tensor in model.named_parameters()
        if name.split(".")[-2] in own
    }
    _, path = write(tmp_path, MULTIPLIED, **changed)
    engine = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    expected = plainly(model, PROMPT, 20)
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == expected
    _, path = write(tmp_path, MULTIPLIED)
    engine = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids != expected


@pytest.mark.parametrize(
    "case", ["qwen35", "qwen3next", "granitehybrid dense", "nemotron_h", "falcon-h1"]
)
def test_blocks_are_of_the_rows_that_transformers_has(case: str, tmp_path: Path) -> None:
    """Loading compares layers with transformers' modules, which are made of unpacked tensors."""
    _, path = write(tmp_path, case, "Q8_0")
    source = open_gguf(path, torch.bfloat16).source
    packed = [weight for weight in source.weights(blocks=source.blocks) if weight.kind == "q8_0"]
    assert any("in_proj" in weight.name for weight in packed)
    for weight in packed:
        if weight.name.endswith(
            (".gate_up_proj", ".down_proj")
        ):  # stacks are read a matrix at a time
            continue
        blocks = weight.rows(0, weight.shape[0]).numpy().reshape(weight.shape[0], -1)
        numbers = written.quants.dequantize(blocks, written.GGMLQuantizationType.Q8_0)
        rows = numbers if weight.order is None else numbers[weight.order.numpy()]
        whole = source.tensor(weight.name).float().flatten(0, -2)
        assert torch.equal(torch.from_numpy(rows).bfloat16().float(), whole), weight.name
    assert (
        Engine.from_pretrained(str(path), "none", offline=True, backend="native").target.dtype
        is torch.bfloat16
    )


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    changes = {
        "block_count": 4,
        "nextn_predict_layers": 1,
        "blk.3.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
    }
    model, path = write(tmp_path, "qwen35", **changes)
    engine = Engine.from_pretrained(
        str(path), "none", offline=True, dtype="float32", backend="native"
    )
    assert engine.generate(PROMPT, max_new_tokens=8).token_ids == plainly(model, PROMPT, 8)
    for count in (4, True, 2.5):
        _, path = write(tmp_path, "qwen35", **{**changes, "nextn_predict_layers": count})
        with pytest.raises(CheckpointError, match=r"nextn_predict_layers|block_count"):
            Engine.from_pretrained(str(path), "none", offline=True, backend="native")


BLOCK = {  # of an MTP head, as llama.cpp's converter calls what Qwen's checkpoints have as mtp.*
    "fc.weight": "nextn.eh_proj.weight",
    "embedding_norm.weight": "nextn.enorm.weight",
    "hidden_norm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
    "block.input_layernorm.weight": "attn_norm.weight",
    "block.post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"block.self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"block.self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    "block.self_attn.o_proj.weight": "attn_output.weight",
    **{f"block.mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{
        f"block.mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
    "block.mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "block.mlp.gate.weight": "ffn_gate_inp.weight",
    "block.mlp.experts.down_proj": "ffn_down_exps.weight",
}


BLOCKS_OF_NEMOTRON = {
    **{
        name: BLOCK[name]
        for name in ("fc.weight", "embedding_norm.weight", "hidden_norm.weight", "norm.weight")
    },
    "block.0.norm.weight": "attn_norm.weight",
    **{f"block.0.mixer.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "block.0.mixer.o_proj.weight": "attn_output.weight",
    "block.1.norm.weight": "post_attention_norm.weight",
    "block.1.mixer.gate.weight": "ffn_gate_inp.weight",
    "block.1.mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"block.1.mixer.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("up", "down")},
    **{
        f"block.1.mixer.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("up", "down")
    },
}


def test_a_head_of_several_blocks_is_read(tmp_path: Path) -> None:
    """As llama.cpp's converter makes one block of two of Nemotron-H."""
    model = made("nemotron_h")
    torch.manual_seed(3)
    head = {
        key: torch.randn(one.shape) * 0.2
        for key, one in MtpLayer(model.config, torch.float32).state_dict().items()
    }
    assert head.keys() == BLOCKS_OF_NEMOTRON.keys()
    changes: Keys = {
        "block_count": 6,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
    }
    changes |= {"feed_forward_length": [0, 24, 0, 0, 24, 24]}
    changes |= {
        f"blk.5.{BLOCKS_OF_NEMOTRON[name]}": tensor.numpy() for name, tensor in head.items()
    }
    for part in "qk":
        rows = changes[f"blk.5.attn_{part}.weight"]
        changes[f"blk.5.attn_{part}.weight"] = (
            rows.reshape(-1, 2, 8, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        )
    _, path = write(tmp_path, "nemotron_h", **changes)
    engine = Engine.from_pretrained(
        str(path), "mtp", "eagle", offline=True, dtype="float32", lookup=False
    )
    source = engine.target.lm.source
    stored = mtp._names_in_file(source.config)
    found = {name: source.made_of(names, name) for name, names in stored.items()}
    assert type(engine.drafter.head) is NativeMtpHead
    assert found.keys() == head.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in head.items())
    answer = engine.generate(PROMPT, max_new_tokens=12)
    assert answer.token_ids == plainly(model, PROMPT, 12)
    assert answer.stats.num_draft_tokens
    assert "mtp" in Engine.from_pretrained(str(path), offline=True).drafter.name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen35", "qwen3next"])
def test_a_head_for_further_tokens_is_read(case: str, tmp_path: Path) -> None:
    model = made(case)
    torch.manual_seed(3)
    head = {
        name: torch.randn(one.shape) * 0.2
        for name, one in MtpLayer(model.config, torch.float32).state_dict().items()
    }
    changes: Keys = {"block_count": 4, "nextn_predict_layers": 1}
    for name, tensor in head.items():
        numbers = tensor.numpy() + np.float32(name.endswith("norm.weight"))
        if name == "block.mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(numbers, 2, axis=1), strict=True):
                changes[f"blk.3.ffn_{part}_exps.weight"] = half
        else:
            changes[f"blk.3.{BLOCK[name]}"] = numbers
    _, path = write(tmp_path, case, **changes)
    engine = Engine.from_pretrained(
        str(path), "mtp", "eagle", offline=True, dtype="float32", lookup=False
    )
    source = engine.target.lm.source
    stored = mtp._names_in_file(source.config)
    found = {name: source.made_of(names, name) for name, names in stored.items()}
    assert type(engine.drafter.head) is NativeMtpHead
    assert found.keys() == head.keys()
    assert all((found[name] - tensor).abs().max() < 1e-6 for name, tensor in head.items())
    answer = engine.generate(PROMPT, max_new_tokens=12)
    assert answer.token_ids == plainly(model, PROMPT, 12)
    assert answer.stats.num_draft_tokens
    assert "mtp" in Engine.from_pretrained(str(path), offline=True).drafter.name
    changes.pop("blk.3.attn_output.weight")
    _, path = write(tmp_path, case, **changes)
    assert "mtp" not in Engine.from_pretrained(str(path), offline=True).drafter.name
    with pytest.raises(
        CheckpointError, match=r"does not fit the model's config; missing: block.self_attn.o_proj"
    ):
        Engine.from_pretrained(str(path), "mtp", offline=True)


@pytest.mark.parametrize(
    "width", [[0, 24, 0, 0, 23], [0, 0, 0, 0, 0], [0, -24, 0, 0, 24], 2.0, "wide"]
)
def test_widths_that_fit_no_layers_are_refused(width: Any, tmp_path: Path) -> None:
    _, path = write(tmp_path, "nemotron_h")
    with gguf.read(path) as file:
        file.metadata["nemotron_h_moe.feed_forward_length"] = width
        with pytest.raises(CheckpointError, match="feed_forward_length"):
            gguf.config(file)

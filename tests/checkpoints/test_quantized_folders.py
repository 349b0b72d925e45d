"""Tests of folders that other libraries quantised: exact in float32, packed where blocks hold the same numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine
from specengine.checkpoints.gguf import dequantize
from specengine.checkpoints.pretrained import open_native
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.models.native import NativeLM
from specengine.models.twins import QuantizedLinear
from specengine.ops import QuantizedWeight
from tests.checkpoints.quantized_folders import (
    Store,
    awq,
    float_quantized,
    fp8,
    gptq,
    in_words,
    int_quantized,
    pack_quantized,
    quantised,
    written,
)
from tests.models.native_engines import PROMPT, needs_extension, plainly

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
Case = tuple[dict[str, Any], Store]
# the smallest block that holds a matrix's numbers; empty: none does
CASES: dict[str, tuple[Case, str]] = {
    "W4A16": (pack_quantized(4, even=True), "q4_0"),
    "W4A16, group 64": (pack_quantized(4, even=True, group=64), "q4_0"),
    "W4A16 by row": (pack_quantized(4, even=True, group=0), "q4_0"),
    "W4A16 with zero points": (pack_quantized(4, even=False), "q5_0"),
    "W8A16": (pack_quantized(8, even=True), "q8_0"),
    "W8A16 with zero points": (pack_quantized(8, even=False), ""),
    "W4A16, fine scales": (pack_quantized(4, even=True, scales=torch.float32), ""),
    "W4A16, group 16": (pack_quantized(4, even=True, group=16), ""),
    "W8A8": (int_quantized(), "q8_0"),
    "FP8 by tensor": (float_quantized("tensor"), ""),
    "FP8 by row": (float_quantized("channel"), ""),
    "GPTQ": (gptq(4, even=True), "q4_0"),
    "GPTQ by row": (gptq(4, even=True, group=0), "q4_0"),
    "GPTQ with zero points": (gptq(4, even=False), "q5_0"),
    "GPTQ v2": (gptq(4, even=False, form="gptq_v2"), "q5_0"),
    "GPTQ of 8 bits": (gptq(8, even=True), "q8_0"),
    "GPTQ by activations": (gptq(4, even=True, act_order=True), ""),
    "AWQ": (awq(), "q5_0"),
    "FP8 blocks": (fp8(), ""),
    "FP8 blocks that end early": (fp8((48, 40)), ""),
}


def generated(folder: Path, **options: Any) -> tuple[list[int], str]:
    engine = Engine.from_pretrained(str(folder), "ngram", **options)
    return engine.generate(PROMPT, max_new_tokens=24).token_ids, engine.target.backend


# Llama's o_proj has 32 inputs: one group of 64 does not fit there
def of_size(case: str) -> dict[str, Any]:
    return {"head_dim": 16} if case.endswith("group 64") else {}


@pytest.mark.sliced(6)
@pytest.mark.parametrize("case", CASES)
def test_float32_answers_are_those_of_the_numbers_that_are_meant(case: str, tmp_path: Path) -> None:
    (config, store), _ = CASES[case]
    expected = plainly(written(tmp_path, config, store, **of_size(case)), PROMPT, 24)
    answer, backend = generated(tmp_path, dtype="float32")
    assert (answer, backend.startswith("native (")) == (expected, True)


@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_the_same_numbers_or_are_not_made(case: str, tmp_path: Path) -> None:
    (config, store), form = CASES[case]
    meant = dict(written(tmp_path, config, store, **of_size(case)).named_parameters())
    source = open_native(str(tmp_path)).source
    assert source.dtype is torch.bfloat16
    packed = 0
    for weight in source.weights(blocks=("q4_0", "q5_0", "q8_0")):
        if "_proj." not in weight.name or (
            case == "GPTQ by activations" and "o_proj" in weight.name
        ):
            continue
        rows = weight.shape[0]
        assert weight.kind == (form or "bf16")
        if form:
            pieces = torch.cat([weight.rows(0, 3), weight.rows(3, 9), weight.rows(9, rows)])
            numbers = dequantize(form, pieces.numpy(), weight.shape)
            assert torch.equal(torch.from_numpy(numbers), meant[weight.name])
            packed += 1
        else:
            assert torch.equal(weight.rows(0, rows), meant[weight.name].bfloat16())
    assert packed == (14 if form else 0)


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        ("FP8 blocks", True),
        ("FP8 by tensor", True),
        ("FP8 by row", True),
        ("FP8 blocks that end early", False),  # within 64 inputs
    ],
)
def test_float8_stays_for_a_device(case: str, fits: bool, tmp_path: Path) -> None:
    (config, store), _ = CASES[case]
    meant = dict(written(tmp_path, config, store).named_parameters())
    model = open_native(str(tmp_path)).source.model(packed=True)
    packed = {
        name: QuantizedWeight(layer.codes, layer.scales)
        for name, layer in model.named_modules()
        if type(layer) is QuantizedLinear
    }
    # o_proj of Llama has 32 inputs here
    assert len(packed) == (12 if fits else 0)
    for name, weight in packed.items():
        assert weight.codes.dtype is torch.float8_e4m3fn
        assert torch.equal(weight.numbers(), meant[f"{name}.weight"])


@pytest.mark.sliced(4)
@pytest.mark.parametrize("case", CASES)
def test_packed_weights_give_a_tree_the_bits_of_plain_decoding(case: str, tmp_path: Path) -> None:
    (config, store), form = CASES[case]
    written(tmp_path, config, store, **of_size(case))
    answer, backend = generated(tmp_path)
    plain = Engine.from_pretrained(str(tmp_path), None).generate(PROMPT, max_new_tokens=24)
    assert plain.token_ids == answer
    assert (form in backend) if form else ("as bf16" in backend or case == "GPTQ by activations")


@pytest.mark.parametrize("form", ["q4_0", "q5_0", "q8_0"])
def test_all_codes_of_a_form_are_multiplied_as_numbers_are(form: str, tmp_path: Path) -> None:
    """The least and the largest code of each form, among them -128, on this machine's products."""
    bits = 8 if form == "q8_0" else 4

    def store(_name: str, weight: torch.Tensor) -> Any:
        matrix = quantised(weight, bits, 32, even=form != "q5_0", scales=torch.bfloat16)
        matrix.codes[:, 0::3] = 0
        matrix.codes[:, 1::3] = 2**bits - 1
        if form == "q5_0":
            matrix.zeros[0::2] = 0
            matrix.zeros[1::2] = 15
        return in_words(matrix, bits, even=form != "q5_0"), matrix.numbers / 4

    config, _ = pack_quantized(bits, even=form != "q5_0")
    written(tmp_path, config, store)
    packed = NativeLM(open_native(str(tmp_path)).source)
    numbers = NativeLM(open_native(str(tmp_path), dtype=torch.float32).source)
    assert form in packed.stored
    logits = [lm.extend(lm.new_cache(64), PROMPT, logits="all")[0] for lm in (packed, numbers)]
    distance = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert distance < 0.1  # of activations in int8; a wrong code gives 0.5 and more


# ---------------------------------------------------------------------------------------------------- other folders


FOLDERS: dict[str, dict[str, Any]] = {
    "shards": {"shards": "20KB"},
    "a tied head": {"tie_word_embeddings": True},
    "a head that is quantised": {"skipped": ()},
    "layers that are not": {"skipped": ("lm_head", "down_proj", "q_proj")},
    "fused matrices": {"family": "phi3"},
    "biases": {"family": "qwen2"},
}


@pytest.mark.sliced(3)
@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("packing", ["W4A16 with zero points", "GPTQ", "AWQ", "FP8 blocks"])
def test_folders_of_other_kinds(case: str, packing: str, tmp_path: Path) -> None:
    (config, store), form = CASES[packing]
    model = written(tmp_path, config, store, **FOLDERS[case])
    assert len(list(tmp_path.glob("*.safetensors"))) > (4 if case == "shards" else 0)
    answer, backend = generated(tmp_path, dtype="float32")
    assert (answer, backend.startswith("native (")) == (plainly(model, PROMPT, 24), True)
    assert (form or "bf16") in generated(tmp_path)[1]


def test_experts_that_are_stored_one_by_one_are_packed(tmp_path: Path) -> None:
    (config, store), _ = CASES["W4A16 with zero points"]
    sizes = {"moe_intermediate_size": 32}
    model = written(
        tmp_path, config, store, family="qwen3_moe", skipped=("lm_head", "gate"), **sizes
    )
    stacks = {
        name: weight
        for name, weight in model.named_parameters()
        if name.split(".")[-2] == "experts"
    }

    def change(state: dict[str, Any]) -> None:
        for name in [name for name in state if ".experts." in name]:
            del state[name]
        for name, weight in stacks.items():
            for expert, matrix in enumerate(weight.data):
                parts = {"down_proj": matrix}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                for part, numbers in parts.items():
                    stored, meant = store("", numbers.contiguous())
                    numbers.copy_(meant)
                    module = f"{name.rpartition('.')[0]}.{expert}.{part}"
                    state.update({f"{module}.{end}": one for end, one in stored.items()})

    changed(tmp_path, change)
    assert stacks
    answer, backend = generated(tmp_path, dtype="float32")
    assert (answer, backend.startswith("native (")) == (plainly(model, PROMPT, 24), True)
    source = open_native(str(tmp_path)).source
    for weight in source.weights(blocks=("q5_0",)):
        if weight.name in stacks:
            numbers = dequantize(weight.kind, weight.rows(0, weight.shape[0]).numpy(), weight.shape)
            assert torch.equal(torch.from_numpy(numbers), stacks[weight.name].data.flatten(0, 1))
    assert "q5_0" in generated(tmp_path)[1]


# ---------------------------------------------------------------------------------------------------- refusals


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no scales": (
        "W4A16",
        lambda state: state.pop(f"{Q}.weight_scale"),
        "q_proj: accepted are matrices weight_packed with weight_scale",
    ),
    "no zero points": (
        "GPTQ",
        lambda state: state.pop(f"{Q}.qzeros"),
        "q_proj: accepted are matrices qweight with scales with qzeros",
    ),
    "codes of one dimension": (
        "W8A8",
        lambda state: state.update({f"{Q}.weight": torch.ones(32).to(torch.int8)}),
        "q_proj: accepted are matrices weight with weight_scale",
    ),
    "no matrix": (
        "AWQ",
        lambda state: [state.pop(f"{Q}.{end}") for end in ("qweight", "qzeros", "scales")],
        rf"missing: {Q}\.weight",
    ),
    "one more": (
        "W4A16",
        lambda state: state.update({"model.layers.0.extra.weight": torch.ones(2, 2)}),
        r"unused: model\.layers\.0\.extra\.weight",
    ),
    "parts of none": (
        "W4A16",
        lambda state: state.pop(f"{Q}.weight_packed"),
        rf"unused: {Q}\.weight_s",
    ),
    "scales of other groups": (
        "W4A16",
        lambda state: state.update({f"{Q}.weight_scale": torch.ones(32, 1)}),
        r"q_proj: weight_scale \[32, 1\] beside \[32, 64\]",
    ),
    "zero points of another shape": (
        "W4A16 with zero points",
        lambda state: state.update({f"{Q}.weight_zero_point": torch.ones(3, 2).int()}),
        r"q_proj: weight_zero_point \[3, 2\] beside",
    ),
    "codes of another type": (
        "W8A8",
        lambda state: state.update({f"{Q}.weight": torch.ones(32, 64)}),
        rf"unused: {Q}\.weight_scale",
    ),
    "codes of another shape": (
        "W4A16",
        lambda state: state.update({f"{Q}.weight_packed": torch.ones(32, 9).int()}),
        r"q_proj: weight_scale \[32, 2\] beside \[32, 72\]",
    ),
    "a matrix of another shape": (
        "FP8 blocks",
        lambda state: state.update({f"{Q}.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)}),
        rf"of another shape: {Q}\.weight \[32, 32\], not \[32, 64\]",
    ),
    "groups of other inputs": (
        "GPTQ",
        lambda state: state.update({f"{Q}.g_idx": torch.zeros(4).int()}),
        r"q_proj: g_idx \[4\] beside",
    ),
    "groups that are not there": (
        "GPTQ",
        lambda state: state[f"{Q}.g_idx"].add_(1),
        "groups of inputs beyond 2",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_tensors_that_do_not_fit_are_listed(case: str, tmp_path: Path) -> None:
    packing, change, message = DAMAGES[case]
    written(tmp_path, *CASES[packing][0])
    changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        Engine.from_pretrained(str(tmp_path), "ngram")


def test_codes_without_a_meaning_are_refused(tmp_path: Path) -> None:
    written(tmp_path, *CASES["W4A16"][0])
    changed(tmp_path, lambda state: state.update({"model.norm.weight": torch.ones(64).char()}))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is stored as .*int8"):
        open_native(str(tmp_path))


def config_of(case: str, **fields: Any) -> dict[str, Any]:
    return CASES[case][0][0] | fields


METHODS = "accepted compressed-tensors, gptq, awq, fp8; transformers may run it with the library"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes, 4 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        f"quant_method: got 'bitsandbytes', {METHODS}",
    ),
    "bitsandbytes, 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        f"quant_method: got 'bitsandbytes', {METHODS}",
    ),
    "no method": ({}, f"quant_method: got None, {METHODS}"),
    "NVFP4": (
        config_of("W4A16", format="nvfp4-pack-quantized"),
        "format: got 'nvfp4-pack-quantized', accepted pack-quantized, int-quantized, .* GGUF",
    ),
    "transforms": (
        config_of("W4A16", transform_config={"config_groups": {"a": 1}}),
        "transform_config: got .*, accepted none;",
    ),
    "two groups": (
        config_of("W4A16", config_groups={key: {"weights": {"num_bits": 4}} for key in "ab"}),
        "config_groups: got 2, accepted none, 1;",
    ),
    "a strategy": (
        config_of("W4A16", config_groups={"a": {"weights": {"num_bits": 4, "strategy": "token"}}}),
        "strategy: got 'token', accepted group, channel, block, tensor;",
    ),
    "bits": (config_of("GPTQ", bits=3), "bits: got 3, accepted 4, 8;"),
    "bits of AWQ": (config_of("AWQ", bits=8), "bits: got 8, accepted 4;"),
    "groups": (config_of("GPTQ", group_size="all"), ": got .*, accepted objects as its library"),
    "another layout": (
        config_of("GPTQ", checkpoint_format="marlin"),
        "checkpoint_format: got 'marlin'",
    ),
    "a version": (config_of("AWQ", version="gemv"), "version: got 'gemv', accepted none, gemm"),
    "no objects": (
        config_of("W4A16", config_groups=5),
        ": got .*, accepted objects as its library",
    ),
    "a block": (
        config_of("FP8 blocks", weight_block_size=[128]),
        ": got .*, accepted objects as its library",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_are_not_read_are_named(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    written(tmp_path, config, CASES["W4A16"][0][1])
    with pytest.raises(
        UnsupportedModelError, match=rf"native: quantized weights: quantization_config\.?{message}"
    ):
        open_native(str(tmp_path))

"""Folders of tiny models in the layouts of libraries that quantise, written by hand, and the models that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.toy import tiny

SIZES = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 128}
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of outputs in a word, from its lowest bits on
Store = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


class Quantised(NamedTuple):
    """A matrix: codes from 0 on [outputs, inputs], codes of zero and scales [outputs, groups]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def numbers(self) -> Tensor:
        """float32 [outputs, inputs]"""
        each = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (
            part.repeat_interleave(each, dim=1) for part in (self.zeros, self.scales.float())
        )
        return (self.codes - zeros).float() * scales


def quantised(
    weight: Tensor, bits: int, group: int, *, even: bool, scales: torch.dtype
) -> Quantised:
    """Round a matrix; even: with zero in the middle of the codes."""
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    if even:
        steps = (groups.abs().amax(2) / (middle - 1)).to(scales)
        zeros = torch.full_like(steps, middle, dtype=torch.int32)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        steps = ((high - low) / most).to(scales)
        zeros = (-low / steps.float()).round().clamp(0, most).int()
    codes = (groups / steps.float()[..., None]).round().int() + zeros[..., None]
    return Quantised(codes.clamp(0, most).flatten(1), zeros, steps)


def words(codes: Tensor, bits: int) -> Tensor:
    """Put codes along the last dimension into int32, the first one lowest."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each))
    parts = padded.unflatten(-1, (-1, each)) << torch.arange(0, 32, bits)
    total = parts.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int().contiguous()


def in_words(matrix: Quantised, bits: int, *, even: bool) -> dict[str, Tensor]:
    """pack-quantized"""
    stored = {
        "weight_packed": words(matrix.codes, bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not even:
        stored["weight_zero_point"] = words(matrix.zeros.T, bits).T.contiguous()
    return stored


def by_gptq(
    matrix: Quantised, bits: int, *, lacking: int = 1, order: Tensor | None = None
) -> dict[str, Tensor]:
    """order: the group of each input, of codes that are already so."""
    inputs, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    in_turn = torch.arange(inputs, dtype=torch.int32) // (inputs // groups)
    return {
        "qweight": words(matrix.codes, bits).T.contiguous(),
        "qzeros": words(matrix.zeros.T - lacking, bits),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": in_turn if order is None else order.int(),
    }


def by_awq(matrix: Quantised) -> dict[str, Tensor]:
    def packed(codes: Tensor) -> Tensor:
        return words(codes.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    return {
        "qweight": packed(matrix.codes),
        "qzeros": packed(matrix.zeros),
        "scales": matrix.scales.T.contiguous(),
    }


def written(
    folder: Path,
    config: Mapping[str, Any],
    store: Store,
    *,
    family: str = "llama",
    skipped: tuple[str, ...] = ("lm_head",),
    shards: str = "5GB",
    dtype: str = "bfloat16",
    **changes: Any,
) -> PreTrainedModel:
    """Write a tiny model whose linear layers `store` quantises, and return what it means, in float32.

    store: gives the tensors of a module, by the ends of their names, and the matrix that they mean.
    """
    model = tiny(family, **{**SIZES, **changes}).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shards)
    means = tiny(family, **{**SIZES, **changes})  # whose rotary frequencies no cast has rounded
    means.load_state_dict(model.state_dict())
    renamed: dict[str, dict[str, Tensor]] = {}
    for name, module in means.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in skipped:
            stored, numbers = store(name, module.weight.detach().float())
            module.weight.data = numbers
            renamed[f"{name}.weight"] = {f"{name}.{end}": one for end, one in stored.items()}
    for file in sorted(folder.glob("*.safetensors")):
        state = load_file(file)
        for name in renamed.keys() & state.keys():
            del state[name]
            state |= renamed[name]
        save_file(state, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    if len(files := sorted(folder.glob("*.safetensors"))) > 1:
        weights = {key: file.name for file in files for key in load_file(file)}
        index = {"metadata": {"total_size": 1}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = dict(config)
    (folder / "config.json").write_text(json.dumps(fields))
    return means.eval()


def compressed(form: str, bits: int = 4, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors; weights: as it has them."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                }
                | weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def blocks_of(matrix: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Round to float8 with a scale for each block: codes and scales."""
    rows, inputs = (-(-length // each) for length, each in zip(matrix.shape, size, strict=True))
    scales = torch.zeros(rows, inputs)
    codes = torch.zeros(matrix.shape)
    for row in range(rows):
        for column in range(inputs):
            place = (
                slice(row * size[0], (row + 1) * size[0]),
                slice(column * size[1], (column + 1) * size[1]),
            )
            scales[row, column] = matrix[place].abs().max() / 448
            codes[place] = matrix[place] / scales[row, column]
    return codes.to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, shape: torch.Size, size: tuple[int, int]) -> Tensor:
    """Return the scale of each number of a matrix."""
    wide = scales.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    return wide[: shape[0], : shape[1]]


def pack_quantized(
    bits: int, *, even: bool, group: int = GROUP, scales: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Any], Store]:
    """group: 0 for one of a whole row"""

    def store(_name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = quantised(weight, bits, group, even=even, scales=scales)
        return in_words(matrix, bits, even=even), matrix.numbers

    strategy = {"strategy": "group" if group else "channel", "group_size": group or None}
    return compressed("pack-quantized", bits, symmetric=even, **strategy), store


def int_quantized() -> tuple[dict[str, Any], Store]:
    """With a scale for a static rounding of inputs."""

    def store(_name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = quantised(weight, 8, 0, even=True, scales=torch.bfloat16)
        stored = {"weight": (matrix.codes - 128).to(torch.int8), "weight_scale": matrix.scales}
        return stored | {"input_scale": torch.ones(1)}, matrix.numbers

    return compressed("int-quantized", 8, strategy="channel", group_size=None), store


def float_quantized(strategy: str) -> tuple[dict[str, Any], Store]:
    def store(_name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = (len(weight) if strategy == "tensor" else 1, weight.shape[1])
        codes, scales = blocks_of(weight, size)
        stored = scales.flatten() if strategy == "tensor" else scales
        numbers = codes.float() * spread(scales, weight.shape, size)
        return {"weight": codes, "weight_scale": stored}, numbers

    weights = {"type": "float", "strategy": strategy, "group_size": None}
    return compressed("float-quantized", 8, **weights), store


def gptq(
    bits: int, *, even: bool, group: int = GROUP, form: str = "gptq", act_order: bool = False
) -> tuple[dict[str, Any], Store]:
    def store(_name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
        sorted_matrix = quantised(weight[:, order], bits, group, even=even, scales=torch.float16)
        places = torch.argsort(order)
        matrix = sorted_matrix._replace(codes=sorted_matrix.codes[:, places])
        groups = (torch.arange(inputs) // (group or inputs))[places]
        stored = by_gptq(matrix, bits, lacking=int(form == "gptq"), order=groups)
        return stored, sorted_matrix.numbers[:, places]

    fields = {"bits": bits, "group_size": group or -1, "desc_act": act_order, "sym": even}
    return {"quant_method": "gptq", "checkpoint_format": form} | fields, store


def awq() -> tuple[dict[str, Any], Store]:
    def store(_name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = quantised(weight, 4, GROUP, even=False, scales=torch.float16)
        return by_awq(matrix), matrix.numbers

    fields = {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return {"quant_method": "awq"} | fields, store


def fp8(size: tuple[int, int] = (128, 128)) -> tuple[dict[str, Any], Store]:
    def store(_name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales = blocks_of(weight, size)
        numbers = codes.float() * spread(scales, weight.shape, size)
        return {"weight": codes, "weight_scale_inv": scales}, numbers

    fields = {"activation_scheme": "dynamic", "weight_block_size": list(size)}
    return {"quant_method": "fp8"} | fields, store

"""Matrices that other libraries quantised: read as numbers, or as blocks of GGUF that hold the same numbers.

A number is (code - zero point) * scale, computed in float32. Sources of the formats: the compressors of
compressed-tensors, GPTQModel, AutoAWQ, and transformers' finegrained_fp8.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specengine.checkpoints.safetensors_file import StoredTensor
from specengine.errors import UnsupportedModelError, require_intact, restating, shown

_FLOAT8 = torch.float8_e4m3fn
# kinds of GGUF, by the bits of codes and whether all zero points are in the middle of these
_KINDS = {(4, True): "q4_0", (4, False): "q5_0", (8, True): "q8_0"}
_LOWEST = {"q4_0": -8, "q5_0": -16, "q8_0": -128}
_UNREAD = (  # ends of names: of activations, which are rounded otherwise here, and of shapes, which codes have too
    ".weight_shape",
    *(
        f".{place}_{kind}"
        for place in ("input", "output", "q", "k", "v")
        for kind in ("scale", "zero_point", "global_scale")
    ),
)


class CodeFormat(NamedTuple):
    """Where the codes of matrices lie, and what they mean.

    names   ends of the names of a matrix's tensors: codes, scales, zero points, the group of each input
    dtypes  of codes
    needed  how many of the tensors must be there, the first ones
    turned  whether inputs come before outputs
    order   of the codes of eight outputs in an int32; empty where it has codes of inputs, from its lowest bits on
    bits    of a code
    size    outputs and inputs that share a scale; 0 for all
    added   to stored zero points
    """

    names: tuple[str, str, str, str]
    dtypes: tuple[torch.dtype, ...]
    needed: int = 2
    turned: bool = False
    order: tuple[int, ...] = ()
    bits: int = 8
    size: tuple[int, int] = (1, 0)
    added: int = 0


class QuantizedMatrix(NamedTuple):
    """A matrix of codes.

    shape   outputs and inputs
    size    how many of them share a scale
    middle  the code of zero where no zero points are stored
    """

    format: CodeFormat
    shape: tuple[int, int]
    size: tuple[int, int]
    middle: int
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    groups: StoredTensor | None

    def flat(self) -> Self:
        return self

    def read(self, first: int, last: int, kind: str = "") -> Tensor:
        """Return rows [first, last) as float32 [rows, inputs], or as blocks of a kind of GGUF, uint8 [bytes]."""
        rows = torch.arange(first, last, dtype=torch.int64, device="cpu") // self.size[0]
        scales, zeros, groups = self._parameters()
        levels = self._codes(first, last) - zeros[rows][:, groups]
        steps = scales[rows][:, groups]
        return _blocks(levels, steps, kind) if kind else levels * steps

    @property
    def kind(self) -> str:
        """The kind of GGUF's blocks that hold the same numbers; empty for none."""
        if self.codes.dtype is _FLOAT8 or self.shape[1] % 32:
            return ""
        scales, zeros, groups = self._parameters()
        by_block = groups.view(-1, 32)
        one_scale = torch.equal(by_block.amin(1), by_block.amax(1))
        holds = one_scale and torch.equal(scales.half().float(), scales)
        return (
            _KINDS.get((self.format.bits, bool((zeros == self.middle).all())), "") if holds else ""
        )

    def _codes(self, first: int, last: int) -> Tensor:
        """Return rows of codes, float32 [rows, inputs]."""
        if self.format.order:
            return _unpacked(
                _whole(self.codes),
                self.format,
                torch.arange(first, last, dtype=torch.int64, device="cpu"),
            ).T.contiguous()
        turned, inputs = (
            self.format.turned,
            torch.arange(self.shape[1], dtype=torch.int64, device="cpu"),
        )
        words = _whole(self.codes).T[first:last] if turned else self.codes.read(first, last)
        return _unpacked(words, self.format, inputs)

    def _parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scales and zero points, float32 [rows, groups], and the group of each input, int64 [inputs]."""
        turned, (outputs, inputs) = self.format.turned, self.shape
        scales = _whole(self.scales).float()
        scales = scales.T if turned else scales
        zeros = torch.full_like(scales, self.middle)
        if self.zeros is not None:
            words, rows = _whole(self.zeros), torch.arange(outputs, dtype=torch.int64, device="cpu")
            by_group = _unpacked(words if turned else words.T, self.format, rows)
            zeros = by_group.T + self.format.added
        groups = (
            torch.arange(inputs, dtype=torch.int64, device="cpu") // self.size[1]
            if self.groups is None
            else _whole(self.groups).flatten().long()
        )
        require_intact(
            f"{self.codes.file}: groups of inputs beyond {scales.shape[1]}",
            bool((groups >= 0).all() and (groups < scales.shape[1]).all()),
        )
        return scales, zeros, groups


def _whole(stored: StoredTensor) -> Tensor:
    return stored.read(0, stored.shape[0]).reshape(stored.shape[0], -1)


def _unpacked(words: Tensor, form: CodeFormat, places: Tensor) -> Tensor:
    """Return the codes at these places of the last dimension, float32."""
    if words.dtype is not torch.int32:
        return words.float()
    each = 32 // form.bits
    shifts = torch.tensor(form.order or range(each), dtype=torch.int32, device="cpu") * form.bits
    return (words[:, places // each] >> shifts[places % each] & (1 << form.bits) - 1).float()


def _blocks(levels: Tensor, steps: Tensor, kind: str) -> Tensor:
    """Return the bytes of blocks of 32 inputs; levels, steps: float32 [rows, inputs], one step for each block."""
    halves = steps[:, ::32].half().reshape(-1, 1).view(torch.uint8)
    codes = (levels.reshape(-1, 32) - _LOWEST[kind]).to(torch.uint8)
    fifths = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8, device="cpu")
    highest = fifths.sum(2, dtype=torch.uint8)
    nibbles = codes[:, :16] & 15 | codes[:, 16:] << 4
    parts = {"q4_0": [nibbles], "q5_0": [highest, nibbles], "q8_0": [codes ^ 128]}[kind]
    return torch.cat((halves, *parts), dim=1).flatten()


def joined(tensors: Mapping[str, Any], form: CodeFormat) -> dict[str, Any]:
    """Return a folder's tensors, those of a quantised matrix as one under transformers' name.

    CheckpointError where tensors of a matrix are missing or do not fit together.
    """
    by_name = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNREAD)}
    for name, codes in tensors.items():
        module, _, end = name.rpartition(".")
        if end == form.names[0] and codes.dtype in form.dtypes:
            by_name[f"{module}.weight"] = _matrix(
                module, form, [by_name.pop(f"{module}.{kind}", None) for kind in form.names]
            )
    return by_name


def _matrix(module: str, form: CodeFormat, parts: list[Any]) -> QuantizedMatrix:
    """Return the matrix of tensors in the order of the format's names. Raises CheckpointError as `joined`."""
    require_intact(
        f"{module}: accepted are matrices {' with '.join(form.names[: form.needed])}",
        None not in parts[: form.needed] and len(parts[0].shape) == 2,
    )
    words, along = parts[0].dtype is torch.int32, -1 if form.turned else 1
    each, middle = (32 // form.bits, 1 << form.bits - 1) if words else (1, 0)
    outputs, inputs = parts[0].shape[::along]
    shape = (outputs * each, inputs) if form.order else (outputs, inputs * each)
    high, wide = (min(one or length, length) for one, length in zip(form.size, shape, strict=True))
    rows, groups = -(-shape[0] // high), -(-shape[1] // wide)
    fitting = (rows, groups)[::along], (-(-shape[0] // each), groups)[::along], (shape[1], 1)
    differing = [
        f"{kind} {list(tensor.shape)}"
        for kind, tensor, fits in zip(form.names[1:], parts[1:], fitting, strict=True)
        if tensor is not None and (*tensor.shape, 1)[:2] != fits
    ]
    require_intact(f"{module}: {', '.join(differing)} beside {list(shape)}", not differing)
    return QuantizedMatrix(form, shape, (high, wide), middle, *parts)


# ---- quantization_config


_BYTES = CodeFormat(
    ("weight", "weight_scale", "weight_zero_point", "weight_g_idx"), (torch.int8, _FLOAT8)
)
_GPTQ = CodeFormat(("qweight", "scales", "qzeros", "g_idx"), (torch.int32,), needed=3, turned=True)
_BITS = {4: {"bits": 4}, 8: {}}
# the format of each method, and what accepted values of fields change of it
_METHODS: dict[str, tuple[CodeFormat, dict[str, dict[Any, dict[str, Any]]]]] = {
    "compressed-tensors": (
        _BYTES,
        {
            "transform_config": {None: {}},
            "num_bits": _BITS,
            "format": {
                "pack-quantized": {
                    "names": ("weight_packed", *_BYTES.names[1:]),
                    "dtypes": (torch.int32,),
                },
                "int-quantized": {"bits": 8},
                "float-quantized": {"bits": 8},
                "naive-quantized": {"bits": 8},
            },
            "strategy": {"group": {}, "channel": {}, "block": {}, "tensor": {"size": (0, 0)}},
        },
    ),
    "gptq": (
        _GPTQ,
        {
            "checkpoint_format": {None: {"added": 1}, "gptq": {"added": 1}, "gptq_v2": {}},
            "bits": _BITS,
        },
    ),
    "awq": (
        _GPTQ._replace(order=(0, 4, 1, 5, 2, 6, 3, 7)),
        {"version": {None: {}, "gemm": {}, "GEMM": {}}, "bits": {4: _BITS[4]}},
    ),
    "fp8": (CodeFormat(("weight", "weight_scale_inv", "", ""), (_FLOAT8,), size=(0, 0)), {}),
}


def take_format(config: PretrainedConfig) -> CodeFormat | None:
    """Take the field out of a config that says how matrices are quantised; None where there is none.

    UnsupportedModelError, which names the field, for what is not read here.
    """
    fields = vars(config).pop("quantization_config", None)
    if fields is None:
        return None
    with restating(
        (AttributeError, KeyError, TypeError, ValueError),
        lambda _: UnsupportedModelError(
            f"native: quantized weights: quantization_config: got {shown(fields)}, "
            "accepted objects as its library writes them"
        ),
    ):
        groups = list((fields.get("config_groups") or {}).values())
        _one_of({"config_groups": len(groups)}, "config_groups", {None: {}, 1: {}})
        for group in groups:
            fields = fields | group["weights"]
        form, meanings = _one_of(fields, "quant_method", _METHODS)
        for field, accepted in meanings.items():
            form = form._replace(**_one_of(fields, field, accepted))
        block = fields.get("weight_block_size") or fields.get("block_structure")
        rows, inputs = block or (form.size[0], fields.get("group_size"))
        return form._replace(size=(max(int(rows), 0), max(int(inputs or 0), 0)))


def _one_of(fields: Mapping[str, Any], field: str, accepted: Mapping[Any, Any]) -> Any:
    """Return what stands for the value of a field; UnsupportedModelError, which names it, where it is unknown."""
    value = fields.get(field) or None
    for key, meaning in accepted.items():
        if value == key:
            return meaning
    values = ", ".join(str(key or "none") for key in accepted)
    raise UnsupportedModelError(
        f"native: quantized weights: quantization_config.{field}: got {shown(value)}, accepted {values}; "
        "transformers may run it with the library that wrote it (backend='huggingface'), and a GGUF file of the model "
        "is read here"
    )

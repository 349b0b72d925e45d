"""A linear layer over a quantised weight: codes become numbers in registers, a tile at a time, and are never stored.

A weight is read once for up to 64 rows, in an eighth to a half of the bytes of float32. Programs have tiles of outputs
times rows; where these are too few to fill a device, the inputs are cut into splits whose sums a second kernel adds in
their order. No row depends on another, and nothing is summed atomically, so equal inputs give equal bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS = 132  # of an H100 or H200; used where there is no device to ask
MIN_SPLIT_STEPS = 4
SUMMED = 1024  # outputs of one program that adds splits
UNIT = tl.constexpr(256)  # inputs that share a unit
# inputs whose codes stand in the lower halves of bytes, before as many in the upper ones
PAIRED = tl.constexpr(16)
MIDDLE = tl.constexpr(8)  # the code of zero of codes of four bits without offsets

# ---- meaning


class Weight(NamedTuple):
    """A quantised matrix, contiguous.

    codes    int8 or float8_e4m3fn [outputs, inputs], or uint8 [outputs, inputs / 2] with two codes of four bits a
             byte: in each 32 inputs byte i has the code of input i in its lower half and that of input i + 16 in its
             upper one
    scales   of each group of inputs, [outputs, groups]: float32, float16, or whole numbers of `units`
    offsets  of each group, subtracted from codes times scales; None: 0, and the codes of four bits have 8 for zero
    units    float16 [outputs, inputs / 256, 1 or 2]: of scales and, where there are any, of offsets; or None
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    units: Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype is torch.uint8 else 1)


def numbers(weight: Weight) -> Tensor:
    """Return the weight's numbers, float32 [outputs, inputs]."""
    codes = weight.codes
    if codes.dtype is torch.uint8:
        bytes_ = codes.view(len(codes), -1, 16)
        codes = torch.cat((bytes_ & 15, bytes_ >> 4), 2).flatten(1).to(torch.int8)
        codes = codes - 8 if weight.offsets is None else codes
    groups = weight.scales.shape[1]
    scales = weight.scales.float()
    offsets = torch.zeros_like(scales) if weight.offsets is None else weight.offsets.float()
    if weight.units is not None:
        units = weight.units.float().repeat_interleave(groups // weight.units.shape[1], 1)
        scales, offsets = scales * units[..., 0], offsets * units[..., -1]
    by_group = codes.float().view(len(codes), groups, -1)
    return (by_group * scales[..., None] - offsets[..., None]).flatten(1)


def reference(states: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute `packed_linear` in plain torch: the product with the numbers rounded to the dtype of the states."""
    return torch.nn.functional.linear(states, numbers(weight).to(states.dtype), bias)


# ---- kernel


@triton.jit
def _levels(codes, scales, offsets, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Return codes [BLOCK_N, columns] times the scale of their group, less its offset; float32."""
    by_group = tl.reshape(codes.to(tl.float32), [BLOCK_N, GROUPS, codes.shape[1] // GROUPS])
    by_group *= scales[:, :, None]
    if offsets is not None:
        by_group -= offsets[:, :, None]
    return tl.reshape(by_group, [BLOCK_N, codes.shape[1]])


@triton.jit
def _float8(bits):
    """Return what the bits of float8_e4m3fn mean, float32. Cards without that type shift them into float16."""
    half = ((bits & 0x80).to(tl.uint16) << 8) | ((bits & 0x7F).to(tl.uint16) << 7)
    number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0  # of exponents 8 apart
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def _rows(states, row, states_row, rows, inputs, column, UPCAST: tl.constexpr):
    """Load columns of rows, transposed: [columns, rows]."""
    at = states + row[None, :] * states_row + column[:, None]
    tile = tl.load(at, mask=(row < rows)[None, :] & (column < inputs)[:, None], other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit(do_not_specialize=["rows", "outputs", "steps"])
def _multiply(
    states,
    codes,
    scales,
    offsets,
    units,
    bias,
    out,
    states_row,
    rows,
    outputs,
    inputs,
    codes_row,
    groups,
    unit_count,
    steps,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = output < outputs
    wide_output = output.to(tl.int64)
    codes += (wide_output * codes_row)[:, None]
    scales += (wide_output * groups)[:, None]
    PER_BYTE: tl.constexpr = 8 // BITS
    # inputs that share a scale within a tile, and how many such groups it has; one scale of a whole row comes last
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP else 1
    place = tl.arange(0, BLOCK_K // PER_BYTE)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(inputs, BLOCK_K))
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * BLOCK_K
        column = start // PER_BYTE + place
        packed = tl.load(
            codes + column[None, :], mask=there[:, None] & (column < codes_row)[None, :], other=0
        )
        factors, least = None, None
        if GROUP:
            group = start // GROUP + tl.arange(0, GROUPS)
            inside = there[:, None] & (group < groups)[None, :]
            factors = tl.load(scales + group[None, :], mask=inside, other=0.0).to(tl.float32)
            if offsets is not None:
                at = offsets + (wide_output * groups)[:, None] + group[None, :]
                least = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            if UNITS:
                at = units + (wide_output * unit_count + start // UNIT) * UNITS
                factors *= tl.load(at, mask=there, other=0.0).to(tl.float32)[:, None]
                if offsets is not None:
                    least *= tl.load(at + 1, mask=there, other=0.0).to(tl.float32)[:, None]
        if BITS == 8:
            lower = _float8(packed) if FLOAT else packed.to(tl.float32)
            if GROUP:
                lower = _levels(lower, factors, least, BLOCK_N, GROUPS)
            tile = _rows(states, row, states_row, rows, inputs, column, UPCAST)
            sums = tl.dot(lower.to(tile.dtype), tile, sums, input_precision="ieee")
        else:
            zero: tl.constexpr = 0 if offsets is not None else MIDDLE
            lower = _levels((packed & 15).to(tl.int8) - zero, factors, least, BLOCK_N, GROUPS)
            upper = _levels((packed >> 4).to(tl.int8) - zero, factors, least, BLOCK_N, GROUPS)
            column = start + place // PAIRED * (2 * PAIRED) + place % PAIRED
            tile = _rows(states, row, states_row, rows, inputs, column, UPCAST)
            sums = tl.dot(lower.to(tile.dtype), tile, sums, input_precision="ieee")
            tile = _rows(states, row, states_row, rows, inputs, column + PAIRED, UPCAST)
            sums = tl.dot(upper.to(tile.dtype), tile, sums, input_precision="ieee")
    if GROUP == 0:
        sums *= tl.load(scales, mask=there[:, None], other=0.0).to(tl.float32)
    inside = there[:, None] & (row < rows)[None, :]
    at = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    if WHOLE:
        if bias is not None:
            sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(at, sums.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(at + split.to(tl.int64) * rows * outputs, sums, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _add_splits(partial, bias, out, outputs, splits, BLOCK: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = output < outputs
    at = partial + row * outputs + output
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(splits):
        total += tl.load(at, mask=there, other=0.0)
        at += rows.to(tl.int64) * outputs
    if bias is not None:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=there)


# ---- launcher


class Tiles(NamedTuple):
    """Tile sizes of a program: rows x outputs x inputs of a step, warps, pipeline stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tiles_for(rows: int, dtype: torch.dtype) -> Tiles:
    """Return the shipped tiles for so many rows; a weight is read again for each 64 of them."""
    # multiplied in full precision, without tensor cores: larger tiles spill
    if dtype is torch.float32:
        return Tiles(16, 32, 64, 4, 2)
    return Tiles(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 128, 4, 3)


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors the device has."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits_for(programs: int, rows: int, steps: int, device: torch.device) -> int:
    """Return into how many parts to split the inputs of `steps` tiles so that `programs` fill the device.

    Two a processor for few rows, whose sums are few bytes.
    """
    filling = processors(device) * (2 if rows <= 16 else 1) // programs
    return max(1, min(filling, steps // MIN_SPLIT_STEPS))


def packed_linear(
    states: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    splits: int | None = None,
    upcast: bool = False,
) -> Tensor:
    """Return states [n, inputs] times the weight, plus bias [outputs] where there is one: [n, outputs], their dtype.

    Numbers of a weight are rounded to the dtype of the states, but codes with one scale a row, which the sums are
    multiplied by. Groups are of 16, 32 or 64 inputs, or of all. n of 1 or more; rows are contiguous. Capturable.
    `upcast` multiplies in float32 whatever the states are, for the interpreter, whose bfloat16 arithmetic is wrong.
    """
    codes, scales, offsets, units = weight
    floats = codes.dtype is torch.float8_e4m3fn
    rows, inputs = states.shape
    outputs, groups = scales.shape
    four = codes.dtype is torch.uint8
    by_row = groups == 1 and not four and offsets is units is None
    group = 0 if by_row else inputs // groups
    fits = by_row or (group in (16, 32, 64) and groups * group == inputs)
    if (
        codes.dtype not in (torch.int8, torch.uint8, torch.float8_e4m3fn)
        or weight.inputs != inputs
        or not fits
    ):
        raise ValueError(
            f"weight: codes int8 or float8_e4m3fn [outputs, {inputs}] or uint8 [outputs, {inputs} / 2] in groups are "
            "needed, got "
            f"{codes.dtype} {list(codes.shape)}, scales {list(scales.shape)}"
        )
    if four and (group % 32 or inputs % 32):
        raise ValueError(f"weight: codes of four bits need groups of 32 or more, got {group}")
    if states.stride(-1) != 1 or not all(part is None or part.is_contiguous() for part in weight):
        raise ValueError(
            "states, weight: the last dimension must be contiguous, and the weight whole"
        )
    tiles = tiles_for(rows, states.dtype)
    steps = triton.cdiv(inputs, tiles.inputs)
    programs = triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows)
    if splits is None:
        splits = splits_for(programs[0] * programs[1], rows, steps, states.device)
    each = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, each)
    out = torch.empty((rows, outputs), dtype=states.dtype, device=states.device)
    partial = out
    if splits > 1:
        partial = torch.empty((splits, rows, outputs), dtype=torch.float32, device=states.device)
    _multiply[(programs[0], splits, programs[1])](
        states,
        codes.view(torch.uint8) if floats else codes,
        scales,
        offsets,
        units,
        bias,
        partial,
        states.stride(0),
        rows,
        outputs,
        inputs,
        codes.shape[1],
        groups,
        0 if units is None else units.shape[1],
        each,
        BITS=4 if four else 8,
        FLOAT=floats,
        GROUP=group,
        UNITS=0 if units is None else units.shape[2],
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        BLOCK_M=tiles.rows,
        STAGES=tiles.stages,
        WHOLE=splits == 1,
        UPCAST=upcast,
        num_warps=tiles.warps,
    )
    if splits > 1:
        _add_splits[(rows, triton.cdiv(outputs, SUMMED))](
            partial, bias, out, outputs, splits, BLOCK=SUMMED, num_warps=4
        )
    return out

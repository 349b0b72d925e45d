"""Trials of implementations for a device: small inputs of each op, on which they are compared with its meaning."""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.ops import attention
from specengine.ops._registry import OPS, by_meaning, meaning
from specengine.ops.networks import QuantizedWeight, Steps, lineage_of
from specengine.ops.tree import ancestor_words

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # of float32, whose sums have another order; integers must be equal
HALF = 2e-2  # both, of bfloat16

ROWS, COLUMNS, HEADS, SLOTS, SIZE = 5, 300, 4, 70, 32
PACKED_ROWS = (16, 32, 64)  # most of a kind of tiles, before the largest
LONG = 400  # slots of a prefix that is split
MAX_THREADS = 8

Implementations = dict[str, Callable[..., Any]]
Inputs = list[tuple[Any, ...]]


class Heads(NamedTuple):
    """Heads of a model: channels, query heads per key-value head, dtype."""

    size: int
    groups: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"heads of {self.size} channels, {self.groups} to a key-value head, {self.dtype}"


SMALL = Heads(SIZE, HEADS // 2, torch.float32)


def differs(
    names: tuple[str, ...], run: Implementations, device: torch.device, inputs: Inputs | None = None
) -> str:
    """Return the fault of `run`, implementations of these ops, of which the last is called; empty where there is none.

    A fault is an exception, or a result that differs from the meaning's. inputs: to try, instead of those of the op.
    """
    for number, arguments in enumerate(INPUTS[names[-1]](device) if inputs is None else inputs):
        theirs, means = _copied(arguments), _copied(arguments)
        with meaning():
            expected = _called(names, means)
        try:
            with meaning({name: run[name] for name in names}):
                results = _called(names, theirs)
            reason = _difference(_counted((results, theirs)), _counted((expected, means)))
        except Exception as error:  # whatever a compiler or a driver says
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if reason:
            return f"{reason} (input {number})"
    return ""


def run_all(run: Implementations, device: torch.device) -> None:
    """Run each op once, side by side, so that programs are compiled in threads; what fails is left to `differs`."""
    tried = {needed(name, run) for name in run} - {()}
    side_by_side(
        [(names, run, arguments) for names in tried for arguments in INPUTS[names[-1]](device)],
        device,
    )


def side_by_side(
    jobs: list[tuple[tuple[str, ...], Implementations, tuple[Any, ...]]], device: torch.device
) -> None:
    """Call ops, each with its implementations and inputs, in threads; results and exceptions are dropped."""

    @torch.inference_mode()
    def one(job: tuple[tuple[str, ...], Implementations, tuple[Any, ...]]) -> None:
        names, run, arguments = job
        with (
            contextlib.suppress(Exception),
            torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
            meaning({name: run[name] for name in names}),
        ):
            _called(names, arguments)

    if device.type == "cuda":
        # threads have a stream of their own, and the inputs come from this one's
        torch.cuda.synchronize(device)
    for job in jobs[:1]:
        one(job)  # loads the driver
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(one, jobs[1:]))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _called(names: tuple[str, ...], arguments: tuple[Any, ...]) -> Any:
    if names == PACKED:
        query, key, value, mask, prefix = arguments
        packed = attention.pack_mask(mask, query.shape[0] // key.shape[0], query.dtype, prefix)
        return attention.tree_attention(query, key, value, packed, SIZE**-0.5)
    return OPS[names[-1]](*arguments)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        if isinstance(value, attention.Slabs):  # whose table says where they lie
            return _slabs(parts[0])
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.clone() if isinstance(value, Tensor) else value


def _counted(value: Any) -> list[Any]:
    """Return the values of a result, or of a changed argument, without padding."""
    if isinstance(value, attention.Slabs):
        return list(value.each)  # copies lie elsewhere
    if isinstance(value, tuple):
        live: Any = getattr(value, "live", None)
        return [
            one
            for name, part in zip(getattr(value, "_fields", value), value, strict=True)
            for one in _counted(
                part[: int(live)]
                if live is not None and name not in ("live", "bonus", "expand")
                else part
            )
        ]
    float8 = isinstance(value, Tensor) and value.dtype is torch.float8_e4m3fn
    return [value.float() if float8 else value]  # which torch compares in no other way


def _difference(results: list[Any], expected: list[Any]) -> str:
    for ours, theirs in zip(results, expected, strict=True):
        if not isinstance(theirs, Tensor):
            if ours != theirs:
                return f"{ours} instead of {theirs}"
            continue
        if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
            return f"{ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
        close = None if theirs.dtype is torch.float32 else HALF
        off = (
            ~torch.isclose(
                ours, theirs, rtol=close or RELATIVE, atol=close or ABSOLUTE, equal_nan=True
            )
            if theirs.is_floating_point()
            else ours != theirs
        )
        if off.any():
            a, b = ours[off].flatten()[0].item(), theirs[off].flatten()[0].item()
            return f"{a} instead of {b}, {int(off.sum())} of {off.numel()} numbers differ"
    return ""


# ---- inputs, without a generator: the device's own would not be the host's


def _wave(device: torch.device, *shape: int, phase: float = 0.0) -> Tensor:
    """Return numbers between -3 and 3, none equal."""
    place = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return ((place * 0.7310585 + phase).sin() * 3).float().view(shape).to(device)


def _whole(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _count(device: torch.device, value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def _tree(device: torch.device, capacity: int) -> tuple[Tensor, ...]:
    """Return the arrays of a tree of 5 nodes."""
    parents = [-1, 0, 0, 1, 3]
    room = [0] * (capacity - 5)
    words = ancestor_words(torch.tensor(parents, dtype=torch.int64, device="cpu"))
    return (
        _whole(device, 7, 8, 9, 10, 11, *room),
        _whole(device, *parents, *room),
        _whole(device, 0, 1, 1, 2, 3, *room),
        _wave(device, capacity).abs().neg(),
        _wave(device, capacity, phase=1.0).abs().neg(),
        torch.nn.functional.pad(words, (0, -(-capacity // 64) - 1, 0, capacity - 5)).to(device),
    )


def _logits(device: torch.device) -> list[Tensor]:
    logits = _wave(device, ROWS, COLUMNS)
    # ties, and values that are not finite
    logits[0, :9], logits[1, 3], logits[2, 5:] = 2.5, math.inf, -math.inf
    return [logits, logits.bfloat16()]


def _choose_tokens(device: torch.device) -> list[tuple[Any, ...]]:
    drawn = (
        torch.arange(ROWS, device=device, dtype=torch.int64) * 2**33,
        _whole(device, -(2**61) + 5),
        torch.tensor([0.7], dtype=torch.float32, device=device),
    )
    return [(logits, *how) for logits in _logits(device) for how in ((), drawn)]


def _walk(device: torch.device) -> list[tuple[Any, ...]]:
    tokens, parents = (part[:7] for part in _tree(device, 7)[:2])
    paths = (
        _whole(device, 8, 10, 1, 11, 5, 9, 9),
        _whole(device, 3, *[9] * 6),
        _whole(device, -1, *[9] * 6),
    )
    return [(tokens, parents, chosen, _count(device, 5)) for chosen in paths]


def _slabs(each: Sequence[Tensor]) -> attention.Slabs:
    caches = [slab[None] for slab in each]
    return attention.Slabs.by_layer(caches, attention.tables_of(caches))[0]


def attention_of(heads: Heads, device: torch.device) -> Inputs:
    """Return inputs of `cached_attention` with these heads: a tree for each kind of tiles, after a split prefix."""
    inputs = []
    counts = [
        *(max(1, packed // heads.groups) for packed in PACKED_ROWS),
        PACKED_ROWS[-1] // heads.groups + 1,
    ]
    for rows in dict.fromkeys(counts):
        parents = torch.tensor(
            [(node - 1) // 2 if node else -1 for node in range(rows)],
            dtype=torch.int64,
            device="cpu",
        )
        words = ancestor_words(parents).to(device)
        live = _count(device, rows)
        inputs.append(
            (
                *_rows(device, heads, rows, LONG + rows + 3),
                words,
                _count(device, LONG),
                live,
                live,
                heads.size**-0.5,
            )
        )
    return inputs


def strict_attention_of(heads: Heads, device: torch.device) -> Inputs:
    """Return an input of `strict_cached_attention` with these heads."""
    paths = by_meaning(attention.order_paths, _tree(device, 5)[5])
    return [
        (
            *_rows(device, heads, ROWS, LONG + ROWS + 3),
            paths,
            _count(device, LONG),
            _count(device, 4),
            heads.size**-0.5,
        )
    ]


def _rows(
    device: torch.device, heads: Heads = SMALL, rows: int = ROWS, slots: int = SLOTS
) -> tuple[Tensor, ...]:
    """Return queries of rows, and keys and values of slots, of 2 key-value heads."""
    shapes = (2 * heads.groups, rows, heads.size), *[(2, slots, heads.size)] * 2
    query, key, value = (
        _wave(device, *shape, phase=float(n)).to(heads.dtype) for n, shape in enumerate(shapes)
    )
    return query / 4, key, value  # no weight is near 1, so that rounding stays small


OF_HEADS = {"cached_attention": attention_of, "strict_cached_attention": strict_attention_of}


def _packed_linear(device: torch.device) -> list[tuple[Any, ...]]:
    """Return rows in bfloat16 for each kind of tiles, with codes of eight bits and of four, in groups and without.

    The last weight has codes of float8.
    """
    codes = (_wave(device, 70, 1024) * 42).to(torch.int8)
    scales = _wave(device, 70, 32).abs() / 4096
    small = (scales * 16384).to(torch.uint8)
    units = _wave(device, 70, 4, 2).abs().half() / 4096
    weights = (
        QuantizedWeight(codes, scales[:, :1].contiguous()),
        QuantizedWeight(codes[:, :512].contiguous().view(torch.uint8), small, small.flip(1), units),
        QuantizedWeight(codes, scales.half()),
        QuantizedWeight(codes.abs().clamp(max=56).view(torch.float8_e4m3fn), scales * 64),
    )
    return [
        (_wave(device, rows - 3, 1024).bfloat16(), weight, _wave(device, 70).bfloat16())
        for rows, weight in zip(cycle(PACKED_ROWS), weights, strict=False)
    ]


def _tree_recurrence(device: torch.device) -> Inputs:
    """Return rows of a tree, with the delta rule, and of a text, without."""
    lineage, state = lineage_of(_tree(device, 5)[5], 4), _wave(device, HEADS, SIZE, SIZE)
    key, value = _wave(device, ROWS, 2, SIZE) / SIZE, _wave(device, ROWS, HEADS, SIZE)
    decays = _wave(device, ROWS, HEADS).sigmoid()
    heads, scalars, steps = (key, key, value), (decays, 1 - decays), Steps(decays, key, value)
    return [
        (heads, scalars, state, lineage, steps, True),
        (heads, scalars, state, lineage._replace(parents=None), steps, False),
    ]


PACKED = ("pack_mask", "tree_attention")  # the first has a meaning only together with the second
# Ops that could change an answer: the target's attention and choices, the walk, and the cache. The others draft, build
# trees, or are compared with the modules that they replace (fused layers). The first of these that a backend has stands
# for its other ops: where nothing of it runs, they are not taken either.
INPUTS: dict[str, Callable[[torch.device], Inputs]] = {
    "walk": _walk,
    "cached_attention": lambda device: [  # in half precision as `attention_of` has it
        (
            *_rows(device),
            _tree(device, 5)[5],
            *(_count(device, slots) for slots in (60, 4, 5)),  # prefix, live, seen
            SIZE**-0.5,
        )
    ],
    "lanes_attention": lambda device: [
        (
            _rows(device)[0][:, :4],
            _slabs([_wave(device, 2, HEADS // 2, slots, SIZE) for slots in (64, 32)]),
            _tree(device, 5)[5][:4].view(2, 2, 1),
            *(_whole(device, *numbers).int() for numbers in ((50, 7), (1, 2), (2, 3))),
            SIZE**-0.5,
        )
    ],
    "choose_tokens": _choose_tokens,
    "compact_kv": lambda device: [
        (
            _wave(device, 2, 2, 2, 20, 8),
            _whole(device, 0, 2, 5, 6),
            _count(device, live),
            _count(device, 9),
        )
        for live in (4, 2)
    ],
    "strict_cached_attention": lambda device: strict_attention_of(SMALL, device),
    "tree_attention": lambda device: [
        (
            *_rows(device),
            torch.ones(ROWS, SLOTS, dtype=torch.bool, device=device).tril(SLOTS - ROWS),
            60,
        )
    ],
    "packed_linear": _packed_linear,
    "tree_convolution": lambda device: [
        (
            _wave(device, ROWS + 3, COLUMNS).to(dtype),
            _wave(device, COLUMNS, 4).to(dtype),
            None,
            lineage_of(_tree(device, 5)[5], 4).sources,
            True,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ],
    "tree_recurrence": _tree_recurrence,
    "advance_states": lambda device: [
        (
            _wave(device, 2, HEADS, SIZE, SIZE),
            Steps(
                _wave(device, 2, ROWS, HEADS).sigmoid(),
                _wave(device, 2, ROWS, 2, SIZE) / SIZE,
                _wave(device, 2, ROWS, HEADS, SIZE),
            ),
            _whole(device, 0, 1, 3, 0, 0),
            _count(device, 3),
        )
    ],
}


def needed(name: str, run: Implementations) -> tuple[str, ...]:
    """Return the ops to try before this one is taken, of which the last is called; none where `run` has none.

    They are the op itself, PACKED for both of these, and for ops that cannot change an answer the first of `run`'s
    that can.
    """
    return (
        PACKED
        if name in PACKED
        else (name,)
        if name in INPUTS
        else tuple(other for other in INPUTS if other in run)[:1]
    )

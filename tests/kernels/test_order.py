"""Kernels that count by atomic additions: one result, whatever order programs run in and whatever the scratch holds."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import candidate_selection, entropy, top_children

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
CALLS = 3 if INTERPRETED else 30
ORDERS = ("reversed", 1)  # a number is a seed


def normal(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)


def poison(tensors: Any) -> None:
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 123456789)


def reorder(patch: pytest.MonkeyPatch, order: str | int) -> None:
    """Have the interpreter run the programs of each launch in another order."""
    builder = sys.modules[type(top_children._pick).__module__].interpreter_builder

    def set_grid_idx(*place: int) -> None:
        shape, index = builder.grid_dim, 0
        for size, at in zip(shape, place, strict=True):
            index = index * size + at
        if order == "reversed":
            index = math.prod(shape) - 1 - index
        else:
            index = int(
                torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(order))[
                    index
                ]
            )
        builder.grid_idx = (
            index // (shape[1] * shape[2]),
            index // shape[2] % shape[1],
            index % shape[2],
        )

    patch.setattr(builder, "set_grid_idx", set_grid_idx, raising=False)


@pytest.mark.sliced(1)
@pytest.mark.skipif(not INTERPRETED, reason="a device has an order of its own")
@pytest.mark.parametrize("name", ["children", "selection", "entropy"])
def test_programs_in_any_order_on_used_scratch(name: str) -> None:
    # of equals, the first: across tiles too
    logits, parents = normal(3, 3000).round(), torch.zeros(3)
    logits[1, 7:2500] = 9.0
    kernel: Any = {"children": top_children, "selection": candidate_selection, "entropy": entropy}[
        name
    ]
    workspace = kernel.workspace_for(logits, 40)

    def call(given: Tensor) -> tuple[Tensor, ...]:
        if name == "entropy":
            return (entropy.top_entropy(given, 40, workspace=workspace),)
        if name == "children":
            return top_children.top_children(given, 40, workspace=workspace)
        return candidate_selection.select_candidates(given, parents, 40, workspace=workspace)

    poison(workspace)
    first = call(logits)
    for order in ORDERS:
        for fill in (lambda: call(normal(3, 3000, seed=4)), lambda: poison(workspace)):
            fill()
            with pytest.MonkeyPatch.context() as patch:
                reorder(patch, order)
                again = call(logits)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    if name == "children":
        assert torch.equal(first[1], top_children.reference(logits, 40)[1])


def order_of(values: Tensor) -> Tensor:
    """Return integers in the order of the values, which have no zero."""
    bits = values.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [
        (3, 5003, 10),
        (3, 5003, 70),
        *(
            pytest.param(*case, marks=pytest.mark.gpu)
            for case in ((64, 32000, 256), (10, 128256, 10))
        ),
    ],
)
def test_arrays_between_the_launches_of_top_children(rows: int, columns: int, k: int) -> None:
    """Compare what each launch leaves to the next with torch and with the call before. The message names the array."""
    logits = normal(rows, columns)
    tile, tiles = top_children.cut_for(rows, columns)
    parts = top_children._parts(rows, tile, tiles)
    groups, workspace = parts[0] // (rows * tiles), top_children.workspace_for(logits, k)
    whole = torch.full((rows, tiles * tile), -math.inf, device=DEVICE)
    whole[:, :columns] = logits
    tops = whole.view(rows, tiles * groups, -1).amax(2)
    kept = order_of(whole) >> 16 >= (order_of(tops) >> 16).topk(k, 1).values[:, -1:]
    keys = (order_of(whole).long() << 32) | (
        0xFFFFFFFF - torch.arange(whole.shape[1], device=DEVICE)
    )
    assert kept.view(rows, tiles, tile).sum(2).max() <= k  # no tile is cut
    before: dict[str, Tensor] = {}
    for _ in range(CALLS):
        out = (
            torch.empty(rows, k, device=DEVICE),
            torch.empty(rows, k, dtype=torch.int64, device=DEVICE),
        )
        poison((*workspace, *out))
        top_children.top_children(logits, k, out=out, workspace=workspace)
        group_peak, tile_peak, tile_sum = (
            part[:size]
            for part, size in zip(
                workspace.floats.split(parts),
                (tops.numel(), rows * tiles, rows * tiles),
                strict=True,
            )
        )
        lists = [
            row[:found]
            for row, found in zip(
                workspace.keys.view(rows, -1), workspace.counts.tolist(), strict=True
            )
        ]
        found = {
            "group_peak": group_peak,
            "tile_peak": tile_peak,
            "tile_sum": tile_sum,
            "counts": workspace.counts.clone(),
            "keys": torch.cat([row.sort().values for row in lists]),  # they come in any order
            "columns": out[1],
            "log_probs": out[0],
        }
        wanted = {
            "group_peak": tops.flatten(),
            "tile_peak": whole.view(rows * tiles, tile).amax(1),
            "counts": kept.sum(1).int(),
            "keys": torch.cat(
                [row[some].sort().values for row, some in zip(keys, kept, strict=True)]
            ),
            "columns": top_children.reference(logits, k)[1],
        }
        for held, against in ((wanted, "torch"), (before, "the call before")):
            for name, values in held.items():
                assert torch.equal(found[name], values), f"{name} differs from {against}"
        before = {name: values.clone() for name, values in found.items()}

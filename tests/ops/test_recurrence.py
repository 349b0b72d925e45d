"""Recurrent layers over trees: each row against its path alone, in float64; states that are folded have its bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from specengine import ops
from specengine.errors import InputError
from specengine.ops import Lineage, Steps
from tests.toy import random_tree

SIZES = [(1, 1, 1, 1, 1), (5, 2, 6, 16, 12), (13, 1, 1, 7, 33), (70, 1, 2, 24, 5)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def chain(rows: int, taps: int) -> Lineage:
    places = torch.arange(taps - 1 + rows).unfold(0, taps, 1).contiguous()
    return Lineage(None, None, places)


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def rows_of(rows: int, shared: int, heads: int, keys: int, values: int) -> tuple:
    key = torch.nn.functional.normalize(normal(rows, shared, keys, seed=1), dim=-1)
    return (
        (normal(rows, shared, keys), key, normal(rows, heads, values)),
        (normal(rows, heads).sigmoid(), normal(rows, heads, seed=3).sigmoid()),
        normal(heads, keys, values, seed=4),
    )


def steps_of(rows: int, shared: int, heads: int, keys: int, values: int) -> Steps:
    nan = torch.full((rows + 2, heads), torch.nan)
    return Steps(
        nan,
        nan.new_full((rows + 2, shared, keys), torch.nan),
        nan.new_full((rows + 2, heads, values), torch.nan),
    )


def alone(heads: tuple, scalars: tuple, state: Tensor, path: list[int], *, delta: bool) -> Tensor:
    """What the last row of a path gives, head by head and token by token, float64."""
    query, key, value = (part.double() for part in heads)
    decays, rates = (part.double() for part in scalars)
    outs = []
    for head in range(value.shape[1]):
        shared = head * key.shape[1] // value.shape[1]
        matrix = state[head].double().clone()
        for row in path:
            matrix *= decays[row, head]
            known = key[row, shared] @ matrix if delta else 0.0
            matrix += torch.outer(key[row, shared], (value[row, head] - known) * rates[row, head])
        outs.append(query[path[-1], shared] @ matrix)
    return torch.stack(outs)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_gives_what_its_path_gives_alone(sizes: tuple[int, ...], delta: bool) -> None:
    tree = random_tree(sizes[0], sizes[0], 90)
    parents = tree.parents.tolist()
    lineage = ops.lineage_of(tree.ancestors, 4)
    assert lineage.parents is not None
    assert lineage.parents.tolist() == parents
    heads, scalars, state = rows_of(*sizes)
    before, steps = state.clone(), steps_of(*sizes)
    outs = ops.tree_recurrence(heads, scalars, state, lineage, steps, delta)
    assert torch.equal(state, before)
    for row, path in enumerate(paths_of(parents)):
        expected = alone(heads, scalars, state, path, delta=delta)
        torch.testing.assert_close(outs[row].double(), expected, atol=1e-5, rtol=1e-5)
        if row % 9 not in (0, 4):
            continue
        picked = [tuple(part[path].contiguous() for part in group) for group in (heads, scalars)]
        own = state.clone()
        in_text = ops.tree_recurrence(*picked, own, chain(len(path), 4), steps, delta)
        assert torch.equal(in_text[-1], outs[row])
        states, rows = state[None].clone(), torch.zeros(len(steps.decays), dtype=torch.int64)
        rows[: len(path)] = torch.tensor(path)
        of_layers = Steps(*(part[None] for part in steps))
        for count in (len(path), 0):
            ops.advance_states(states, of_layers, rows, torch.tensor([count], dtype=torch.int32))
            assert torch.equal(states[0], own)


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("activate", [True, False])
def test_a_convolution_reads_a_rows_path_and_the_text(taps: int, activate: bool) -> None:
    rows, channels = 14, 300
    tree = random_tree(taps, rows, 90)
    inputs, tail = normal(rows, channels), normal(taps - 1, channels, seed=1)
    weight, bias = normal(channels, taps, seed=2), normal(channels, seed=3)
    lineage = ops.lineage_of(tree.ancestors, taps)
    for added in (None, bias):
        whole = torch.cat([tail, inputs])
        found = ops.tree_convolution(whole, weight, added, lineage.sources, activate)
        for row, path in enumerate(paths_of(tree.parents.tolist())):
            text = torch.cat([tail, inputs[path]]).double()[-taps:].t()
            expected = conv1d(text, weight.double()[:, None], groups=channels)[:, 0]
            expected = expected if added is None else expected + added.double()
            expected = silu(expected) if activate else expected
            torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)
            if row % 9 == 8:
                own = torch.cat([tail, inputs[path]])
                sources = chain(len(path), taps).sources
                in_text = ops.tree_convolution(own, weight, added, sources, activate)[-1]
                torch.testing.assert_close(in_text, found[row], atol=1e-6, rtol=1e-6)


def test_rows_that_are_no_heads_of_one_layer_are_refused() -> None:
    heads, scalars, state = rows_of(3, 1, 2, 4, 5)
    steps = steps_of(3, 1, 2, 4, 5)
    with pytest.raises(InputError, match="state"):
        ops.tree_recurrence(heads, scalars, state[:1], chain(3, 2), steps, True)
    with pytest.raises(InputError, match="sources"):
        ops.tree_convolution(normal(5, 4), normal(4, 5), None, chain(3, 3).sources, True)

"""The recurrence's kernels against their references on random trees; tests/ops/test_recurrence.py has paths alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import recurrence

from specengine import ops
from tests.kernels import all_kernels
from tests.kernels.test_provider import DEVICE
from tests.ops.backends import choose
from tests.toy import random_tree

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize("seed", range(6))
def test_states_of_random_trees(seed: int) -> None:
    all_kernels.states(seed, DEVICE)


@pytest.mark.parametrize("seed", range(6))
def test_convolutions_of_random_trees(seed: int) -> None:
    all_kernels.convolutions(seed, DEVICE)


def test_the_ops_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernels' place as in the meanings', strided rows and a state of wide heads included."""
    choose(monkeypatch, "triton")
    tree = random_tree(3, 9, 90)
    for keys in (8, 300):
        lineage = ops.Lineage(*(part.to(DEVICE) for part in ops.lineage_of(tree.ancestors, 3)))
        wide = torch.randn(9, 60, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        inputs, weight = torch.cat([wide[:2], wide])[:, :40], wide[:3, 20:].t()
        given = inputs, weight, None, lineage.sources, True
        torch.testing.assert_close(
            ops.tree_convolution(*given), ops.by_meaning(ops.tree_convolution, *given)
        )
        outs = []
        for run in (lambda function, *given: function(*given), ops.by_meaning):
            key = torch.ones(9, 2, keys, device=DEVICE) / keys
            heads = key, key, wide[:, :20].view(9, 4, 5)
            state = torch.ones(4, keys, 5, device=DEVICE)
            steps = ops.Steps(
                key.new_zeros(9, 4), key.new_zeros(9, 2, keys), key.new_zeros(9, 4, 5)
            )
            scalars = wide[:, :4].sigmoid(), wide[:, 4:8]
            out = run(ops.tree_recurrence, heads, scalars, state, lineage, steps, True)
            states, path = state[None].clone(), torch.arange(9, device=DEVICE)
            layers = ops.Steps(*(part[None] for part in steps))
            run(ops.advance_states, states, layers, path, all_kernels.number(3, DEVICE))
            outs.append((out, *steps, states))
        for found, expected in zip(*outs, strict=True):
            torch.testing.assert_close(found, expected)


def test_other_shapes_are_refused() -> None:
    key = torch.ones(3, 2, 4, device=DEVICE)
    value, scalars = torch.ones(3, 4, 5, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="H a multiple of Hk"):
        recurrence.tree_recurrence(key, key, value, scalars, scalars, key, None, delta=True)
    state = torch.ones(4, 5, 4, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        recurrence.tree_recurrence(key, key, value, scalars, scalars, state, None, delta=True)
    rows = torch.ones(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="weight"):
        recurrence.tree_convolution(rows, rows, None, rows[:, :2].long(), silu=True)

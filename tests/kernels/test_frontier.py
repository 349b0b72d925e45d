"""append_nodes against the op that it serves, gather_rows against indexing, both on poisoned memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import frontier as kernel

from specengine import ops

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poisoned_tree(capacity: int, root: int = 5) -> kernel.Tree:
    """A root alone; everything behind it is garbage."""
    whole = [torch.full((capacity,), -77, device=DEVICE) for _ in range(3)]
    real = [torch.full((capacity,), math.nan, device=DEVICE) for _ in range(2)]
    words = torch.full((capacity, -(-capacity // 64)), -1, device=DEVICE)
    tree = kernel.Tree(*whole, *real, words, torch.ones(1, dtype=torch.int32, device=DEVICE))
    tree.tokens[0], tree.parents[0], tree.depths[0] = root, -1, 0
    tree.log_probs[0] = tree.path_log_probs[0] = 0.0
    words[0] = 0
    words[0, 0] = 1
    return tree


def number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def clone(tree: kernel.Tree) -> kernel.Tree:
    return kernel.Tree(*(tensor.cpu().clone() for tensor in tree))


def same(found: kernel.Tree, wanted: kernel.Tree) -> None:
    for name, one, other in zip(kernel.Tree._fields, found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True, msg=name)


@examples(25)
@given(
    capacity=st.one_of(st.integers(2, 140), st.sampled_from([64, 65, 128, 129])),
    layers=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_a_tree_grown_by_the_kernel_is_one_grown_by_the_op(
    capacity: int, layers: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    tree = poisoned_tree(capacity)
    wanted, refused, overflow = clone(tree), number(0), torch.zeros(1, dtype=torch.int32)
    for _ in range(layers):
        most = int(random.integers(1, 40))
        count = int(random.integers(0, most + 1))
        parents = torch.from_numpy(random.integers(0, int(wanted.size), most))
        tokens = torch.from_numpy(random.integers(0, 10**6, most))
        edges = -torch.from_numpy(random.random(most)).float()
        # what is not there is not read
        parents[count:], tokens[count:], edges[count:] = 2**40, 2**40, math.nan
        meant, listed, _ = kernel.reference(wanted, parents, tokens, edges, count)
        given = parents, tokens, edges, torch.tensor([count], dtype=torch.int32)
        expected = ops.by_meaning(ops.append_nodes, wanted[:6], wanted.size, *given, overflow)
        ids = torch.full((most,), -77, device=DEVICE)
        kernel.append_nodes(tree, *(part.to(DEVICE) for part in given), ids, refused)
        assert ids.tolist() == expected.tolist() == listed
        assert int(refused) == int(overflow)
        same(tree, wanted)
        same(tree, meant)


def test_what_does_not_fit_is_refused_whole() -> None:
    tree, refused = poisoned_tree(4), number(0)
    before = clone(tree)
    zeros, edges = torch.zeros(4, dtype=torch.int64, device=DEVICE), -torch.ones(4, device=DEVICE)
    ids = torch.full_like(zeros, -77)
    kernel.append_nodes(tree, zeros, zeros, edges, number(4), ids, refused)
    assert (int(refused), ids.tolist()) == (1, [0, 0, 0, 0])
    same(tree, before)
    kernel.append_nodes(tree, zeros, zeros, edges, number(3), ids, refused)
    assert (int(tree.size), ids.tolist()) == (4, [1, 2, 3, 0])
    assert int(refused), "it stays"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [16, 80, 1030])
def test_gathered_rows_are_those_asked_for(channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    states, table = (
        torch.randn(n, channels, generator=generator).to(dtype).to(DEVICE) for n in (6, 9)
    )
    sources, tokens = (
        torch.tensor([4, 0, 2, 0], device=DEVICE),
        torch.tensor([8, 0, 3, 3], device=DEVICE),
    )
    states[1], table[1] = math.nan, math.nan  # nobody asks for these
    out = torch.full((2, 4, channels), math.nan, dtype=dtype, device=DEVICE)
    kernel.gather_rows(states, sources, table, tokens, out[0], out[1])
    assert torch.equal(out[0], states[sources])
    assert torch.equal(out[1], table[tokens])


def test_wrong_arguments_are_refused() -> None:
    tree, refused = poisoned_tree(4), number(0)
    ids, edges = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, device=DEVICE)
    with pytest.raises(ValueError, match="parents, tokens, log_probs, ids"):
        kernel.append_nodes(tree, ids[:1], ids, edges, number(1), ids, refused)
    with pytest.raises(ValueError, match="log_probs: float32"):
        kernel.append_nodes(tree, ids, ids, edges.double(), number(1), ids, refused)
    with pytest.raises(ValueError, match="int32"):
        kernel.append_nodes(tree, ids, ids, edges, ids[:1], ids, refused)
    narrow = poisoned_tree(70)._replace(ancestors=tree.ancestors[:, :0])
    with pytest.raises(ValueError, match=r"tree\.ancestors"):
        kernel.append_nodes(narrow, ids, ids, edges, number(1), ids, refused)
    out = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="dtypes"):
        kernel.gather_rows(out.double(), ids, out, ids, out, out)
    with pytest.raises(ValueError, match="dense"):
        kernel.gather_rows(torch.zeros(8, 4, device=DEVICE).t(), ids, out, ids, out, out)
    with pytest.raises(ValueError, match="sources, tokens"):
        kernel.gather_rows(out, ids.int(), out, ids, out, out)

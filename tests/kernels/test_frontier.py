"""append_nodes and level_rows against the ops that they serve, gather_rows against indexing, on poisoned memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
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


@examples(25)
@given(
    capacity=st.sampled_from([2, 9, 64, 65, 129, 200]),
    width=st.integers(1, 12),
    dead=st.integers(0, 12),
    seed=st.integers(0, 10**6),
)
def test_rows_of_a_level_are_those_of_the_op(
    capacity: int, width: int, dead: int, seed: int
) -> None:
    """Garbage stands behind the tree and in the padding of the nodes."""
    random = np.random.default_rng(seed)
    size = int(random.integers(1, capacity + 1))
    tree = poisoned_tree(capacity)
    for node in range(1, size):
        tree.tokens[node], tree.parents[node] = 100 + node, int(random.integers(node))
        tree.depths[node] = tree.depths[tree.parents[node]] + 1
    tree.size[0] = size
    live = min(max(width - dead, 0), size)
    nodes = torch.full((width,), -(2**40), device=DEVICE)
    nodes[:live] = torch.from_numpy(random.permutation(size)[:live]).to(DEVICE)
    filled, used = int(random.integers(99)), int(random.integers(capacity))
    seen = torch.from_numpy(random.integers(2**62, size=(capacity + 1, -(-capacity // 64))))
    factors = None if seed % 2 else torch.linspace(1.0, 0.5, 1 + seed % 5, device=DEVICE)
    words = torch.full((width, seen.shape[1]), -77, device=DEVICE)
    lists = torch.full((4, width), -77, device=DEVICE)
    scales = None if factors is None else torch.full((width, 1), math.nan, device=DEVICE)
    slot, after = torch.full((1,), -77, device=DEVICE), seen.clone().to(DEVICE)
    rows = kernel.Rows(lists[0], lists[1], words, slot, lists[2], lists[3], scales)
    counts = number(live), number(filled), number(used), number(3)
    kernel.level_rows(tree, nodes, *counts, after, factors, rows=rows)
    assert [int(count) for count in counts] == [live, filled, used + live, 3 + (live > 0)]
    meant, meant_after = kernel.reference_rows(
        clone(tree), nodes[:live].tolist(), width, filled, used, seen
    )
    for name, one, other in zip(kernel.Rows._fields[:6], rows, meant, strict=False):
        assert torch.equal(one.cpu(), other), name
    assert torch.equal(after[:-1].cpu(), meant_after[:-1])
    given = [part.cpu().clone() for part in (nodes, number(live), number(filled), number(used))]
    expected_after, passes = seen.clone(), number(3).cpu()
    expected = ops.by_meaning(
        ops.level_rows,
        tuple(clone(tree)[:6]),
        tree.size.cpu(),
        ops.Nodes(*given[:2]),
        *given[2:],
        expected_after,
        None if factors is None else factors.cpu(),
        passes,
    )
    for name, one in zip(kernel.Rows._fields[:6], rows, strict=False):
        assert torch.equal(one.cpu(), getattr(expected, name)), name
    assert torch.equal(expected_after[:-1], meant_after[:-1])
    assert (int(given[3]), int(passes)) == (used + live, 3 + (live > 0))
    assert factors is None or torch.equal(scales.cpu(), expected.factors)


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
    words, one = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), ids[:1]
    for changes, named in (
        ({"nodes": ids.int()}, "dense int64"),
        ({"seen": words.int()}, "seen: contiguous int64"),
        ({"filled": one}, "int32"),
    ):
        known = {"live": number(1), "filled": number(1), "used": number(0), "passes": number(0)}
        known |= {"nodes": ids, "seen": words, "factors": None} | changes
        with pytest.raises(ValueError, match=named):
            kernel.level_rows(tree, **known)

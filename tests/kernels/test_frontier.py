"""append_nodes against TokenTree.add, gather_rows against indexing, both on poisoned memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install 'specengine[kernels]'")
from specengine_kernels import candidate_selection
from specengine_kernels import frontier as kernel

from specengine import ops
from specengine.tree import TokenTree

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


def poisoned_frontier(width: int) -> kernel.Frontier:
    room = kernel.frontier_for(width, DEVICE)
    for tensor in room:
        tensor.fill_(math.nan if tensor.is_floating_point() else -77)
    return room


def same(found: kernel.Tree, wanted: TokenTree) -> None:
    size = int(found.size)
    assert size == wanted.size
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(found, name)[:size].cpu(), getattr(wanted, name)), name
        assert (getattr(found, name)[size:] == (-1 if name == "ancestors" else -77)).all(), name
    for name in ("log_probs", "path_log_probs"):
        assert torch.equal(getattr(found, name)[:size].cpu(), getattr(wanted, name)), name
        assert getattr(found, name)[size:].isnan().all(), name


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.one_of(st.integers(2, 140), st.sampled_from([64, 65, 128, 129])),
    layers=st.integers(1, 6),
    width=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    some=st.booleans(),
)
def test_a_tree_grown_by_the_kernel_is_one_grown_by_add(
    capacity: int, layers: int, width: int, seed: int, some: bool
) -> None:
    random = np.random.default_rng(seed)
    tree, wanted = poisoned_tree(capacity), TokenTree.root(5, capacity)
    refused = number(0)
    for _ in range(layers):
        most = int(random.integers(1, 40))
        count = int(random.integers(0, min(most, capacity - wanted.size) + 1))
        parents = torch.from_numpy(random.integers(0, wanted.size, most))
        tokens = torch.from_numpy(random.integers(0, 10**6, most))
        edges = -torch.from_numpy(random.random(most)).float()
        parents[count:], tokens[count:], edges[count:] = 2**40, 2**40, math.nan  # what is not there is not read
        chosen = sorted(random.permutation(count)[: int(random.integers(0, count + 1))].tolist()) if some else None
        start = wanted.size
        nodes = wanted.add(parents[:count], tokens[:count], edges[:count])
        frontier = poisoned_frontier(width)
        options = {}
        if chosen is not None:
            options = {
                "expand": torch.tensor([*chosen, *[2**40] * width], device=DEVICE)[: max(width, len(chosen))],
                "expanded": number(len(chosen)),
            }
        before = kernel.Tree(*(tensor.cpu() for tensor in tree))
        meant, meant_frontier, _ = kernel.reference(before, parents, tokens, edges, count, chosen, width)
        kernel.append_nodes(
            tree, *(given.to(DEVICE) for given in (parents, tokens, edges)), number(count), frontier, refused, **options
        )
        for found, means in zip((*tree, *frontier), (*meant, *meant_frontier), strict=True):
            torch.testing.assert_close(found.cpu(), means, rtol=0, atol=0, equal_nan=True)
        same(tree, wanted)
        expected = [start + i for i in (range(count) if chosen is None else chosen)][:width]
        kept = len(expected)
        assert nodes.shape[0] == count
        assert int(frontier.count) == kept
        assert frontier.nodes.tolist() == expected + [0] * (width - kept)
        assert frontier.depths.tolist() == wanted.depths[expected].tolist() + [0] * (width - kept)
        assert frontier.scores.tolist() == wanted.path_log_probs[expected].tolist() + [-math.inf] * (width - kept)
    assert not int(refused)


def test_what_does_not_fit_is_refused_whole() -> None:
    tree, refused = poisoned_tree(4), number(0)
    zeros, edges = torch.zeros(4, dtype=torch.int64, device=DEVICE), -torch.ones(4, device=DEVICE)
    frontier = poisoned_frontier(3)
    kernel.append_nodes(tree, zeros, zeros, edges, number(4), frontier, refused)
    assert (int(refused), int(tree.size), int(frontier.count)) == (1, 1, 0)
    same(tree, TokenTree.root(5, 4))
    kernel.append_nodes(tree, zeros, zeros, edges, number(3), frontier, refused)
    assert (int(tree.size), int(frontier.count)) == (4, 3)


def test_the_selections_rows_and_columns_go_straight_in() -> None:
    """candidate_selection -> append_nodes, without the host: what Step.best_of_layer and TokenTree.add make."""
    random = torch.Generator().manual_seed(3)
    tree, wanted = poisoned_tree(40), TokenTree.root(5, 40)
    ids = torch.randperm(900, generator=random)[:300]
    frontier, refused = poisoned_frontier(8), number(0)
    frontier.nodes.zero_()
    frontier.scores.fill_(-math.inf)
    frontier.scores[0] = 0.0  # the root alone
    nodes = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        logits = torch.randn(8, 300, generator=random) * 4
        found = ops.best_candidates(logits[: len(nodes)], wanted.path_log_probs[nodes], 6, log_gate=math.log(0.05))
        selection = candidate_selection.select_candidates(
            logits.to(DEVICE), frontier.scores, 6, log_gate=math.log(0.05)
        )
        rows_of = frontier.nodes.clone()
        given = selection.rows, selection.tokens, selection.log_probs, selection.count
        kernel.append_nodes(tree, *given, frontier, refused, rows_of=rows_of, target_ids=ids.to(DEVICE))
        nodes = wanted.add(nodes[found.rows], ids[found.columns], selection.log_probs[: len(found.rows)].cpu())
        same(tree, wanted)
        assert frontier.nodes[: int(frontier.count)].tolist() == nodes.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [16, 80, 1030])
def test_gathered_rows_are_those_asked_for(channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    states, table = (torch.randn(n, channels, generator=generator).to(dtype).to(DEVICE) for n in (6, 9))
    sources, tokens = torch.tensor([4, 0, 2, 0], device=DEVICE), torch.tensor([8, 0, 3, 3], device=DEVICE)
    states[1], table[1] = math.nan, math.nan  # nobody asks for these
    out = torch.full((2, 4, channels), math.nan, dtype=dtype, device=DEVICE)
    kernel.gather_rows(states, sources, table, tokens, out[0], out[1])
    assert torch.equal(out[0], states[sources])
    assert torch.equal(out[1], table[tokens])


def test_wrong_arguments_are_refused() -> None:
    tree, refused, frontier = poisoned_tree(4), number(0), poisoned_frontier(3)
    ids, edges = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, device=DEVICE)
    with pytest.raises(ValueError, match="parents, tokens, log_probs"):
        kernel.append_nodes(tree, ids[:1], ids, edges, number(1), frontier, refused)
    with pytest.raises(ValueError, match="int64, int64, float32"):
        kernel.append_nodes(tree, ids, ids, edges.double(), number(1), frontier, refused)
    with pytest.raises(ValueError, match="expand, expanded"):
        kernel.append_nodes(tree, ids, ids, edges, number(1), frontier, refused, expand=ids, expanded=number(1))
    with pytest.raises(ValueError, match="int32"):
        kernel.append_nodes(tree, ids, ids, edges, ids[:1], frontier, refused)
    with pytest.raises(ValueError, match=r"tree\.ancestors"):
        kernel.append_nodes(
            poisoned_tree(70)._replace(ancestors=tree.ancestors[:, :0]), ids, ids, edges, number(1), frontier, refused
        )
    out = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="dtypes"):
        kernel.gather_rows(out.double(), ids, out, ids, out, out)
    with pytest.raises(ValueError, match="dense"):
        kernel.gather_rows(torch.zeros(8, 4, device=DEVICE).t(), ids, out, ids, out, out)
    with pytest.raises(ValueError, match="sources, tokens"):
        kernel.gather_rows(out, ids.int(), out, ids, out, out)

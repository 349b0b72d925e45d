"""strict_attention: a row is computed as it would be alone, whatever stands beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine import ops
from specengine.errors import InputError
from tests import toy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
attentions = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "shape": st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from([4, 20, 64, 96])),
        "rows": st.integers(1, 9),
        "prefix": st.sampled_from([0, 1, 5, 63, 64, 65, 130]),
        "dtype": st.sampled_from(DTYPES),
    }
)


def inputs(seed: int, shape: tuple[int, int, int], rows: int, prefix: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads, groups, size = shape
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(heads * groups, rows, size, generator=draw).to(dtype)
    keys, values = torch.randn(2, heads, prefix + rows, size, generator=draw).to(dtype)
    mask = torch.rand(rows, prefix + rows, generator=draw) > 0.5
    mask[:, :prefix] = True
    return query, keys, values, mask


@pytest.mark.usefixtures("backend")
@settings(deadline=None, max_examples=150)
@given(case=attentions)
def test_a_row_is_what_it_would_be_alone(case: dict) -> None:
    query, keys, values, mask = inputs(**case)
    out = ops.strict_attention(query, keys, values, mask, 0.3)
    for row in range(query.shape[1]):
        seen = mask[row]
        alone = ops.strict_attention(query[:, row : row + 1], keys[:, seen], values[:, seen], None, 0.3)
        assert torch.equal(out[:, row : row + 1], alone)


@settings(deadline=None, max_examples=200)
@given(case=attentions)
def test_it_is_attention(case: dict) -> None:
    query, keys, values, mask = inputs(**case)
    heads = keys.shape[0]
    scores = torch.einsum("hgnd,hld->hgnl", query.double().view(heads, -1, *query.shape[1:]), keys.double()) * 0.3
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("hgnl,hld->hgnd", weights, values.double()).reshape(query.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[query.dtype]
    for found in (
        ops.strict_attention(query, keys, values, mask, 0.3),
        ops.by_meaning(ops.strict_attention, query, keys, values, mask, 0.3),
    ):
        assert found.dtype is query.dtype
        assert float((found.double() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def test_what_a_row_does_not_see_cannot_reach_it(backend: str) -> None:
    query, keys, values, mask = inputs(1, (2, 2, 64), 3, 70, torch.float32)
    clean = ops.strict_attention(query, keys, values, mask, 0.1)
    hidden = ~mask.any(0)
    hidden[71] = True
    mask[:, 71] = False
    clean = ops.strict_attention(query, keys, values, mask, 0.1)
    keys[:, hidden], values[:, hidden] = float("nan"), float("inf")
    assert torch.equal(ops.strict_attention(query, keys, values, mask, 0.1), clean)


def test_a_row_that_sees_nothing_gives_zero(backend: str) -> None:
    query, keys, values, mask = inputs(1, (1, 2, 8), 2, 0, torch.float32)
    mask[:] = False
    assert not ops.strict_attention(query, keys, values, mask, 0.1).any()


def test_strided_inputs(backend: str) -> None:
    query, keys, values, mask = inputs(4, (3, 1, 20), 5, 9, torch.bfloat16)
    slab = torch.full((3, 40, 20), float("nan"), dtype=torch.bfloat16)
    slab[:, :14] = keys
    turned = values.transpose(1, 2).contiguous().transpose(1, 2)
    found = ops.strict_attention(query.transpose(0, 1).contiguous().transpose(0, 1), slab[:, :14], turned, mask, 0.2)
    assert torch.equal(found, ops.strict_attention(query, keys, values, mask, 0.2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, m: (q, k, v[:, 1:], m), "query"),
        (lambda q, k, v, m: (q, k.double(), v, m), "query"),
        (lambda q, k, v, m: (q, k, v, m.float()), "mask: bool"),
        (lambda q, k, v, m: (q, k, v, m[:, 1:]), "mask: bool"),
    ],
)
def test_wrong_inputs(change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.strict_attention(*change(*inputs(0, (1, 1, 4), 2, 3, torch.float32)), 1.0)


cached = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "shape": st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from([4, 20, 64])),
        "nodes": st.integers(1, 70),
        "prefix": st.sampled_from([0, 1, 5, 63, 64, 65, 130]),
        "padding": st.integers(0, 3),
        "dtype": st.sampled_from(DTYPES),
    }
)


def tree_in_cache(
    seed: int, shape: tuple[int, int, int], nodes: int, prefix: int, padding: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, words, prefix, live; NaN stands in the slots behind the tree."""
    heads, groups, size = shape
    rows, draw = nodes + padding, torch.Generator().manual_seed(seed)
    words = torch.zeros(rows, -(-rows // 64), dtype=torch.int64)
    ancestors = toy.random_tree(seed, nodes, 500).ancestors
    words[:nodes, : ancestors.shape[1]] = ancestors  # padding may need more words than the tree
    query = torch.randn(heads * groups, rows, size, generator=draw).to(dtype)
    keys, values = torch.randn(2, heads, prefix + rows + 70, size, generator=draw).to(dtype)
    keys[:, prefix + nodes :], values[:, prefix + nodes :] = float("nan"), float("nan")
    return query, keys, values, words, *(torch.tensor([n], dtype=torch.int32) for n in (prefix, nodes))


@given(st.integers(0, 10**6), st.integers(1, 200))
def test_paths_are_the_ancestors_in_their_order(seed: int, nodes: int) -> None:
    tree = toy.random_tree(seed, nodes, 500)
    found = ops.order_paths(tree.ancestors)
    for node in range(nodes):
        path = [node]
        while path[-1]:
            path.append(int(tree.parents[path[-1]]))
        assert found.nodes[node, : int(found.counts[node])].tolist() == path[::-1]


@pytest.mark.usefixtures("backend")
@settings(deadline=None, max_examples=60)
@given(case=cached)
def test_a_node_in_a_cache_is_what_its_path_gives_alone(case: dict) -> None:
    """The path committed before it, in a cache of another size: the same bits; and it is attention."""
    query, keys, values, words, prefix, live = tree_in_cache(**case)
    paths, length = ops.order_paths(words), case["prefix"]
    out = ops.strict_cached_attention(query, keys, values, paths, prefix, live, 0.3)
    assert not out[:, case["nodes"] :].any()
    mask = torch.zeros(query.shape[1], keys.shape[1], dtype=torch.bool)
    for row in range(case["nodes"]):
        mask[row, [*range(length), *(length + node for node in paths.nodes[row, : paths.counts[row]].tolist())]] = True
    usual = ops.strict_attention(query, keys.nan_to_num(), values.nan_to_num(), mask, 0.3)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[query.dtype]
    torch.testing.assert_close(out, usual, rtol=tolerance, atol=tolerance)
    for row in {0, case["nodes"] // 2, case["nodes"] - 1}:
        slots = mask[row].nonzero()[:, 0]
        alone = [torch.full((keys.shape[0], len(slots) + 99, keys.shape[2]), float("nan"), dtype=keys.dtype)] * 2
        alone = [torch.cat([cache[:, slots], rest], 1) for cache, rest in zip((keys, values), alone, strict=True)]
        moved = query.clone()
        moved[:, 0] = query[:, row]
        numbers = (torch.tensor([n], dtype=torch.int32) for n in (len(slots) - 1, 1))
        only = torch.zeros_like(words)
        only[0, 0] = 1
        again = ops.strict_cached_attention(moved, *alone, ops.order_paths(only), *numbers, 0.3)
        assert torch.equal(again[:, 0], out[:, row])


def test_a_cache_is_checked() -> None:
    query, keys, values, words, prefix, live = tree_in_cache(0, (1, 1, 4), 3, 5, 0, torch.float32)
    paths = ops.order_paths(words)
    for wrong, message in (
        ({"key": keys[:, 1:]}, "query"),
        ({"paths": ops.Paths(paths.nodes.long(), paths.counts)}, "paths: int32"),
        ({"paths": ops.Paths(paths.nodes[1:], paths.counts)}, "paths: int32"),
        ({"live": live.long()}, "prefix, live: int32"),
    ):
        given = {"query": query, "key": keys, "value": values, "paths": paths, "prefix": prefix, "live": live}
        with pytest.raises(InputError, match=message):
            ops.strict_cached_attention(**given | wrong, scale=1.0)
    with pytest.raises(InputError, match="words: int64"):
        ops.order_paths(words.int())

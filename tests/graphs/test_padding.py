"""The parts of a padded forward: row buffers, scratch words, sizes, and attention over a whole cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine import ops
from specengine.cuda_graphs import RowBuffer, SlotWords, bucket, buckets, causal_words, room, words_for
from specengine.drafters import scratch_mask
from specengine.errors import InputError
from tests import toy

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_sizes() -> None:
    assert [bucket(n) for n in (1, 2, 8, 9, 16, 60, 61, 64, 65, 1011)] == [1, 8, 8, 16, 16, 64, 64, 64, 128, 1024]
    assert buckets(1) == [1]
    assert buckets(60) == [64, 32, 16, 8, 1]
    assert {bucket(n) for n in range(1, 61)} == set(buckets(60))
    assert [room(n) for n in (1, 1024, 1025, 5000)] == [1024, 1024, 2048, 8192]


def test_a_buffer_holds_what_it_was_filled_with_and_padding() -> None:
    rows = RowBuffer(4, 2, CPU)
    words = torch.tensor([[5, -1], [6, 7]])
    rows.fill([11, 12], torch.tensor([3, 4]), words, slot=9, prefix=8, seen=2, sources=torch.tensor([1, 2]), spare=70)
    assert rows.tokens.tolist() == [11, 12, 0, 0]
    assert rows.positions.tolist() == [3, 4, 0, 0]
    assert rows.sources.tolist() == [1, 2, 70, 70]
    assert rows.targets.tolist() == [70] * 4
    assert rows.words.tolist() == [[5, -1], [6, 7], [0, 0], [0, 0]]
    assert [int(number) for number in (rows.prefix, rows.live, rows.seen, rows.slots)] == [8, 2, 2, 9]
    assert rows.prefix.dtype is rows.live.dtype is rows.seen.dtype is torch.int32
    addresses = [tensor.data_ptr() for tensor in rows.tensors]
    rows.fill([1], torch.tensor([2]), words[:1, :1], slot=1, prefix=1, seen=1)
    assert rows.words.tolist() == [[5, 0], [0, 0], [0, 0], [0, 0]]
    assert rows.tokens.tolist() == [1, 0, 0, 0]
    assert [tensor.data_ptr() for tensor in rows.tensors] == addresses


@pytest.mark.parametrize("rows", [1, 2, 63, 64])
def test_consecutive_tokens_see_those_before(rows: int) -> None:
    seen = ops.tree_mask(causal_words(rows), rows)
    assert torch.equal(seen, torch.ones(rows, rows, dtype=torch.bool).tril())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 150), root=st.booleans())
def test_words_over_slots_are_the_scratch_mask(seed: int, size: int, root: bool) -> None:
    """Nodes drafted from in any order that follows the tree, some never: the padded form of drafters.scratch_mask."""
    tree, random = toy.random_tree(seed, size, 400), np.random.default_rng(seed)
    words = SlotWords()
    words.start(tree.capacity, int(root))
    slots, done = torch.zeros(int(root), dtype=torch.int64), [0]
    while True:
        ready = [n for n in range(1, size) if n not in done and int(tree.parents[n]) in done]
        if not ready or len(done) > 40:
            break
        nodes = torch.tensor(sorted(random.permutation(ready)[: int(random.integers(1, 9))].tolist()))
        given_words = words.add(tree.parents[nodes], nodes)
        slots = torch.cat([slots, nodes])
        assert words.used == len(slots)
        assert torch.equal(ops.tree_mask(given_words, len(slots)), scratch_mask(tree, nodes, slots, 0))
        done += nodes.tolist()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    live=st.integers(0, 70),
    padding=st.integers(0, 9),
    prefix=st.integers(0, 60),
    behind=st.integers(0, 20),
    groups=st.sampled_from([1, 3]),
)
def test_attention_over_a_whole_cache(
    seed: int, live: int, padding: int, prefix: int, behind: int, groups: int
) -> None:
    """As tree_attention over the slots that count, whatever stands in the others, NaN too; padding gives 0."""
    rows = live + padding or 1
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2 * groups, rows, 8, generator=generator)
    key, value = (torch.randn(2, prefix + live + behind, 8, generator=generator) for _ in range(2))
    words = torch.zeros(rows, words_for(rows), dtype=torch.int64)
    mask = torch.ones(live, prefix + live, dtype=torch.bool)
    if live:
        tree = toy.random_tree(seed, live, 300)
        words[:live, : tree.ancestors.shape[1]] = tree.ancestors
        mask[:, prefix:] = ops.tree_mask(tree.ancestors, live)
    garbage = [cache.clone() for cache in (key, value)]
    for cache in garbage:
        cache[:, prefix + live :] = math.nan
    numbers = [torch.tensor([number], dtype=torch.int32) for number in (prefix, live, live)]
    found = ops.cached_attention(query, *garbage, words, *numbers, 0.3)
    assert not found[:, live:].any()
    if live:
        seen = [cache[:, : prefix + live] for cache in (key, value)]
        wanted = ops.tree_attention(query[:, :live], *seen, mask, 0.3)
        torch.testing.assert_close(found[:, :live], wanted, rtol=1e-5, atol=1e-5)


def test_attention_over_a_cache_refuses() -> None:
    query, key, words = torch.zeros(2, 3, 8), torch.zeros(1, 9, 8), torch.zeros(3, 1, dtype=torch.int64)
    number = torch.ones(1, dtype=torch.int32)
    with pytest.raises(InputError, match="query"):
        ops.cached_attention(query, key, key[:, :4], words, number, number, number, 1.0)
    with pytest.raises(InputError, match="words"):
        ops.cached_attention(query, key, key, words[:2], number, number, number, 1.0)
    with pytest.raises(InputError, match="prefix, live, seen"):
        ops.cached_attention(query, key, key, words, number, number.long(), number, 1.0)

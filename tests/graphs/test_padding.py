"""Tests of what rows see: words over a draft's scratch, and attention over a whole cache."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as fused

from bench.short_models import first_layers
from specengine import Engine, ops
from specengine.drafters import RowDraft
from specengine.errors import InputError
from specengine.models.kv_cache import CacheLayout, KVCache, Rows, causal_words, words_for
from specengine.ops import Nodes, PassRows
from tests import toy
from tests.examples import examples
from tests.graphs.engines import as_on_a_device

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 130])
def test_consecutive_tokens_see_those_before(rows: int) -> None:
    seen = ops.tree_mask(causal_words(rows), rows)
    assert torch.equal(seen, torch.ones(rows, rows, dtype=torch.bool).tril())


class Recording(RowDraft):
    """A draft without a model, which keeps the rows that it is to run."""

    name = "recording"

    def __init__(self) -> None:
        super().__init__(KVCache(CacheLayout(((1, 1, 2),), torch.float32), 1))
        self.given: list[tuple[Rows, PassRows]] = []

    def begin(self, prompt: list[int], features: Any = None, hints: Any = None) -> None:
        self.cache.length = len(prompt)
        self.taken.fill_(1)

    def _run(self, rows: Rows, given: PassRows, shared: object = None) -> tuple[Tensor, None]:
        self.given.append((rows, given))
        return torch.zeros(len(rows) if given.one is None else 1, 3), None


@examples(40)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 150), padding=st.integers(0, 5))
def test_rows_see_their_ancestors_wherever_those_stand(seed: int, size: int, padding: int) -> None:
    """Nodes drafted from in any order that follows the tree, some never; as on a host, and padded as on a device."""
    tree, random = toy.random_tree(seed, size, 400), np.random.default_rng(seed)
    eager, padded = Recording(), Recording()
    for draft in (eager, padded):
        draft.reserve(60, size, 5)
        draft.begin([0] * 7)
    eager.root(tree)
    with as_on_a_device():
        padded.root(tree)
    slots: list[int] = []
    while ready := [
        n for n in range(1, size) if n not in slots and int(tree.parents[n]) in (0, *slots)
    ]:
        if len(slots) > 40:
            break
        nodes = sorted(random.permutation(ready)[: int(random.integers(1, 9))].tolist())
        eager.step(tree, toy.nodes_of(nodes))
        wide = Nodes(
            torch.tensor([*nodes, *[size - 1] * padding]),
            torch.tensor([len(nodes)], dtype=torch.int32),
        )
        with as_on_a_device():
            padded.step(tree, wide)
        slots += nodes
        for draft in (eager, padded):
            rows, given = draft.given[-1]
            live = slice(int(rows.live))
            assert (int(rows.prefix), int(rows.slot), int(rows.seen)) == (
                8,
                8 + len(slots) - len(nodes),
                len(slots),
            )
            assert rows.tokens[live].tolist() == tree.tokens[nodes].tolist()
            assert rows.positions[live].tolist() == [
                7 + depth for depth in tree.depths[nodes].tolist()
            ]
            assert given.sources[live].tolist() == tree.parents[nodes].tolist()
            assert given.targets.tolist() == [*nodes, *[size] * (len(given.targets) - len(nodes))]
            mask = ops.tree_mask(tree.ancestors[nodes], size)[:, slots]
            assert torch.equal(ops.tree_mask(rows.words[live], len(slots)), mask)


@examples(40)
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
    """As in float64 over the slots that count, whatever stands in the others, NaN too; padding gives 0."""
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
        seen = [cache[:, : prefix + live].double() for cache in (key, value)]
        exact = fused(query[:, :live].double(), *seen, attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(found[:, :live].double(), exact, rtol=1e-5, atol=1e-5)


def test_attention_over_a_cache_refuses() -> None:
    query, key, words = (
        torch.zeros(2, 3, 8),
        torch.zeros(1, 9, 8),
        torch.zeros(3, 1, dtype=torch.int64),
    )
    number = torch.ones(1, dtype=torch.int32)
    with pytest.raises(InputError, match="query"):
        ops.cached_attention(query, key, key[:, :4], words, number, number, number, 1.0)
    with pytest.raises(InputError, match="words"):
        ops.cached_attention(query, key, key, words[:2], number, number, number, 1.0)
    with pytest.raises(InputError, match="live"):
        ops.cached_attention(query, key, key, words, number, number.long(), number, 1.0)


def test_padded_rows_under_a_dense_mask() -> None:
    """A draft of a model without tree attention pads its first rows on a device; their keys are masked."""
    model = toy.tiny("Gemma2", name="Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=128)
    answers = []
    for place in (contextlib.nullcontext, as_on_a_device):
        with place():
            engine = Engine.from_pretrained(
                model, first_layers(model, 1), toy.policy_for("eagle", 3)
            )
            assert engine.target.lm.attention == "dense mask"
            answers.append(engine.generate([1, 5, 9, 5, 9, 7, 5, 9], max_new_tokens=12).token_ids)
    assert answers[0] == answers[1]

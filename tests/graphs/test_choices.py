"""The sampler's choices for all nodes of a tree at once are those that it makes one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specengine import ops
from specengine.request.sampling import History, RowFilter, Sampler, TopP
from tests import toy
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread")


@examples(40)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 300),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    temperature=st.one_of(st.none(), st.floats(0.05, 3.0)),
    top_k=st.one_of(st.none(), st.integers(1, 400)),
    top_p=st.one_of(st.none(), st.floats(0.05, 0.95)),
    min_p=st.one_of(st.none(), st.floats(0.0, 0.9)),
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    undefined=st.booleans(),
)
def test_all_at_once_and_one_by_one(
    rows: int,
    columns: int,
    seed: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    kind: torch.dtype,
    undefined: bool,
) -> None:
    """No two logits of a row are equal: which of equal ones topk takes is left open."""
    random = torch.Generator().manual_seed(columns)
    logits = torch.stack([torch.randperm(columns, generator=random) for _ in range(rows)])
    logits = ((logits - columns // 2) / 16).to(kind)
    if undefined:
        logits[0] = math.nan
        logits[-1, 0] = math.inf
    made = (
        (temperature, TemperatureLogitsWarper),
        (top_k, TopKLogitsWarper),
        (top_p, TopP),
        (min_p, MinPLogitsWarper),
    )
    sampler = Sampler(
        [] if seed is None else [kind(value) for value, kind in made if value is not None], seed
    )
    positions = [3 * row for row in range(rows)]
    chosen = [
        sampler.choose(logits[row], History([0] * place, place))
        for row, place in enumerate(positions)
    ]
    assert sampler.choose_rows(logits, positions) == [
        -1 if token is None else token for token in chosen
    ]


class OnDevice(Tensor):
    """A CPU tensor that says it is on a device, where one transfer for all nodes is worth it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("seed", [None, 4])
def test_a_tree_on_a_device_is_chosen_for_at_once(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, logits = (
        toy.random_tree(1, 9, 6),
        torch.randn(9, 6, generator=torch.Generator().manual_seed(2)),
    )
    sampler, asked = Sampler([], seed), list[list[int]]()
    whole = Sampler.choose_rows
    monkeypatch.setattr(
        Sampler,
        "choose_rows",
        lambda self, rows, positions: (
            asked.append(list(positions)) or whole(self, logits, positions)
        ),
    )
    choose = sampler.chooser_of_tree(logits.as_subclass(OnDevice), History([0] * 5, 5), tree.depths)
    assert asked == [[] if seed is None else [5 + depth for depth in tree.depths.tolist()]]
    for node, depth in enumerate(tree.depths.tolist()):
        assert choose(node) == Sampler([], seed).choose(
            logits[node], History([0] * (5 + depth), 5 + depth)
        )


def test_only_what_does_not_read_the_history_is_chosen_at_once() -> None:
    temperature = TemperatureLogitsWarper(0.5)
    assert not Sampler().reads_history
    assert not Sampler([temperature], 1).reads_history
    top_k, top_p, min_p = TopKLogitsWarper(3), TopP(0.5), MinPLogitsWarper(0.1)
    assert Sampler([temperature, top_k, top_p, min_p], 1).row_filter == RowFilter(0.5, 3, 0.5, 0.1)
    assert Sampler([min_p], 1).row_filter == RowFilter(min_p=0.1)
    for processors in (
        [RepetitionPenaltyLogitsProcessor(1.2)],
        [temperature, temperature],
        [top_k, temperature],
        [min_p, top_p],
        [TopPLogitsWarper(0.5)],  # sorts equal ones in another order
        [MinPLogitsWarper(0.1, min_tokens_to_keep=2)],
        [TopKLogitsWarper(3, filter_value=0.0)],
    ):
        assert Sampler(processors, 1).reads_history


def kept(row: list[float], **options: float) -> list[int]:
    given = RowFilter(**options)  # type: ignore[arg-type]
    shares = torch.tensor([given.temperature, given.top_p, given.min_p]).split(1)
    truncation = ops.Truncation(torch.tensor([given.top_k]), *shares[1:])
    return (
        ops.truncate(torch.tensor([row]), shares[0], truncation)[0]
        .isfinite()
        .nonzero()[:, 0]
        .tolist()
    )


def test_truncations_by_hand() -> None:
    """Of equal columns top-k keeps all, top-p the first; the likeliest always stays."""
    row = [math.log(chance) for chance in (0.1, 0.4, 0.1, 0.2, 0.1, 0.1)]
    assert kept(row) == [0, 1, 2, 3, 4, 5]
    assert kept(row, top_k=2) == [1, 3]
    assert kept(row, top_k=3) == [0, 1, 2, 3, 4, 5]
    assert (
        kept(row, top_p=0.39)
        == kept(row, top_p=1e-6)
        == kept(row, top_p=0.0)
        == kept(row, min_p=1.0)
        == [1]
    )
    assert kept(row, top_p=0.65) == [0, 1, 3]
    assert kept(row, top_p=0.75) == [0, 1, 2, 3]
    assert kept(row, top_k=2, top_p=0.65) == [1]  # of 0.6, two thirds are 0.4
    assert kept(row, min_p=0.3) == [1, 3]
    assert kept(row, min_p=0.2) == [0, 1, 2, 3, 4, 5]
    assert kept([*row[:3], math.nan, math.inf, -math.inf], top_p=0.7) == [0, 1]
    assert kept([math.nan, -math.inf], top_k=1, top_p=0.5, min_p=0.5) == []
    assert kept([0.0, 1.0, -60.0], temperature=0.01, top_k=2, top_p=1.0) == [0, 1]


def test_a_row_is_truncated_as_alone() -> None:
    """Shares are sums of integers, which no order changes."""
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(3)) * 2
    truncation = ops.Truncation(torch.tensor([2000]), torch.tensor([0.9]), torch.tensor([1e-5]))
    given = torch.tensor([0.6]), truncation
    whole = ops.truncate(logits, *given)
    assert torch.equal(
        whole, torch.cat([ops.truncate(logits[row : row + 1], *given) for row in range(40)])
    )
    turned = ops.truncate(logits.flip(1), *given).flip(1)
    assert torch.equal(whole, turned)
    assert 10 < int(whole.isfinite().sum()) / 40 < 2000

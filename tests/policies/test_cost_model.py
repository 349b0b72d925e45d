"""Tests of the costs that auto asks: what stays, what texts share, and which experts are remembered."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specengine.costs import PassCosts
from specengine.policies.auto.costs import CostModel

DENSE = PassCosts(
    "dense", {1: 0.01, 8: 0.02, 64: 0.3}, {1: 0.001, 8: 0.003}, measured=True, overhead=0.002
)
MIXTURE = dataclasses.replace(
    DENSE, name="mixture", experts={1: 8.0, 8: 40.0, 64: 60.0}, all_experts=64, expert=0.0001
)
PADDED = dataclasses.replace(DENSE, name="padded", padded=True)


@pytest.mark.parametrize("costs", [DENSE, PADDED, DENSE.beside(2), DENSE.beside(1, joined=True)])
def test_costs_that_nothing_observes_stay_bit_by_bit(costs: PassCosts) -> None:
    model = CostModel(costs, 16, 4)
    model.context = 300
    prices, table = model.price(), costs.table(16, 4, 300)
    assert torch.equal(prices.verify, table.verify)
    assert torch.equal(prices.draft, table.draft)
    assert model.predicted.verify == table.verify.tolist()


def test_a_dense_model_has_no_experts() -> None:
    model = CostModel(DENSE, 16, 4)
    assert model.experts is None
    assert model.expert_prices() == []


def test_experts_that_were_counted_are_remembered_over_other_costs() -> None:
    now = [MIXTURE]
    model = CostModel(MIXTURE, 16, 4)
    model.find = lambda: now[0]
    counted = model.experts
    assert counted is not None
    counted.extra = 1.0  # seconds of a tree under other prices
    for other in (MIXTURE.beside(1), DENSE, PADDED):
        now[0] = other
        assert model.update(rests=False, explores=False) is not None
        assert model.experts is None
        now[0] = MIXTURE
        model.update(rests=False, explores=False)
        assert model.experts is counted
        assert counted.extra == 0.0
    now[0] = dataclasses.replace(MIXTURE, all_experts=128)
    model.update(rests=False, explores=False)
    assert model.experts is not counted


def test_texts_share_corrections_of_the_same_costs_alone() -> None:
    one, other = CostModel(DENSE, 16, 4), CostModel(DENSE.beside(1), 16, 4)
    other.book = one.book
    corrections = one.corrections
    verify = corrections.verify
    assert other.corrections.verify is verify
    again = CostModel(dataclasses.replace(DENSE), 16, 4)  # measured again
    again.book = one.book
    assert again.corrections.verify is not verify


def test_prices_are_put_off_while_all_texts_rest() -> None:
    shared = DENSE.beside(1)
    model = CostModel(shared, 16, 4)
    model.find = lambda: shared
    assert model.update(rests=True, explores=True) is None
    assert model.stale
    assert model.update(rests=False, explores=False) is not None
    assert not model.stale
    model.find = lambda: DENSE  # alone again: its own pace decides
    assert model.update(rests=True, explores=False) is not None


def test_only_costs_that_may_change_are_explored() -> None:
    model = CostModel(DENSE, 16, 4)
    model.price()
    for _ in range(6):
        model.corrections.verify.observe(model.predicted.measured, 1, 0.01)
    assert model.corrections.verify.exploring(model.predicted.rows) is not None
    known = model.update(rests=False, explores=True)
    assert not model.tries
    model.find = lambda: DENSE
    trial = model.update(rests=False, explores=True)
    assert model.tries
    assert known is not None
    assert trial is not None
    assert bool((trial.verify < known.verify).any())

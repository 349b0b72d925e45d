"""The sampler's choices for all nodes of a tree at once are those that it makes one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from specengine.request.sampling import History, Sampler
from tests import toy

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 300),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    temperature=st.one_of(st.none(), st.floats(0.05, 3.0)),
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    undefined=st.booleans(),
)
def test_all_at_once_and_one_by_one(
    rows: int, columns: int, seed: int | None, temperature: float | None, kind: torch.dtype, undefined: bool
) -> None:
    logits = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 3).to(kind)
    if undefined:
        logits[0] = math.nan
        logits[-1, 0] = math.inf
    sampled = seed is not None and temperature is not None
    sampler = Sampler([TemperatureLogitsWarper(temperature)] if sampled else [], seed)
    positions = [3 * row for row in range(rows)]
    chosen = [sampler.choose(logits[row], History([0] * place, place)) for row, place in enumerate(positions)]
    assert sampler.choose_rows(logits, positions) == [-1 if token is None else token for token in chosen]


class OnDevice(Tensor):
    """A CPU tensor that says it is on a device, where one transfer for all nodes is worth it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("seed", [None, 4])
def test_a_tree_on_a_device_is_chosen_for_at_once(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, logits = toy.random_tree(1, 9, 6), torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    sampler, asked = Sampler([], seed), list[list[int]]()
    whole = Sampler.choose_rows
    monkeypatch.setattr(
        Sampler,
        "choose_rows",
        lambda self, rows, positions: asked.append(list(positions)) or whole(self, logits, positions),
    )
    choose = sampler.chooser_of_tree(logits.as_subclass(OnDevice), History([0] * 5, 5), tree.depths)
    assert asked == [[] if seed is None else [5 + depth for depth in tree.depths.tolist()]]
    for node, depth in enumerate(tree.depths.tolist()):
        assert choose(node) == Sampler([], seed).choose(logits[node], History([0] * (5 + depth), 5 + depth))


def test_only_what_does_not_read_the_history_is_chosen_at_once() -> None:
    temperature = TemperatureLogitsWarper(0.5)
    assert not Sampler().reads_history
    assert not Sampler([temperature], 1).reads_history
    for processors in (
        [RepetitionPenaltyLogitsProcessor(1.2)],
        [temperature, TopKLogitsWarper(3)],
        [temperature, temperature],
    ):
        assert Sampler(processors, 1).reads_history

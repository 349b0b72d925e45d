"""The ops with counts on the device give what their twins with counts on the host give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine import ops
from specengine.errors import InputError
from tests.ops.resident_cases import CHECKS, number

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("op", CHECKS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_twins(op: str, seed: int) -> None:
    CHECKS[op](seed, "cpu")


def test_inputs_of_other_shapes_are_refused() -> None:
    one, whole, real = number(1, "cpu"), torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    found, frontier = ops.Selection(whole, whole, real, real, one), ops.Frontier(whole, whole, real, one)
    queues = ops.Queues.start(3, "cpu")
    refused = [
        lambda: ops.select_nodes(real, one.long(), 2),
        lambda: ops.select_nodes(real.double(), one, 2),
        lambda: ops.select_candidates(real[None], real, 2, one, real[:1]),
        lambda: ops.select_candidates(real[None], real[:1], 2, one, real),
        lambda: ops.step_queues(queues, found._replace(rows=whole[:2]), frontier, None, one, 1, 1, 0.0),
        lambda: ops.step_queues(queues._replace(tokens=whole[:2]), found, frontier, None, one, 1, 1, 0.0),
        lambda: ops.step_queues(queues, found, frontier, None, one.long(), 1, 1, 0.0),
        lambda: ops.step_queues(queues, found, frontier, None, one, 0, 1, 0.0),
        lambda: ops.hang_nodes((), one, whole, whole, real[:2], one, ops.Found(whole, one)),
        lambda: ops.gather_rows(real[None], whole, real[None], whole[:2]),
        lambda: ops.gather_rows(real[None], whole.int(), real[None], whole),
        lambda: ops.take_subtree(real, whole[:, None], whole, one),
        lambda: ops.choose_rows(real[None], whole, None, real[:1]),
        lambda: ops.choose_rows(real[None], whole[:1], real, real[:1]),
        lambda: ops.walk_down(whole, whole, whole[:2], one),
        lambda: ops.move_rows(real, whole, one, one),
    ]
    for call in refused:
        with pytest.raises(InputError, match="needed, got"):
            call()

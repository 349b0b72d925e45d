"""Graphs: what is captured once and replayed, and that the tests' stand-in for a capture sees what one would refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specengine.ops.cuda_graphs import Graphs, room
from tests.graphs.engines import DEVICE, frozen, model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_caches_grow_by_an_eighth() -> None:
    assert [room(n) for n in (1, 1024, 1025, 5000)] == [1024, 1024, 1152, 5120]


def test_a_number_of_the_host_in_a_captured_function_is_seen() -> None:
    part, numbers = Graphs(DEVICE), iter([1, 1, 2])
    with frozen():
        part.run("f", [], lambda: torch.zeros(3) + next(numbers))
        with pytest.raises(AssertionError):
            part.run("f", [], lambda: torch.zeros(3) + next(numbers))


def test_a_shape_that_changes_is_seen() -> None:
    part, sizes = Graphs(DEVICE), iter([3, 3, 4])
    with frozen():
        part.run("f", [], lambda: torch.zeros(next(sizes)))
        with pytest.raises(AssertionError):
            part.run("f", [], lambda: torch.zeros(next(sizes)))


def test_a_host_read_is_seen() -> None:
    with frozen(), pytest.raises(AssertionError, match="the host would wait"):
        Graphs(DEVICE).run("f", [], lambda: torch.ones(1) * float(torch.ones(1)))


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(2).where(torch.ones(2).bool(), 0), lambda: torch.tensor([1.0])]
)
def test_a_constant_that_the_host_would_send_is_seen(make: Any) -> None:
    part = Graphs(DEVICE)
    with frozen(), pytest.raises(AssertionError, match="the host would send"):
        part.run("f", [], make)


def test_what_a_function_reads_decides_whether_it_is_captured_again() -> None:
    part, given = Graphs(DEVICE), torch.zeros(2, device=DEVICE)
    assert not part.has("f", [given])
    assert part.run("f", [given], lambda: given + 1).tolist() == [1.0, 1.0]
    given += 5
    assert part.has("f", [given])
    assert part.run("f", [given], lambda: given + 1).tolist() == [6.0, 6.0]
    moved = given.clone()
    assert not part.has("f", [moved])
    part.run("f", [moved], lambda: moved + 1)
    assert part.captures == {"f": 2}


def test_the_models_are_where_the_tests_say() -> None:
    assert model().device.type == DEVICE.type

"""How often the host waits for the device per cycle, counted on the pretended one; trees move as one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from specengine.ops.tree import TokenTree
from tests import toy
from tests.graphs import pretended, replays
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
DRAWN = {"temperature": 0.6, "seed": 5}


@pytest.fixture(autouse=True)
def _meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(graphs, "MIN_SLOTS", 128)


def waits(
    engine: Engine, device: pretended.Device, options: dict[str, Any], cycles: int = 8
) -> int:
    """Return the waits of some cycles of an answer, of which the first is not one."""
    stream = iter(engine.stream(replays.PROMPT, max_new_tokens=100, **options))
    for _ in range(2):
        next(stream)
    before = device.waits
    for _ in range(cycles):
        next(stream)
    return device.waits - before


@pytest.mark.sliced(1)
@pytest.mark.parametrize(
    "options", [{}, DRAWN, DRAWN | {"top_p": 0.9}], ids=["greedy", "drawn", "top-p"]
)
def test_recycled_trees_cost_two_waits_a_cycle(options: dict[str, Any]) -> None:
    """One for the choices and one for the successors; a path that leaves the first children is sent without one."""
    with pretended.cuda() as device:
        target = HuggingFaceTarget(
            pretended.moved(toy.tiny("llama", num_hidden_layers=2)), captured=True
        )
        engine = Engine(target, Lookup(Recycling()), toy.policy_for("auto"))
        list(engine.stream(replays.PROMPT, max_new_tokens=10, **options))
        assert waits(engine, device, options) == 2 * 8


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["eagle", "talon", "auto"])
def test_top_p_waits_no_more_than_temperature_alone(policy: str) -> None:
    with pretended.cuda() as device:
        drawn, truncated = (
            waits(replays.engine_of("eagle3", policy, captured=True), device, options)
            for options in (DRAWN, DRAWN | {"top_p": 0.9})
        )
    assert truncated <= drawn + 8 * (policy != "eagle")  # trees that end early are not of one depth
    assert truncated <= 8 * 6


@pytest.mark.parametrize("capacity", [1, 5, 64, 67, 130])
def test_trees_move_as_one_copy(capacity: int) -> None:
    """There and back all arrays are the same, and each begins where a kernel may load 16 bytes."""
    grown = toy.random_tree(3, capacity, 50)
    with pretended.cuda() as device:
        tree = TokenTree(capacity + 3, pretended.CUDA)
        for part in (*tree.arrays, *tree.counters):
            assert (part.data_ptr() - tree.memory.data_ptr()) % 16 == 0
            assert part.is_contiguous()
        assert (len(tree), int(tree.parents[0]), tree.ancestors[0].tolist()[0]) == (1, -1, 1)
        before = device.waits
        for _ in range(2):
            tree.copy_(grown)
        assert device.waits == before
        moved, there = tree.to("cpu"), tree.to(pretended.CUDA)
        assert device.waits == before + 1
        for back in (moved, there.to("cpu")):
            for ours, theirs in zip(back.trimmed().arrays[:5], grown.arrays, strict=False):
                assert torch.equal(ours, theirs)
            width = grown.ancestors.shape[1]
            assert torch.equal(back.ancestors[:capacity, :width], grown.ancestors)
            assert not back.ancestors[:capacity, width:].any()
            assert (len(back), int(back.passes)) == (capacity, int(grown.passes))

"""On a CUDA device: truncated sampling in captured cycles, rows alone and together, trees as one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specengine import ops
from specengine.engine.captured import NOTE
from specengine.ops.tree import TokenTree
from tests import toy
from tests.graphs.engines import DEVICE, PROMPT, engine_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.7, "min_p": 0.01},
]


def truncation(top_k: int, top_p: float, min_p: float, device: torch.device) -> ops.Truncation:
    shares = torch.tensor([top_p, min_p], device=device).split(1)
    return ops.Truncation(torch.tensor([top_k], device=device), *shares)


@pytest.mark.parametrize("policy", ["auto", "eagle"])
@pytest.mark.parametrize("draft", ["none", "eagle3", "small_model", "recycling"])
def test_truncated_answers_are_those_of_plain_sampling(draft: str, policy: str) -> None:
    captured, eager, plain = (
        engine_of(draft, policy, captured=True),
        engine_of(draft, policy, captured=False),
        engine_of("none", "", captured=False),
    )
    for way in WAYS:
        wanted = plain.generate(PROMPT, max_new_tokens=24, seed=5, **way).token_ids
        assert eager.generate(PROMPT, max_new_tokens=24, seed=5, **way).token_ids == wanted
        found = captured.generate(PROMPT, max_new_tokens=24, seed=5, **way)
        assert found.token_ids == wanted
        assert (NOTE in found.stats.notes) is (draft != "recycling")
    assert captured.drivers.own.captured is not None
    assert captured.drivers.own.captured.graphs.captures.get("finish truncated", 0) <= 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 49152), (64, 128256), (7, 151936), (3, 50)])
def test_rows_are_truncated_as_alone_and_as_on_the_host(
    rows: int, columns: int, kind: torch.dtype
) -> None:
    logits = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 3).to(
        kind
    )
    one, there = torch.tensor([0.6]), logits.to(DEVICE)
    given = one.to(DEVICE), truncation(5000, 0.9, 1e-6, DEVICE)
    found = ops.truncate(there, *given)
    alone = torch.cat([ops.truncate(there[row : row + 1], *given) for row in range(rows)])
    assert torch.equal(found, alone)
    wanted = ops.truncate(logits, one, truncation(5000, 0.9, 1e-6, torch.device("cpu")))
    counts = found.isfinite().sum(1).cpu(), wanted.isfinite().sum(1)
    assert (counts[0] - counts[1]).abs().max() <= 1  # exponentials differ in their last bit
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = ops.truncate(there, *given)
    graph.replay()
    assert torch.equal(captured, found)
    given[1].top_p.fill_(0.5)  # one capture serves all values
    graph.replay()
    assert torch.equal(captured, ops.truncate(there, *given))
    assert captured.isfinite().sum() < found.isfinite().sum()


@pytest.mark.parametrize("capacity", [1, 64, 67, 833])
def test_trees_move_there_and_back(capacity: int) -> None:
    tree = TokenTree(capacity, DEVICE)
    for seed in range(4):
        grown = toy.random_tree(seed, capacity, 2000)
        tree.copy_(grown)
        back = tree.to("cpu")
        for ours, theirs in zip(back.trimmed().arrays[:5], grown.arrays, strict=False):
            assert torch.equal(ours, theirs)
        assert torch.equal(back.ancestors[:, : grown.ancestors.shape[1]], grown.ancestors)
        assert (len(back), int(back.passes)) == (capacity, int(grown.passes))

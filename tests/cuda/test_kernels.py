"""step_queues, on a GPU and on the host, where the lanes of a block run in lock step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine import ops
from specengine.ops import cuda
from specengine.ops.queue import Drawn, Queues, Search, step_queues
from specengine.ops.select import Candidates
from specengine.ops.tree import Nodes
from tests.csrc.test_spec import COMPILER, CSRC, build_and_run

NODES, COLUMNS = 30, 20


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++) on the path")
def test_logic_of_the_lanes_under_the_sanitizers(tmp_path: Path) -> None:
    run = build_and_run(tmp_path / "device_logic_test", CSRC / "tests" / "device_logic_test.cpp")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all checks passed" in run.stdout


def count(value: int, device: str) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def random_candidates(
    most: int, live: int, coarse: bool, frontier: int, random: torch.Generator
) -> Candidates:
    """Best first, the last of them of -inf; what stands behind `live` is NaN and points nowhere."""
    rows, columns = (
        torch.randint(bound, (most,), generator=random) for bound in (frontier, COLUMNS)
    )
    scores = -torch.randint(9 if coarse else 10**5, (most,), generator=random).float() / (
        2 if coarse else 10**4
    )
    scores[scores < -3.9] = -math.inf
    scores = scores.sort(descending=True).values
    rows[live:], columns[live:], scores[live:] = 2**40, 2**40, math.nan
    return Candidates(rows, columns, torch.rand(most, generator=random), scores, count(live, "cpu"))


def moved(given: tuple, device: str) -> list:
    return [part.to(device) for part in given]


def same(found: tuple, wanted: tuple) -> None:
    for name, one, other in zip(type(wanted)._fields, found, wanted, strict=True):
        if isinstance(other, Nodes):
            same(one, other)
        else:
            assert one.tolist() == other.tolist(), name


def meant(queues: Queues, *given: object) -> Drawn:
    """Compute the op's torch reference, with zeros after the counts."""
    drawn = ops.by_meaning(step_queues, queues, *given)
    padding = torch.arange(len(drawn.tokens)) >= drawn.live
    parts = (part.masked_fill(padding, 0) for part in drawn[:3])
    return Drawn(*parts, drawn.live, drawn.expand)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 60, 256])
@pytest.mark.parametrize("batch", [1, 10, 300])
def test_steps_are_what_they_mean(device: str, budget: int, batch: int, fill: bool) -> None:
    random = torch.Generator().manual_seed(budget + fill)
    wanted = Queues.start(budget, "cpu")
    queues = Queues(*moved(tuple(part.clone() for part in wanted), device))
    depths, ids = (
        torch.randint(4, (NODES,), generator=random),
        torch.randint(999, (COLUMNS,), generator=random),
    )
    for step in range(16):
        frontier = Nodes(
            torch.randint(NODES, (6,), generator=random), count(0 if step % 5 == 4 else 6, "cpu")
        )
        most = int(torch.randint(1, 2 * budget + 2, (1,), generator=random)) + 300 * (step == 7)
        live = int(torch.randint(0, most + 1, (1,), generator=random))
        found = random_candidates(most, live, step % 2 == 0, 6, random)
        readable = found._replace(
            rows=found.rows.clamp(max=5), columns=found.columns.clamp(max=COLUMNS - 1)
        )
        search = Search(batch, 3, (0.0, 0.30001)[step % 2], fill)
        token_ids, passes = (None, ids)[step % 2], count(1 + step % 9, "cpu")
        before = [part.tolist() for part in queues]
        expected = meant(wanted, readable, frontier, depths, token_ids, passes, search)
        drawn = cuda.step_queues(
            queues,
            Candidates(*moved(found, device)),
            Nodes(*moved(frontier, device)),
            depths.to(device),
            None if token_ids is None else token_ids.to(device),
            passes.to(device),
            search,
        )
        same(drawn, expected)
        held = int((wanted.scores > -math.inf).sum())
        for name, one, other in zip(Queues._fields, queues, wanted, strict=True):
            end = held if name in ("log_probs", "parents", "depths", "tokens") else None
            assert one[:end].tolist() == other[:end].tolist(), name
        if not int(frontier.live):
            assert [part.tolist() for part in queues] == before


def test_nan_never_becomes_a_node(device: str) -> None:
    queues, zeros = (
        Queues(*moved(Queues.start(4, "cpu"), device)),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    scores = torch.tensor([math.nan, -1.0, -math.inf], device=device)
    found = Candidates(zeros, zeros + 7, scores, scores, count(3, device))
    one = count(1, device)
    drawn = cuda.step_queues(
        queues, found, Nodes(zeros, one), zeros, None, one, Search(3, 9, 0.0, True)
    )
    assert (drawn.tokens[: int(drawn.live)].tolist(), drawn.log_probs.tolist()) == (
        [7],
        [-1.0, 0.0, 0.0, 0.0],
    )
    assert queues.accepted.tolist() == [0.0, -1.0, -math.inf, -math.inf]


def test_larger_budgets_run_by_their_meaning(device: str) -> None:
    budget = cuda.CAPACITY + 1
    queues, zeros = Queues.start(budget, device), torch.zeros(3, dtype=torch.int64, device=device)
    scores = torch.tensor([-1.0, -2.0, -3.0], device=device)
    one = count(1, device)
    found = Candidates(zeros, zeros, scores, scores, count(3, device))
    drawn = cuda.step_queues(
        queues, found, Nodes(zeros, one), zeros, None, one, Search(2, 9, 0.0, False)
    )
    assert (int(drawn.live), drawn.expand.ids.tolist()) == (2, [0, 1])


@pytest.mark.gpu
def test_a_step_captured_once() -> None:
    """Replays are the passes of searches: how many there were is read on the device."""
    random, wanted = torch.Generator().manual_seed(0), Queues.start(60, "cpu")
    queues = Queues.start(60, "cuda")
    depths, search = torch.randint(4, (NODES,), generator=random), Search(10, 4, 0.01, True)
    frontier, passes = Nodes.of(torch.zeros(10, dtype=torch.int64, device="cuda")), count(1, "cuda")
    found = Candidates(*moved(random_candidates(59, 0, False, 10, random), "cuda"))
    nodes_depths = depths.cuda()
    cuda.step_queues(queues, found, frontier, nodes_depths, None, passes, search)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = cuda.step_queues(queues, found, frontier, nodes_depths, None, passes, search)
    for case in range(12):
        given = random_candidates(59, 59, case % 2 == 0, 10, random)
        nodes = Nodes.of(torch.randint(NODES, (10,), generator=random))
        for into, values in zip(
            (*found, *frontier, passes), (*given, *nodes, count(case % 6 + 1, "cpu")), strict=True
        ):
            into.copy_(values)
        graph.replay()
        same(drawn, meant(wanted, given, nodes, depths, None, passes.cpu(), search))

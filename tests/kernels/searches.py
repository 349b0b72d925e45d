"""Random best-first searches, a step at a time, on poisoned memory; and what a step leaves against what it should."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from specengine_kernels import best_first as kernel
from torch import Tensor


class Level(NamedTuple):
    """A frontier, int64 [rows] x 2, and its candidates."""

    nodes: Tensor
    depths: Tensor
    candidates: kernel.Candidates


def number(value: int, device: torch.device | str) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def poisoned(tensors: tuple[Tensor, ...]) -> None:
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else -77)


def poisoned_queues(budget: int, device: torch.device | str) -> kernel.Queues:
    real, whole = torch.empty(3, budget, device=device), torch.empty(3, budget, dtype=torch.int64, device=device)
    poisoned((real, whole))
    return kernel.Queues(*real, *whole)


def random_level(seed: int, rows: int, count: int, values: int, device: torch.device | str) -> Level:
    """`count` candidates of `values` different scores, the worst of them of -inf, in front of three of padding."""
    random = torch.Generator().manual_seed(seed)
    scores = -torch.randint(values, (count,), generator=random).float() * (4 / values)
    scores[scores <= -3.9] = -math.inf
    whole = [torch.randint(most, (count,), generator=random) for most in (rows, 50)]
    real = [torch.rand(count, generator=random), scores.sort(descending=True).values]
    padded = [torch.cat([part, torch.full((3,), 2**40)]) for part in whole]
    padded += [torch.cat([part, torch.full((3,), math.nan)]) for part in real]
    nodes, depths = (torch.randint(most, (rows,), generator=random).to(device) for most in (99, 3))
    return Level(nodes, depths, kernel.Candidates(*(part.to(device) for part in padded), number(count, device)))


def same(queues: kernel.Queues, drawn: kernel.Drawn, wanted: kernel.Left) -> None:
    budget = queues.scores.shape[0]
    held, count, expanded = len(wanted.queue), len(wanted.nodes), len(wanted.expand)
    assert queues.accepted.tolist() == wanted.accepted + [-math.inf] * (budget - len(wanted.accepted))
    assert queues.scores[held:].tolist() == [-math.inf] * (budget - held)
    assert list(zip(*(part[:held].tolist() for part in queues[1:]), strict=True)) == wanted.queue
    assert (int(drawn.count), int(drawn.expanded)) == (count, expanded)
    found = zip(*(part[:count].tolist() for part in drawn[:3]), strict=True)
    assert list(found) == [(parent, token, edge) for _, edge, parent, _, token in wanted.nodes]
    assert drawn.expand.tolist() == wanted.expand + [0] * (len(drawn.expand) - expanded)

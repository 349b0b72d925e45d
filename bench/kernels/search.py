"""Ways to make the second step of a best-first search; results are the tokens drawn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.cases import Search
from bench.kernels.inputs import Layers
from bench.kernels.way import Way, kernel


def triton_search(case: Search, layers: Layers) -> Callable[[], Any]:
    module, device = kernel("best_first"), layers.nodes.device
    real = torch.empty(3, case.budget, device=device)
    whole = torch.empty(3, case.budget, dtype=torch.int64, device=device)
    options = {"batch": case.batch, "max_depth": case.budget, "threshold": 0.0, "target_ids": layers.ids}
    step = partial(module.step_queues, module.Queues(*real, *whole), **options)
    frontier, out = layers[:3], module.drawn_for(case.budget, case.batch, device)
    step(module.Candidates(*layers.first), *frontier, layers.levels[:1])
    return lambda: step(module.Candidates(*layers.second), *frontier, layers.levels[1:], out=out)


def torch_search(case: Search, layers: Layers) -> Callable[[], Any]:
    """What the engine runs without the kernel: about a hundred operations."""
    module = importlib.import_module("specengine.reference_resident")
    queues = module.Queues.start(case.budget, layers.nodes.device)
    frontier = module.Frontier(layers.nodes, layers.depths, layers.nodes.float(), layers.live)

    def step(found: tuple[Tensor, ...], level: Tensor) -> Any:
        given = module.Selection(*found), frontier, layers.ids, level
        return module.step_queues(queues, *given, case.batch, case.budget, 0.0)

    step(layers.first, layers.levels[:1])
    return lambda: step(layers.second, layers.levels[1:])


def host_search(case: Search, layers: Layers) -> Callable[[], Any]:
    """The C++ queues, candidates copied to the host and what is drawn back to the device."""
    module, device = importlib.import_module("specengine.native"), layers.nodes.device
    queues = module.BestFirst(case.budget, case.batch, case.budget, "cpu")
    nodes, depths, ids = (part.cpu() for part in (layers.nodes, layers.depths, layers.ids))

    def step(found: tuple[Tensor, ...]) -> Any:
        rows, columns, log_probs, scores = (part.cpu() for part in found[:4])
        queues.push(nodes[rows], depths[rows], ids[columns], log_probs, scores)
        drawn = queues.pop()
        return drawn._replace(**{name: getattr(drawn, name).to(device) for name in drawn._fields[:4]})

    step(layers.first)
    return lambda: step(layers.second)


def tokens_of(case: Search, drawn: Any) -> Tensor:
    return drawn.tokens[: case.batch]


WAYS = [
    Way("search", "specengine", triton_search, tokens_of, "triton"),
    Way("search", "torch operations", torch_search, tokens_of),
    Way("search", "torch operations, eager", torch_search, tokens_of, captured=False),
    Way("search", "C++ on the host, and the copies", host_search, tokens_of, "specengine", captured=False),
]  # fmt: skip

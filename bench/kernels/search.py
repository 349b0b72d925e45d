"""Ways to make the second step of a best-first search; results are the tokens drawn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels.cases import Search
from bench.kernels.inputs import Layers
from bench.kernels.way import Unavailable, Way

OPS = "specengine.ops"  # loaded when a case runs: --dry-run does not need it


def library_search(case: Search, layers: Layers) -> Callable[[], Any]:
    """Search by the CUDA kernel of csrc/best_first.cu."""
    try:
        run = importlib.import_module("specengine.ops.cuda").implementations()["step_queues"]
    except ImportError as error:
        raise Unavailable(str(error)) from error
    return _prepared(run, case, layers)


def torch_search(case: Search, layers: Layers) -> Callable[[], Any]:
    """Search by the op's torch reference: about a hundred operations."""
    return _prepared(_meaning, case, layers)


def host_search(case: Search, layers: Layers) -> Callable[[], Any]:
    """Search by the C++ queues: copy candidates to the host, and drawn nodes back to the device."""
    module = importlib.import_module(OPS)
    if (taken := module.backends("cpu")["step_queues"]).name != "cpp":
        raise Unavailable(taken.reason)
    run = module.step_queues
    device = layers.nodes.device

    def search(queues: Any, found: Any, *given: Any) -> Any:
        drawn = run(queues, type(found)(*(part.cpu() for part in found)), *given)
        sent = {
            name: getattr(drawn, name).to(device) for name in ("parents", "tokens", "log_probs")
        }
        return drawn._replace(**sent)

    return _prepared(search, case, layers, host=True)


def _meaning(*given: Any) -> Any:
    module = importlib.import_module(OPS)
    return module.by_meaning(module.step_queues, *given)


def _prepared(
    run: Callable[..., Any], case: Search, layers: Layers, host: bool = False
) -> Callable[[], Any]:
    """Prepare the second step by running the first. host: queues and frontier are on the host."""
    module, device = (
        importlib.import_module(OPS),
        torch.device("cpu") if host else layers.nodes.device,
    )
    nodes, depths, live, ids, levels = (
        part.to(device)
        for part in (layers.nodes, layers.depths, layers.live, layers.ids, layers.levels)
    )
    queues, frontier = module.Queues.start(case.budget, device), module.Nodes(nodes, live)
    search = module.Search(case.batch, case.budget, 0.0, False)

    def step(found: tuple[Tensor, ...], passes: Tensor) -> Any:
        return run(queues, module.Candidates(*found), frontier, depths, ids, passes, search)

    step(layers.first, levels[:1])
    return lambda: step(layers.second, levels[1:])


def tokens_of(case: Search, drawn: Any) -> Tensor:
    return drawn.tokens[: case.batch]


WAYS = [
    Way("search", "specengine", library_search, tokens_of, "specengine"),
    Way("search", "torch operations", torch_search, tokens_of, "specengine"),
    Way("search", "torch operations, eager", torch_search, tokens_of, "specengine", captured=False),
    Way("search", "C++ on the host, and the copies", host_search, tokens_of, "specengine", captured=False),
]  # fmt: skip

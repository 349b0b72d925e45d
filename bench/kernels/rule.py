"""Ways to grow a level by the rule of `auto`; results are the log-chances of the appended nodes' paths, best first."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels.cases import Rule
from bench.kernels.inputs import Level
from bench.kernels.way import Unavailable, Way

OPS = "specengine.ops"  # loaded when a case runs: --dry-run does not need it
BUDGET, WIDTH, ROUNDS, PASSES = 64, 8, 2, 12  # those of the policy
LEAST = math.log(1e-4)


def library_level(case: Rule, level: Level) -> Callable[[], Any]:
    """Run the best children of each row and the block of csrc/worth.cu: four launches, and one that sets a count."""
    try:
        run = importlib.import_module("specengine.ops.cuda").implementations()["grow_likely"]
    except ImportError as error:
        raise Unavailable(str(error)) from error
    return prepared(run, case, level)


def torch_level(case: Rule, level: Level) -> Callable[[], Any]:
    """Run the op's torch reference: some hundred operations."""
    return prepared(meaning, case, level)


def meaning(*given: Any) -> Any:
    module = importlib.import_module(OPS)
    return module.by_meaning(module.grow_likely, *given)


def prepared(run: Callable[..., Any], case: Rule, level: Level) -> Callable[[], Any]:
    """Prepare a level over a tree that each call finds as large as the first one did."""
    module, device = importlib.import_module(OPS), level.logits.device
    trees, search, costs = (
        importlib.import_module(f"specengine.{name}")
        for name in ("ops.tree", "policies.auto.search", "costs")
    )
    tree = trees.TokenTree(1 + BUDGET * (PASSES + 1), device)
    for at in range(case.nodes - 1):
        node = slice(at, at + 1)
        tree.add(level.parents[node], level.tokens[node], level.edges[node])
    passes = torch.full((1,), 2, dtype=torch.int32, device=device)
    verify = torch.linspace(5e-3, 6e-3, BUDGET + 1)
    widths = torch.tensor([1, 2, 3, 4, 6, WIDTH], device=device)
    tables = costs.CostTable(verify, torch.linspace(1e-4, 2e-4, WIDTH + 1))
    state = search.DeviceSearch(tree.capacity, widths, tables, 1e-4, (), device)
    state.enter(0, trained=True)
    state.bound.notes.waiting[: case.nodes] = True
    drafted = module.Drafted(level.logits, None, False, None)
    frontier = module.Nodes.of(level.nodes)
    limits = module.Limits(LEAST, BUDGET, ROUNDS, PASSES)

    def step() -> Any:
        tree.size.fill_(case.nodes)
        counters = tree.size, passes, tree.overflow
        run(tree.arrays, counters, frontier, drafted, state.bound, limits)
        return tree

    return step


def paths_of(case: Rule, tree: Any) -> Tensor:
    return tree.path_log_probs[case.nodes : case.nodes + BUDGET].sort(descending=True).values


WAYS = [
    Way("rule", "specengine", library_level, paths_of, "specengine"),
    Way("rule", "torch operations", torch_level, paths_of, "specengine"),
    Way("rule", "torch operations, eager", torch_level, paths_of, "specengine", captured=False),
]

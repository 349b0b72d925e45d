"""Ways to choose the target's token after every node of a tree; results are the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels.cases import Choice
from bench.kernels.inputs import Rows
from bench.kernels.way import Unavailable, Way, kernel


def triton_choice(case: Choice, rows: Rows) -> Callable[[], Any]:
    """Choose and walk by the Triton kernels: two launches or three."""
    module = kernel("verification")
    device, nodes = rows.logits.device, case.nodes
    chosen, path = (torch.zeros(nodes, dtype=torch.int64, device=device) for _ in range(2))
    size, count = (
        torch.full((1,), value, dtype=torch.int32, device=device) for value in (nodes, 0)
    )
    bonus, temperature = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.ones(1, device=device),
    )
    noise = (rows.positions, rows.seed, temperature) if case.sampled else ()
    workspace = module.workspace_for(rows.logits)

    def call() -> Tensor:
        module.choose_tokens(rows.logits, *noise, chosen=chosen, workspace=workspace)
        module.walk(rows.tokens, rows.parents, chosen, size, path, count, bonus)
        return chosen

    return call


def torch_choice(case: Choice, rows: Rows) -> Callable[[], Any]:
    if case.sampled:
        raise Unavailable("torch has no noise keyed by position")
    return lambda: rows.logits.argmax(-1)


def softmax_choice(case: Choice, rows: Rows) -> Callable[[], Any]:
    """Choose as samplers do, per node, without a walk. Draws differ from ours, so only the argmax is compared."""
    if case.sampled:
        raise Unavailable("its draws cannot be compared; see the greedy row")

    def call() -> Tensor:
        probabilities = rows.logits.float().softmax(-1)
        rows.drawn.copy_(torch.multinomial(probabilities, 1)[:, 0])
        return probabilities.argmax(-1)

    return call


def as_given(_: Choice, chosen: Tensor) -> Tensor:
    return chosen


WAYS = [
    Way("choice", "specengine", triton_choice, as_given, "triton"),
    Way("choice", "torch argmax, no walk", torch_choice, as_given),
    Way("choice", "torch argmax, no walk, eager", torch_choice, as_given, captured=False),
    Way("choice", "softmax, multinomial, argmax, no walk, eager", softmax_choice, as_given, captured=False),
]  # fmt: skip

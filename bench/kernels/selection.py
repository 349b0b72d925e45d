"""Ways to select the candidates of a layer; results are the scores in order, padded with -inf."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels.cases import LOG_MU, Selection
from bench.kernels.inputs import Layer
from bench.kernels.way import Unavailable, Way, kernel


def triton_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    module = kernel("candidate_selection")
    given = {
        "out": module.selection_for(layer.logits, case.most),
        "workspace": module.workspace_for(layer.logits, case.most),
    }
    gate = torch.tensor([LOG_MU if case.gated else -math.inf], device=layer.logits.device)
    return lambda: module.select_candidates(*layer, case.most, log_gate=gate, **given)


def eagle_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    """Select by the operations of EAGLE's topK_genrate: log_softmax, best k per row, their sums, best of those."""

    def call() -> Tensor:
        best = layer.logits.float().log_softmax(-1).topk(min(case.most, case.columns), -1)
        scores = (layer.parents[:, None] + best.values).view(-1).topk(case.most).values
        return scores.masked_fill(scores < scores[0] + LOG_MU, -math.inf) if case.gated else scores

    return call


def flat_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    def call() -> Tensor:
        scores = (
            (layer.logits.float().log_softmax(-1) + layer.parents[:, None])
            .view(-1)
            .topk(case.most)
            .values
        )
        return scores.masked_fill(scores < scores[0] + LOG_MU, -math.inf) if case.gated else scores

    return call


def flashinfer_selection(case: Selection, layer: Layer) -> Callable[[], Any]:
    """Select by FlashInfer's softmax and top_k of each row, and torch for the rest."""
    module = importlib.import_module("flashinfer")
    if not hasattr(module, "top_k"):
        raise Unavailable("this flashinfer has no top_k")

    def call() -> Tensor:
        best = module.top_k(
            module.sampling.softmax(layer.logits.float()), min(case.most, case.columns)
        )[0]
        scores = (layer.parents[:, None] + best.log()).view(-1).topk(case.most).values
        return scores.masked_fill(scores < scores[0] + LOG_MU, -math.inf) if case.gated else scores

    return call


def as_given(_: Selection, scores: Tensor) -> Tensor:
    return scores


WAYS = [
    Way("selection", "specengine", triton_selection, lambda case, found: found.scores, "triton"),
    Way("selection", "eagle's torch operations", eagle_selection, as_given),
    Way("selection", "eagle's torch operations, eager", eagle_selection, as_given, captured=False),
    Way("selection", "torch topk of all", flat_selection, as_given),
    Way("selection", "flashinfer softmax, top_k", flashinfer_selection, as_given, "flashinfer"),
]  # fmt: skip

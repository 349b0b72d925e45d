"""Compute the result that each way must give, from the definition in float64, with its tolerance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bench.kernels import rule
from bench.kernels.cases import LOG_MU, Attention, Case, Choice, Rule, Search, Selection
from bench.kernels.way import kernel

MAX_ERROR = {"attention": 6e-3, "selection": 2e-5, "compaction": 0.0, "choice": 0.0, "search": 0.0}
MAX_ERROR |= {"rule": 1e-4}  # of log-chances


def truth(case: Case, inputs: Any) -> Tensor:
    """Compute the result from the definition in float64, in the form of each way's `result`."""
    if isinstance(case, Attention):
        q, k, v = (tensor[0].double() for tensor in inputs[:3])
        groups = case.heads // case.kv_heads
        scores = torch.einsum("nhd,hsd->hns", q, k.repeat_interleave(groups, 0)) * case.size**-0.5
        weights = scores.masked_fill(~inputs.mask, -math.inf).softmax(-1)
        return torch.einsum("hns,hsd->nhd", weights, v.repeat_interleave(groups, 0))
    if isinstance(case, Selection):
        scores = inputs.logits.double().log_softmax(-1) + inputs.parents.double()[:, None]
        best = scores.flatten().topk(case.most).values
        return best.masked_fill(best < best[0] + LOG_MU, -math.inf) if case.gated else best
    if isinstance(case, Choice):
        if case.sampled:
            seed, positions = int(inputs.seed), inputs.positions.cpu()
            return (
                kernel("verification")
                .reference(inputs.logits.cpu(), positions, seed)
                .to(inputs.logits.device)
            )
        return inputs.logits.double().argmax(-1)
    if isinstance(case, Search):
        # what the first step left, then the second layer
        columns, scores = (
            torch.cat([inputs.first[i][case.batch :], inputs.second[i]]) for i in (1, 3)
        )
        return inputs.ids[columns[scores.argsort(descending=True, stable=True)[: case.batch]]]
    if isinstance(case, Rule):
        # the op's meaning, on the host
        grown = rule.prepared(rule.meaning, case, type(inputs)(*(part.cpu() for part in inputs)))
        return rule.paths_of(case, grown()).to(inputs.logits.device)
    return inputs.slab[:, :, :, case.prefix + inputs.path.long()].clone()


def error_of(case: Case, got: Tensor, wanted: Tensor) -> float:
    """Return the error: relative Frobenius for attention, largest difference for scores, else wrong values."""
    if isinstance(case, Attention):
        return float((got.double() - wanted).norm() / wanted.norm())
    if isinstance(case, Selection):
        # one of both is -inf: a score within rounding of the gate
        near_gate = (got.double() - wanted).abs() > 1.0
        difference = (got.double() - wanted).masked_fill(near_gate, 0.0).nan_to_num(0.0).abs().max()
        return float(difference) if int(near_gate.sum()) <= 1 else math.inf
    if isinstance(case, Rule):
        return float((got.double() - wanted.double()).abs().max())
    return float((got != wanted).sum())

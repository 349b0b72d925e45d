"""Compute what the networks of Learning to Draft observe of logged beams, many at once, and the best actions."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine import ops
from specengine.errors import InputError
from specengine.policies._ltd import FACTS, REPEATS, LtdShape, Networks


def laid_out(scores: Tensor, depths: Tensor, shape: LtdShape) -> Tensor:
    """Return float32 [shape.candidates]: the candidates' path log-probabilities, each level from its own place on.

    scores: float32 [m], in the order of creation; depths: int64 [m], ascending from 1. InputError for a shape whose
    parents stand best first: logged trees do not say which node is whose child.
    """
    if shape.best_first:
        raise InputError(
            "best_first: logged trees hold candidates in the order of creation, accepted networks trained on that"
        )
    window = ops.Window(shape.width, False, shape.candidates, shape.pad, 0, (1.0, 1.0))
    expansions = int(depths[-1]) - 1 if len(depths) else 0
    count, done = torch.tensor([[len(depths)], [expansions]], dtype=torch.int32, device="cpu")
    return ops.beam_observation(
        scores, depths, count, done, torch.zeros(1, dtype=torch.int64, device="cpu"), window
    )


def depth_observation(
    laid: Tensor, context: Tensor | int, expansions: int, shape: LtdShape
) -> Tensor:
    """Return float32 [..., width**2 + 28]: the last level's candidates, the context's length, the expansions so far.

    laid: float32 [..., shape.candidates] (see `laid_out`); context: tokens committed, [...]; expansions: complete.
    Before the first expansion the last level has `width` candidates. Source: Learning to Draft, equation 3.
    """
    start = shape.grown(expansions - 1) if expansions else 0
    level = laid[..., start : shape.grown(expansions)]
    level = pad(
        level, (0, shape.inputs["depth"] - 2 * REPEATS["depth"] - level.shape[-1]), value=shape.pad
    )
    return _with_facts(level, context, expansions, "depth", shape)


def size_observation(
    laid: Tensor, context: Tensor | int, expansions: int, shape: LtdShape
) -> Tensor:
    """Return float32 [..., shape.candidates + 58]: all candidates, the context's length, the number of expansions.

    laid: float32 [..., shape.candidates], of which those of later expansions are not shown. Source: equation 3.
    """
    grown = shape.grown(expansions)
    shown = (
        laid
        if expansions == shape.expansions
        else pad(laid[..., :grown], (0, shape.candidates - grown), value=shape.pad)
    )
    return _with_facts(shown, context, expansions, "size", shape)


def _with_facts(
    values: Tensor, context: Tensor | int, expansions: int, which: str, shape: LtdShape
) -> Tensor:
    """Append each fact REPEATS times, so that it weighs among many inputs; 0 for one that the shape does not see."""
    lengths = torch.as_tensor(context, dtype=torch.float32, device=values.device)
    length, depth = (unit if fact in shape.sees else math.inf for fact, unit in FACTS.items())
    shown = lengths / length, torch.full_like(lengths, expansions / depth)
    spread = (*values.shape[:-1], REPEATS[which])
    return torch.cat([values, *(fact[..., None].expand(spread) for fact in shown)], -1)


def best_actions(networks: Networks, name: str, observations: Tensor) -> Tensor:
    """Return the best actions of network `name`, int64 [...], for observations float32 [..., inputs]."""
    return getattr(networks, name)(observations).argmax(-1)

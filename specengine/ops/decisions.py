"""Ops of Learning to Draft: what its networks see of a beam, and what they decide."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._backends import describe, implementation

ACTIVATIONS = ("relu", "tanh")


def beam_observation(
    scores: Tensor,
    depths: Tensor,
    width: int,
    *,
    pad: float,
    shown: tuple[int, int],
    room: int,
    facts: tuple[float, float],
    repeats: int,
) -> Tensor:
    """float32 [room + 2 * repeats]: some of a beam's candidates by their places, then two facts, `repeats` times each.

    scores: float32 [m], path log-probabilities of the nodes level by level, the root first, which is not shown; depths:
    int64 [m]. Level 1 has places 0 to width, each later one width**2 places; a level's nodes stand together at its
    beginning. shown: the first place and the one behind the last, at most `room` apart; pad: in vacant places, 0 or
    less; lower scores count as a negative pad, as -1e4 where it is 0. Source: Learning to Draft, equation 3.
    """
    if scores.dtype is not torch.float32 or depths.dtype is not torch.int64 or scores.shape != depths.shape:
        raise InputError(f"scores, depths: float32 [m], int64 [m] are needed, got {describe(scores, depths)}")
    if not 0 <= shown[0] <= shown[1] <= shown[0] + room or pad > 0:
        raise InputError(
            f"shown, room, pad: an ascending pair at most room apart, 0 or less, got {shown}, {room}, {pad}"
        )
    run = implementation("beam_observation", scores.device.type)
    return run(scores, depths, width, pad, shown, room, facts, repeats)


def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> int:
    """The first of the largest outputs of a multi-layer perceptron.

    observation: float32 [inputs]; layers: weight [outputs, inputs] and bias [outputs] of each, contiguous float32;
    activation: relu or tanh, between layers.
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"activation: got {activation!r}, accepted {', '.join(ACTIVATIONS)}")
    if observation.dtype is not torch.float32 or observation.shape != layers[0].shape[1:]:
        raise InputError(f"observation: float32 {list(layers[0].shape[1:])} is needed, got {describe(observation)}")
    return implementation("best_action", observation.device.type)(observation, layers, activation)

"""Ops of the small networks that some policies ask: C2T's and Disco's classifiers, Learning to Draft's pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from specengine.errors import InputError
from specengine.ops._registry import attached, op
from specengine.ops.numbers import are_counts, describe
from specengine.ops.select import require_logits, top_children, top_entropy

ACTIVATIONS = ("relu", "tanh")
LOWEST = -1e4  # finite, so that an impossible candidate does not silence a network


@op
def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    """The probability that a network of one hidden layer of ReLU units gives, without gradients on a CPU.

    features: float32 [..., inputs]; net: float32 weights and biases, [hidden, inputs], [hidden], [1, hidden], [1].
    Returns float32 [...].
    """
    inputs = features.shape[-1]
    _require_network(net, inputs)
    if features.dtype is not torch.float32:
        raise InputError(f"features: float32 [..., {inputs}] is needed, got {describe(features)}")
    if run := attached("mlp", features):
        return run(features, net)
    # by their weights, as calling a module takes longer than the products
    hidden = linear(features, net[0], net[1]).relu()
    return linear(hidden, net[2], net[3])[..., 0].sigmoid()


@op
def classify_paths(path_log_probs: Tensor, entropies: Tensor, depth: Tensor, net: Sequence[Tensor]) -> Tensor:
    """As `mlp` of C2T's three features: each candidate's path probability, its parent's entropy, its depth.

    path_log_probs: float32 [rows, children]; entropies: float32 [rows], in nats; depth: int32 [1], one for all. Returns
    float32 [rows, children].
    """
    _require_network(net, 3)
    if not path_log_probs.dtype is entropies.dtype is torch.float32 or path_log_probs.shape[:-1] != entropies.shape:
        given = describe(path_log_probs, entropies)
        raise InputError(f"path_log_probs, entropies: float32 [rows, children], [rows] are needed, got {given}")
    if not are_counts(depth):
        raise InputError(f"depth: int32 [1] is needed, got {describe(depth)}")
    if run := attached("classify_paths", path_log_probs):
        return run(path_log_probs, entropies, depth, net)
    probs = path_log_probs.exp()
    return mlp(torch.stack((probs, entropies[:, None].expand_as(probs), depth.float().expand_as(probs)), -1), net)


@op
def classify_row(logits: Tensor, top: int, depth: Tensor, net: Sequence[Tensor], normalized: bool = False) -> Tensor:
    """As `mlp` of Disco's features: a distribution's largest probabilities, its entropy in nats over its `top`
    likeliest columns, the depth.

    logits: float32, bfloat16 or float16 [1, V], read as in `top_children`; as many probabilities as the network has
    inputs, but two, filled up with 0; depth: int32 [1]. Returns float32 [1].
    """
    inputs = net[0].shape[1]
    _require_network(net, inputs)
    require_logits(logits)
    if logits.shape[0] != 1 or not logits.shape[1] or top < 1 or inputs < 3 or not are_counts(depth):
        given = describe(logits, depth)
        raise InputError(f"logits, depth: floating [1, V], int32 [1] are needed, got {given} and {inputs} inputs")
    if run := attached("classify_row", logits):
        return run(logits, top, depth, net, normalized)
    probs = top_children(logits, inputs - 2, normalized)[0].exp()
    probs = pad(probs, (0, inputs - 2 - probs.shape[1]))
    entropy = top_entropy(logits, top, normalized)[:, None]
    return mlp(torch.cat([probs, entropy, depth.float()[:, None]], 1), net)


class Window(NamedTuple):
    """What a network sees of a beam of `width`: of the last level alone (`last`), or of all; at most `room` candidates,
    then the context's length over units[0] and the expansions over units[1], `repeats` times each.

    pad: in vacant places, 0 or less; lower scores count as a negative pad, as -1e4 where it is 0.
    """

    width: int
    last: bool
    room: int
    pad: float
    repeats: int
    units: tuple[float, float]


@op
def beam_observation(
    scores: Tensor, depths: Tensor, live: Tensor, expansions: Tensor, context: Tensor, window: Window
) -> Tensor:
    """float32 [room + 2 * repeats]: some of a beam's candidates by their places, then the two facts.

    scores: float32 [m], path log-probabilities of the first `live` nodes level by level; depths: int64 [m], 0 of the
    root, which is not shown. Level 1 has places 0 to width, each later one width**2 places; a level's nodes stand
    together at its beginning. expansions: int32 [1], complete; context: int64 [1], tokens. Source: Learning to Draft,
    equation 3.
    """
    if scores.dtype is not torch.float32 or depths.dtype is not torch.int64 or not _one_line(scores, depths):
        raise InputError(f"scores, depths: float32 [m], int64 [m] are needed, got {describe(scores, depths)}")
    a_number = context.dtype is torch.int64 and context.shape == (1,)
    if not are_counts(live, expansions) or not a_number or window.pad > 0:
        given = describe(live, expansions, context)
        raise InputError(f"live, expansions, context, pad: int32 [1] x 2, int64 [1], 0 or less are needed, got {given}")
    if run := attached("beam_observation", scores):
        return run(scores, depths, live, expansions, context, window)
    width, device = window.width, scores.device
    first = (width + (expansions.long() - 1) * width**2) * (window.last & (expansions > 0))
    place = torch.arange(scores.shape[0], device=device, dtype=torch.int64)
    before = torch.searchsorted(depths.masked_fill(place >= live, torch.iinfo(torch.int64).max), depths.contiguous())
    starts = (depths > 1) * width + (depths - 2).clamp(min=0) * width**2
    at = starts + place - before - first
    shown = (depths > 0) & (place < live) & (at >= 0) & (at < window.room)
    values = scores.clamp(min=window.pad if window.pad < 0 else LOWEST)
    laid = torch.full((window.room + 1,), window.pad, device=device, dtype=torch.float32)
    laid = laid.index_copy(0, at.masked_fill(~shown, window.room), values)[: window.room]
    facts = (fact.double() / unit for fact, unit in zip((context, expansions), window.units, strict=True))
    return torch.cat([laid, *(fact.float().expand(window.repeats) for fact in facts)])


@op
def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> Tensor:
    """The first of the largest outputs of a multi-layer perceptron, int64 [1].

    observation: float32 [inputs]; layers: weight [outputs, inputs] and bias [outputs] of each, contiguous float32;
    activation: relu or tanh, between layers.
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"activation: got {activation!r}, accepted {', '.join(ACTIVATIONS)}")
    if observation.dtype is not torch.float32 or observation.shape != layers[0].shape[1:]:
        raise InputError(f"observation: float32 {list(layers[0].shape[1:])} is needed, got {describe(observation)}")
    if run := attached("best_action", observation):
        return run(observation, layers, activation)
    values = observation
    for place in range(0, len(layers), 2):  # without modules, whose calls take longer than these products
        if place:
            values = values.tanh() if activation == "tanh" else values.relu()
        values = linear(values, layers[place], layers[place + 1])
    return values.argmax(0, keepdim=True)


def _one_line(*tensors: Tensor) -> bool:
    return tensors[0].dim() == 1 and all(tensor.shape == tensors[0].shape for tensor in tensors)


def _require_network(net: Sequence[Tensor], inputs: int) -> None:
    hidden = net[0].shape[0]
    shapes = [(hidden, inputs), (hidden,), (1, hidden), (1,)]
    whole = [part.dtype is torch.float32 and part.is_contiguous() for part in net]
    if [part.shape for part in net] != shapes or whole != [True] * 4:
        raise InputError(f"net: float32 {', '.join(map(str, shapes))} are needed, got {describe(*net)}")

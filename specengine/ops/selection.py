"""Ops that choose what comes into a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.ops._backends import FLOATS, describe, implementation
from specengine.reference import Candidates, Popped


def select_best(log_probs: Tensor, count: int) -> Tensor:
    """Indices of the `count` best by (log-probability descending, index ascending), in ascending order.

    log_probs: float32 [m], in creation order. Returns int64 [min(count, m)], or fewer, as -inf is never selected.
    For path log-probabilities the result is closed under parent, also under ties: a child is never better than its
    parent and comes later. InputError on NaN (on a CUDA device: an asynchronous assertion) and on a negative count.
    """
    if log_probs.dtype is not torch.float32 or log_probs.dim() != 1:
        raise InputError(f"log_probs: float32 [m] is needed, got {describe(log_probs)}")
    if count < 0:
        raise InputError(f"count: got {count}, accepted 0 or more")
    return implementation("select_best", log_probs.device.type)(log_probs, count)


def top_children(logits: Tensor, k: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """The k best columns of each row by (value descending, column ascending), with log-probabilities.

    logits: float32, bfloat16 or float16 [rows, V]; `normalized` says that they are log-probabilities already.
    Returns log_probs float32 [rows, min(k, V)] (natural log, over the whole row) and columns int64 of the same shape.
    Ties are those of the values as given. NaN counts as -inf and +inf as 3e38; columns of -inf come last, with -inf.
    """
    if logits.dtype not in FLOATS or logits.dim() != 2:
        raise InputError(f"logits: float32, bfloat16 or float16 [rows, V] is needed, got {describe(logits)}")
    if k < 1 or logits.shape[1] < 1:
        raise InputError(f"k: got {k} of {logits.shape[1]} columns, at least 1 of 1 is needed")
    return implementation("top_children", logits.device.type)(logits, min(k, logits.shape[1]), normalized)


def best_candidates(
    logits: Tensor,
    scores: Tensor,
    count: int,
    *,
    log_gate: float = -math.inf,
    bound: float = -math.inf,
    normalized: bool = False,
) -> Candidates:
    """The `count` best continuations of a whole layer, by path log-probability, as far as they pass gate and bound.

    logits: float32, bfloat16 or float16 [rows, V], read as in `top_children`; scores: float32 [rows], the rows' own
    path log-probabilities, -inf for a row that is padding; on the same device or on the host, and the results are where
    they are. A candidate's score is its row's plus its log-probability.
    log_gate: with m the layer's best score, only scores of m + log_gate and above pass. bound: only scores above it
    pass. Ordered by (score descending, row ascending, log-probability descending, column ascending); -inf never passes.
    Sources: TALON Alg. 2 (gate); SALF Alg. 2 (bounded queue).
    """
    if logits.dtype not in FLOATS or logits.dim() != 2:
        raise InputError(f"logits: float32, bfloat16 or float16 [rows, V] is needed, got {describe(logits)}")
    if scores.dtype is not torch.float32 or scores.shape != logits.shape[:1]:
        raise InputError(f"scores: float32 [{logits.shape[0]}] is needed, got {describe(scores)}")
    if count < 0 or log_gate > 0 or math.isnan(log_gate) or math.isnan(bound):
        raise InputError(
            f"count, log_gate, bound: got {count}, {log_gate}, {bound}, accepted 0 or more, 0 or less, not NaN"
        )
    run = implementation("best_candidates", logits.device.type)
    return run(logits, scores, count, log_gate, bound, normalized)


def top_entropy(logits: Tensor, top: int, normalized: bool = False) -> Tensor:
    """-sum p log p over the `top` most likely columns of each row, in nats; p over the whole row, not renormalised.

    logits: as in `top_children`. Returns float32 [rows]; 0 for a row of -inf alone. Source: C2T App. C.
    """
    if logits.dtype not in FLOATS or logits.dim() != 2:
        raise InputError(f"logits: float32, bfloat16 or float16 [rows, V] is needed, got {describe(logits)}")
    if top < 1 or logits.shape[1] < 1:
        raise InputError(f"top: got {top} of {logits.shape[1]} columns, at least 1 of 1 is needed")
    return implementation("top_entropy", logits.device.type)(logits, min(top, logits.shape[1]), normalized)


def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    """The probability that a network of one hidden layer of ReLU units gives, without gradients on a CPU.

    features: float32 [..., inputs]; net: float32 weights and biases, [hidden, inputs], [hidden], [1, hidden], [1].
    Returns float32 [...].
    """
    inputs = features.shape[-1]
    _require_network(net, inputs)
    if features.dtype is not torch.float32:
        raise InputError(f"features: float32 [..., {inputs}] is needed, got {describe(features)}")
    return implementation("mlp", features.device.type)(features, net)


def classify_paths(path_log_probs: Tensor, entropies: Tensor, depth: int, net: Sequence[Tensor]) -> Tensor:
    """As `mlp` of C2T's three features: each candidate's path probability, its parent's entropy, its depth.

    path_log_probs: float32 [rows, children]; entropies: float32 [rows], in nats; depth: one for all. Returns float32
    [rows, children].
    """
    _require_network(net, 3)
    if not path_log_probs.dtype is entropies.dtype is torch.float32 or path_log_probs.shape[:-1] != entropies.shape:
        given = describe(path_log_probs, entropies)
        raise InputError(f"path_log_probs, entropies: float32 [rows, children], [rows] are needed, got {given}")
    return implementation("classify_paths", path_log_probs.device.type)(path_log_probs, entropies, depth, net)


def classify_row(logits: Tensor, top: int, depth: int, net: Sequence[Tensor], normalized: bool = False) -> float:
    """As `mlp` of Disco's features: a distribution's largest probabilities, its entropy in nats over its `top`
    likeliest columns, the depth.

    logits: float32, bfloat16 or float16 [V], read as in `top_children`; as many probabilities as the network has
    inputs, but two, filled up with 0.
    """
    inputs = net[0].shape[1]
    _require_network(net, inputs)
    if logits.dtype not in FLOATS or logits.dim() != 1 or not logits.shape[0] or top < 1 or inputs < 3:
        raise InputError(
            f"logits: float32, bfloat16 or float16 [V] is needed, got {describe(logits)} and {inputs} inputs"
        )
    run = implementation("classify_row", logits.device.type)
    return run(logits, min(top, logits.shape[0]), depth, net, normalized)


def _require_network(net: Sequence[Tensor], inputs: int) -> None:
    hidden = net[0].shape[0]
    shapes = [(hidden, inputs), (hidden,), (1, hidden), (1,)]
    if [tuple(part.shape) for part in net] != shapes or any(
        part.dtype is not torch.float32 or not part.is_contiguous() for part in net
    ):
        raise InputError(f"net: float32 {', '.join(map(str, shapes))} are needed, got {describe(*net)}")


def best_first(budget: int, batch: int, max_depth: int | None = None, device: torch.device | str = "cpu") -> BestFirst:
    """The bounded queues of a best-first search (SALF Alg. 2) over one tree: see BestFirst."""
    for name, value in {"budget": budget, "batch": batch, "max_depth": 1 if max_depth is None else max_depth}.items():
        if value < 1:
            raise InputError(f"{name}: got {value}, accepted 1 or more")
    make = implementation("best_first", torch.device(device).type)
    return BestFirst(make(budget, batch, budget if max_depth is None else max_depth, device))


class BestFirst:
    """The queue Q of scored, not yet drawn nodes and the scores of the accepted set G, each the best `budget` of all.

    Ranked by (path log-probability descending, order of creation ascending). The root is in G from the start.
    Made by `best_first`.
    """

    __slots__ = ("_queues",)

    def __init__(self, queues: Any) -> None:
        self._queues = queues

    @property
    def bound(self) -> float:
        """No candidate at or below this path log-probability can come to anything; -inf while there is room."""
        return self._queues.bound

    def push(
        self, parents: Tensor, depth_of_parents: Tensor, tokens: Tensor, log_probs: Tensor, scores: Tensor
    ) -> None:
        """Add candidates, in order of creation. int64 [m] x 3, float32 [m] x 2 (edge, path).

        A path log-probability of -inf is passed over, NaN is refused (InputError, nothing is added).
        """
        given = parents, depth_of_parents, tokens, log_probs, scores
        if (
            not parents.shape == depth_of_parents.shape == tokens.shape == log_probs.shape == scores.shape
            or not parents.dtype is depth_of_parents.dtype is tokens.dtype is torch.int64
            or not log_probs.dtype is scores.dtype is torch.float32
            or scores.dim() != 1
        ):
            raise InputError(f"candidates: int64 [m] x 3, float32 [m] x 2 are needed, got {describe(*given)}")
        self._queues.push(*given)

    def pop(self) -> Popped:
        """Move the best `batch` of Q above the greatest depth into G, and all that rank before the last of them.

        Not drafted from: the worst of a full G, and nodes at the greatest depth. What was driven out of G again does
        not become a node.
        """
        return self._queues.pop()

    def fill(self) -> Popped:
        """Move the best of Q into G while there is room; none of them is drafted from."""
        return self._queues.fill()

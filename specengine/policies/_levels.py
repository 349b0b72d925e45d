"""How policies grow trees that stand on the device, a draft pass at a time: a module of policies, none itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specengine import ops
from specengine.device_tree import DeviceTree

if TYPE_CHECKING:
    from specengine.policies.c2t import C2t


class Levels(ABC):
    """A policy's `grow` with fixed shapes and without the host: it can be captured, once for the root and once for all
    later passes.

    width       nodes drafted from in one pass, at most
    passes      draft passes per tree, at most
    ends_early  whether a tree may end before that: then its frontier is empty
    states      gives the draft's hidden states of nodes that it has run, int64 [n] to [n, hidden size]; None where the
                draft has none
    """

    width: int
    passes: int
    ends_early: bool
    states: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        """Hang children under the frontier; whom to draft from next, `width` of them with padding.

        frontier: of as many nodes as logits, [rows, draft vocabulary], has rows; ids: int64 [draft vocabulary], the
        target's id of each column, or None where they are the columns; level: int32 [1], passes so far.
        """

    def finish(self, tree: DeviceTree) -> None:  # noqa: B027  most have nothing left to do
        """Once after the last level of a tree, before it is verified."""


class NoLevels(Levels):
    """A tree of its root alone."""

    width, passes, ends_early = 1, 0, False

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        return frontier


class Scored(NamedTuple):
    """A level of a beam just scored, whose nodes are in the tree in a moment.

    frontier, logits: the nodes drafted from, and of each a row, [rows, draft vocabulary]; paths: float32 [rows *
    children], path log-probabilities of their children; beam: the best of these; passes: int32 [1], so far.
    """

    tree: DeviceTree
    frontier: ops.Frontier
    logits: Tensor
    paths: Tensor
    beam: ops.Found
    passes: Tensor

    @property
    def scores(self) -> Tensor:
        """float32 [width]: path log-probabilities of the beam, -inf for padding."""
        padding = torch.arange(len(self.beam.indices), device=self.paths.device) >= self.beam.live
        return self.paths.index_select(0, self.beam.indices).masked_fill(padding, -math.inf)


class BeamLevels(Levels):
    """EAGLE-2's beam: `width` children of each node, the best `width` of which are drafted from."""

    ends_early = False

    def __init__(self, width: int, passes: int) -> None:
        self.width, self.passes = width, passes

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        log_probs, columns = ops.top_children(logits, self.width)
        parents = frontier.nodes[:, None].expand_as(columns).reshape(-1)
        tokens, edges = target_ids(columns.reshape(-1), ids), log_probs.reshape(-1)
        count = frontier.live * columns.shape[1]
        paths = (frontier.scores[:, None] + log_probs).reshape(-1)
        beam = ops.select_nodes(paths, count, self.width)
        drafted = beam.live * self.goes_on(Scored(tree, frontier, logits, paths, beam, level))
        return tree.add(parents, tokens, edges, count, ops.Found(beam.indices, drafted))

    def goes_on(self, scored: Scored) -> Tensor:
        """Whether the beam is drafted from: bool [1]."""
        return scored.passes < self.passes


class FixedLevels(Levels):
    """A tree of one shape: each node of a level has as many children as `branching` says of that level."""

    ends_early = False

    def __init__(self, branching: tuple[int, ...]) -> None:
        sizes = [math.prod(branching[:depth]) for depth in range(len(branching) + 1)]
        self.width, self.passes = max(sizes[:-1]), len(branching)
        self._widest, self._most = max(sizes), max(branching)
        self._branching = torch.tensor(branching, dtype=torch.int32)

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        if self._branching.device != logits.device:
            self._branching = self._branching.to(logits.device)
        log_probs, columns = ops.top_children(logits, self._most)
        rows, children = columns.shape
        at = (level.long() - 1).clamp(0, self.passes - 1)
        each = self._branching.index_select(0, at).clamp(max=children)
        entry = torch.arange(min(rows * children, self._widest), device=logits.device)
        row = (entry // each).clamp(max=rows - 1)  # beyond the frontier's children it is padding
        place = row * children + entry % each
        tokens, edges = (part.reshape(-1).index_select(0, place) for part in (columns, log_probs))
        count = frontier.live * each
        expand = ops.Found(torch.arange(self.width, device=logits.device), count * (level < self.passes))
        parents = frontier.nodes.index_select(0, row)
        return tree.add(parents, target_ids(tokens, ids), edges, count, expand)


class GatedLevels(Levels):
    """TALON: the layer's best within a factor of its largest path probability, until the budget is spent."""

    ends_early = True

    def __init__(self, budget: int, width: int, mu: float, robust_layers: int, max_depth: int | None) -> None:
        self.width = max(budget - 1, 1)
        self.passes = min(budget - 1, max_depth or budget)
        self._budget, self._layer, self._robust = budget, width, robust_layers
        self._gates = torch.tensor([math.log(mu), -math.inf])

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        if self._gates.device != logits.device:
            self._gates = self._gates.to(logits.device)
        robust = level <= self._robust
        room = self._budget - tree.size
        limit = torch.where(robust, room.clamp(max=self._layer), room)
        gate = self._gates.index_select(0, robust.long())
        found = ops.select_candidates(logits, frontier.scores, self.width, limit, gate)
        goes_on = (tree.size + found.live < self._budget) & (level < self.passes)
        nodes = torch.arange(self.width, device=logits.device)
        expand = ops.Found(nodes, found.live * goes_on)
        parents = frontier.nodes.index_select(0, found.rows)
        return tree.add(parents, target_ids(found.columns, ids), found.log_probs, found.live, expand)


class BestFirstLevels(Levels):
    """SALF: the best of all nodes that were scored, wherever they stand, until a batch is not worth a pass."""

    ends_early = True

    def __init__(self, budget: int, batch: int, threshold: float, fill: bool, max_depth: int | None) -> None:
        self.width, self.passes = min(batch, budget), budget - 1
        self._budget, self._batch, self._threshold, self._fill = budget, batch, threshold, fill
        self._depth = budget if max_depth is None else max_depth
        self._queues: ops.Queues | None = None
        self._most, self._no_gate = torch.tensor([budget - 1], dtype=torch.int32), torch.tensor([-math.inf])

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        if self._queues is None:
            self._queues = ops.Queues.start(self._budget, logits.device)
            self._most, self._no_gate = (number.to(logits.device) for number in (self._most, self._no_gate))
        found = ops.select_candidates(logits, frontier.scores, self._budget - 1, self._most, self._no_gate)
        how = self._batch, self._depth, self._threshold
        drawn = ops.step_queues(self._queues, found, frontier, ids, level, *how)
        return tree.add(drawn.parents, drawn.tokens, drawn.log_probs, drawn.live, drawn.expand)

    def finish(self, tree: DeviceTree) -> None:
        if self._fill and self._queues is not None:
            filled = ops.fill_queues(self._queues)
            tree.add(filled.parents, filled.tokens, filled.log_probs, filled.live, filled.expand)


class ClassifiedLevels(Levels):
    """C2T: of each parent's best children those of which a classifier is sure."""

    ends_early = True

    def __init__(self, policy: C2t, width: int) -> None:
        self.width, self.passes = width, policy.max_depth
        self._policy = policy

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        policy = self._policy
        log_probs, columns = ops.top_children(logits, policy.children)
        entropies = ops.top_entropy(logits, policy.entropy_over)
        paths = frontier.scores[:, None] + log_probs
        confidence = policy.confidence(paths, entropies[:, None], frontier.depths[:, None] + 1)
        confidence = confidence.masked_fill(log_probs == -math.inf, -math.inf).reshape(-1)
        proposed = frontier.live * log_probs.shape[1]
        limit = (policy.hard_cap - tree.size).clamp(max=self.width)
        sure = confidence.masked_fill(confidence < policy.threshold, -math.inf)
        kept = ops.select_nodes(sure, proposed, self.width, limit)
        least = ops.select_nodes(confidence, proposed, self.width, limit.clamp(max=policy.min_level1))
        few = (level == 1) & (kept.live < policy.min_level1)
        chosen, count = torch.where(few, least.indices, kept.indices), torch.where(few, least.live, kept.live)
        goes_on = (level < policy.max_depth) & (tree.size + count < policy.hard_cap)
        expand = ops.Found(torch.arange(self.width, device=logits.device), count * goes_on)
        parents = frontier.nodes.index_select(0, chosen // log_probs.shape[1])
        tokens, edges = target_ids(columns.reshape(-1)[chosen], ids), log_probs.reshape(-1)[chosen]
        return tree.add(parents, tokens, edges, count, expand)


def target_ids(columns: Tensor, ids: Tensor | None) -> Tensor:
    return columns if ids is None else ids.index_select(0, columns)

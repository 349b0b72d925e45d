"""How policies grow trees that stand on the device, a draft pass at a time: a module of policies, none itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

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
    """

    width: int
    passes: int
    ends_early: bool

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
        tokens, edges = _target_ids(columns.reshape(-1), ids), log_probs.reshape(-1)
        count = frontier.live * columns.shape[1]
        paths = (frontier.scores[:, None] + log_probs).reshape(-1)
        beam = ops.select_nodes(paths, count, self.width)
        drafted = beam.live * (level < self.passes)
        return tree.add(parents, tokens, edges, count, ops.Found(beam.indices, drafted))


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
        return tree.add(parents, _target_ids(found.columns, ids), found.log_probs, found.live, expand)


class BestFirstLevels(Levels):
    """SALF: the best of all nodes that were scored, wherever they stand, until a batch is not worth a pass."""

    ends_early = True

    def __init__(self, budget: int, batch: int, threshold: float, fill: bool, max_depth: int | None) -> None:
        self.width, self.passes = min(batch, budget), budget - 1
        self._budget, self._batch, self._threshold, self._fill = budget, batch, threshold, fill
        self._depth = budget if max_depth is None else max_depth
        self._queues: ops.Queues | None = None

    def grow(
        self, tree: DeviceTree, frontier: ops.Frontier, logits: Tensor, ids: Tensor | None, level: Tensor
    ) -> ops.Frontier:
        fresh = ops.start_queues(self._budget, logits.device)
        if self._queues is None:
            self._queues = fresh
        going = frontier.live > 0
        begins = (level == 1) & going
        known = (torch.where(begins, new, old) for new, old in zip(fresh, self._queues, strict=True))
        no_gate = torch.full((1,), -math.inf, device=logits.device)
        limit = torch.full_like(tree.size, self._budget - 1)
        found = ops.select_candidates(logits, frontier.scores, self._budget - 1, limit, no_gate)
        parents, depths = (part.index_select(0, found.rows) for part in (frontier.nodes, frontier.depths))
        padding = torch.arange(self._budget - 1, device=logits.device) >= found.live
        scores = found.scores.masked_fill(padding, -math.inf)
        tokens = _target_ids(found.columns, ids)
        queues = ops.push_queues(ops.Queues(*known), parents, depths + 1, tokens, found.log_probs, scores)
        queues, drawn = ops.pop_queues(queues, self._batch, self._depth, going)
        for into, values in zip(self._queues, queues, strict=True):
            into.copy_(values)
        expand = ops.Found(drawn.expand.indices[: self.width], drawn.expand.live * (drawn.mass >= self._threshold))
        return tree.add(drawn.parents, drawn.tokens, drawn.log_probs, drawn.live, expand)

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
        tokens, edges = _target_ids(columns.reshape(-1)[chosen], ids), log_probs.reshape(-1)[chosen]
        return tree.add(parents, tokens, edges, count, expand)


def _target_ids(columns: Tensor, ids: Tensor | None) -> Tensor:
    return columns if ids is None else ids.index_select(0, columns)
